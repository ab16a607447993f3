"""`python -m jaxrl` and the console script `jaxrl`: the signals first, then the command line."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Runs the command of `sys.argv`; returns the exit status."""
    try:
        from jaxrl.runtime.stop import Stop

        with Stop() as stop:
            from jaxrl.cli import main as run

            return run(stop=stop)
    except KeyboardInterrupt:  # Python's own handler, before ours was there
        os.write(2, b"jaxrl: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
