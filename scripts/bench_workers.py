#!/usr/bin/env python3
"""Two workers on two devices: do plans issued from one host thread keep both devices busy?

    python scripts/bench_workers.py [--shape SmolLM2-135M] [--rows 8] [--new 64] [--decode-steps 4 16] [--json]

Each worker is an engine on one device; a CPU's devices get one core each (XLA's products are kept in one thread). Cases
take turns, over the same requests, whose lengths differ:

- alone: one worker draws its half of the samples, and the other device is idle. Twice as many samples in the same time
  would be the best that two workers can do.
- one thread: both workers, served by `jaxrl.scheduling.tokens.local_workers.LocalWorkers` as in a run, in logical time.
- two threads: both workers, each stepped by a thread of its own; what that draws is the same, in no fixed order.

Figures: seconds; late: the share of plans that were submitted when the device had finished the one before, so that it
had nothing to do; host: what the host's threads work for a plan, waiting left out; speed over alone: tokens per second
over those of the first case, measured in the same run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from bench import records
from bench.jax_cases import build_params
from bench.measure import Bench, Gauge, Summary, Values, say, summarise, verdict

from jaxrl.rollout.calls import MeshTicket
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.rollout.worker_set import WorkerSet
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.scheduling.tokens.plan import Plan, Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh, submeshes
from jaxrl.types import SampleKey, SamplingParams

QUICK = {"repetitions": 2, "dtypes": ["float32"], "rows": 2, "new": 8, "decode_steps": [2]}
PROMPT, BLOCK = 16, 16


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    records.common_options(made)
    made.set_defaults(devices=2, dtypes=["float32"])
    made.add_argument("--rows", type=int, default=8, help="samples of a worker, all at once (8)")
    made.add_argument(
        "--new", type=int, default=64, help="tokens of the longest sample; the shortest has a quarter (64)"
    )
    made.add_argument("--decode-steps", type=int, nargs="+", default=[4, 16], help="decode steps of a plan (4 and 16)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 2 if it was asked for nonsense."""
    return records.run("bench_workers", arguments, _parsed, _run)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = records.parse(parser(), arguments, QUICK, ("rows", "new", "decode_steps"))
    if options.devices != 2:
        raise ValueError(f"--devices ({options.devices}) must be 2: one for each worker")
    return options


def _run(options: argparse.Namespace, called: str) -> dict[str, Any]:
    model = records.model_of(options)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    devices = records.prepare_devices(2)
    head = records.header("workers", records.describe_devices(devices), records.versions(), called)
    records.print_header(head, say)
    bench = Bench(Gauge() if devices[0].platform == "cpu" else None, say)
    for dtype in options.dtypes:
        for steps in options.decode_steps:
            case = Case(options, model, devices, dtype, steps)
            bench.interleave({f"{name} {dtype} {steps}": run for name, run in case.runs().items()}, options.repetitions)
            case.workers.release(weights=True)
    if bench.gauge:
        bench.gauge.close()
    say(verdict(bench))
    kept, dropped = bench.counts()
    shape = {"model": model.name, "rows": options.rows, "new": options.new}
    return head | shape | {"kept": kept, "dropped": dropped, "results": {"cases": _results(summarise(bench.runs))}}


class Case:
    """Two workers with weights, pools and compiled programs."""

    def __init__(
        self, options: argparse.Namespace, model: records.Model, devices: Sequence[Any], dtype: str, steps: int
    ) -> None:
        self.options, self.steps = options, steps
        self.config, mesh = model.config(), make_mesh(devices)
        sizes = ExecutorConfig(
            num_slots=options.rows,
            block_size=BLOCK,
            max_length=PROMPT + options.new,
            max_prefill_tokens=options.rows * PROMPT,
            decode_steps=steps,
            dtype=dtype,
        )
        executors = [Watched(self.config, Layout(part, 1), sizes) for part in submeshes(mesh, 2)]
        self.workers = WorkerSet(mesh, executors)
        self.executors = executors
        self.workers.sync_weights(build_params(model, self.config, mesh, "float32", options.seed), 0)
        self.workers.allocate()
        self.workers.warm_up()
        for run in self.runs().values():
            run()

    def runs(self) -> dict[str, Callable[[], Values]]:
        return {
            "alone": lambda: self._timed(1, _in_turns),
            "one-thread": lambda: self._timed(2, _in_turns),
            "two-threads": lambda: self._timed(2, _in_threads),
        }

    def _timed(self, count: int, drive: Callable[[LocalWorkers], float]) -> Values:
        for executor in self.executors:
            executor.num_plans = executor.num_late = 0
        workers = LocalWorkers(
            [Engine(each, BatcherConfig(decode_steps=self.steps)) for each in self.executors[:count]]
        )
        random = np.random.default_rng(self.options.seed)
        for i in range(count * self.options.rows):
            prompt = tuple(random.integers(1, self.config.vocab_size, PROMPT).tolist())
            params = SamplingParams(max_tokens=int(random.integers(-(-self.options.new // 4), self.options.new + 1)))
            workers.add(Request(i, SampleKey(0, i, 0), prompt, params, share=i))
        began = time.perf_counter()
        host_s = drive(workers)
        seconds = time.perf_counter() - began
        plans, late = (sum(getattr(e, name) for e in self.executors) for name in ("num_plans", "num_late"))
        tokens = float(workers.counters.busy_row_steps)
        return {"seconds": seconds, "late": late / plans, "host_per_plan_s": host_s / plans, "tokens": tokens}


def _in_turns(workers: LocalWorkers | Engine) -> float:
    """Runs to the end; returns the seconds that this thread has worked."""
    began = time.thread_time()
    while not workers.is_idle:
        workers.step()
    workers.drain()
    return time.thread_time() - began


def _in_threads(workers: LocalWorkers) -> float:
    """The same with a thread for each engine; returns the seconds of all threads together."""
    with ThreadPoolExecutor(len(workers.engines)) as pool:
        return sum(pool.map(_in_turns, workers.engines))


class Watched(MeshExecutor):
    """An executor that counts plans which came when its device had nothing left to do."""

    num_plans = num_late = 0
    _last: Any = None

    def submit(self, plan: Plan) -> MeshTicket:
        self.num_plans += 1
        self.num_late += self._last is not None and self._last.is_ready()
        ticket = super().submit(plan)
        self._last = ticket.calls[-1].generated.tokens if ticket.calls else None
        return ticket


def _results(summaries: dict[str, Summary]) -> list[dict[str, Any]]:
    cases = []
    for label, summary in summaries.items():
        name, dtype, steps = label.split()
        alone = summaries[f"alone {dtype} {steps}"].medians
        found = summary.medians
        speed = found["tokens"] / found["seconds"] / (alone["tokens"] / alone["seconds"])
        figures = {name: found[name] for name in ("seconds", "late", "host_per_plan_s")} | {"speed_over_alone": speed}
        say(
            f"{name}, {dtype}, plans of {steps}: {found['seconds']:.3f} s, {speed:.2f} times the tokens per second of "
            f"one alone, {found['host_per_plan_s'] * 1e3:.2f} ms of host work a plan, {found['late']:.0%} of plans "
            f"late{'  DISTURBED' if summary.disturbed else ''}"
        )
        judged = {"kept": summary.kept, "dropped": summary.dropped, "disturbed": summary.disturbed}
        cases.append({"case": name, "dtype": dtype, "decode_steps": int(steps)} | figures | judged)
    return cases


if __name__ == "__main__":
    sys.exit(main())
