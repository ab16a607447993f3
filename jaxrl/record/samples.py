"""A few samples of each step, for people: `samples.jsonl` in the run directory.

One line per sample: step, prompt, response, answer, reward, length (tokens), finish_reason, source; with reward
shaping also overlong_reward and wrong_reward, which are part of reward; with weights and parts own_reward and parts, of
which it is made; where scoring failed, error. What else the scorer said is `info`, of which long values are cut. The
report shows them; `jaxrl simulate` can draw lengths and rewards from them, and `jaxrl tune` does
(`jaxrl.sim.recorded`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.record.files import JsonLines, to_json
from jaxrl.types import Group, Sample

FILE_NAME = "samples.jsonl"
GROUPS_PER_STEP = 2
SAMPLES_PER_GROUP = 2
_OF_REWARD = ("overlong_reward", "wrong_reward", "own_reward", "parts", "error")
MAX_VALUE, MAX_INFO = 2_000, 8_000
"""Characters of one value of a sample's info, and of all of them."""


class SampleLog(JsonLines):
    """Appends the first samples of a step's first groups; drops lines of steps after `last_step` when it begins."""

    def __init__(self, path: str | Path, last_step: int, *, begin: bool = True) -> None:
        super().__init__(path, lambda step: step <= last_step, begin=begin)

    def begin(self) -> None:
        super().begin()
        self.make()

    def write(self, step: int, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Returns the lines."""
        lines = [_line(step, group, sample) for group in groups[:GROUPS_PER_STEP] for sample in _first(group)]
        for line in lines:
            self.append(line)
        return lines


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
