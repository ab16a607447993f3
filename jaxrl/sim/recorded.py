"""Lengths of a real run, replayed: `samples.jsonl` of a run directory as a `Workload`.

Purpose: a simulation in which lengths come from a run instead of a formula.

Source: bootstrap resampling (Efron 1979), by prompt so that a long prompt is long again (RollPacker §3, RhymeRL §6.1).

Departures: `samples.jsonl` (`jaxrl.record.samples`) holds a few samples of each step and no prompt index, so a recorded
prompt is identified by its text. Responses that reached the run's own token limit would have been longer; they are
replayed as recorded, and `num_truncated` counts them.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxrl.config import SimulatedScoring
from jaxrl.sim.workload import normal, scoring_s, uniform
from jaxrl.types import SampleKey

Rule = Literal["by_prompt", "pooled"]
# What a random number is for; different from those of `jaxrl.sim.workload`.
_PROMPT, _RESPONSE, _TIME, _HANGS = range(16, 20)

_NO_SCORING = SimulatedScoring()


@dataclass(frozen=True, slots=True)
class Response:
    """A recorded response: the training step it was drawn in, its tokens, its reward."""

    step: int
    length: int
    reward: float


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """A prompt of a run: its length in tokens, its source, its recorded responses."""

    prompt_tokens: int
    source: str
    responses: tuple[Response, ...]


class RecordedWorkload:
    """`jaxrl.sim.workload.Workload` that draws from a run's responses.

    Args:
      seed: of the draws.
      prompts: the recorded prompts. Prompt index i is one of them, drawn by (seed, i), so always the same one.
      rule: `by_prompt`: a response is one of its prompt's recorded ones; `pooled`: one of any prompt's, so that prompts
        have no length of their own.
      scoring, timeout_s: seconds of scoring, which the file does not hold, and when it is cut off.
      num_truncated: recorded responses that ended at the run's token limit.

    A response is drawn from the recorded step nearest to the step asked for, so growth over training is replayed too.

    Raises ValueError without prompts, or for a prompt without responses.
    """

    def __init__(
        self,
        seed: int,
        prompts: Sequence[RecordedPrompt],
        rule: Rule = "by_prompt",
        scoring: SimulatedScoring = _NO_SCORING,
        timeout_s: float = math.inf,
        num_truncated: int = 0,
    ) -> None:
        if not prompts or any(not prompt.responses for prompt in prompts):
            raise ValueError(f"RecordedWorkload: prompts ({len(prompts)}) must be at least one, each with a response")
        if rule not in ("by_prompt", "pooled"):
            raise ValueError(f"RecordedWorkload: rule ({rule!r}) must be 'by_prompt' or 'pooled'")
        self.seed = seed
        self.prompts = tuple(prompts)
        self.rule: Rule = rule
        self.scoring, self.timeout_s = scoring, timeout_s
        self.num_truncated = num_truncated
        pools = [prompt.responses for prompt in prompts]
        if rule == "pooled":
            pools = [tuple(response for pool in pools for response in pool)]
        self._pools = [_by_step(pool) for pool in pools]

    @classmethod
    def read(
        cls,
        run_dir: str | Path,
        seed: int,
        rule: Rule = "by_prompt",
        scoring: SimulatedScoring = _NO_SCORING,
        timeout_s: float = math.inf,
    ) -> RecordedWorkload:
        """From `samples.jsonl` of a run directory. A prompt has as many characters per token as the responses have.

        Raises ValueError if the file is missing, holds no finished response, or a line is not one of
        `jaxrl.record.samples`.
        """
        path = Path(run_dir) / "samples.jsonl"
        rows = [row for row in _read_lines(path) if row["finish_reason"] in ("stop", "length") and row["length"] > 0]
        if not rows:
            raise ValueError(f"{path}: holds no finished response to play; the run must have made at least one step")
        characters, tokens = sum(len(row["response"]) for row in rows), sum(row["length"] for row in rows)
        per_character = tokens / characters if characters else 0.0
        by_text: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_text.setdefault(row["prompt"], []).append(row)
        prompts = [
            RecordedPrompt(
                prompt_tokens=max(round(len(text) * per_character), 1),
                source=same[0]["source"],
                responses=tuple(Response(row["step"], row["length"], _unshaped_reward(row)) for row in same),
            )
            for text, same in by_text.items()
        ]
        truncated = sum(row["finish_reason"] == "length" for row in rows)
        return cls(seed, prompts, rule, scoring, timeout_s, truncated)

    def length(self, key: SampleKey, step: int = 0) -> int:
        return self._response(key, step).length

    def prompt_length(self, prompt_index: int) -> int:
        return self.prompts[self._recorded_index(prompt_index)].prompt_tokens

    def kind_name(self, prompt_index: int) -> str:
        return self.prompts[self._recorded_index(prompt_index)].source

    def reward_s(self, key: SampleKey, step: int = 0) -> float:
        words = (self.seed, key.epoch, key.prompt_index, key.sample_index, key.attempt)
        z, u = normal(_TIME, *words), uniform(_HANGS, *words)
        return scoring_s(self.scoring, self.timeout_s, z, u, self.length(key, step))

    def reward(self, key: SampleKey, step: int = 0) -> float:
        return self._response(key, step).reward

    def _recorded_index(self, prompt_index: int) -> int:
        return int(uniform(_PROMPT, self.seed, prompt_index) * len(self.prompts))

    def _response(self, key: SampleKey, step: int) -> Response:
        pool = self._pools[0 if self.rule == "pooled" else self._recorded_index(key.prompt_index)]
        rows = pool[_nearest(list(pool), step)]
        u = uniform(_RESPONSE, self.seed, key.epoch, key.prompt_index, key.sample_index, key.attempt)
        return rows[int(u * len(rows))]


def _by_step(responses: Sequence[Response]) -> dict[int, list[Response]]:
    """Responses by step, steps ascending."""
    pool: dict[int, list[Response]] = {}
    for response in sorted(responses, key=lambda response: response.step):
        pool.setdefault(response.step, []).append(response)
    return pool


def _nearest(steps: Sequence[int], step: int) -> int:
    """The one of ascending `steps` that is nearest to `step`; the earlier of two equally near."""
    i = bisect_left(steps, step)
    return min(steps[max(i - 1, 0) : i + 1], key=lambda known: abs(known - step))


def _unshaped_reward(row: Mapping[str, Any]) -> float:
    """Without the run's overlong reward shaping: the simulated run has its own."""
    return float(row["reward"] or 0) - float(row.get("overlong_reward", 0))


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
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; it is written by `jaxrl train` into its run directory") from None
    rows = []
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline was cut off
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not valid JSON ({error})") from None
        fields = row if isinstance(row, dict) else {}
        wrong = [name for name, kind in _FIELDS.items() if not isinstance(fields.get(name, ...), kind)]
        if wrong:
            raise ValueError(f"{path}, line {number}: {', '.join(wrong)} must be as `jaxrl.record.samples` writes them")
        rows.append(row)
    return rows
