"""A process that runs the `main` of modules, one after another, for whoever holds its standard input.

A line of input is JSON: a module's name and its arguments. The line that answers it: the status, and what was printed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import traceback


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        name, arguments = json.loads(line)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                status = importlib.import_module(name).main(arguments)
            except (Exception, SystemExit):
                status = 1
                traceback.print_exc()
        print(json.dumps([status, printed.getvalue()]), file=answers, flush=True)


if __name__ == "__main__":
    main()
