"""When a plan verifies drafts, how many tokens a step verifies, and how a row's window moves.

Source: RhymeRL §5.4 (HistoSpec): a window for each response, which starts at 2 tokens, grows by 2 when all drafted
tokens were accepted, up to 32, and falls back to 2 at any rejection; and no speculation above the batch size at which
it stops to pay at the present acceptance rate, known from a profile.

Departures:

- The rows of a dp group share the width of a step: all have room for the same number of drafted tokens, and a row's
  window is cut to it. `verify_tokens` bounds width times rows, so the width falls as rows rise. What a step costs then
  depends on the number of rows alone, and is one number of the profile.
- The paper disables speculation by batch size and acceptance rate. Here a plan verifies if its rows are expected to
  gain more tokens a second that way: by the acceptance and the share of steps with a draft that the last plans had.
  Where drafts do not pay, one plan in `PROBE_EVERY` verifies all the same, because acceptance is not seen otherwise.

Logical time: the rule looks at the results of plans that were collected, in their order, never at a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxrl.scheduling.tokens.plan import VerifyCounts

PROBE_EVERY = 32  # where verification does not pay, one in this many plans verifies, to see how acceptance is
_MEMORY = 0.98  # how much of what was seen is remembered from one plan to the next


@dataclass(frozen=True, slots=True)
class DraftWindow:
    """How many tokens a row drafts: additive increase, and back to the least at a rejection."""

    least: int = 2
    step: int = 2
    most: int = 32

    def after(self, window: Any, drafted: Any, accepted: Any) -> Any:
        """The windows of rows after a step; one without a draft leaves them. Of numpy or jax arrays alike."""
        xp = window.__array_namespace__()
        grown = xp.minimum(window + self.step, self.most)
        return xp.where(drafted == 0, window, xp.where(accepted == drafted, grown, self.least))


def default_verify_tokens(platform: str) -> int:
    """How many drafted tokens a step verifies per dp group where `rollout.speculation.verify_tokens` is 0: about as
    many as keep a matrix product no slower than reading its weights. On CPUs those are few: with one row of SmolLM2 on
    two cores, eight drafted tokens double a step's time."""
    return 16 if platform == "cpu" else 256


def draft_width(rows: int, verify_tokens: int, most: int) -> int:
    """The most tokens that each of `rows` rows may draft in a step; 0: none, because it would be less than 2.
    `verify_tokens`: drafted tokens of a step, all rows together; `most`: the largest window."""
    width = min(most, verify_tokens // max(rows, 1))
    return width if width >= min(2, most) else 0


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step, by the rows in the fullest dp group and their tokens of context together: `decode_s`, and
    `verify_s` at the width for these rows."""

    decode_s: Callable[[int, float], float]
    verify_s: Callable[[int, float], float]


@dataclass(frozen=True, slots=True)
class DraftConfig:
    window: DraftWindow  # of every row
    verify_tokens: int  # drafted tokens that a step may verify, per dp group
    max_batch: int = 0  # the most rows of a dp group with which a plan verifies; 0: no limit but `costs`, and the width
    costs: StepCosts | None = None  # None: verifying is assumed to pay wherever there is a width

    def width(self, rows: int) -> int:
        """How many tokens each row may draft, with `rows` in the fullest dp group."""
        return draft_width(rows, self.verify_tokens, self.window.most)


class DraftRule:
    """Decides plan by plan whether drafts are verified. An executor whose program has more rows than the plan may have
    no room for drafts; it then decodes."""

    def __init__(self, config: DraftConfig) -> None:
        self.config = config
        self._steps = self._drafted_steps = self._drafted = self._accepted = 0.0
        self._since_probe = 0

    def gain(self, width: int) -> float:
        """Tokens that a row is expected to gain in a step of this width, by the plans so far; before the first, as if
        every token were accepted."""
        if not self._steps:
            return 1.0 + width
        share = self._drafted_steps / self._steps
        rate = self._accepted / self._drafted if self._drafted else 0.0
        mean = min(self._drafted / self._drafted_steps, width) if self._drafted_steps else 0.0
        return 1.0 + share * rate * mean

    def decides(self, rows: int, context: float) -> bool:
        """Whether the next plan verifies, with `rows` in the fullest dp group that have `context` tokens together.
        Called once for each plan that could."""
        width, config = self.config.width(rows), self.config
        if not width or (config.max_batch and rows > config.max_batch):
            return False
        if config.costs is None or config.max_batch:
            return True
        ratio = config.costs.verify_s(rows, context) / config.costs.decode_s(rows, context)
        if self.gain(width) > ratio:
            self._since_probe = 0
            return True
        self._since_probe += 1
        if self._since_probe < PROBE_EVERY:
            return False
        self._since_probe = 0
        return True

    def saw(self, counts: VerifyCounts) -> None:
        """Takes in the counts of a plan that verified, all rows together."""
        self._steps = _MEMORY * self._steps + counts.steps
        self._drafted_steps = _MEMORY * self._drafted_steps + counts.proposing_steps
        self._drafted = _MEMORY * self._drafted + counts.proposed
        self._accepted = _MEMORY * self._accepted + counts.accepted
