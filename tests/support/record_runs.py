#!/usr/bin/env python3
"""Records whole runs over all mechanisms, and compares two recordings: a change that is to change nothing changes none.

    python tests/support/record_runs.py record out/before
    python tests/support/record_runs.py record out/after        # another commit, or the same one again
    python tests/support/record_runs.py compare out/before out/after ['simulated/*' real/killed ...]

`recorded_runs.py` has the table of runs. Of each, a recording holds every file of the run directory, its output, and
each array of its last checkpoint, without what the clock, the machine and the commit put there (`recorded_masks.py`):
what is left is the same to the byte, so `diff -r` compares as well (`Spec.keeps`: of some only batches, metrics
and digests). Where a run is started twice, the folder beside it,
`<name>.first`, is the whole run directory in between; `record --first FOLDER` goes on from that of another recording.

Recordings of two machines agree up to rounding: `compare --close` allows that, and names that have been added.
`tests/commands/data/recorded-runs.tar.xz`, which the tests compare with, is made with

    tar -C FOLDER --exclude=report.html --exclude=output.txt --sort=name --owner=0 --group=0 --numeric-owner \\
        --mtime=2026-01-01 -cJf tests/commands/data/recorded-runs.tar.xz real simulated
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, redirect_stderr, redirect_stdout
from fnmatch import fnmatch
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import yaml
from quick_xla import flags
from recorded_masks import masked
from recorded_runs import RUNS, Spec, write_inputs

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(tempfile.gettempdir()) / f"jaxrl-recorded-xla-{os.getuid()}"
"""Programs compile in half the time."""
FIRST = ".first"
DECISIONS = ("samples.jsonl", "timeline.json", "state.json")
"""What a run decides: of a run of which a recording keeps few files, it keeps digests of these."""
PATIENCE_S = 900.0


def chosen(patterns: Sequence[str]) -> list[str]:
    """Names of runs, as `simulated/plain`, that match any pattern; without patterns all."""
    found = [name for name in RUNS if not patterns or any(fnmatch(name, each) for each in patterns)]
    if not found:
        raise ValueError(f"no run is called {' or '.join(patterns)}: there are {', '.join(RUNS)}")
    return found


def record_here(folder: Path, name: str, first: Path) -> None:
    """Records one run that goes on from another recording."""
    with tempfile.TemporaryDirectory() as made:
        write_inputs(Path(made))
        _record_one(name, Path(made), folder, first)


def record(folder: Path, names: Sequence[str], first: Path | None = None, jobs: int = 2) -> list[str]:
    """Runs them, and writes what must not change to `folder/<name>`; returns what went wrong, of each run that did not
    end well.

    Args:
      first: a recording to resume from, in the runs that are started twice; None: their first starts are run as well.
      jobs: runs at the same time.
    """
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(jobs) as pool:
        work = Path(made)
        write_inputs(work)
        failures: list[str] = []
        for name in filter(is_simulated, names):
            try:
                _record_one(name, work, folder, first)
            except Exception as error:
                failures.append(str(error))
        futures = [pool.submit(_record_one, name, work, folder, first) for name in names if not is_simulated(name)]
        return [*failures, *(str(error) for future in futures if (error := future.exception()))]


def is_simulated(name: str) -> bool:
    """Such a run is recorded in this process, which is quicker."""
    return name.startswith("simulated/")


def _record_one(name: str, work: Path, folder: Path, first: Path | None) -> None:
    began, spec, run_dir, target = time.monotonic(), RUNS[name], work / name, folder / name
    if spec.profile:
        made_up = (str(ROOT / "scripts" / "made_up_profile.py"), "--out=inputs/profile.json")
        _ended(_start(name, spec, work, spec.options, made_up), name)
    said, kept = "", target.with_name(target.name + FIRST)
    goes_on = spec.keeps is None and not spec.command  # sft and dpo would miss the model that they began with
    if spec.first and first is not None and goes_on:
        shutil.copytree(first / kept.relative_to(folder), run_dir)
    elif spec.first:
        said = _first_start(name, spec, work, run_dir)
        if goes_on:
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(run_dir, kept)
    said += _whole_start(name, spec, work, spec.options)
    _check_acts(run_dir, name, spec)
    shutil.rmtree(target, ignore_errors=True)
    for file, text in recorded(run_dir, said, spec, is_simulated(name)):
        place = target / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def _whole_start(name: str, spec: Spec, work: Path, options: Sequence[str]) -> str:
    """What a start says that comes to its end."""
    if not is_simulated(name):
        return _ended(_start(name, spec, work, options), name)
    from jaxrl.cli import main as jaxrl

    output = io.StringIO()
    with chdir(work), redirect_stdout(output), redirect_stderr(output):
        status = jaxrl(["simulate", "--config=inputs/simulated.yaml", f"simulate.run_dir={name}", *options])
    if status:
        raise RuntimeError(f"{name} ended with status {status}:\n{output.getvalue()}")
    return output.getvalue()


def _start(
    name: str, spec: Spec, work: Path, options: Sequence[str], program: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """A process in `work`, so that no path in what it writes is of this machine."""
    kind = name.partition("/")[0]
    command, place = {"simulated": ("simulate", "simulate.run_dir"), "real": ("train", "trainer.run_dir")}[kind]
    command, kind = spec.command or command, spec.command or kind
    variables = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags(spec.devices),
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "120",
    }
    arguments = [*(program or ("-m", "jaxrl", command)), f"--config=inputs/{kind}.yaml", f"{place}={name}", *options]
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=work,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _ended(process: subprocess.Popen[str], name: str) -> str:
    output, _ = process.communicate(timeout=PATIENCE_S)
    if process.returncode:
        raise RuntimeError(f"{name} ended with status {process.returncode}:\n{output}")
    return output


def _first_start(name: str, spec: Spec, work: Path, run_dir: Path) -> str:
    """What the start before the last one said; nothing of one that was killed, whose last words are chance."""
    options = (*spec.options, *spec.first)
    if not spec.killed_after:
        return _whole_start(name, spec, work, options)
    process = _start(name, spec, work, options)
    file = run_dir / "run.json"
    try:
        while not file.exists() or (json.loads(file.read_text()).get("checkpoint") or 0) < spec.killed_after:
            if process.poll() is not None:
                raise RuntimeError(f"{name} was to be killed, and has ended:\n{_ended(process, name)}")
            time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
    return ""


def _check_acts(run_dir: Path, name: str, spec: Spec) -> None:
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for metric in spec.acts:
        found = [step.get(metric) for step in steps]
        if not any(found):
            raise RuntimeError(f"{name}: {metric} was to be above 0 in some step, found {found}")


# ---------------------------------------------------------------- what is kept


def recorded(run_dir: Path, said: str, spec: Spec, simulated: bool) -> Iterator[tuple[str, str]]:
    """Each file of a recording, by its name in it."""
    names, digests = [], {}
    for path in sorted(run_dir.rglob("*")):
        name = path.relative_to(run_dir).as_posix()
        if path.is_dir() or name == ".lock":
            continue
        if name.startswith("checkpoints/"):
            names.append("/".join(name.split("/")[:2]))
            continue
        names.append(name)
        if any(fnmatch(name, each) for each in spec.clocked):
            continue
        if spec.killed_after and name in ("timeline.json", "run.json"):  # how far the killed start came is chance
            continue
        text = masked(name, path.read_text(encoding="utf-8"), simulated, spec.clocked)
        if spec.keeps is None or name in spec.keeps:
            yield name, text
        elif name in DECISIONS:
            digests[name] = {"sha256": hashlib.sha256(text.encode()).hexdigest()[:16]}
    if spec.keeps is not None:
        yield "digests.json", json.dumps(digests, indent=1)
        return
    yield "output.txt", masked("output.txt", said, simulated)
    yield "files.txt", "".join(f"{name}\n" for name in dict.fromkeys(names))
    if not simulated:
        yield "checkpoint.jsonl", checkpoint(run_dir)


def checkpoint(run_dir: Path) -> str:
    """The last checkpoint: the host's values, and of each array its type, shape, norm and digest."""
    import jax
    import numpy as np
    from runs import state_of

    with jax.enable_x64(True):
        arrays, values = state_of(run_dir)
    described = {
        name: {
            "type": str(array.dtype),
            "shape": array.shape,
            "norm": float(np.linalg.norm(array.astype(np.float64).ravel())),
            "sha256": hashlib.sha256(array.tobytes()).hexdigest()[:16],
        }
        for name, array in sorted(arrays.items())
    }
    lines = [json.dumps({"host": values}), *(json.dumps({name: entry}) for name, entry in described.items())]
    return masked("checkpoint.jsonl", "".join(f"{line}\n" for line in lines), False)


