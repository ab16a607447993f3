"""A few samples of each step, for people: `samples.jsonl` in the run directory.

One line per sample. `key` is its prompt's pass over the data, its prompt, its number, and its attempt if that is not
the first. With reward shaping there are overlong_reward and wrong_reward, which are part of reward. With weights and
parts there are own_reward and parts, of which reward is made. Where scoring failed there is error. Other output of the
scorer is `info`, cut where it is long. A sample with an environment has its `turns`. `ids` has the prompt's tokens, and
the response's as [version, tokens] for each span of one origin.

The report shows them; `jaxrl simulate` and `jaxrl tune` draw lengths and rewards from them (`jaxrl.sim.recorded`);
`jaxrl replay` draws one again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.record.files import JsonLines, read_lines, to_json
from jaxrl.types import ENVIRONMENT, Group, Sample, SampleKey

FILE_NAME = "samples.jsonl"
IDS = "ids"
"""The one field that is for programs."""
GROUPS_PER_STEP = 2
SAMPLES_PER_GROUP = 2
_OF_REWARD = ("overlong_reward", "wrong_reward", "own_reward", "parts")
MAX_VALUE, MAX_INFO = 2_000, 8_000
"""Characters of one value of a sample's info, and of all of them."""
MAX_TOKENS = 1_000
"""The most tokens of a turn that are kept."""
PiecesOf = Callable[[Sequence[int]], Sequence[str]]


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """A sample with all of its tokens, and the step that trained on it. `spans`: (version, token ids) of consecutive
    tokens of one origin, the weights' version or `jaxrl.types.ENVIRONMENT`."""

    key: SampleKey
    step: int
    prompt_ids: tuple[int, ...]
    spans: tuple[tuple[int, tuple[int, ...]], ...]


def key_text(key: SampleKey) -> str:
    """`0-17-3`: the fourth sample of prompt 17 in the first pass; `0-17-3-1` in its second attempt."""
    return f"{key.epoch}-{key.prompt_index}-{key.sample_index}" + (f"-{key.attempt}" if key.attempt else "")


def read_sample(run_dir: str | Path, key: str) -> RecordedSample:
    """Raises ValueError where the file has no sample of that key."""
    path = Path(run_dir) / FILE_NAME
    lines = read_lines(path)
    for line in lines:
        if line.get("key") == key and IDS in line:
            ids = line[IDS]
            spans = tuple((version, tuple(token_ids)) for version, token_ids in ids["response"])
            return RecordedSample(SampleKey(*map(int, key.split("-"))), line["step"], tuple(ids["prompt"]), spans)
    some = ", ".join(line["key"] for line in lines[-4:] if "key" in line)
    there = f"the last ones are {some}" if some else "it has no sample"
    raise ValueError(f"{path} has no sample {key!r}: {there}")


class SampleLog(JsonLines):
    """Appends the first samples of a step's first groups. `pieces_of`: the text of each token, for turns."""

    def __init__(self, path: str | Path, last_step: int, *, pieces_of: PiecesOf | None = None) -> None:
        super().__init__(path, last_step)
        self._pieces_of = pieces_of

    def begin(self) -> None:
        super().begin()
        self.open()

    def write(self, step: int, groups: Sequence[Group]) -> list[dict[str, Any]]:
        lines = [
            _line(step, group, sample) | self._turns(sample)
            for group in groups[:GROUPS_PER_STEP]
            for sample in group.samples[:SAMPLES_PER_GROUP]
        ]
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
            answer = [{"role": each["role"], "content": each["content"][:MAX_VALUE]} for each in turn.messages]
            turns.append(said | {"answer": answer})
            start = turn.end
        return {"turns": turns}


def _line(step: int, group: Group, sample: Sample) -> dict[str, Any]:
    starts = np.flatnonzero(np.diff(sample.versions, prepend=ENVIRONMENT - 1))
    parts = np.split(sample.token_ids, starts)[1:]
    spans = [(int(sample.versions[start]), ids.tolist()) for start, ids in zip(starts, parts, strict=True)]
    line = {
        "step": step,
        "key": key_text(sample.key),
        "prompt": group.prompt.text,
        "response": sample.text,
        "answer": group.prompt.answer,
        "reward": sample.reward,
        "length": len(sample),
        "finish_reason": sample.finish_reason,
        "source": group.prompt.source,
        IDS: {"prompt": [*group.prompt.token_ids], "response": spans},
    }
    line |= {name: sample.reward_info[name] for name in _OF_REWARD if name in sample.reward_info}
    info = _short({name: value for name, value in sample.reward_info.items() if name not in _OF_REWARD})
    if sample.failure:
        line["error"] = sample.failure
        info.pop("error", None)  # the same
    return line | ({"info": info} if info else {})


def _short(info: Mapping[str, Any]) -> dict[str, Any]:
    """Values that JSON has. One that is too long is cut; beyond `MAX_INFO` names are left out, and `...` says how
    many."""
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
