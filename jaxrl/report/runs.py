"""A run as a page reads it: the files in its folder, each of which may be missing. config.yaml is read only to say so
if it is damaged, because a run could not resume then."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.config import flatten
from jaxrl.config.inputs import read_text
from jaxrl.config.yaml_text import parse_yaml
from jaxrl.record import batches, layouts, metrics, samples
from jaxrl.record.files import read_lines
from jaxrl.record.run_dir import CONFIG_FILE, RUN_FILE, SIMULATED
from jaxrl.report.charts import Point


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The contents of a run's folder; `problems` says what could not be read."""

    folder: Path
    metrics: list[dict[str, float]]
    samples: list[dict[str, Any]]
    layouts: list[dict[str, Any]]
    batches: list[dict[str, Any]]
    info: Mapping[str, Any]
    problems: list[str]

    def series(self, name: str) -> list[Point]:
        """(step, value) where the metric was recorded."""
        return [(row["step"], row[name]) for row in self.metrics if name in row]

    def section(self, name: str) -> Mapping[str, Any]:
        value = self.info.get(name)
        return value if isinstance(value, Mapping) else {}

    @property
    def learns_from_files(self) -> bool:
        return self.info.get("kind") in ("sft", "dpo")

    @property
    def is_simulated(self) -> bool:
        lines = self.metrics[:1]
        return self.section("devices").get("platform") == SIMULATED or any("simulated" in line for line in lines)

    def option(self, path: str) -> Any:
        return flatten(self.section("config")).get(path)


def read_run(run_dir: str | Path) -> RecordedRun:
    folder, expected = Path(run_dir), (metrics.FILE_NAME, samples.FILE_NAME, RUN_FILE)
    if not any((folder / name).is_file() for name in expected):
        raise ValueError(f"{folder} is not a run: it has none of {', '.join(expected)}")
    problems: list[str] = []

    def attempt(read: Callable[[], Any], name: str, otherwise: Any, optional: bool = False) -> Any:
        if not (folder / name).is_file():
            if not optional or os.path.lexists(folder / name):
                problems.append(f"{name} is missing")
            return otherwise
        try:
            value = read()
            if type(value) is not type(otherwise):
                raise ValueError("must hold an object")
            return value
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{name} could not be read: {error}")
            return otherwise

    def note(damaged: str) -> None:
        problems.append(f"{damaged}, and left out")

    steps = attempt(lambda: metrics.read_metrics(folder, note), metrics.FILE_NAME, [])
    if not steps and not problems:
        problems.append("no step has been finished yet")
    info = attempt(lambda: json.loads((folder / RUN_FILE).read_text(encoding="utf-8")), RUN_FILE, {})
    shown = attempt(lambda: _read_samples(folder / samples.FILE_NAME, note), samples.FILE_NAME, [])
    attempt(lambda: parse_yaml(read_text(folder / CONFIG_FILE), CONFIG_FILE)[0], CONFIG_FILE, {})
    rounds = attempt(lambda: layouts.read_layouts(folder, note), layouts.FILE_NAME, [], optional=True)
    of_steps = attempt(lambda: batches.read_batches(folder, note), batches.FILE_NAME, [], optional=True)
    return RecordedRun(folder, steps, shown, rounds, of_steps, info, problems)


def _read_samples(path: Path, note: Callable[[str], None]) -> list[dict[str, Any]]:
    def parse(line: bytes) -> dict[str, Any]:
        sample = json.loads(line.decode(errors="replace"))
        if not isinstance(sample["step"], int | float):
            raise ValueError("step must be a number")
        sample.pop(samples.IDS, None)  # no page shows them, and they are most of a long sample
        return sample

    return read_lines(path, parse, note)


def facts(run: RecordedRun) -> dict[str, Any]:
    data = run.option("data.train_files")
    return {
        "command": run.info.get("command"),
        "started": run.info.get("started"),
        "commit": run.info.get("commit"),
        "host": run.info.get("host"),
        "devices": devices(run),
        "data": ", ".join(map(str, data)) if isinstance(data, list) and data else run.option("data.task"),
        "versions": ", ".join(f"{name} {version}" for name, version in run.section("versions").items()),
        "folder": run.folder.resolve(),
    }


def devices(run: RecordedRun) -> str:
    """`8 × NVIDIA H100`."""
    found = run.section("devices")
    return " × ".join(str(found[key]) for key in ("count", "kind") if key in found)


def option_text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value)) or "empty"
