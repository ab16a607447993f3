#!/usr/bin/env python3
"""A judge beside the rollout on the same devices: what its streamed layers cost, and what gaps save.

    python scripts/bench_judge.py [--shape Qwen2.5-1.5B] [--resident 14] [--json]

Actor and judge are the same model. Two families of cases, each taking turns:

- streaming: the judge alone reads `--judged` tokens and writes `--written`, for each of its `--judge-rows` rows.
  resident: all layers on the device; pipelined: all but `--resident` streamed, a layer's copy begun while the streamed
  one before it computes; serial: the same, begun at its turn. On a CPU nothing is copied, and the cases should agree.
- turns: a rollout of `--responses` responses of geometric lengths (`--mean`, at most `--new`), each judged when it
  ends, with the pipelined judge. rollout: no judge; gaps: between plans once at most half of the rows are busy; after:
  once no row is. seconds: until the last verdict; its cost is that over the rollout's alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from bench import records
from bench.frame import Benchmark, Record, Session
from bench.jax_cases import build_params
from bench.measure import Summary, Values, say
from jax.sharding import Mesh

from jaxrl.mechanisms.judge import Judge
from jaxrl.mechanisms.judge.device import DeviceJudge, JudgeMachine
from jaxrl.mechanisms.judge.verdicts import Reading
from jaxrl.models.config import ModelConfig
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.host_weights import HostWeights
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.types import Prompt, Sample, SampleKey, SamplingParams

QUICK = {
    "repetitions": 1,
    "dtypes": ["float32"],
    "resident": 1,
    "judged": 24,
    "written": 4,
    "judge_rows": 2,
    "responses": 4,
    "mean": 32,
    "new": 72,
    "rows": 4,
}
AT_LEAST_ONE = ("judged", "written", "judge_rows", "responses", "mean", "new", "rows")
PROMPT = 16  # tokens of an actor's prompt


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--resident", type=int, default=-1, help="of the judge's layers (half)")
    made.add_argument("--judged", type=int, default=512, help="tokens that the judge reads of a response (512)")
    made.add_argument("--written", type=int, default=32, help="tokens of a verdict (32)")
    made.add_argument("--judge-rows", type=int, default=8, help="verdicts that it writes at once (8)")
    made.add_argument("--responses", type=int, default=32, help="of the rollout (32)")
    made.add_argument("--rows", type=int, default=16, help="of the rollout (16)")
    made.add_argument("--mean", type=int, default=128, help="tokens of a response (128)")
    made.add_argument("--new", type=int, default=512, help="tokens of the longest response (512)")


class Fixed(Reading):
    """A judge that reads random tokens, and writes as many as it is asked to."""

    writes = True

    def __init__(self, options: argparse.Namespace, vocab_size: int) -> None:
        self._random_ids = _tokens(options.seed, options.judged, vocab_size)
        self.params = SamplingParams(max_tokens=options.written)

    def ids(self, request: Any) -> tuple[int, ...]:
        return self._random_ids

    def reward(self, samples: Sequence[Sample]) -> tuple[float, dict[str, Any]]:
        return float(len(samples[0])), {}


def _measure(options: argparse.Namespace, session: Session) -> Record:
    model = records.model_of(options)
    config = model.config()
    if not -1 <= options.resident <= config.num_layers:
        raise ValueError(f"--resident ({options.resident}) must be at most the model's layers ({config.num_layers})")
    resident = config.num_layers // 2 if options.resident < 0 else options.resident
    devices = records.prepare_devices(options.devices)
    mesh = make_mesh(devices)
    with session.on(records.describe_devices(devices)):
        for dtype in options.dtypes:
            params = build_params(model, config, mesh, "float32", options.seed)
            judges = {"resident": (config.num_layers, True), "pipelined": (resident, True), "serial": (resident, False)}
            pools = {name: _judge(options, config, mesh, params, dtype, *how) for name, how in judges.items()}
            cases = {f"{name} {dtype}": _streaming(options, pool) for name, pool in pools.items()}
            actor = _actor(options, config, mesh, params, dtype)
            turns = {"rollout": None, "gaps": Judge.Options(when="gaps"), "after": Judge.Options(when="after")}
            for name, rule in turns.items():
                cases[f"{name} {dtype}"] = _turns(options, config, actor, pools["pipelined"], rule)
            session.bench.interleave(cases, options.repetitions, warm_up=1)
    asked = {name: getattr(options, name) for name in AT_LEAST_ONE}
    shape = {"model": model.name, "devices": len(devices), "resident": resident, "layers": config.num_layers}
    return session.record({"cases": _cases(session.summaries())}, **shape, **asked)


def _judge(
    options: argparse.Namespace, config: ModelConfig, mesh: Mesh, params: Any, dtype: str, resident: int, ahead: bool
) -> DeviceJudge:
    sizes = ExecutorConfig(
        num_slots=options.judge_rows,
        max_length=options.judged + options.written,
        max_prefill_tokens=options.judged,
        dtype=dtype,
        max_tp=mesh.size,
        resident_layers=resident,
        ahead=ahead,
    )
    executor = MeshExecutor(config, Layout(mesh, mesh.size), sizes)
    outer = {name: value for name, value in params.items() if name != "layers"}
    layers = ({name: x[i : i + 1] for name, x in params["layers"].items()} for i in range(config.num_layers))
    machine = JudgeMachine(executor, HostWeights(executor, outer, layers), lambda: None, alone=False)
    return DeviceJudge(Fixed(options, config.vocab_size), Engine(executor, BatcherConfig()), machine, Judge.Options())


def _actor(options: argparse.Namespace, config: ModelConfig, mesh: Mesh, params: Any, dtype: str) -> Engine:
    sizes = ExecutorConfig(num_slots=options.rows, max_length=PROMPT + options.new, dtype=dtype)
    executor = MeshExecutor(config, Layout(mesh, 1), sizes)
    executor.sync_weights(params, 0)
    executor.allocate()
    return Engine(executor, BatcherConfig())


def _streaming(options: argparse.Namespace, pool: DeviceJudge) -> Callable[[], Values]:
    """Seconds from a full batch of samples to its last verdict; what is resident comes to the devices before."""

    def judge() -> Values:
        pool.machine.enter()
        for index in range(options.judge_rows):
            pool.submit(_prompt(), Sample.empty(SampleKey(0, 0, index)))
        began, steps = time.perf_counter(), pool.engine.counters.steps
        while pool.step():
            pass
        seconds = time.perf_counter() - began
        steps = pool.engine.counters.steps - steps
        pool.release()  # before another case's
        return {"seconds": seconds, "steps": float(steps)}

    return judge


def _turns(
    options: argparse.Namespace, config: ModelConfig, actor: Engine, judge: DeviceJudge, rule: Judge.Options | None
) -> Callable[[], Values]:
    """A rollout, and verdicts on all of it, with turns as the backend gives them."""
    lengths = np.minimum(
        np.random.default_rng(options.seed).geometric(1 / options.mean, options.responses), options.new
    )
    prompt = _tokens(options.seed + 1, PROMPT, config.vocab_size)

    def step() -> Values:
        first = actor.counters.admissions
        for index, length in enumerate(lengths):
            params = SamplingParams(max_tokens=int(length))
            actor.add(Request(10**6 * first + index, SampleKey(0, 1, index), prompt, params))
        began, gap_turns = time.perf_counter(), 0
        while not actor.is_idle:
            busy = min(len(actor.unfinished()), options.rows)
            if rule is not None and rule.allows_turn(busy, options.rows):
                gap_turns += judge.turn(0, options.rows)  # by this case's rule, not by the pool's own
            for finished in actor.step():
                if rule is not None:
                    judge.submit(_prompt(), finished.sample)
        rollout_s = time.perf_counter() - began
        while judge.step():
            pass
        seconds = time.perf_counter() - began
        judge.release()
        return {"seconds": seconds, "rollout_s": rollout_s, "gap_turns": float(gap_turns)}

    return step


def _prompt() -> Prompt:
    return Prompt(0, 0, (1,), "", "bench")


def _tokens(seed: int, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(1, vocab_size, count).tolist())


def _cases(summaries: dict[str, Summary]) -> list[dict[str, Any]]:
    cases = []
    for label, summary in summaries.items():
        name, dtype = label.split()
        base = "resident" if "steps" in summary.medians else "rollout"
        over = summary.medians["seconds"] / summaries[f"{base} {dtype}"].medians["seconds"]
        say(f"{name}, {dtype}: {summary.medians['seconds']:.3f} s, {over:.2f} times {base}{summary.mark}")
        cases.append({"case": name, "dtype": dtype, "over": over} | summary.medians | summary.judged)
    return cases


BENCHMARK = Benchmark("judge", __doc__, _measure, _options, QUICK, AT_LEAST_ONE)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
