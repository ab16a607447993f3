#!/usr/bin/env python3
"""Benchmarks: `python scripts/bench.py NAME --help`. docs/benchmarks/README.md lists them."""

import sys

from bench.harness import main

if __name__ == "__main__":
    sys.exit(main())
