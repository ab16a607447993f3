"""Continuous batching against static waves, on one engine (`bench_decode.py --continuous`)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrl.rollout.executor import MeshExecutor, MeshTicket
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Executor, Plan, PlanResult, Request, Ticket

from .decode_cases import Setting, build_executor, requests
from .measure import Summary, Values, say


class TimedExecutor:
    """Passes everything on, and adds up the seconds that the engine spends inside.

    Attributes:
      inside_s: in `submit` and `collect`.
      waited_s: the part of it in which the host did nothing but wait for a plan's values.
    """

    def __init__(self, inner: Executor) -> None:
        self.num_groups, self.num_slots, self.num_blocks = inner.num_groups, inner.num_slots, inner.num_blocks
        self.block_size, self.max_prefill_tokens = inner.block_size, inner.max_prefill_tokens
        self.inner, self.inside_s, self.waited_s = inner, 0.0, 0.0

    def check(self, request: Request) -> None:
        self.inner.check(request)

    def submit(self, plan: Plan) -> Ticket:
        began = time.perf_counter()
        ticket = self.inner.submit(plan)
        self.inside_s += time.perf_counter() - began
        return ticket

    def collect(self, ticket: Ticket) -> PlanResult:
        assert isinstance(ticket, MeshTicket)
        began = time.perf_counter()
        jax.block_until_ready(([call.generated for call in ticket.calls], ticket.steps))
        self.waited_s += time.perf_counter() - began
        result = self.inner.collect(ticket)
        self.inside_s += time.perf_counter() - began
        return result


def lognormal_lengths(options: argparse.Namespace) -> list[int]:
    """Tokens of each request, seeded."""
    draw = np.random.default_rng(options.seed).lognormal(np.log(options.median_length), options.sigma, options.requests)
    return np.clip(np.rint(draw), 1, options.max_length).astype(int).tolist()


def measure(setting: Setting) -> dict[str, Any]:
    """Runs both ways for every dtype; returns lengths and recompiles."""
    options = setting.options
    lengths = lognormal_lengths(options)
    recompiles = 0
    for dtype in options.dtypes:
        executor, engine = _engine(setting, dtype)
        say(f"{dtype}: compiling")
        say(f"{executor.warm_up()} programs")
        wanted = requests(setting.prompts(options.requests), lengths)
        size = options.slots * executor.num_groups
        waves = [wanted[start : start + size] for start in range(0, len(wanted), size)]
        cases = {
            f"continuous {dtype}": _batched(engine, executor, [wanted]),
            f"static {dtype}": _batched(engine, executor, waves),
        }
        _batched(engine, executor, waves[:1])()  # all is compiled: one wave shows whether it is
        setting.bench.interleave(cases, options.repetitions)
        recompiles += executor.recompiles
        executor.release(weights=True)
    return {"lengths": lengths, "recompiles": recompiles}


def _engine(setting: Setting, dtype: str) -> tuple[MeshExecutor, Engine]:
    options = setting.options
    executor = build_executor(
        setting,
        setting.params(dtype),
        dtype,
        slots=options.slots,
        length=options.prompt + options.max_length,
        prefill_tokens=max(512, options.prompt),
    )
    return executor, Engine(TimedExecutor(executor), BatcherConfig(decode_steps=options.decode_steps))


def _batched(engine: Engine, executor: MeshExecutor, waves: list[list[Request]]) -> Callable[[], Values]:
    def run() -> Values:
        timed = engine.executor
        assert isinstance(timed, TimedExecutor)
        steps, busy = engine.counters.steps, engine.counters.busy_row_steps
        inside, host = timed.inside_s, executor.host_s
        began = time.perf_counter()
        for wave in waves:
            engine.generate(wave)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "steps": float(engine.counters.steps - steps),
            "busy_row_steps": float(engine.counters.busy_row_steps - busy),
            "engine_s": seconds - (timed.inside_s - inside),
            "submit_s": executor.host_s - host,
        }

    return run


def results(setting: Setting, summaries: Mapping[str, Summary], found: dict[str, Any]) -> dict[str, Any]:
    options = setting.options
    tokens = sum(found["lengths"])
    cases = []
    print(f"{options.requests} requests, {tokens} tokens over {options.slots} slots")
    for label, summary in summaries.items():
        name, dtype = label.split()
        m = summary.medians
        host_s = m["engine_s"] + m["submit_s"]
        case = {"case": name, "dtype": dtype, "tokens": tokens, **m, "tokens_per_s": tokens / m["seconds"]}
        case |= {"step_s": m["seconds"] / m["steps"], "host_per_step_s": host_s / m["steps"]}
        case |= {"host_share": host_s / m["seconds"]}
        case |= {"kept": summary.kept, "dropped": summary.dropped, "disturbed": summary.disturbed}
        cases.append(case)
        print(
            f"{name:<12}{dtype:<9}{m['seconds']:>9.2f} s{case['tokens_per_s']:>10.1f} tokens/s{m['steps']:>8.0f} steps"
            f"{case['step_s'] * 1e3:>9.2f} ms/step, host {case['host_per_step_s'] * 1e3:.2f} ms/step = "
            f"{case['host_share']:.1%} (engine {m['engine_s']:.2f} s, submit {m['submit_s']:.2f} s), "
            f"{summary.kept} kept, {summary.dropped} dropped{'  DISTURBED' if summary.disturbed else ''}"
        )
    ratios = {}
    for dtype in options.dtypes:
        both = {c["case"]: c for c in cases if c["dtype"] == dtype}
        disturbed = any(c["disturbed"] for c in both.values())
        ratio = both["static"]["seconds"] / both["continuous"]["seconds"]
        ratios[dtype] = {"static_over_continuous": ratio, "disturbed": disturbed}
        print(f"static / continuous, seconds, {dtype}: {ratio:.3f}{'  DISTURBED' if disturbed else ''}")
    print(f"recompiles after warm-up: {found['recompiles']}")
    return found | {"cases": cases, "ratios": ratios}
