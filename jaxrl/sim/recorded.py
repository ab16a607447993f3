"""Lengths of a real run, replayed: `samples.jsonl` of a run directory as a `Workload`, in place of a formula.

Responses are drawn by rank: the model of `jaxrl.sim.workload`, with the recorded lengths of the prompt's source as its
distribution and the correlation of the recorded scores within a prompt as c.

Source: bootstrap resampling (Efron 1979), by prompt so that its responses are long again (RollPacker §3, RhymeRL §6.1).

Departures: `samples.jsonl` holds a few samples of each step, and a prompt is identified by its text. Responses that
reached the run's own token limit are replayed as recorded, and `num_truncated` counts them. Two responses to each
prompt show half of the variance within prompts on average. Drawn from those alone, rounds that drop the slowest
responses of a prompt would gain too little; drawn from all, too much (docs/rollout-rules.md). By rank they gain about
as much as with the distribution itself. Growth over training is not replayed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from jaxrl.config import SimulatedHistory, SimulatedScoring
from jaxrl.config.inputs import reading
from jaxrl.sim.workload import correlated, normal, scoring_s, uniform
from jaxrl.types import SampleKey

# What a random number is for; different from those of `jaxrl.sim.workload`.
_PROMPT, _TIME, _HANGS, _PROMPT_SCORE, _RESPONSE_SCORE = 16, 18, 19, 20, 21
_NORMAL = NormalDist()

_NO_SCORING, _HISTORY = SimulatedScoring(), SimulatedHistory()


@dataclass(frozen=True, slots=True)
class RecordedResponse:
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

    Args:
      prompts: at least one, each with a response. Prompt index i is always the same one, drawn by (seed, i).
      scoring, timeout_s, history: as in a `SimulatedTask`, since the file does not hold them.
      num_truncated: recorded responses that ended at the run's token limit.

    Raises ValueError if no prompt has two responses.
    """

    def __init__(
        self,
        seed: int,
        prompts: Sequence[RecordedPrompt],
        scoring: SimulatedScoring = _NO_SCORING,
        timeout_s: float = math.inf,
        history: SimulatedHistory = _HISTORY,
        num_truncated: int = 0,
    ) -> None:
        self.seed, self.prompts = seed, tuple(prompts)
        self.scoring, self.timeout_s, self.num_truncated = scoring, timeout_s, num_truncated
        self._history = history
        self._by_source: dict[str, list[RecordedPrompt]] = {}
        for prompt in prompts:
            self._by_source.setdefault(prompt.source, []).append(prompt)
        self.correlation = _correlation(self._by_source)
        self._by_length = {
            source: sorted((response for prompt in own for response in prompt.responses), key=lambda each: each.length)
            for source, own in self._by_source.items()
        }

    @classmethod
    def read(
        cls, run_dir: str | Path, seed: int, scoring: SimulatedScoring, timeout_s: float, history: SimulatedHistory
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
                responses=tuple(RecordedResponse(row["length"], _unshaped_reward(row)) for row in same),
            )
            for text, same in by_text.items()
        ]
        truncated = sum(row["finish_reason"] == "length" for row in rows)
        return cls(seed, prompts, scoring, timeout_s, history, truncated)

    @property
    def lengths(self) -> list[int]:
        return sorted(response.length for prompt in self.prompts for response in prompt.responses)

    def resampled(self, seed: int) -> RecordedWorkload:
        """As many of the recorded prompts of each source, drawn with replacement: what another run might have recorded.
        Differences between such workloads show how much the record leaves open."""
        same = [self._by_source[prompt.source] for prompt in self.prompts]
        prompts = [own[int(uniform(_PROMPT, seed, i, len(self.prompts)) * len(own))] for i, own in enumerate(same)]
        return RecordedWorkload(seed, prompts, self.scoring, self.timeout_s, self._history, self.num_truncated)

    def length(self, key: SampleKey, step: int = 0) -> int:
        return self._response(key).length

    def prompt_length(self, prompt_index: int) -> int:
        return self._recorded(prompt_index).prompt_tokens

    def kind_name(self, prompt_index: int) -> str:
        return self._recorded(prompt_index).source

    def reward_s(self, key: SampleKey, step: int = 0) -> float:
        words = (self.seed, key.epoch, key.prompt_index, key.sample_index, key.attempt)
        z, u = normal(_TIME, *words), uniform(_HANGS, *words)
        return scoring_s(self.scoring, self.timeout_s, z, u, self.length(key))

    def reference_time_s(self, prompt_index: int) -> float:
        return self.scoring.median_s

    def reward(self, key: SampleKey, step: int = 0) -> float:
        return self._response(key).reward

    def history(self, prompt_index: int) -> SimulatedHistory:
        return self._history

    def _recorded(self, prompt_index: int) -> RecordedPrompt:
        return self.prompts[int(uniform(_PROMPT, self.seed, prompt_index) * len(self.prompts))]

    def _response(self, key: SampleKey) -> RecordedResponse:
        responses = self._by_length[self.kind_name(key.prompt_index)]
        prompt = normal(_PROMPT_SCORE, self.seed, key.prompt_index)
        own = normal(_RESPONSE_SCORE, self.seed, key.epoch, key.prompt_index, key.sample_index, key.attempt)
        score = correlated(self.correlation, prompt, own)
        return responses[min(int(_NORMAL.cdf(score) * len(responses)), len(responses) - 1)]


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
            "simulate.recorded_run: no prompt has two recorded responses, which would show how much of a length its "
            "prompt decides: let the run make more steps"
        )
    return min(max(float(np.mean(products)), 0.0), 1.0)


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
