"""Responses of earlier rollouts, by prompt: drafts come from them, and ranking groups rank by them. Part of a
checkpoint.

Source: RhymeRL §5.3 (a prompt's history is the responses of its last rollout, with their rewards) and §6.2 to §6.3 (its
length is their median; by how much lengths have grown since the epoch before).

Departures:

- A group enters when it leaves its round, scored: trained on, or filtered. What a round discards, or carries on without
  samples, never enters: a clock decides which of its responses have been scored by then. So the store is a function of
  logical time.
- Bytes are bounded. The prompts whose last rollout is longest ago go first; their lengths stay. An index counts with
  its largest possible size until `settle` says how large it is.
- Prompts are identified by their index alone: a run that resumes with other data finds the history of other prompts.
  Tokens never depend on it, so that costs speed alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.types import Group, check_schema

SCHEMA = 1
_UNKNOWN = -1  # bytes of an index, in a checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class PastRollout:
    """A prompt's responses in one epoch: tokens int32 [T] of all, one after another; lengths int32 [R] and rewards
    float64 [R] of each."""

    epoch: int
    tokens: np.ndarray
    lengths: np.ndarray
    rewards: np.ndarray

    @classmethod
    def of(cls, group: Group) -> PastRollout:
        samples = sorted(group.samples, key=lambda sample: sample.key)
        tokens = np.concatenate([np.asarray(sample.token_ids, np.int32) for sample in samples])
        lengths = np.asarray([len(sample) for sample in samples], np.int32)
        return cls(group.prompt.epoch, tokens, lengths, np.asarray([s.reward for s in samples], np.float64))

    def responses(self) -> list[np.ndarray]:
        return np.split(self.tokens, np.cumsum(self.lengths)[:-1])

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + self.lengths.nbytes + self.rewards.nbytes


class PromptHistory:
    """A prompt's last rollouts, the oldest first. Immutable but for a cache, so another thread may read it."""

    __slots__ = ("_packed", "rollouts")

    def __init__(self, rollouts: tuple[PastRollout, ...], packed: bytes | None = None) -> None:
        self.rollouts = rollouts
        self._packed = packed

    @property
    def num_responses(self) -> int:
        return sum(len(rollout.lengths) for rollout in self.rollouts)

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout.tokens) for rollout in self.rollouts)

    @property
    def num_bytes(self) -> int:
        return sum(rollout.num_bytes for rollout in self.rollouts)

    def pack(self) -> bytes:
        """Compressed for a checkpoint; cached."""
        if self._packed is None:
            self._packed = _packed(self.rollouts)
        return self._packed

    @classmethod
    def unpack(cls, packed: bytes) -> PromptHistory:
        return cls(_unpacked(packed), packed)


@dataclass(frozen=True, slots=True)
class PastLengths:
    """Response lengths of a prompt's last rollout. `before`: the median of the rollout before it, or 0."""

    epoch: int
    median: float
    mean: float
    longest: int
    before: float

    @property
    def growth(self) -> float | None:
        return self.median / self.before if self.before else None


