"""What the room of a mechanism declares about it: when it is on, what it goes with, and what memory it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxrl.config import Config
from jaxrl.schema.limits import FloatType


@dataclass(frozen=True, slots=True)
class Searched:
    """What `jaxrl tune` searches of a batch rule.

    Attributes:
      options: of its section: by how many times more prompts are launched than a batch has, then samples of each.
      values: that all options take together, by default.
      warm_up: steps that are left out of every mean: until then the rule carries less than it will.
      period: steps until its rounds begin anew, by the first factor and the prompts of a batch.
    """

    options: tuple[str, ...]
    values: tuple[float, ...]
    warm_up: int = 0
    period: Callable[[float, int], int] = lambda factor, num_prompts: 1


@dataclass(frozen=True, slots=True)
class Room:
    """A mechanism as a configuration asks for it. `jaxrl.mechanisms.table` holds those that there are.

    Attributes:
      name: in words, for messages.
      option: what switches it on, for messages.
      is_on: whether a configuration asks for it.
      decides: of what it alone may decide; two mechanisms that decide the same exclude each other.
      changes: what it changes that others may rely on.
      relies_on: what no other mechanism may change beside it, each with the reason that a user is told.
      races: which samples of a round count depends on which of them end first.
      orders: which prompts make up a batch depends on which are complete first, though all samples of a prompt count.
      reads_profile: whether a configuration has it read `rollout.layout.profile`.
      problem: why a configuration with it is impossible, as a sentence; None: it is possible. Asked where it is on,
        with the names of the mechanisms that race.
      excludes_spanning: why it cannot be where workers span hosts; empty: it can.
      devices_problem: why it cannot run on so many devices; None: it can. Asked where it is on.
      float_types: in which it computes, beside those of the policy.
      note: what a start says about it; None: nothing.
      drops_slowest: whether a configuration has it end the slowest responses of a prompt, for good.
      searched: its factors, of a rule that `jaxrl tune` searches.
    """

    name: str
    option: str
    is_on: Callable[[Config], bool]
    decides: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()
    relies_on: Mapping[str, str] = field(default_factory=dict)
    races: bool = False
    orders: bool = False
    reads_profile: Callable[[Config], bool] = lambda config: False
    problem: Callable[[Config, Sequence[str]], str | None] = lambda config, racing: None
    excludes_spanning: str = ""
    devices_problem: Callable[[int], str | None] = lambda num_devices: None
    float_types: Callable[[Config], Sequence[FloatType]] = lambda config: ()
    note: Callable[[Config], str | None] = lambda config: None
    drops_slowest: Callable[[Config], bool] = lambda config: False
    searched: Searched | None = None


@dataclass(frozen=True, slots=True)
class RolloutMemory:
    """What a mechanism has on each device of the rollout, beside weights and KV pool.

    Attributes:
      name: of all of it, for messages.
      parts: bytes by name, as `jaxrl explain-config` lists them.
      option: to lower where it leaves too little for a KV pool; empty: none makes it smaller.
      lower: options with their values, to lower where it is larger than the pool and does not fit.
      positions: of a decode step of a dp group that have logits, beside one for each row.
      stays: whether it lies also on devices that leave the rollout before the end of a round.
      line: what else `jaxrl explain-config` says of it.
    """

    name: str
    parts: Mapping[str, int]
    option: str = ""
    lower: str = ""
    positions: int = 0
    stays: bool = False
    line: str = ""

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class FreedMemory:
    """What a mechanism has on devices that leave the rollout before the end of a round, beside what is always there.

    Attributes:
      column: its name in `jaxrl explain-config`.
      parts: bytes by name.
      what, why: what needs them, and why so many, for the refusal where they do not fit.
      advice: what else helps than to lower options of the update.
    """

    column: str
    parts: Mapping[str, int]
    what: str
    why: str
    advice: str


UNFINISHED = "what becomes of unfinished responses"
"""`Room.decides`."""

LAYOUTS = "the layouts of workers"
PROMPTS_OF_ROUNDS = "which prompts share a round"
WORKERS = "which worker has a request"
"""`Room.changes`."""