# ---------------------------------------------------------------- comparison


def compare(old: Path, new: Path, names: Sequence[str], close: bool = False) -> list[str]:
    """What differs, a sentence each.

    Args:
      close: `old` is of another machine, and perhaps an older commit: numbers may be rounded otherwise, names may have
        been added, and files that `old` does not have are not compared.
    """
    found = []
    for name in names:
        ours, theirs = ({path.relative_to(at / name) for path in (at / name).rglob("*.*")} for at in (new, old))
        if not theirs:
            found.append(f"{name}: not in {old}")
        found += [f"{name}: {file} is only in {old}" for file in sorted(theirs - ours)]
        found += [f"{name}: {file} is only in {new}" for file in sorted(ours - theirs) if not close]
        for file in sorted(ours & theirs):
            difference = _difference(old / name / file, new / name / file, close)
            found += [f"{name}: {file}, {difference}"] if difference else []
    return found


def _difference(old: Path, new: Path, close: bool) -> str:
    if old.is_dir() or old.read_bytes() == new.read_bytes():
        return ""
    if close:
        return "".join(islice(differing(_content(new), _content(old)), 1))
    theirs, ours = (file.read_text(encoding="utf-8").splitlines() for file in (old, new))
    differ = (pair for pair in zip_longest(theirs, ours) if pair[0] != pair[1])
    return "\n  ".join(("a line", *(str(line)[:1000] for line in next(differ, ()))))


