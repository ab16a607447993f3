#!/usr/bin/env python3
"""What a simulated step costs: seconds of one core, and whether memory stays flat over many steps.

    python scripts/bench_simulate.py [--config configs/tail_batching_128.yaml] [--steps 6] [--adaptive] [--bar 1.0]
        [section.option=value ...]

Runs what `jaxrl simulate` runs, files included, in a temporary folder; with --adaptive, then once more with layouts
that adapt (tp 2, 4 and 8 inside hosts of eight devices). Printed for every step (or every --every-th): the kind of its
round, seconds of the process's CPU time, and resident memory after it; at the end medians by kind of round, the average
beside the bar (1,000 steps in 1,000 s of one core), and memory after a tenth of the steps and after all. The exit
status is 1 if a bar is missed. CPU time is not wall-clock time, but other processes make it longer too: caches and
cores are shared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import records
from bench.measure import say

from jaxrl.config import Config
from jaxrl.config import files as config_files
from jaxrl.loop import Hooks
from jaxrl.record.metrics import MetricsWriter
from jaxrl.record.samples import SampleLog
from jaxrl.runtime.simulation import build, rare_collections
from jaxrl.sim.configured import cost_model, machine_sizes, model_sizes, workload_of

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "tail_batching_128.yaml"
ADAPTIVE = (
    "rollout.layout.switch=true",
    "rollout.layout.profile=of the modelled devices",  # named, and not read
    "rollout.layout.degrees=[2, 4, 8]",
    "rollout.layout.devices_per_host=8",
)


@dataclass(frozen=True, slots=True)
class Step:
    """A step's cost, and resident memory after it."""

    kind: str
    cpu_s: float
    rss_mib: float


def run(config: Config, folder: Path, every: int) -> list[Step]:
    """All steps of a configuration; every `every`-th is printed."""
    steps: list[Step] = []
    writer, samples = MetricsWriter(folder), SampleLog(folder / "samples.jsonl", -1)
    began_s = time.process_time()

    def on_step(step: int, measured: dict[str, float], groups: Any) -> None:
        nonlocal began_s
        writer.write(step, measured)
        samples.write(step, groups)
        now_s = time.process_time()
        kind = {0.0: "short", 1.0: "long"}.get(measured.get("rollout/long_round", -1.0), "all")
        steps.append(Step(kind, now_s - began_s, resident_mib()))
        if step % every == 0:
            say(f"step {step:5}  {kind:<5}  {steps[-1].cpu_s:6.2f} s  {steps[-1].rss_mib:6.0f} MiB")
        began_s = time.process_time()

    hooks = Hooks(lambda *_: None, on_step, lambda *_: None, lambda *_: None, lambda: False)
    cost, _ = cost_model(config)
    workload, _ = workload_of(config)
    sizes = machine_sizes(config, cost, model_sizes(config))
    simulation = build(config, cost, workload, hooks, sizes=sizes, timeline=folder / "timeline.json")
    with rare_collections():
        simulation.loop.run()
    for each in (simulation.phases, writer, samples):
        each.close()
    return steps


def resident_mib() -> float:
    """Memory of this process now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(CONFIG))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--adaptive", action="store_true", help="once more with layouts that adapt")
    parser.add_argument("--bar", type=float, default=1.0, help="seconds of a core that a step may take on average")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    overrides = (f"trainer.total_training_steps={options.steps}", *options.overrides)
    say(f"command: {records.command()}")
    kept = True
    for name, more in (("configured", ()), ("adaptive", ADAPTIVE))[: 1 + options.adaptive]:
        config = config_files.load(options.config, (*overrides, *more))
        with tempfile.TemporaryDirectory() as folder:
            steps = run(config, Path(folder), options.every)
        kept &= tell(f"{name} layout", steps, options.bar)
    return 0 if kept else 1


def tell(name: str, steps: Sequence[Step], bar_s: float) -> bool:
    """Prints what a run's steps took; whether that is at most the bar, on average."""
    for kind in sorted({step.kind for step in steps}):
        own = [step.cpu_s for step in steps if step.kind == kind]
        say(f"{kind} rounds: {statistics.median(own):.2f} s of a core in the middle, {max(own):.2f} at most")
    mean_s = statistics.fmean(step.cpu_s for step in steps)
    verdict = "kept" if mean_s <= bar_s else "missed"
    say(f"{name}: all {len(steps)} steps: {mean_s:.2f} s of a core on average (bar {bar_s:g}: {verdict})")
    tenth = max(len(steps) // 10, 1)
    say(f"memory: {steps[tenth - 1].rss_mib:.0f} MiB after step {tenth}, {steps[-1].rss_mib:.0f} after {len(steps)}")
    return mean_s <= bar_s


if __name__ == "__main__":
    sys.exit(main())
