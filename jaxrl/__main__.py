"""`python -m jaxrl`."""

import sys

from jaxrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
