#!/usr/bin/env python3
"""Rollouts on many simulated hosts: what the order costs, and what process 0 does for the others.

    python scripts/bench_host_scale.py [--hosts 128] [--rows 512] [--spreads 0 0.02 0.1] [--seeds 0 1 2] [--steps 2]
        [--orders logical arrival] [--json]
    python scripts/bench_host_scale.py --hosts 16 --rows 64 --spreads 0.1 --seeds 0 --orders logical --steps 200

Tail batching on hosts of eight H100s each, with a batch of --rows responses for each host, 16 a prompt: 128 x 512 are
4,096 prompts x 16. Every step is the run's own code for process 0, on modelled devices (`scripts/bench/host_scale.py`).

- rollout: simulated seconds; in logical order beside order of arrival, and by how much it is longer.
- order wait: seconds for which devices stood idle for the order, on average over the workers.
- process 0: CPU seconds of merging, deciding and publishing, as a share of the simulated step, and us per event.
- memory: resident, after a tenth of a run's steps and after all.

Medians over the seeds, which draw the lengths and which host is how slow; the least and the most beside them. The exit
status is 1 where process 0 has more than --bar of a step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from bench import records
from bench.frame import Benchmark, Record, Session
from bench.host_scale import ScaleStep, configured, play
from bench.measure import say

QUICK = {
    "hosts": 3, "rows": 16, "spreads": [0.0, 0.1], "seeds": [0], "steps": 3, "longest": 200, "median": 40.0, "bar": 1e9,
}  # fmt: skip


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--hosts", type=int, default=128, help="of eight devices (128)")
    made.add_argument("--rows", type=int, default=512, help="responses of a batch for each host (512)")
    made.add_argument("--spreads", type=float, nargs="+", default=[0.0, 0.02, 0.1], help="shares (0 0.02 0.1)")
    made.add_argument("--orders", nargs="+", choices=("logical", "arrival"), default=["logical", "arrival"])
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of lengths and speeds (0 1 2)")
    made.add_argument("--steps", type=int, default=2, help="of each run (2)")
    made.add_argument("--latency-s", type=float, default=0.013, help="of a value between hosts (0.013)")
    made.add_argument("--call-s", type=float, default=0.00015, help="of a call of the shared store (0.00015)")
    made.add_argument("--event-s", type=float, default=0.0001, help="of a process for an event (0.0001)")
    made.add_argument("--median", type=float, default=2000.0, help="of the lognormal lengths, tokens (2000)")
    made.add_argument("--sigma", type=float, default=0.9, help="of the logarithm of a length (0.9)")
    made.add_argument("--longest", type=int, default=16384, help="cap on a length, tokens (16384)")
    made.add_argument("--bar", type=float, default=0.05, help="share of a step that process 0 may have (0.05)")


def _check(options: argparse.Namespace) -> None:
    if options.hosts < 2:
        raise ValueError(f"--hosts ({options.hosts}) must be at least 2: one host waits for nobody")
    if options.hosts * options.rows % 16:
        raise ValueError(f"--hosts ({options.hosts}) × --rows ({options.rows}) must be a multiple of 16 responses")
    if min(options.spreads) < 0:
        raise ValueError(f"--spreads ({min(options.spreads)}) must be at least 0")


def _measure(options: argparse.Namespace, session: Session) -> Record:
    with session.on(records.describe_host(), is_timed=False):
        cases = [case for spread in options.spreads for case in _cases(options, spread)]
    return session.record(cases, bar=options.bar)


def _missed(record: Record) -> Iterable[str]:
    worst = max((case["share"][-1] for case in record["results"] if case["order"] == "logical"), default=0.0)
    if worst > record["bar"]:
        yield f"process 0 has {100 * worst:.2f} % of a step, more than {100 * record['bar']:g} %"


def _cases(options: argparse.Namespace, spread: float) -> list[dict[str, Any]]:
    """A case for each order and kind of round; each of arrival has how much longer the logical one is."""
    found: dict[tuple[bool, str], list[list[ScaleStep]]] = {}
    for seed in options.seeds:
        for order in options.orders:
            steps = _run(options, spread, seed, order)
            for is_long in sorted({step.is_long for step in steps}):
                own = [step for step in steps if step.is_long == is_long]
                found.setdefault((is_long, order), []).append(own)
    cases = []
    for (is_long, order), runs in sorted(found.items()):
        arrived = found.get((is_long, "arrival")) if order == "logical" else None
        cases.append(_case(spread, is_long, order, runs, arrived))
    return cases


def _run(options: argparse.Namespace, spread: float, seed: int, order: str) -> list[ScaleStep]:
    times = {"host_latency_s": options.latency_s, "host_call_s": options.call_s, "host_event_s": options.event_s}
    simulate = {"host_spread": spread, "host_order": order, **times}
    config = configured(
        options.hosts, options.rows, seed, options.steps, (options.median, options.sigma, options.longest), **simulate
    )
    gc.collect()  # what is left of the run before
    steps = play(config)
    step_s = statistics.mean(step.metrics["timing_s/step"] for step in steps)
    first, last = steps[max(len(steps) // 10, 1) - 1].memory_mib, steps[-1].memory_mib
    say(
        f"spread {spread:4.2f}  seed {seed}  {order:<7}  {len(steps)} steps of {step_s:.1f} s, "
        f"{sum(step.events for step in steps)} events, process 0 at most "
        f"{100 * max(step.share for step in steps):.2f} % of a step, memory {first:.0f} then {last:.0f} MiB"
    )
    return steps


def _case(
    spread: float, is_long: bool, order: str, runs: Sequence[Sequence[ScaleStep]], arrived: Any
) -> dict[str, Any]:
    def of_runs(value: Any) -> list[float]:
        """Least, median and most over the seeds, of each one's mean."""
        each = [statistics.mean(value(step) for step in steps) for steps in runs]
        return [min(each), statistics.median(each), max(each)]

    case: dict[str, Any] = {
        "spread": spread,
        "round": "long" if is_long else "short",
        "order": order,
        "rollout_s": of_runs(lambda step: step.metrics["timing_s/gen"]),
        "step_s": of_runs(lambda step: step.metrics["timing_s/step"]),
        "order_wait_s": of_runs(lambda step: step.metrics["hosts/order_wait_s"]),
        "share": of_runs(lambda step: step.share),
        "us_per_event": of_runs(lambda step: 1e6 * sum(step.cpu_s.values()) / step.events),
        "store_s": of_runs(lambda step: step.metrics["hosts/stream_s"]),
        "cpu_s": {name: of_runs(lambda step, name=name: step.cpu_s[name])[1] for name in runs[0][0].cpu_s},
    }
    if arrived is not None:
        ratios = [
            statistics.mean(step.metrics["timing_s/gen"] for step in own)
            / statistics.mean(step.metrics["timing_s/gen"] for step in other)
            - 1
            for own, other in zip(runs, arrived, strict=True)
        ]
        case["longer"] = [min(ratios), statistics.median(ratios), max(ratios)]
    longer = "" if arrived is None else f"  {_percent(case['longer'])} longer than by arrival"
    say(
        f"spread {spread:4.2f}  {case['round']:<5} {order:<7}  rollout {_seconds(case['rollout_s'])}  order wait "
        f"{_seconds(case['order_wait_s'])}  process 0 {_percent(case['share'])} of the step, "
        f"{case['us_per_event'][1]:.0f} us per event{longer}"
    )
    return case


def _seconds(found: Sequence[float]) -> str:
    return f"{found[1]:.2f} s ({found[0]:.2f} to {found[2]:.2f})"


def _percent(found: Sequence[float]) -> str:
    return f"{100 * found[1]:.2f} % ({100 * found[0]:.2f} to {100 * found[2]:.2f})"


COUNTS = ("hosts", "rows", "steps", "longest")
BENCHMARK = Benchmark("host-scale", __doc__, _measure, _options, QUICK, COUNTS, _check, _missed, has_model=False)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
