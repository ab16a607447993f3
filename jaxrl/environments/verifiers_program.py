"""An environment of Prime Intellect's verifiers, as a program that asks for turns (`environment.kind=verifiers`).

Runs under the Python that `environment.python` names, with `verifiers` and the environment's own package installed
there. What the library calls an environment is another thing from 0.4 on, so a file beside this one drives each kind;
this one picks it by the version that is installed.
"""

import re
import runpy
import sys
from importlib import metadata
from pathlib import Path

FIRST, TASKSETS, UNKNOWN = (0, 1, 11), (0, 4), (0, 5)


def _driver():
    """The file that drives the installed version."""
    try:
        version = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"environment.python: {sys.executable} has no verifiers: install it there, with the environment's package"
        ) from None
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if not FIRST <= release < UNKNOWN:
        raise ValueError(f"environment.python: {sys.executable} has verifiers {version}, and 0.1.11 to 0.4 are driven")
    return "verifiers_classic.py" if release < TASKSETS else "verifiers_tasksets.py"


if __name__ == "program":  # as program_server.py runs it
    _functions = runpy.run_path(str(Path(__file__).with_name(_driver())))
    schemas, problem, run = (_functions[name] for name in ("schemas", "problem", "run"))
