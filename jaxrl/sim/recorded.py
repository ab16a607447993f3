"""Lengths of a real run, replayed: `samples.jsonl` of a run directory as a `ModelledWorkload`, in place of a formula.

Responses are drawn by rank: the model of `jaxrl.sim.workload`, with the recorded responses of the prompt's source as
its distribution and the correlation of the recorded scores within a prompt as c.

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from jaxrl.config import SimulatedTask
from jaxrl.record.files import read_lines
from jaxrl.record.samples import FILE_NAME
from jaxrl.sim.workload import ModelledWorkload, uniform
from jaxrl.types import SampleKey

_PROMPT = 16  # what a random number is for; different from those of `jaxrl.sim.workload`
_NORMAL = NormalDist()


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


@dataclass(frozen=True, slots=True)
class RecordedWorkload(ModelledWorkload):
    """Draws from a run's responses.

    Attributes:
      prompts: at least one, each with a response. Prompt index i is always the same one, drawn by (seed, i).
      num_truncated: recorded responses that ended at the run's token limit.
    """

    prompts: tuple[RecordedPrompt, ...] = ()
    num_truncated: int = 0
    _by_length: dict[str, list[RecordedResponse]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_length = {
            source: sorted((response for prompt in own for response in prompt.responses), key=lambda each: each.length)
            for source, own in _by_source(self.prompts).items()
        }
        object.__setattr__(self, "_by_length", by_length)

    @classmethod
    def of(
        cls, seed: int, prompts: Sequence[RecordedPrompt], task: SimulatedTask, timeout_s: float, num_truncated: int = 0
    ) -> RecordedWorkload:
        """`task`: says what is not recorded: how long scoring takes, and how well history foretells responses. Raises
        ValueError if no prompt has two responses."""
        own = task.replace(correlation=_correlation(prompts))
        longest = max(response.length for prompt in prompts for response in prompt.responses)
        return cls(seed, (own,), longest, timeout_s=timeout_s, prompts=tuple(prompts), num_truncated=num_truncated)

    @classmethod
    def read(cls, run_dir: str | Path, seed: int, task: SimulatedTask, timeout_s: float) -> RecordedWorkload:
        """From `samples.jsonl` of a run directory. A prompt has as many characters per token as the responses have.

        Raises ValueError where the file is missing, holds no finished response, or a damaged line; and as `of`.
        """
        path = Path(run_dir) / FILE_NAME
        if not path.exists():
            raise ValueError(f"{path}: no such file; it is written by `jaxrl train` into its run directory")
        ended = [row for row in read_lines(path, _parsed, _refuse) if row["end"] in ("stop", "length")]
        rows = [row for row in ended if row["length"] > 0]
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
                responses=tuple(RecordedResponse(row["length"], row["reward"]) for row in same),
            )
            for text, same in by_text.items()
        ]
        return cls.of(seed, prompts, task, timeout_s, sum(row["end"] == "length" for row in rows))

    @property
    def lengths(self) -> list[int]:
        return sorted(response.length for prompt in self.prompts for response in prompt.responses)

    def resampled(self, seed: int) -> RecordedWorkload:
        """As many of the recorded prompts of each source, drawn with replacement: what another run might have recorded.
        Differences between such workloads show how much the record leaves open."""
        by_source = _by_source(self.prompts)
        same = [by_source[prompt.source] for prompt in self.prompts]
        prompts = [own[int(uniform(_PROMPT, seed, i, len(same)) * len(own))] for i, own in enumerate(same)]
        return RecordedWorkload.of(seed, prompts, self.tasks[0], self.timeout_s, self.num_truncated)

    def length(self, key: SampleKey, step: int = 0) -> int:
        return self._response(key).length

    def prompt_length(self, prompt_index: int) -> int:
        return self._recorded(prompt_index).prompt_tokens

    def kind_name(self, prompt_index: int) -> str:
        return self._recorded(prompt_index).source

    def reward(self, key: SampleKey, step: int = 0) -> float:
        return self._response(key).reward

    def _recorded(self, prompt_index: int) -> RecordedPrompt:
        return self.prompts[int(uniform(_PROMPT, self.seed, prompt_index) * len(self.prompts))]

    def _response(self, key: SampleKey) -> RecordedResponse:
        responses = self._by_length[self.kind_name(key.prompt_index)]
        return responses[min(int(_NORMAL.cdf(self.score(key)) * len(responses)), len(responses) - 1)]


def _by_source(prompts: Sequence[RecordedPrompt]) -> dict[str, list[RecordedPrompt]]:
    found: dict[str, list[RecordedPrompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.source, []).append(prompt)
    return found


def _correlation(prompts: Sequence[RecordedPrompt]) -> float:
    """How much of a length its prompt decides: the mean product of two normal scores of a prompt, at least 0. A score
    is a rank within the source; equal lengths share theirs."""
    products: list[float] = []
    for same in _by_source(prompts).values():
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


def _parsed(line: bytes) -> dict[str, Any]:
    """What is drawn from a line, whose values have the types that `jaxrl.record.samples` writes. The reward is without
    the run's shaping: the simulated run has its own."""
    row = json.loads(line)
    reward = float(row["reward"] or 0) - float(row.get("overlong_reward", 0)) - float(row.get("wrong_reward", 0))
    texts = {name: row[name] for name in ("prompt", "response", "source")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise TypeError(f"{', '.join(texts)} must be text")
    return texts | {"length": int(row["length"]), "reward": reward, "end": row["finish_reason"]}


def _refuse(damage: str) -> None:
    raise ValueError(damage)
