#!/usr/bin/env python3
"""What is to be known of jaxrl on a GPU, in one command: is it right, and how near is it to what the card can do.

    python scripts/gpu_battery.py --minutes 9 --out DIR [--only NAME ...] [--again NAME ...]
    python scripts/gpu_battery.py --list --out DIR
    python scripts/gpu_battery.py --quick --out DIR          # all of it on a CPU with tiny shapes: does it run?

Parts (`gpu/parts.yaml`) run in order of worth, each in a process of its own with a limit of its own, until the minutes
are up. What has passed is not run again by the next call with the same DIR, on this machine or another; parts that
never ran come first then, and those that failed last. A part that fails does not stop the others.

DIR holds `summary.txt` (one page: every figure beside what was expected of it and the bar that it must reach),
`records.jsonl` (the same as records, one a line, each with date, device, commit, versions and command; and the state
that the next call reads) and `log.txt` (the end of what each part printed).

Needs one NVIDIA GPU and jaxrl with JAX's CUDA plugin (`pip install 'jaxrl[cuda13]'`), pytest and pytest-xdist; no
network, and no other process on the card. Exit status 1: a part failed or a bar was missed; 2: asked for nonsense, or
no GPU.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import header, say, survey
from bench.worker import once
from gpu import page
from gpu.battery import Battery, Part

ROOT = Path(__file__).resolve().parents[1]
MEMORY_SHARE = "0.93"
"""Of the card, for JAX: its own default of 0.75 leaves a quarter to nothing, since a part has the card to itself."""
TRIAL_S = 80
"""For each part of a trial; 2.5 times as long, however busy the machine is."""
_QUICK_COMPILES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""A trial's programs run once: it is compiling that takes its time."""


def parts(is_trial: bool) -> list[Part]:
    made = []
    for each in page.PARTS:
        if words := each.get("quick" if is_trial else "run", "").split():
            command = (sys.executable, str(ROOT / "scripts" / "bench.py"), *words, "--json", "{folder}")
            shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if each.get("shares_device") else {}
            made.append(Part(each["name"], TRIAL_S if is_trial else each["seconds"], command, shared))
    return made


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=9.0, help="when it ends, whatever still runs (9)")
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="results, and what has been done")
    made.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run these parts alone")
    made.add_argument("--again", nargs="+", default=[], metavar="NAME", help="run these though they have passed")
    made.add_argument("--list", action="store_true", help="print the parts, their seconds and what has become of them")
    made.add_argument("--quick", action="store_true", help="tiny shapes on a CPU: try the battery itself")
    made.add_argument("--cache", type=Path, metavar="DIR", help="compilation cache (~/.cache/jaxrl/xla)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        return _run(options)
    except ValueError as error:
        print(f"gpu_battery: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    began = time.monotonic()
    if not options.minutes > 0:
        raise ValueError(f"--minutes ({options.minutes}) must be above 0")
    environment = _environment(options)
    device = functools.cache(lambda: _device(environment))

    def write_page() -> str:
        text = page.results(battery.records(), options.quick)
        (options.out / "summary.txt").write_text(text, encoding="utf-8")
        return text

    battery = Battery(
        parts(options.quick),
        options.out,
        lambda command: header("part", device(), command) | {"trial": options.quick},
        environment,
        say=say,
        on_end=write_page,
    )
    wanted = battery.waiting(options.only, options.again)
    if options.list:
        statuses = battery.statuses()
        for part in battery.parts:
            words = " ".join(Path(word).name for word in part.command[1:-2])
            print(f"{part.name:<22} {part.seconds:>4} s  {statuses.get(part.name, 'not run'):<15} {words}")
        return 0
    _refuse_a_mix(battery.records(), device(), options)

    def end(*_: object) -> None:  # so that what the battery has begun ends with it
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    battery.run(wanted, 60 * options.minutes - (time.monotonic() - began))
    print(write_page(), end="")
    found, is_gpu = battery.records(), device()["platform"] == "gpu"
    failed = {"failed", "over its limit"} & {*battery.statuses().values()}
    missed = any(
        page.verdict(each, page.value(each, found), is_gpu) == page.MISSED for each in page.figures(options.quick)
    )
    return int(bool(failed or missed))


def _refuse_a_mix(found: Sequence[Mapping[str, Any]], device: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Shares are of what the same device measured, so a folder has the results of one; and none of a trial.

    Raises:
      ValueError: the folder has results of another device, or of a trial beside which this is none, or the reverse.
    """
    for each in found:
        if each["bench"] == "part" and (each["device"]["kind"], each["trial"]) != (device["kind"], options.quick):
            what = f"{'a trial on' if each['trial'] else 'results of'} {each['device']['kind']}"
            here = f"{'a trial on' if options.quick else 'a run on'} {device['kind']}"
            raise ValueError(f"--out ({options.out}) holds {what}, and this is {here}: name another folder")


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """Of all parts."""
    cache = (options.cache or Path("~/.cache/jaxrl/xla")).expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT / "scripts"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = dict(os.environ)
    found |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    if options.quick:
        return found | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _QUICK_COMPILES}
    found.setdefault("JAX_PLATFORMS", "cuda,cpu")
    if not found.get("XLA_CLIENT_MEM_FRACTION"):  # jax refuses both
        found.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_SHARE)
    return found


def _device(environment: Mapping[str, str]) -> dict[str, Any]:
    """The device that the parts will find. A process of its own asks: this one must not hold its memory.

    Raises:
      ValueError: there is none.
    """
    os.environ.update(environment)
    try:
        return once("device", survey, (1, False, False))["device"]
    except RuntimeError as error:
        said = str(error).strip().splitlines()[-1]
        raise ValueError(f"JAX finds no device ({said}); --quick tries it on a CPU") from None


if __name__ == "__main__":
    sys.exit(main())
