"""The layout of a worker over one round after another: the planner between rounds, the switch rule inside them.

Purpose: `RoundLayouts` says how RollPacker's per-step planner (§4.2) and PAT's switches (§4.2, Algorithm 1) compose.

- A round starts in the planner's degree for its kind; without a planner, in the configured one.
- Inside it the switch rule decides, several times if it pays. Beside a planner it may only go up from there, as the
  batch drains.
- When the round has ended, the planner hears of all its preemptions, those after a switch included, and the worker
  returns to the degree that the next round starts in. What the switch rule chose leaves no trace in the planner.

So beside a planner tp never falls while rows live, and the planner compares rounds that began in its own degrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl.scheduling.layouts.situation import Situation
from jaxrl.scheduling.layouts.switch_rule import (
    LayoutSwitchConfig,
    LayoutSwitchRule,
    ReplayedSwitchRule,
    Switch,
    SwitchRule,
)
from jaxrl.scheduling.layouts.tp_planner import TpPlanner


class RoundLayouts:
    """Both rules over one round after another; see the module.

    Args:
      planner: chooses the degree to start with; or that degree itself, the same for every round.
      rule: decides inside rounds; None to stay in the degree all round.

    Example::

        tp = layouts.start(kind)                     # the layout to be in, before weights are synchronised
        switch = layouts.decide(situation)           # between two plans, as often as wished
        layouts.end(preemptions)                     # and back: `start` says the next layout
    """

    def __init__(self, planner: TpPlanner | int, rule: LayoutSwitchRule | None = None) -> None:
        """Raises ValueError if the rule could lower tp beside a planner, or leave the host, or cannot start."""
        self.planner = planner if isinstance(planner, TpPlanner) else None
        self._fixed = 0 if isinstance(planner, TpPlanner) else planner
        if rule is not None:
            _check(planner, rule.config)
        self._live = rule
        self._rule: SwitchRule | None = rule
        self._kind: str | None = None
        self._tp = 0

    def degree(self, kind: str = "all") -> int:
        """The degree that the next round of this kind starts with."""
        return self._fixed if self.planner is None else self.planner.degree(kind)

    def start(self, kind: str = "all", replay: Sequence[Switch] = ()) -> int:
        """Begins a round; returns its degree. `replay`: switches of this round that were decided before a crash."""
        if self._kind is not None:
            raise ValueError(f"round layouts: a {kind!r} round starts before the {self._kind!r} round has ended")
        self._kind, self._tp = kind, self.degree(kind)
        self._rule = ReplayedSwitchRule(replay, self._live) if replay else self._live
        if self._rule is not None:
            self._rule.start_generation()
        return self._tp

    def wants(self, now: Situation) -> bool:
        """Whether to look closer (`SwitchRule.wants`): asked while plans are in flight, it decides nothing."""
        return self._rule is not None and self._rule.wants(now)

    def decide(self, now: Situation) -> Switch | None:
        """The switch to make now, or None. Raises ValueError outside a round, or below a planner's degree."""
        if self._kind is None or (self.planner is not None and now.tp < self._tp):
            raise ValueError(
                f"round layouts: a decision at tp {now.tp} needs a round that started, at that degree or below "
                f"(round: {self._kind!r}, started at tp {self._tp})"
            )
        switch = None if self._rule is None else self._rule.decide(now)
        if switch is not None and self.planner is not None and switch.to_tp < now.tp:
            raise ValueError(f"round layouts: {switch} lowers tp inside a round")
        return switch

    def end(self, preemptions: int) -> int:
        """Ends the round, with all its preemptions; returns the degree that the next round of its kind starts with."""
        if self._kind is None:
            raise ValueError("round layouts: no round has started")
        kind, self._kind = self._kind, None
        return self._fixed if self.planner is None else self.planner.observe(preemptions, kind)

    def cancel(self) -> None:
        """The round is dropped: the planner hears nothing of it."""
        self._kind = None

    def state_dict(self) -> dict[str, Any]:
        """Part of a checkpoint, cut between rounds."""
        return {} if self.planner is None else {"planner": self.planner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another worker was; a state without a planner's leaves this one's as it is."""
        if self.planner is not None and "planner" in state:
            self.planner.load_state_dict(state["planner"])


def _check(planner: TpPlanner | int, config: LayoutSwitchConfig) -> None:
    if not isinstance(planner, TpPlanner):
        if planner not in config.degrees:
            raise ValueError(
                f"round layouts: the degree that rounds start in ({planner}) must be one of the switch rule's "
                f"{config.degrees}"
            )
        return
    if config.direction != "up":
        raise ValueError(
            f"round layouts: with a planner the switch rule's direction ({config.direction!r}) must be 'up': the "
            "planner alone lowers tp, between rounds"
        )
    if config.degrees != planner.config.allowed:
        raise ValueError(
            f"round layouts: the switch rule's degrees {config.degrees} must be those of the planner inside one host "
            f"{planner.config.allowed}"
        )
