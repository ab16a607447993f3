"""A function of the user's that orders the groups that partial rollout has buffered.

Before each round it sees every buffered group that the round need not wait for, and says which resume first, which wait
for a later round, and which restart.

Source: slime's `--buffer-filter-path`, a function that takes groups out of the buffer.

Departures: the function decides and takes nothing out, so that no prompt is lost; it sees numbers, not samples. It must
give the same answer whenever it is asked the same, because a resumed run asks again.

Example::

    def buffer_filter(groups, policy_version):
        # the longest first; what is two versions old restarts
        longest = sorted(groups, key=lambda group: -max(group.lengths))
        return {g.key: "restart" if g.lag(policy_version) >= 2 else "resume" for g in longest}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from jaxrl.scheduling.rounds.events import PromptKey

Action = Literal["resume", "wait", "restart"]


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """A buffered group as the user's function sees it. Tuples have one entry per sample.

    Attributes:
      key: (epoch, index) of the prompt.
      steps_waited: training steps since its first launch.
      lengths: tokens so far.
      finished: whether the response has ended.
      oldest_versions: the version of the first token; None without tokens.
      restarts: how often it has started again.
    """

    key: PromptKey
    steps_waited: int
    lengths: tuple[int, ...]
    finished: tuple[bool, ...]
    oldest_versions: tuple[int | None, ...]
    restarts: tuple[int, ...]

    def lag(self, policy_version: int) -> int:
        """By how many versions its oldest token is behind the version that samples; 0 without tokens."""
        return max((policy_version - version for version in self.oldest_versions if version is not None), default=0)


class BufferFilter(Protocol):
    def __call__(self, *, groups: Sequence[WaitingGroup], policy_version: int) -> Mapping[PromptKey, Action]:
        """The action for each group in a round of `policy_version`; groups resume in the order of the answer, and those
        without an action after them."""
        ...


def decide(buffer_filter: BufferFilter, groups: Sequence[WaitingGroup], policy_version: int) -> dict[PromptKey, Action]:
    """The function's answer for all groups, checked, in order. Raises ValueError for an impossible one."""
    place = "rollout.partial_rollout.buffer_filter_path: the function"
    try:
        answer = buffer_filter(groups=list(groups), policy_version=policy_version)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{place} failed with {type(error).__name__}: {error}") from error
    if not isinstance(answer, Mapping):
        raise ValueError(f"{place} must return a mapping from keys of groups to actions, found {answer!r:.200}")
    decided: dict[PromptKey, Action] = {}
    keys = [group.key for group in groups]
    for key, action in answer.items():
        if key not in keys:
            raise ValueError(f"{place} returned {key!r:.200}, which is the key of none of its {len(keys)} groups")
        if action not in get_args(Action):
            raise ValueError(f"{place} must say one of {', '.join(get_args(Action))} for {key}, found {action!r:.200}")
        decided[key] = action
    for key in keys:
        decided.setdefault(key, "resume")
    return decided
