"""Puts faults into copies of the tree, one at a time, and says which test of the default suite finds each.

    python scripts/sabotage.py                      # all of them: a quarter of an hour on two cores
    python scripts/sabotage.py stale "a lost"       # those whose description has one of these words in it

`sabotage.yaml` has the faults. The tests of a fault's room run first; if they find nothing, the whole default suite
runs. A test that fails without the fault as well ends it all with an error. The exit status is 1 if a fault was not
found.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from jaxrl.processes.process_tree import adopt_orphans, children, kill_descendants

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 1200  # for the suite; a fault may also be one that makes it hang
Fault = dict[str, str]


def faults() -> list[Fault]:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def broken(fault: Fault) -> str:
    """The file's text with the fault. Raises ValueError where `old` is not there once: it is to be written anew."""
    text = (ROOT / fault["file"]).read_text()
    if text.count(fault["old"]) != 1:
        raise ValueError(f"{fault['file']} must have {fault['old']!r} once, found {text.count(fault['old'])}")
    return text.replace(fault["old"], fault["new"])


def copy_tree(to: Path) -> None:
    """What git has, or would have with `git add`, as it stands now; in a repository of its own, which tests ask."""
    to.chmod(0o755)  # some tests run programs of it as another user
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name, follow_symlinks=False)
    git = ("git", "-c", "user.name=sabotage", "-c", "user.email=sabotage@localhost")
    for command in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", "The tree")):
        subprocess.run([*git, *command], cwd=to, check=True)


def variables(tree: Path) -> dict[str, str]:
    """For tests of a copy: its own modules, and the data of the tree that it is a copy of. No bytecode: Python knows it
    by the source's second and size, and a fault may come and go within one second."""
    data = os.environ.get("JAXRL_DATA", str(ROOT.parent / "shared" / "data"))
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return os.environ | {"PYTHONPATH": str(tree), "JAXRL_DATA": data, **threads}


def first_failure(tree: Path, tests: list[str], processes: int) -> str | None:
    """The first test that fails, and why in a line; None: all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-rfE", *tests]
    command += ["--numprocesses", str(processes), "--dist", "worksteal"]
    with tempfile.TemporaryFile("w+") as said:  # a pipe would be held open by what a fault leaves behind
        process = subprocess.Popen(command, cwd=tree, env=variables(tree), stdout=said, stderr=subprocess.STDOUT)
        until = time.monotonic() + PATIENCE_S
        while (status := process.poll()) is None and time.monotonic() < until:
            for orphan in {*children(os.getpid())} - {process.pid}:  # a test may wait until it is gone
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan, os.WNOHANG)
            time.sleep(0.1)
        if status is None:
            process.kill()
            return f"the tests have no end within {PATIENCE_S} s"
        said.seek(0)
        text = said.read()
    if status == 0:
        return None
    found = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return found[0] if found else f"pytest ended with status {status}: {text[-300:]}"


def found_by(fault: Fault, tree: Path, processes: int) -> str | None:
    """What finds a fault that is put into the tree, and taken out of it again; None: nothing."""
    (tree / fault["file"]).write_text(broken(fault))
    found = first_failure(tree, fault["tests"].split(), processes) or first_failure(tree, [], processes)
    shutil.copy(ROOT / fault["file"], tree / fault["file"])
    if found is not None and found.startswith(("FAILED ", "ERROR ")):
        test = found.split(" ", 1)[1].split(" - ")[0]
        if first_failure(tree, [test], 0) is not None:
            raise ValueError(f"{test} fails without a fault as well: mend it first")
    return found


def main(words: list[str], processes: int) -> int:
    adopt_orphans()
    wanted = [fault for fault in faults() if not words or any(word in fault["what"] for word in words)]
    missed = 0
    for fault in wanted:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="sabotage-") as folder:
            copy_tree(Path(folder))
            found = found_by(fault, Path(folder), processes)
            kill_descendants()  # a fault may be one that leaves processes behind
        missed += found is None
        said = f"{'MISSED' if found is None else 'found'}  {time.monotonic() - started:4.0f} s"
        print(f"{said}  {fault['file']}: {fault['what']}\n        {found or 'no test of the default suite fails'}")
    print(f"{len(wanted) - missed} of {len(wanted)} faults found")
    return int(missed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults whose description has one of these in it")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 4), help="that share the tests")
    arguments = parser.parse_args()
    sys.exit(main(arguments.words, arguments.processes))
