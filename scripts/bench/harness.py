"""The harness of all benchmarks: options, cases in turns, the gauge, medians, ratios, records, exit status.

A benchmark is a module of this folder with a `BENCH`, whose `cases` yields groups of `Case`. The harness runs the cases
of a group in turns, and then asks for the next group, so that code behind the `yield` can free what a group held::

    def cases(options):
        run = jax.jit(...)
        yield [Case({"case": "jaxrl", "rows": rows}, lambda turn: {"seconds": queued_s(run)}) for rows in options.rows]

    BENCH = Bench(__doc__, cases, {"rows": ([16, 64], "rows of a product")}, quick={"rows": [2]})

A shared machine can lose cores without a trace: no load shows, everything just takes longer. So on CPUs a short gauge
of the parallel capacity stands between any two runs. A turn counts only if all of its gauges reach `KEEP_SHARE` of the
best of the whole benchmark. An accelerator is not disturbed in the same way, and needs no gauge.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.worker import Ask, once

if TYPE_CHECKING:
    from bench.machine import Ceilings

NAMES = {
    "attention": "attention alone, beside JAX's own and cuDNN's",
    "ceilings": "what the device does at best, beside its data sheet",
    "check": "what a device draws and differentiates, against float64",
    "decode": "the engine; --at-context: decode steps of rows that stand at a context already",
    "failures": "a run that is killed again and again: which share of its time moved it forward",
    "learning": "held-out reward of settings over seeds, seconds, memory",
    "option": "what each value of an option costs, simulated",
    "rules": "seconds a sample of the rollout rules, and what the simulator predicts",
    "step": "whole GRPO steps of settings, phase by phase",
    "sync": "the trainer's weights to the rollout",
    "tests": "the tests marked gpu",
    "train": "forward, backward, AdamW: the trainer, and PyTorch",
}
RECORDS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
KEEP_SHARE = 0.93
_CHUNK = bytes(1 << 17)

Values = dict[str, float]
Record = Mapping[str, Any]


class LeftOut(Exception):
    """A case cannot run here; says why. For a case's first run."""


@dataclass(slots=True)
class Case:
    """One line of a benchmark.

    Attributes:
      facts: which case it is, and of what sizes; no two cases have the same. Cases that differ in `case` alone are
        compared with the first of them.
      run: one repetition, given the number of its turn (below 0: a warm-up).
      figures: what follows from its averages, the machine's ceilings and all of its runs.
      extra: for the record alone.
    """

    facts: dict[str, Any]
    run: Callable[[int], Values]
    figures: Callable[[Values, Ceilings, list[Values]], dict[str, Any]] = lambda average, ceilings, runs: {}
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return " ".join(str(value) for value in self.facts.values())


@dataclass(frozen=True, slots=True)
class Bench:
    """A benchmark.

    Attributes:
      text: its help.
      cases: yields groups of cases. A ValueError is a sentence about what was asked for.
      options: its own options by name: (default, help). A type, such as `int`: several, by default none; `[[]]`:
        several words, each time that it is given; a name that begins with * takes all words without a dash. Numbers
        that are 1 or more by default must be, as must several that are none by default.
      quick: other defaults with `--quick`, tiny sizes that try the benchmark itself; None: there is no trial.
      place: `devices`; `apart`: cases live in processes of their own, and this one must not hold a device's memory;
        `host`: no device takes part.
      warm_up: runs of each case before those that count.
      average: the median, for timed runs; `mean`, for runs that differ in their seeds: standard deviations are kept.
      has_model: it has a model, devices and types of numbers, as most have.
      has_ceilings: the machine's are measured before and after.
      check: raises ValueError for options that do not fit together, and may complete them.
      promises: a sentence for each promise that a record breaks.
    """

    text: str | None
    cases: Callable[[argparse.Namespace], Iterable[Sequence[Case]]]
    options: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    quick: Mapping[str, Any] | None = field(default_factory=dict)
    place: str = "devices"
    warm_up: int = 1
    average: str = "median"
    has_model: bool = True
    has_ceilings: bool = False
    check: Callable[[argparse.Namespace], Any] = lambda options: None
    promises: Callable[[Record], Iterable[str]] = lambda record: ()


