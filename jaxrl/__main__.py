"""`python -m jaxrl` and the console script `jaxrl`: streams and signals first, then the command line."""

from __future__ import annotations

import io
import os
import sys


def main(arguments: list[str] | None = None) -> int:
    """Runs the command of `arguments`, by default those of `sys.argv`; returns the exit status."""
    try:
        _complete_streams()
        from jaxrl.run.stop import Stop

        stop = Stop()
        stop.watch()
        from jaxrl.cli import main as run

        return run(arguments, stop)
    except KeyboardInterrupt:  # by Python's own handler, before ours was there
        os.write(2, b"jaxrl: interrupted\n")
        return 130


def _complete_streams() -> None:
    """A stream that was closed becomes an empty one: no file that is opened later may take its number. Characters that
    the terminal's encoding lacks are written with backslashes."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - gets the lowest free number: this one
            os.set_inheritable(number, True)
        elif isinstance(stream, io.TextIOWrapper) and mode == "w":
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