class HistoryStore:
    """The history of all prompts, by their index in the data.

    Args:
      epochs: rollouts that are kept of a prompt; 0: lengths alone.
      max_bytes: of responses and their indexes together; 0: no bound.
      index_bytes: (responses, their tokens) -> the most bytes that an index over them takes; None: there are none.

    Attributes:
      num_evicted: prompts whose responses were dropped for the bound, so far.
    """

    def __init__(self, epochs: int, max_bytes: int = 0, index_bytes: Callable[[int, int], int] | None = None) -> None:
        self.num_evicted = 0
        self._epochs, self._max_bytes, self._index_bytes = epochs, max_bytes, index_bytes
        self._kept: dict[int, PromptHistory] = {}  # those whose last rollout is longest ago first
        self._lengths: dict[int, PastLengths] = {}
        self._settled: dict[int, int] = {}  # bytes of the indexes that are known, by prompt
        self.num_bytes = 0

    def prompts(self) -> list[int]:
        """The prompts whose responses are kept, in the order of their last rollouts, the oldest first."""
        return list(self._kept)

    def history(self, index: int) -> PromptHistory | None:
        return self._kept.get(index)

    def unsettled(self) -> list[int]:
        return [] if self._index_bytes is None else [index for index in self._kept if index not in self._settled]

    def lengths(self, index: int) -> PastLengths | None:
        """They stay when responses are dropped."""
        return self._lengths.get(index)

    def growths(self) -> np.ndarray:
        """float64 [N]: the factor by which the median length of each prompt with two rollouts or more grew to its last
        one."""
        found = (self._lengths[index].growth for index in sorted(self._lengths))
        return np.asarray([growth for growth in found if growth is not None], np.float64)

    def add(self, groups: Iterable[Group]) -> list[int]:
        """Takes in the scored groups of a round; returns the prompts whose responses have changed and are kept. Ignores
        a rollout older than the one kept (which waited in a queue for longer than an epoch)."""
        changed: dict[int, None] = {}
        for group in groups:
            if self._take(group.prompt.index, PastRollout.of(group)):
                changed[group.prompt.index] = None
        self._evict()
        return [index for index in changed if index in self._kept]

    def _take(self, index: int, rollout: PastRollout) -> bool:
        before, kept = self._lengths.get(index), self._kept.get(index)
        if before is not None and rollout.epoch <= before.epoch:
            return False
        median, lengths = float(np.median(rollout.lengths)), rollout.lengths
        earlier = 0.0 if before is None else before.median
        self._lengths[index] = PastLengths(rollout.epoch, median, float(lengths.mean()), int(lengths.max()), earlier)
        if not self._epochs:
            return False
        rollouts = (*(() if kept is None else kept.rollouts), rollout)[-self._epochs :]
        self._forget(index)
        self._keep(index, PromptHistory(rollouts))
        return True

    def settle(self, index: int, num_bytes: int) -> None:
        """Sets the bytes of a prompt's index. Called in logical time."""
        self.num_bytes -= self._bytes_of(index)
        self._settled[index] = num_bytes
        self.num_bytes += self._bytes_of(index)

    def _keep(self, index: int, history: PromptHistory) -> None:
        self._kept[index] = history
        self.num_bytes += self._bytes_of(index)

    def _forget(self, index: int) -> None:
        if index in self._kept:
            self.num_bytes -= self._bytes_of(index)
            self._settled.pop(index, None)
            del self._kept[index]

    def _bytes_of(self, index: int) -> int:
        history, built = self._kept[index], self._settled.get(index)
        if built is None:
            most = self._index_bytes
            built = 0 if most is None else most(history.num_responses, history.num_tokens)
        return history.num_bytes + built

    def _evict(self) -> None:
        while self._max_bytes and self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._kept)))
            self.num_evicted += 1

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Flat arrays: `prompts` int64 [P, 3] (index, bytes of its part of `packed`, bytes of its index or -1), the
        oldest first; `packed` uint8; `lengths` float64 [L, 6] (index, epoch, median, mean, longest, the median
        before)."""
        parts = [history.pack() for history in self._kept.values()]
        sizes = [(i, len(part), self._settled.get(i, _UNKNOWN)) for i, part in zip(self._kept, parts, strict=True)]
        rows = [(i, of.epoch, of.median, of.mean, of.longest, of.before) for i, of in sorted(self._lengths.items())]
        return {
            "schema": SCHEMA,
            "num_evicted": self.num_evicted,
            "prompts": np.asarray(sizes, np.int64).reshape(-1, 3),
            "packed": np.frombuffer(b"".join(parts), np.uint8),
            "lengths": np.asarray(rows, np.float64).reshape(-1, 6),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what was kept, within this run's bounds."""
        check_schema("history", state, SCHEMA)
        prompts, packed, lengths = (np.asarray(state[name]) for name in ("prompts", "packed", "lengths"))
        self._kept, self._lengths, self._settled, self.num_bytes = {}, {}, {}, 0
        self.num_evicted = int(state["num_evicted"])
        for index, epoch, median, mean, longest, before in lengths.tolist():
            self._lengths[int(index)] = PastLengths(int(epoch), median, mean, int(longest), before)
        ends = np.cumsum(prompts[:, 1])
        for index, size, built, end in zip(*prompts.T.tolist(), ends.tolist(), strict=True):
            if not self._epochs:
                continue
            history = PromptHistory.unpack(packed[end - size : end].tobytes())
            if len(history.rollouts) > self._epochs:
                history, built = PromptHistory(history.rollouts[-self._epochs :]), _UNKNOWN
            self._keep(index, history)
            if built != _UNKNOWN:
                self.settle(index, built)
        self._evict()


def _packed(rollouts: tuple[PastRollout, ...]) -> bytes:
    """One prompt's rollouts, compressed: their number, then of each its epoch, number of responses and number of
    tokens, all as int64; then of each the rewards as float64, and of each the lengths and tokens as int32, split into
    planes of bytes, of which the higher ones are nearly constant. Little-endian."""
    heads = [(each.epoch, len(each.lengths), len(each.tokens)) for each in rollouts]
    parts = [np.asarray([len(rollouts), *np.ravel(heads)], "<i8").tobytes()]
    parts += [each.rewards.astype("<f8").tobytes() for each in rollouts]
    numbers = (np.concatenate([each.lengths, each.tokens]).astype("<i4") for each in rollouts)
    parts += [each.view(np.uint8).reshape(-1, 4).T.tobytes() for each in numbers]
    return zlib.compress(b"".join(parts))


def _unpacked(packed: bytes) -> tuple[PastRollout, ...]:
    data = zlib.decompress(packed)
    (count,) = np.frombuffer(data, "<i8", 1).tolist()
    heads = np.frombuffer(data, "<i8", 3 * count, 8).reshape(count, 3).tolist()
    place = 8 + 24 * count
    rewards: list[np.ndarray] = []
    for _, num_responses, _ in heads:
        rewards.append(np.frombuffer(data, "<f8", num_responses, place).astype(np.float64))
        place += 8 * num_responses
    found: list[PastRollout] = []
    for (epoch, num_responses, num_tokens), each in zip(heads, rewards, strict=True):
        size = 4 * (num_responses + num_tokens)
        numbers = np.frombuffer(data, np.uint8, size, place).reshape(4, -1).T.copy().view("<i4")[:, 0]
        lengths, tokens = np.split(numbers.astype(np.int32), [num_responses])
        found.append(PastRollout(epoch, tokens, lengths, each))
        place += size
    return tuple(found)