def say(text: str) -> None:
    """Prints at once, also into a file: a benchmark may take an hour."""
    print(text, flush=True)


# -- the gauge, and what counts ----------------------------------------------------------------------------------------


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Gauge:
    """Bytes that all cores hash per second (hashing releases Python's lock): the median of three readings of 40 ms,
    0.2 s after the last run, whose leftovers are not another's load."""

    def __init__(self) -> None:
        self._pool, self._start = ThreadPoolExecutor(num_cores()), threading.Barrier(num_cores())
        self._read()  # starts the threads

    def __call__(self) -> float:
        time.sleep(0.2)
        return statistics.median(self._read() for _ in range(3))

    def _read(self) -> float:
        return sum(self._pool.map(lambda _: self._hash(), range(num_cores())))

    def _hash(self) -> float:
        self._start.wait()
        began, done = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < 0.04:
            hashlib.sha256(_CHUNK)
            done += len(_CHUNK)
        return done / elapsed


@dataclass(slots=True)
class Turn:
    """Each case of a group once.

    Attributes:
      values: by the case's label.
      gauges: before the first, and after each; none on an accelerator.
    """

    values: dict[str, Values]
    gauges: list[float]


def take_turns(group: Sequence[Case], repetitions: int, gauge: Callable[[], float] | None) -> Iterator[Turn]:
    """A slow hour is slow for all cases of a group."""
    last = [gauge()] if gauge else []
    for number in range(repetitions):
        turn = Turn({}, list(last))
        for case in group:
            values = turn.values[case.label] = case.run(number)
            last = [gauge()] if gauge else []
            turn.gauges += last
            if "seconds" in values:
                say(f"  {case.label}: {shown('seconds', values['seconds'])}")
        yield turn


def keep(turns: Sequence[Turn]) -> list[bool]:
    """Which turns count: those whose gauges all reach `KEEP_SHARE` of the best of all turns."""
    best = max((gauge for turn in turns for gauge in turn.gauges), default=0.0)
    return [min(turn.gauges, default=best) >= KEEP_SHARE * best for turn in turns]


def summarise(label: str, turns: Sequence[Turn], average: str = "median") -> tuple[Values, dict[str, Any]]:
    """A case's averages over its turns that count, or over all where none does; and for the record how many count, and
    whether it is `disturbed`: none does."""
    kept = keep(turns)
    own = [(turn.values[label], good) for turn, good in zip(turns, kept, strict=True) if label in turn.values]
    good = [values for values, is_good in own if is_good]
    used = good or [values for values, _ in own]
    found = {name: [values[name] for values in used] for name in used[0]}
    averages = {name: float(getattr(statistics, average)(each)) for name, each in found.items()}
    if average == "mean" and len(used) > 1:
        averages |= {f"{name}_std": statistics.stdev(each) for name, each in found.items()}
    return averages, {"kept": len(good), "dropped": len(own) - len(good), "disturbed": not good}


