"""What a page reads of a run: the files in its folder, each of which may be missing.

- metrics.jsonl: one line per step (`jaxrl.record.metrics`);
- samples.jsonl: one line per shown sample (`jaxrl.record.samples` has its fields);
- batches.jsonl: lengths and groups' rewards of each step (`jaxrl.record.batches`);
- timeline.json: of which the last round's rows are read (`jaxrl.report.rounds`);
- layouts.jsonl: the layout over each rollout round, where it adapts (`jaxrl.record.layouts`);
- config.yaml: only to say so if it cannot be read, as a run could not go on;
- run.json: config (resolved), versions, commit, devices {platform, kind, count}, started, command.
"""

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
from jaxrl.record.batches import FILE_NAME as BATCHES_FILE
from jaxrl.record.batches import read_batches
from jaxrl.record.files import read_lines
from jaxrl.record.layouts import FILE_NAME as LAYOUTS_FILE
from jaxrl.record.layouts import read_layouts
from jaxrl.record.metrics import FILE_NAME, read_metrics
from jaxrl.record.run_dir import CONFIG_FILE, RUN_FILE, SIMULATED
from jaxrl.record.samples import FILE_NAME as SAMPLES_FILE
from jaxrl.record.samples import IDS
from jaxrl.report.charts import Point
from jaxrl.report.rounds import DrawnRound, read_round


@dataclass(frozen=True, slots=True)
class Run:
    """What was found in a run's folder; `problems` says what could not be read."""

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

    def drawn_round(self) -> DrawnRound | None:
        """The rows of the last round on the timeline."""
        return read_round(self.folder / "timeline.json")

    def section(self, name: str) -> Mapping[str, Any]:
        """A part of run.json; empty where it is missing or not a mapping."""
        value = self.info.get(name)
        return value if isinstance(value, Mapping) else {}

    @property
    def learns_from_files(self) -> bool:
        """Whether it is one of `jaxrl sft` or `jaxrl dpo`: without rollouts and rewards."""
        return self.info.get("kind") in ("sft", "dpo")

    @property
    def is_simulated(self) -> bool:
        """Whether its seconds are those of modelled devices."""
        lines = self.metrics[:1]
        return self.section("devices").get("platform") == SIMULATED or any("simulated" in line for line in lines)

    def option(self, path: str) -> Any:
        return flatten(self.section("config")).get(path)


def read_run(run_dir: str | Path) -> Run:
    """Reads a run's folder; ValueError if it is not one."""
    folder = Path(run_dir)
    if not any((folder / name).is_file() for name in (FILE_NAME, SAMPLES_FILE, RUN_FILE)):
        raise ValueError(f"{folder} is not a run: it has none of {FILE_NAME}, {SAMPLES_FILE}, {RUN_FILE}")
    problems: list[str] = []

    def attempt(read: Callable[[Path], Any], name: str, otherwise: Any) -> Any:
        if not (folder / name).is_file():
            problems.append(f"{name} is missing")
            return otherwise
        try:
            value = read(folder / name)
            if type(value) is not type(otherwise):
                raise ValueError("must hold an object")
            return value
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{name} could not be read: {error}")
            return otherwise

    metrics = attempt(lambda _: list(read_metrics(folder)), FILE_NAME, [])
    if not metrics and not problems:
        problems.append("no step has been finished yet")
    info = attempt(lambda path: json.loads(path.read_text(encoding="utf-8")), RUN_FILE, {})
    samples = attempt(_read_samples, SAMPLES_FILE, [])
    attempt(lambda path: parse_yaml(read_text(path), CONFIG_FILE)[0], CONFIG_FILE, {})

    def if_there(read: Callable[[Path], Any], name: str) -> list[dict[str, Any]]:
        """Of a file that not every run has."""
        return attempt(lambda _: read(folder), name, []) if os.path.lexists(folder / name) else []

    layouts, batches = if_there(read_layouts, LAYOUTS_FILE), if_there(read_batches, BATCHES_FILE)
    return Run(folder, metrics, samples, layouts, batches, info, problems)


def _read_samples(path: Path) -> list[dict[str, Any]]:
    def parse(line: bytes) -> Any:
        sample = json.loads(line.decode(errors="replace"))
        if isinstance(sample, dict):
            sample.pop(IDS, None)  # no page shows them, and they are most of a long sample
        return sample

    samples = read_lines(path, parse)
    return [sample for sample in samples if isinstance(sample, dict) and isinstance(sample.get("step"), int | float)]


def devices(run: Run) -> str:
    """`8 × NVIDIA H100`."""
    found = run.section("devices")
    return " × ".join(str(found[key]) for key in ("count", "kind") if key in found)


def option_text(value: Any) -> str:
    """An option's value as YAML would have it, in one line."""
    return (value if isinstance(value, str) else json.dumps(value)) or "empty"
