"""A few samples of each step, for people: `samples.jsonl` in the run directory.

One line per sample: step, prompt, response, answer, reward, length (tokens), finish_reason, source; with reward
shaping also overlong_reward and wrong_reward, which are part of reward; with weights and parts own_reward and parts, of
which it is made; where scoring failed, error. What else the scorer said is `info`, of which long values are cut. One
with an environment has its `turns`: each with what the model said, its tokens as [text, log-probability], the answer,
the reward and the seconds until the answer was there. The report shows them; `jaxrl simulate` can draw lengths and
rewards from them, and `jaxrl tune` does (`jaxrl.sim.recorded`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.record.files import JsonLines, to_json
from jaxrl.types import Group, Sample

FILE_NAME = "samples.jsonl"
GROUPS_PER_STEP = 2
SAMPLES_PER_GROUP = 2
_OF_REWARD = ("overlong_reward", "wrong_reward", "own_reward", "parts", "error")
MAX_VALUE, MAX_INFO = 2_000, 8_000
"""Characters of one value of a sample's info, and of all of them."""
MAX_TOKENS = 1_000
"""Of a turn."""
PiecesOf = Callable[[Sequence[int]], Sequence[str]]


class SampleLog(JsonLines):
    """Appends the first samples of a step's first groups; drops lines of steps after `last_step` when it begins.

    Args:
      pieces_of: the text of each of some tokens; None: tokens are not written.
    """

    def __init__(
        self, path: str | Path, last_step: int, *, begin: bool = True, pieces_of: PiecesOf | None = None
    ) -> None:
        self._pieces_of = pieces_of
        super().__init__(path, lambda step: step <= last_step, begin=begin)

    def begin(self) -> None:
        super().begin()
        self.make()

    def write(self, step: int, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Returns the lines."""
        some = [(group, sample) for group in groups[:GROUPS_PER_STEP] for sample in _first(group)]
        lines = [_line(step, group, sample) | self._turns(sample) for group, sample in some]
        for line in lines:
            self.append(line)
        return lines

    def _turns(self, sample: Sample) -> dict[str, Any]:
        if sample.episode is None:
            return {}
        turns: list[dict[str, Any]] = []
        start = 0
        for turn in sample.episode.turns:
            mine = np.flatnonzero(sample.drawn[start : turn.end])[:MAX_TOKENS] + start
            said = {"text": turn.text[:MAX_VALUE], "reward": turn.reward, "seconds": round(turn.seconds, 3)}
            if self._pieces_of is not None:
                logprobs = sample.rollout_logprobs[mine].round(2).tolist()
                said["tokens"] = [*zip(self._pieces_of(sample.token_ids[mine].tolist()), logprobs, strict=True)]
            turns.append(said | {"answer": [_cut(message) for message in turn.messages]})
            start = turn.end
        return {"turns": turns}


def _cut(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": message["role"], "content": message["content"][:MAX_VALUE]}


def _first(group: Group) -> list[Sample]:
    return group.samples[:SAMPLES_PER_GROUP]


def _line(step: int, group: Group, sample: Sample) -> dict[str, Any]:
    line = {
        "step": step,
        "prompt": group.prompt.text,
        "response": sample.text,
        "answer": group.prompt.answer,
        "reward": sample.reward,
        "length": len(sample),
        "finish_reason": sample.finish_reason,
        "source": group.prompt.source,
    }
    line |= {name: sample.reward_info[name] for name in _OF_REWARD if name in sample.reward_info}
    info = _short({name: value for name, value in sample.reward_info.items() if name not in _OF_REWARD})
    return line | ({"info": info} if info else {})


def _short(info: Mapping[str, Any]) -> dict[str, Any]:
    """What a scorer said, in values that JSON has. A value that is too long becomes the beginning of its text, and says
    how much is missing; beyond `MAX_INFO` names are left out, and `...` says how many."""
    found: dict[str, Any] = {}
    room = MAX_INFO
    for name, value in info.items():
        text = value if isinstance(value, str) else to_json(value, default=str)
        more = len(text) - MAX_VALUE
        shown = f"{text[:MAX_VALUE]}... and {more} more characters" if more > 0 else text
        room -= len(name) + len(shown)
        if room < 0:
            return found | {"...": f"{len(info) - len(found)} more"}
        found[name] = shown if more > 0 or isinstance(value, str) else json.loads(text)
    return found
