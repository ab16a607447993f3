#!/usr/bin/env python3
"""Training as a script: `python scripts/train.py --config configs/x.yaml a.b=c ...`; the same as `jaxrl train`."""

import sys

from jaxrl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