def ratios(cases: Sequence[Mapping[str, Any]], facts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of cases that differ in `case` alone, the speed of the first over each of the others."""
    first: dict[str, Mapping[str, Any]] = {}
    found: list[dict[str, Any]] = []
    for case, own in zip(cases, facts, strict=True):
        shared = {name: value for name, value in own.items() if name != "case"}
        ours = first.setdefault(json.dumps(shared), case)
        if ours is not case and ours.get("seconds") and case.get("seconds"):
            ratio = {"ratio": f"{ours['case']} / {case['case']}", **shared}
            ratio |= {"speed": case["seconds"] / ours["seconds"], "disturbed": ours["disturbed"] or case["disturbed"]}
            found.append(ratio)
    return found


def shown(name: str, value: float) -> str:
    """A figure in print; the end of its name says its unit."""
    if re.search(r"^seconds|^timing_s/|(?<!per)_s$", name):
        return f"{value:.3f} s" if abs(value) >= 1 else f"{value * 1e3:.3f} ms"
    if re.search(r"(_fraction|_share|mfu|mfu_datasheet|^error|_rate)$", name) and abs(value) < 10:
        return f"{value:.1%}"
    if name.endswith("bytes_per_s"):
        return f"{value / 1e9:.1f} GB/s"
    if name.endswith("flops_per_s"):
        return f"{value / 1e9:.1f} GFLOP/s"
    return f"{value / 1e9:.3f} GB" if name.endswith("bytes") else f"{value:.4g}"


# -- options -----------------------------------------------------------------------------------------------------------

_MODEL_OPTIONS: dict[str, tuple[Any, str]] = {
    "model": ("", "a Hugging Face folder, a .gguf file or package:file, as model.path"),
    "shape": ("", "random weights of a named shape, without --model (SmolLM2-135M)"),
    "dtypes": (["float32", "bfloat16"], "of products"),
    "devices": (1, "how many; on CPUs: virtual ones"),
    "seed": (0, "of weights, prompts and lengths"),
}


def all_options(bench: Bench) -> dict[str, tuple[Any, str]]:
    shared = {"repetitions": (5, "runs of each case, in turns")}
    return (_MODEL_OPTIONS if bench.has_model else {}) | shared | dict(bench.options)


def parser(name: str, bench: Bench) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"bench.py {name}", description=bench.text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, (default, text) in all_options(bench).items():
        kind, default = (default, []) if isinstance(default, type) else (None, default)
        told = " ".join(map(str, default)) if isinstance(default, list) else default
        how: dict[str, Any] = {"default": default, "help": f"{text} ({told})" if told else text}
        if option.startswith("*"):
            made.add_argument(option[1:], nargs="*", **how)
            continue
        if isinstance(default, bool):
            how["action"] = "store_true"
        elif default == [[]]:
            how |= {"action": "append", "nargs": "+", "default": None, "help": text}
        elif isinstance(default, list):
            how |= {"nargs": "*", "type": kind or type(default[0])}
        else:
            how["type"] = type(default)
        made.add_argument(f"--{option.replace('_', '-')}", **how)
    made.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=RECORDS,
        metavar="FOLDER",
        help="append a dated record to a file in FOLDER (docs/benchmarks), named after the benchmark and the device",
    )
    if bench.quick is not None:
        made.add_argument("--quick", action="store_true", help="tiny sizes: try the benchmark itself")
    return made


def parsed(name: str, bench: Bench, arguments: Sequence[str]) -> argparse.Namespace:
    """Checked options; with `--quick`, its defaults replace the others, and what was given still wins."""
    made = parser(name, bench)
    options = made.parse_args(arguments)
    if bench.quick is None:
        options.quick = False
    elif options.quick:
        made.set_defaults(**({"repetitions": 2, "dtypes": ["float32"]} | dict(bench.quick)))
        options = made.parse_args(arguments)
    for option, (default, _) in all_options(bench).items():
        usual = default[0] if isinstance(default, list) else default
        value = vars(options)[option.lstrip("*")]
        for each in value if isinstance(value, list) else [value]:
            if (default is int or (type(usual) is int and usual >= 1)) and each < 1:
                raise ValueError(f"--{option.replace('_', '-')} ({each}) must be at least 1")
    if bench.has_model:
        options.shape = "" if options.model else options.shape or ("tiny" if options.quick else "SmolLM2-135M")
        model_of(options).config()  # refuses what is none
    bench.check(options)
    return options


@dataclass(frozen=True, slots=True)
class Model:
    """Which weights: a path, as `model.path` takes it, or random ones of a named shape. One of the two is empty."""

    path: str = ""
    shape: str = ""

    @property
    def name(self) -> str:
        """Its name in records."""
        return self.shape or Path(self.path.partition(":")[2] or self.path).name

    def resolved(self) -> str:
        """The path with `package:file` resolved. Not for shapes."""
        from jaxrl.models import loading

        return loading.resolve_path(self.path)

    def config(self) -> Any:
        """The `ModelConfig` of the path, or of the shape."""
        from jaxrl.models import loading, shapes

        return shapes.named_shape(self.shape) if self.shape else loading.config_of(self.resolved())


def model_of(options: argparse.Namespace) -> Model:
    return Model(options.model, options.shape)


# -- devices and records -----------------------------------------------------------------------------------------------


def prepare_devices(num_devices: int) -> list[Any]:
    """jax's devices for this process, before its first computation; a compilation cache as training has it.

    On GPUs memory is taken as it is needed, so that several processes can share a device.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is None:
        cache = Path("~/.cache/jaxrl/xla").expanduser()
        cache.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    if num_devices > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", num_devices)
    devices = jax.devices()
    if num_devices > len(devices):
        raise ValueError(f"--devices ({num_devices}) must be at most the devices there are ({len(devices)})")
    return devices[:num_devices]


def describe(devices: Sequence[Any]) -> dict[str, Any]:
    """platform, kind, count; a CPU's kind is its model name, with the number of cores that this process may use. No
    devices: the host."""
    if devices and devices[0].platform != "cpu":
        return {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    kind = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    name = kind[1].strip() if kind else platform.machine()
    return {"platform": "cpu", "kind": name, "count": max(len(devices), 1), "cores": num_cores()}


def survey(spec: tuple[int, bool, bool], ask: Ask) -> None:
    """What `once` asks: `describe`, and where it is wanted the machine's ceilings."""
    from bench.machine import measure

    num_devices, has_ceilings, quick = spec
    device = describe(prepare_devices(num_devices))
    ask({"device": device, "ceilings": measure(num_devices, quick) if has_ceilings else None})


def header(name: str, device: Mapping[str, Any], called: str) -> dict[str, Any]:
    """Date, command, commit, device and versions: how every record begins. No path of the machine, and not its name."""
    from jaxrl.record import run_dir

    commit, _, changes = run_dir.commit().partition("+")
    known = run_dir.versions()
    return {
        "schema": 1,
        "bench": name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": called,
        "commit": commit,
        "dirty": bool(changes),
        "device": dict(device),
        "versions": {package: known[package] for package in ("python", "jax", "jaxlib")},
    }


def command(words: Sequence[str]) -> str:
    """A command, every path reduced to its last part."""
    return " ".join(re.sub(r"(?<=[=])[^=]*[/\\]|^(?!-)[^=]*[/\\]", "", word.rstrip("/\\")) for word in words)


def append_record(folder: Path, record: Record) -> Path:
    """Appends a record to the file of its benchmark and device; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    words = f"{record['bench']}-{record['device']['count']}x-{record['device']['kind']}"
    file = folder / (re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-") + ".jsonl")
    with open(file, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(record, allow_nan=False) + "\n")
    return file


# -- a benchmark -------------------------------------------------------------------------------------------------------


def run(name: str, bench: Bench, options: argparse.Namespace, called: str) -> dict[str, Any]:
    """Runs all cases; prints and returns the record."""
    num_devices = vars(options).get("devices", 1)
    asked = (num_devices, bench.has_ceilings, options.quick)
    ceilings: Any = None
    if bench.place == "apart":
        found = once("survey", survey, asked)
        device, ceilings, again = found["device"], found["ceilings"], lambda: once("survey", survey, asked)["ceilings"]
    else:
        device = describe(prepare_devices(num_devices) if bench.place == "devices" else [])
        from bench.machine import measure

        again = partial(measure, num_devices, options.quick)
    head = header(getattr(options, "record_as", name), device, called)
    say("\n".join(f"{key:<9} {value}" for key, value in head.items() if key != "schema"))
    if bench.has_ceilings and ceilings is None:
        ceilings = again()
    is_timed = bench.average == "median" and bench.place != "host"
    gauge = Gauge() if is_timed and device["platform"] == "cpu" else None
    cases, turns, left_out = _run_all(bench, options, gauge)
    if bench.has_ceilings:
        ceilings = ceilings.best(again())
        head["ceilings"] = ceilings.record()
    results = _results(cases, turns, ceilings, bench.average)
    sizes = {key: value for key, value in vars(options).items() if key in bench.options and "/" not in str(value)}
    kept = keep(turns)
    if not any(kept) and turns:
        say("EVERY TURN WAS DISTURBED: the machine was shared all the time. The figures are of all turns.")
    if bench.has_model:
        head |= {"model": model_of(options).name, "devices": num_devices}
    own = {key: vars(options)[key] for key in ("tp",) if key in vars(options)}
    counts = {"kept": sum(kept), "dropped": len(kept) - sum(kept)}
    return head | own | counts | {"results": sizes | results | {"left_out": left_out}}


def _run_all(
    bench: Bench, options: argparse.Namespace, gauge: Gauge | None
) -> tuple[list[Case], list[Turn], list[dict[str, Any]]]:
    cases: list[Case] = []
    turns: list[Turn] = []
    left_out: list[dict[str, Any]] = []
    for group in bench.cases(options):
        able = []
        for case in group:
            try:
                for _ in range(bench.warm_up):
                    case.run(-1)
                able.append(case)
            except LeftOut as reason:
                left_out.append(case.facts | {"reason": str(reason)})
            except RuntimeError as error:  # jax's
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                left_out.append(case.facts | {"reason": "out of memory"})
            if case not in able:
                say(f"{case.label}: left out: {left_out[-1]['reason']}")
        turns += take_turns(able, options.repetitions, gauge) if able else []
        cases += able
    return cases, turns, left_out


def _results(cases: Sequence[Case], turns: Sequence[Turn], ceilings: Any, average: str) -> dict[str, Any]:
    found = []
    for case in cases:
        averages, judged = summarise(case.label, turns, average)
        runs = [turn.values[case.label] for turn in turns if case.label in turn.values]
        averages |= case.figures(dict(averages), ceilings, runs)
        found.append(case.facts | averages | case.extra | judged)
        figures = []
        for name, value in averages.items():
            if isinstance(value, int | float) and not name.endswith("_std"):
                spread = averages.get(f"{name}_std")
                figures.append(f"{name} {shown(name, value)}{'' if spread is None else f' ± {shown(name, spread)}'}")
        mark = "  DISTURBED" if judged["disturbed"] else ""
        say(f"{case.label}: {', '.join(figures)} ({judged['kept']} kept, {judged['dropped']} dropped){mark}")
    compared = ratios(found, [case.facts for case in cases])
    for ratio in compared:
        where = " ".join(str(ratio[key]) for key in ratio if key not in ("ratio", "speed", "disturbed"))
        say(f"speed of {ratio['ratio']} {where}: {ratio['speed']:.3f}{'  DISTURBED' if ratio['disturbed'] else ''}")
    return {"cases": found, "ratios": compared}


def load(name: str) -> Bench:
    return importlib.import_module(f"bench.{name}").BENCH


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0; 1: a promise is broken (figures are printed and recorded all the same); 2: it was asked for
    nonsense."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in NAMES:
        print(f"usage: bench.py NAME [options]\n\n{chr(10).join(f'  {n:<14}{text}' for n, text in NAMES.items())}")
        return 0 if words[:1] in (["-h"], ["--help"]) else 2
    name, bench = words[0], load(words[0])
    try:
        options = parsed(name, bench, words[1:])
        record = run(name, bench, options, command(["bench.py", *words]))
    except ValueError as error:
        print(f"bench.py {name}: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        say(f"appended to {append_record(options.json, record).name}")
    broken = list(bench.promises(record))
    for sentence in broken:
        print(f"bench.py {name}: {sentence}", file=sys.stderr)
    return int(bool(broken))
