"""When a trajectory ends, what its environment has said, and its reward.

Source: names of limits as in tinker-cookbook's rollouts.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from jaxrl.types import Episode, Prompt, Sample, SampleKey

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.environments.env import Trajectory


STOPS = (
    *("done", "max_turns", "max_trajectory_tokens", "rollout_timeout"),
    *("error", "timeout", "crash"),  # what became of the environment
)
"""Why trajectories end. `done`: the environment said so. `max_trajectory_tokens`: a turn was cut, or the next
observation has no room."""


def max_trajectory_tokens(config: Config) -> int:
    """The most tokens of a trajectory behind its prompt; the rollout's own limit is always there."""
    return config.environment.max_trajectory_tokens or config.data.max_response_length


@dataclass(frozen=True, slots=True)
class Observed:
    key: SampleKey
    done: bool  # the episode has ended
    messages: tuple[Mapping[str, Any], ...] = ()  # empty where it is
    reward: float = 0.0  # of the turn
    state: bytes | None = b""  # of the environment after it
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the environment
    seconds: float = 0.0  # until it was there
    status: str = "ok"  # or what became of it: the last of `STOPS`
    error: str = ""


class Acting(Protocol):
    """Environments, beside the rollout. Used from one thread."""

    keeps: bool  # whether what was submitted may continue between two rounds

    def submit(self, key: SampleKey, prompt: Prompt, text: str, state: bytes | None) -> None:
        """Has a turn answered. Exactly one answer follows, unless it is cancelled."""
        ...

    def cancel(self, keys: Collection[SampleKey]) -> None: ...

    def completed(self, timeout_s: float = 0.0) -> list[Observed]:
        """The answers that have come; waits so long for one."""
        ...


Compared = Callable[[Sequence[tuple[Prompt, "Sequence[Trajectory]"]]], Sequence[list[float] | str]]
"""Compares the trajectories of prompts: for each prompt what each trajectory is given, or why there is nothing."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """How the turns of a run are answered, and how answers become tokens. `tokens_of`: the tokens of an answer, given
    its messages and the tokens of the response; raises ValueError where the chat template refuses it."""

    acting: Acting
    has_turns: Callable[[Prompt], bool]  # whether a prompt has an environment
    text_of: Callable[[Sequence[int]], str]  # of a turn's tokens
    tokens_of: Callable[[Sequence[Mapping[str, Any]], Sequence[int]], Sequence[int]]
    compared: Compared = lambda asked: []  # `environment.group`


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The row of a prompt, as environments get it."""
    row = {"index": prompt.index, "epoch": prompt.epoch, "question": prompt.question, "answer": prompt.answer}
    return row | dict(prompt.extra)


def total(episode: Episode, name: str) -> float:
    """A metric, over the turns."""
    return sum(turn.metrics.get(name, 0.0) for turn in episode.turns)


def trajectory_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """Metrics of samples with turns: `stop/<reason>`, the share of them that ended so; turns, seconds of answers, and
    what environments measure, as means over trajectories. Nothing where there are none."""
    there = [sample for sample in samples if sample.episode is not None and sample.episode.turns]
    episodes = [sample.episode for sample in there if sample.episode is not None]
    if not episodes:
        return {}
    import numpy as np

    stops = Counter(episode.stop for episode in episodes)
    turns = np.array([len(episode.turns) for episode in episodes])
    seconds = np.array([sum(turn.seconds for turn in episode.turns) for episode in episodes])
    answered = np.array([len(sample) - sample.num_drawn for sample in there])
    names = sorted({name for episode in episodes for turn in episode.turns for name in turn.metrics})
    return {
        **{f"stop/{name}": stops[name] / len(episodes) for name in STOPS},
        "environment/num_turns/mean": float(turns.mean()),
        "environment/num_turns/max": float(turns.max()),
        "environment/seconds/mean": float(seconds.mean()),
        "environment/seconds/max": float(seconds.max()),
        "environment/answer_tokens/mean": float(answered.mean()),
        **{f"environment/{name}": float(np.mean([total(each, name) for each in episodes])) for name in names},
    }


def tokens_crc32(sample: Sample) -> int:
    """The CRC-32 of a sample's tokens, which a journal entry about the sample holds."""
    import numpy as np

    return zlib.crc32(np.ascontiguousarray(sample.token_ids, np.int32).tobytes())
