"""Time limits of test cases from the times of correct responses: T = min(max(T_min, f T_anchor), T_max).

T_anchor is the longest time that a correct response to the prompt has taken for the test case. The anchors are part of
a checkpoint.

Source: RollPacker §4.3; its constants are the defaults of `reward.code`: T_min 2 s, T_max 30 s, f 1.5. That data may
say how long a right program takes (`data.reference_time_key`) is in the authors' code
(Farrrrland/RollPacker, code_sandbox_reward_worker.py).

Departures, where the paper is silent:

- A correct response is one that passes all its tests. Until a prompt has one, its limit is T_max.
- A prompt is identified by its place in the data, source, text and answer, so a run that resumes with other data uses
  no anchor of another problem. Of prompts whose last correct response is longest ago, anchors are dropped once there
  are more than `MAX_ANCHORS`.
- Evaluations neither use anchors nor make any: their figures must not depend on what training has seen.

A limit depends on the clock, and may differ if the step runs again. No result does: every verdict that a limit may have
decided is journalled whole before the round receives it. That is a cut-off, or the verdict on a response with a test
case that took more than half of the smallest limit (`is_close`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Self

from jaxrl.scheduling.mechanism import Mechanism, RoundEnd
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, check_schema

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.config.rewards import CodeSection
    from jaxrl.run.run import Run

SCHEMA = 1
MAX_ANCHORS = 1 << 20
"""Test cases whose anchors are kept: 8 MiB of a checkpoint."""
_REACHED = 0.99  # a case that took so much of its limit was ended by it: clocks of two processes differ a little


@dataclass(frozen=True, slots=True)
class TimeoutRule:
    min_s: float = 2.0
    max_s: float = 30.0  # counts where the bounds contradict each other
    factor: float = 1.5

    @classmethod
    def of(cls, options: CodeSection) -> TimeoutRule:
        """The limits of `reward.code`: with a fixed time-out the same limit for every anchor."""
        least = options.min_timeout_s if options.timeout == "adaptive" else options.max_timeout_s
        return cls(least, options.max_timeout_s, options.timeout_factor)

    def limit_s(self, anchor_s: float | None) -> float:
        """Seconds that a test case may take; `anchor_s`: of correct responses, None before there is one."""
        return self.max_s if anchor_s is None else min(max(self.min_s, self.factor * anchor_s), self.max_s)


class AdaptiveTimeouts(Mechanism):
    """Limits the test cases of training prompts. `has_tests`: whether the
    prompts of a source have any; `max_anchors`: test cases whose anchors are kept; `reference_time_key`: what of a
    prompt's `extra` is the first anchor of its test cases, in seconds; empty: nothing."""

    name = "timeouts"
    title = "adaptive time limits"
    option = "reward.code.adaptive"

    def __init__(
        self,
        rule: TimeoutRule,
        has_tests: Callable[[str], bool] = lambda source: True,
        max_anchors: int = MAX_ANCHORS,
        reference_time_key: str = "",
    ) -> None:
        self.rule, self.has_tests, self._reference_time_key = rule, has_tests, reference_time_key
        self._max_anchors = max_anchors
        self._anchors: dict[int, tuple[float, ...]] = {}  # those whose last correct response is longest ago first
        self._num_anchors = 0
        self._cut_off, self._saved_s = 0, 0.0  # since the last round of training
        self.score_limits = self

    @classmethod
    def is_on(cls, config: Config) -> bool:
        return cls.configured(config) is not None

    @classmethod
    def build(cls, run: Run) -> Self | None:
        return cls.configured(run.config)

    @classmethod
    def configured(cls, config: Config) -> Self | None:
        """The time-outs of `reward.code`, without anchors; None where no prompt has test cases."""
        from jaxrl.config.domains import domains

        of = domains(config.reward)
        if not any(domain.kind == "code" for domain in of.values()):
            return None
        rule, key = TimeoutRule.of(config.reward.code), config.data.reference_time_key
        return cls(rule, lambda source: of.get(source, of[""]).kind == "code", reference_time_key=key)

    def limits(self, prompt: Prompt) -> tuple[float, ...]:
        """Seconds that each test case of the next response may take, the last for all beyond; empty: `rule.max_s`
        each."""
        if not self.has_tests(prompt.source):
            return ()
        anchors = self._anchors.get(_place(prompt), ())
        reference_s = prompt.extra.get(self._reference_time_key) if self._reference_time_key else None
        if reference_s is not None:
            anchors = tuple(max(anchor, reference_s) for anchor in anchors or (0.0,))
        return tuple(map(self.rule.limit_s, anchors))

    def scored(self, prompt: Prompt, limits_s: tuple[float, ...], verdict: Verdict) -> None:
        """Learns from the scorer's info on a response that was sent with these limits: `case_s`, `correct` and
        `cut_off`."""
        if not self.has_tests(prompt.source):
            return
        info = verdict.info
        seconds, cut_off = case_seconds(info), info.get("cut_off")
        if type(cut_off) is int and cut_off > 0:
            self._cut_off += cut_off
            limits = [limit_of(limits_s, case, self.rule.max_s) for case in range(len(seconds))]
            ended = [limit for took, limit in zip(seconds, limits, strict=False) if took >= _REACHED * limit]
            self._saved_s += sum(self.rule.max_s - limit for limit in ended[:cut_off])
        if info.get("correct") is not True or not seconds:
            return
        place = _place(prompt)
        earlier = self._anchors.pop(place, ())
        self._num_anchors -= len(earlier)
        if len(earlier) == len(seconds):  # else the prompt's tests are others by now
            seconds = tuple(map(max, earlier, seconds))
        self._keep(place, seconds)

    def is_close(self, prompt: Prompt, verdict: Verdict) -> bool:
        """Whether another limit might have changed a verdict: see the module's docstring."""
        least_s = min(self.rule.min_s, self.rule.max_s)
        return self.has_tests(prompt.source) and max(case_seconds(verdict.info), default=0.0) > least_s / 2

    def _keep(self, place: int, seconds: tuple[float, ...]) -> None:
        if len(seconds) > self._max_anchors:
            return
        self._anchors[place] = seconds
        self._num_anchors += len(seconds)
        while self._num_anchors > self._max_anchors:
            self._num_anchors -= len(self._anchors.pop(next(iter(self._anchors))))

    def round_ends(self, end: RoundEnd) -> dict[str, float]:
        """`reward/code/anchor_s/{median,max}` over all anchors; and, of this round, `reward/code/cut_off`, the test
        cases that their limit ended, and `reward/code/saved_s`, what they lacked until `rule.max_s`."""
        found = {"reward/code/cut_off": float(self._cut_off), "reward/code/saved_s": self._saved_s}
        self._cut_off, self._saved_s = 0, 0.0
        if self._anchors:
            import numpy as np

            anchors = np.concatenate(list(self._anchors.values()))
            found["reward/code/anchor_s/median"] = float(np.median(anchors))
            found["reward/code/anchor_s/max"] = float(anchors.max())
        return found

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Flat arrays: `prompts` int64 [P, 2] (what tells a prompt apart, its test cases), those whose last correct
        response is longest ago first; `seconds` float64 [A], the anchors of all their test cases."""
        import numpy as np

        prompts = [(place, len(seconds)) for place, seconds in self._anchors.items()]
        anchors = [anchor for seconds in self._anchors.values() for anchor in seconds]
        return {
            "schema": SCHEMA,
            "prompts": np.asarray(prompts, np.int64).reshape(-1, 2),
            "seconds": np.asarray(anchors, np.float64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes with what was kept, within this run's bound. Raises ValueError for a state of another schema."""
        check_schema("time-outs", state, SCHEMA)
        import numpy as np

        prompts, anchors = np.asarray(state["prompts"]), np.asarray(state["seconds"])
        self._anchors, self._num_anchors = {}, 0
        ends = np.cumsum(prompts[:, 1])
        for (place, count), end in zip(prompts.tolist(), ends.tolist(), strict=True):
            self._keep(place, tuple(anchors[end - count : end].tolist()))


def limit_of(limits_s: Sequence[float], case: int, else_s: float) -> float:
    """A test case's limit among those of its prompt, the last of which is that of all beyond; `else_s`: of none."""
    return limits_s[min(case, len(limits_s) - 1)] if limits_s else else_s


def case_seconds(info: Mapping[str, Any]) -> tuple[float, ...]:
    """Seconds of each test case that was run, by `case_s` of a scorer's info; empty where that is no list of them."""
    found = info.get("case_s")
    if not isinstance(found, list | tuple) or not all(type(each) in (int, float) and 0 <= each < inf for each in found):
        return ()
    return tuple(float(each) for each in found)


def _place(prompt: Prompt) -> int:
    """64 bits that tell a prompt from all others, and from those of other data."""
    key = repr((prompt.index, prompt.source, prompt.text, prompt.answer))
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=8).digest(), "big", signed=True)
