"""Lengths of a real run, replayed: `samples.jsonl` of a run directory as a `Workload`, in place of a formula.

Source: bootstrap resampling (Efron 1979), by prompt so that its responses are long again (RollPacker §3, RhymeRL §6.1).
`by_rank` is the model of `jaxrl.sim.workload` with the recorded lengths as its distribution, and c is the correlation
of the recorded scores within a prompt.

Departures: `samples.jsonl` holds a few samples of each step, and a prompt is identified by its text. Responses that
reached the run's own token limit are replayed as recorded, and `num_truncated` counts them. Two responses to each
prompt show half of the variance within prompts on average. So rounds that drop the slowest responses of a prompt gain
too little under `by_prompt` (docs/rollout-rules.md has figures), and too much under `pooled`. Under `by_rank` they gain
about as much as with the distribution itself.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from jaxrl.config import SimulatedHistory, SimulatedScoring
from jaxrl.config.inputs import reading
from jaxrl.sim.workload import correlated, normal, reference_time_s, scoring_s, uniform
from jaxrl.types import SampleKey

Rule = Literal["by_prompt", "pooled", "by_rank"]
# What a random number is for; different from those of `jaxrl.sim.workload`.
_PROMPT, _RESPONSE, _TIME, _HANGS, _PROMPT_SCORE, _RESPONSE_SCORE, _PROMPT_TIME = range(16, 23)
_NORMAL = NormalDist()

_NO_SCORING, _HISTORY = SimulatedScoring(), SimulatedHistory()


@dataclass(frozen=True, slots=True)
class RecordedResponse:
    """A recorded response: the training step it was drawn in, its tokens, its reward."""

    step: int
    length: int
    reward: float


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """A prompt of a run: its length in tokens, its source, its recorded responses."""

    prompt_tokens: int
    source: str
    responses: tuple[RecordedResponse, ...]


class RecordedWorkload:
    """`jaxrl.sim.workload.Workload` that draws from a run's responses.

    A response is drawn from the recorded step nearest to the step asked for, so growth over training is replayed too;
    `by_rank` takes all steps together.

    Args:
      prompts: at least one, each with a response. Prompt index i is always the same one, drawn by (seed, i).
      rule: `by_prompt`: a response is one of its prompt's recorded ones; `pooled`: one of any prompt's, so that prompts
        have no length of their own; `by_rank`: one of any prompt of the same source, prompts differing as much as the
        recorded ones.
      scoring, timeout_s, history: as in a `SimulatedTask`, since the file does not hold them.
      num_truncated: recorded responses that ended at the run's token limit.

    Raises ValueError with `by_rank` if no prompt has two responses.
    """

    def __init__(
        self,
        seed: int,
        prompts: Sequence[RecordedPrompt],
        rule: Rule = "by_prompt",
        scoring: SimulatedScoring = _NO_SCORING,
        timeout_s: float = math.inf,
        num_truncated: int = 0,
        history: SimulatedHistory = _HISTORY,
    ) -> None:
        self.seed = seed
        self.prompts = tuple(prompts)
        self.rule: Rule = rule
        self.scoring, self.timeout_s = scoring, timeout_s
        self.num_truncated = num_truncated
        self._history = history
        pools = [prompt.responses for prompt in prompts]
        if rule == "pooled":
            pools = [tuple(response for pool in pools for response in pool)]
        self._pools = [_by_step(pool) for pool in pools]
        self._by_source = _by_source(prompts)
        self.correlation = _correlation(self._by_source) if rule == "by_rank" else math.nan
        self._by_length = {
            source: sorted((response for prompt in own for response in prompt.responses), key=lambda each: each.length)
            for source, own in self._by_source.items()
        }

    @classmethod
    def read(
        cls,
        run_dir: str | Path,
        seed: int,
        rule: Rule = "by_prompt",
        scoring: SimulatedScoring = _NO_SCORING,
        timeout_s: float = math.inf,
        history: SimulatedHistory = _HISTORY,
    ) -> RecordedWorkload:
        """From `samples.jsonl` of a run directory. A prompt has as many characters per token as the responses have.

        Raises ValueError where the file is missing, holds no finished response, or a damaged line.
        """
        path = Path(run_dir) / "samples.jsonl"
        rows = [row for row in _read_lines(path) if row["finish_reason"] in ("stop", "length") and row["length"] > 0]
        if not rows:
            raise ValueError(f"{path}: holds no finished response to play; the run must draw some (jaxrl train)")
        characters, tokens = sum(len(row["response"]) for row in rows), sum(row["length"] for row in rows)
        per_character = tokens / characters if characters else 0.0
        by_text: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_text.setdefault(row["prompt"], []).append(row)
        prompts = [
            RecordedPrompt(
                prompt_tokens=max(round(len(text) * per_character), 1),
                source=same[0]["source"],
                responses=tuple(RecordedResponse(row["step"], row["length"], _unshaped_reward(row)) for row in same),
            )
            for text, same in by_text.items()
        ]
        truncated = sum(row["finish_reason"] == "length" for row in rows)
        return cls(seed, prompts, rule, scoring, timeout_s, truncated, history)

    @property
    def lengths(self) -> list[int]:
        return sorted(response.length for prompt in self.prompts for response in prompt.responses)

    def resampled(self, seed: int) -> RecordedWorkload:
        """As many of the recorded prompts of each source, drawn with replacement, as of one step: what another run
        might have recorded. Differences between such workloads show how much the record leaves open."""
        same = [self._by_source[prompt.source] for prompt in self.prompts]
        prompts = [own[int(uniform(_PROMPT, seed, i, len(self.prompts)) * len(own))] for i, own in enumerate(same)]
        timeless = [replace(p, responses=tuple(replace(response, step=0) for response in p.responses)) for p in prompts]
        limits = self.scoring, self.timeout_s, self.num_truncated
        return RecordedWorkload(seed, timeless, self.rule, *limits, self._history)

    def length(self, key: SampleKey, step: int = 0) -> int:
        return self._response(key, step).length

    def prompt_length(self, prompt_index: int) -> int:
        return self.prompts[self._recorded_index(prompt_index)].prompt_tokens

    def kind_name(self, prompt_index: int) -> str:
        return self.prompts[self._recorded_index(prompt_index)].source

    def reward_s(self, key: SampleKey, step: int = 0) -> float:
        words = (self.seed, key.epoch, key.prompt_index, key.sample_index, key.attempt)
        prompt = normal(_PROMPT_TIME, self.seed, key.prompt_index)
        z, u = correlated(self.scoring.correlation, prompt, normal(_TIME, *words)), uniform(_HANGS, *words)
        return scoring_s(self.scoring, self.timeout_s, z, u, self.length(key, step))

    def reference_time_s(self, prompt_index: int) -> float:
        return reference_time_s(self.scoring, normal(_PROMPT_TIME, self.seed, prompt_index))

    def reward(self, key: SampleKey, step: int = 0) -> float:
        return self._response(key, step).reward

    def history(self, prompt_index: int) -> SimulatedHistory:
        return self._history

    def _recorded_index(self, prompt_index: int) -> int:
        return int(uniform(_PROMPT, self.seed, prompt_index) * len(self.prompts))

    def _response(self, key: SampleKey, step: int) -> RecordedResponse:
        if self.rule == "by_rank":
            return self._of_rank(key)
        pool = self._pools[0 if self.rule == "pooled" else self._recorded_index(key.prompt_index)]
        rows = pool[_nearest(list(pool), step)]
        u = uniform(_RESPONSE, self.seed, key.epoch, key.prompt_index, key.sample_index, key.attempt)
        return rows[int(u * len(rows))]

    def _of_rank(self, key: SampleKey) -> RecordedResponse:
        responses = self._by_length[self.kind_name(key.prompt_index)]
        prompt = normal(_PROMPT_SCORE, self.seed, key.prompt_index)
        own = normal(_RESPONSE_SCORE, self.seed, key.epoch, key.prompt_index, key.sample_index, key.attempt)
        score = correlated(self.correlation, prompt, own)
        return responses[min(int(_NORMAL.cdf(score) * len(responses)), len(responses) - 1)]


def _by_source(prompts: Sequence[RecordedPrompt]) -> dict[str, list[RecordedPrompt]]:
    found: dict[str, list[RecordedPrompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.source, []).append(prompt)
    return found


def _correlation(by_source: Mapping[str, Sequence[RecordedPrompt]]) -> float:
    """How much of a length its prompt decides: the mean product of two normal scores of a prompt, at least 0. A score
    is a rank within the source; equal lengths share theirs."""
    products: list[float] = []
    for same in by_source.values():
        lengths = np.sort([response.length for prompt in same for response in prompt.responses])
        known, first, count = np.unique(lengths, return_index=True, return_counts=True)
        scores = np.array([_NORMAL.inv_cdf((i + n / 2) / len(lengths)) for i, n in zip(first, count, strict=True)])
        mean = np.average(scores, weights=count)
        deviation = math.sqrt(np.average((scores - mean) ** 2, weights=count)) or 1.0  # all equal: nothing to share
        score_of = dict(zip(known.tolist(), ((scores - mean) / deviation).tolist(), strict=True))
        for prompt in same:
            pairs = combinations((score_of[response.length] for response in prompt.responses), 2)
            if of_prompt := [a * b for a, b in pairs]:
                products.append(float(np.mean(of_prompt)))
    if not products:
        raise ValueError(
            "simulate.recorded_rule (by_rank) needs prompts with two recorded responses, which show how much of a "
            "length its prompt decides, and the record has none: take pooled or by_prompt"
        )
    return min(max(float(np.mean(products)), 0.0), 1.0)


def _by_step(responses: Sequence[RecordedResponse]) -> dict[int, list[RecordedResponse]]:
    pool: dict[int, list[RecordedResponse]] = {}
    for response in sorted(responses, key=lambda response: response.step):
        pool.setdefault(response.step, []).append(response)
    return pool


def _nearest(steps: Sequence[int], step: int) -> int:
    """The one of ascending `steps` that is nearest to `step`; the earlier of two equally near."""
    i = bisect_left(steps, step)
    return min(steps[max(i - 1, 0) : i + 1], key=lambda known: abs(known - step))


def _unshaped_reward(row: Mapping[str, Any]) -> float:
    """Without the run's reward shaping: the simulated run has its own."""
    return float(row["reward"] or 0) - float(row.get("overlong_reward", 0)) - float(row.get("wrong_reward", 0))


_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "step": int,
    "prompt": str,
    "response": str,
    "reward": (int, float, type(None)),
    "length": int,
    "finish_reason": (str, type(None)),
    "source": str,
}


def _read_lines(path: Path) -> list[dict[str, Any]]:
    with reading(path):
        if not path.exists():
            raise ValueError(f"{path}: no such file; it is written by `jaxrl train` into its run directory")
        lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline was cut off
        with reading(path, line=number):
            row = json.loads(line.decode("utf-8"))
        fields = row if isinstance(row, dict) else {}
        wrong = [name for name, kind in _FIELDS.items() if not isinstance(fields.get(name, ...), kind)]
        if wrong:
            raise ValueError(f"{path}, line {number}: {', '.join(wrong)} must be as `jaxrl.record.samples` writes them")
        rows.append(row)
    return rows