def _content(file: Path) -> Any:
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    match file.suffix:
        case ".jsonl":
            return [json.loads(line) for line in lines]
        case ".json" if file.name == "state.json":  # of a simulation: a header, and the state
            return [json.loads(line) for line in lines]
        case ".json":
            return json.loads(text)
        case ".yaml":
            return yaml.safe_load(text)
    return lines


def differing(found: Any, expected: Any, where: str = "") -> Iterator[str]:
    """Where the two differ, but for what another machine rounds differently and for names that have been added."""
    match expected:
        case dict() if isinstance(found, dict):
            for name, value in expected.items():
                if name not in found:
                    yield f"{where}/{name} is gone"
                elif name != "sha256":
                    yield from differing(found[name], value, f"{where}/{name}")
        case list() if isinstance(found, list) and len(found) == len(expected):
            for number, value in enumerate(expected):
                yield from differing(found[number], value, f"{where}/{number}")
        case float() if isinstance(found, float | int) and math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9):
            return
        case _:
            if found != expected:
                yield f"{where}: {expected!r:.1000}, now {found!r:.1000}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("record")
    make.add_argument("folder", type=Path)
    make.add_argument("--first", type=Path, metavar="FOLDER", help="a recording to resume from")
    make.add_argument("--jobs", type=int, default=2, help="runs at the same time (2)")
    check = commands.add_parser("compare")
    check.add_argument("old", type=Path)
    check.add_argument("new", type=Path)
    check.add_argument("--close", action="store_true", help="numbers may be rounded as another machine does")
    for command in (make, check):
        command.add_argument("names", nargs="*", metavar="NAME", help="as real/plain or 'simulated/*' (all)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    names = chosen(options.names)
    if options.command == "record":
        failures = record(options.folder, names, options.first, options.jobs)
        print("\n".join(failures) or f"{len(names)} runs recorded")
        return 1 if failures else 0
    differences = compare(options.old, options.new, names, options.close)
    print("\n".join(differences) or f"{len(names)} runs, every file equal")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
