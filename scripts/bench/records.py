"""What all benchmarks share (`frame.py` puts it together): options, header, and dated records.

A record is one JSON object on one line of `docs/benchmarks/<bench>-<device>.jsonl`. It never holds the machine's name
or a path of it: only the last part of a path is kept.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.models.config import ModelConfig
from jaxrl.record import run_dir

from .measure import num_cores

RECORDS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
SCHEMA = 1
DTYPES = ("float32", "bfloat16")


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
        from jaxrl.models.loading import resolve_path  # imports jax, which reward workers must not

        return resolve_path(self.path)

    def config(self) -> ModelConfig:
        """Of the path, or of the shape."""
        if self.shape:
            from jaxrl.models.shapes import named_shape

            return named_shape(self.shape)
        from jaxrl.models.loading import config_of

        return config_of(self.resolved())


def model_options(parser: argparse.ArgumentParser) -> None:
    """The options of all benchmarks that have a model."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="", help="a Hugging Face folder, a .gguf file or package:file, as model.path")
    model.add_argument("--shape", default="", help="random weights of a named shape (SmolLM2-135M)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES], help="of products (both)")
    parser.add_argument("--devices", type=int, default=1, help="how many devices (1); on CPUs: virtual ones")
    parser.add_argument("--repetitions", type=int, default=5, help="timed runs of each case, in turns (5)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and lengths (0)")


def record_options(parser: argparse.ArgumentParser, *, is_quick: bool = False) -> None:
    """Where records go; `is_quick`: there is a trial."""
    parser.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=RECORDS,
        metavar="FOLDER",
        help="append a dated record to a file in FOLDER (docs/benchmarks), named after the benchmark and the device",
    )
    if is_quick:
        parser.add_argument("--quick", action="store_true", help="tiny sizes: try the benchmark itself")


def model_of(options: argparse.Namespace) -> Model:
    """The model of the options; ValueError for a name or path that is none."""
    model = Model(options.model, options.shape)
    model.config()
    return model


def threads(options: argparse.Namespace) -> int:
    """Torch's threads: one per core, as XLA uses; one for a trial, because its products are too small to share."""
    return 1 if options.quick else num_cores()


def prepare_devices(num_devices: int) -> list[Any]:
    """jax's devices for this process, before its first computation; a compilation cache as training has it.

    On GPUs memory is taken as it is needed, so that several processes can share a device.
    """
    import os

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    cache = Path("~/.cache/jaxrl/xla").expanduser()
    if jax.config.values["jax_compilation_cache_dir"] is None:
        cache.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    if num_devices > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", num_devices)
    devices = jax.devices()
    if num_devices > len(devices):
        raise ValueError(f"--devices ({num_devices}) must be at most the devices there are ({len(devices)})")
    return devices[:num_devices]


def describe_devices(devices: Sequence[Any]) -> dict[str, Any]:
    """platform, kind, count; a CPU's kind is its model name, with the number of cores that this process may use."""
    first = devices[0]
    described: dict[str, Any] = {"platform": first.platform, "kind": first.device_kind, "count": len(devices)}
    return described | describe_host() | {"count": len(devices)} if first.platform == "cpu" else described


def describe_host() -> dict[str, Any]:
    """The same of a benchmark that needs no device."""
    return {"platform": "cpu", "kind": cpu_name(), "count": 1, "cores": num_cores()}


def cpu_name() -> str:
    """The model name of this machine's CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions(*packages: str) -> dict[str, str]:
    """Of Python, jax and what else was used."""
    known = run_dir.versions()
    found = {name: known[name] for name in ("python", "jax", "jaxlib")}
    return found | {name: importlib.metadata.version(name) for name in packages}


def installed(*packages: str) -> bool:
    """Whether all of these distributions are there."""
    try:
        for name in packages:
            importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def command(arguments: Sequence[str] | None = None) -> str:
    """How the benchmark was called, every path reduced to its last part."""
    words = [sys.argv[0], *(sys.argv[1:] if arguments is None else arguments)]
    return " ".join(_without_folders(word) for word in words)


def _without_folders(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    if "/" in value or "\\" in value:
        value = re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return option + equals + value


def header(bench: str, device: Mapping[str, Any], used: Mapping[str, str], called: str) -> dict[str, Any]:
    """Date, command, commit, device and versions: how every record begins."""
    commit, _, changes = run_dir.commit().partition("+")
    return {
        "schema": SCHEMA,
        "bench": bench,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": called,
        "commit": commit,
        "dirty": bool(changes),
        "device": dict(device),
        "versions": dict(used),
    }


def print_header(head: Mapping[str, Any], say: Callable[[str], None]) -> None:
    device = dict(head["device"])
    cores = f", {device['cores']} cores" if "cores" in device else ""
    say(f"{head['bench']}: {head['command']}")
    say(f"date      {head['date']}")
    say(f"commit    {head['commit'] or 'unknown'}{' with uncommitted changes' if head['dirty'] else ''}")
    say(f"device    {device['count']} x {device['kind']} ({device['platform']}{cores})")
    say("versions  " + ", ".join(f"{name} {version}" for name, version in head["versions"].items()))


def append_record(folder: Path, record: Mapping[str, Any]) -> Path:
    """Appends a record to the file of its benchmark and device; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    device = record["device"]
    words = f"{record['bench']}-{device['count']}x-{device['kind']}"
    file = folder / (re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-") + ".jsonl")
    with open(file, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(record, allow_nan=False) + "\n")
    return file


def read_records(file: Path) -> list[dict[str, Any]]:
    """The records of a file, oldest first."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
