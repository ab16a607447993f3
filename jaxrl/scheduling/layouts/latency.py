"""Predicts how long decode steps, prefills and changes of layout take, from a profile
(`jaxrl.scheduling.layouts.latency_profile`) and the step times that the engine measures.

Source: PAT §4.2 (online latency predictor) and §4.3 (equations 1-4).

Departures:

- The paper's T_move divides the bytes that a rank sends (equation 1) by a measured bandwidth (equation 2). The table
  holds the measured seconds per token of the fullest source group, which is that quotient for one token.
- Between two profiled batches the paper interpolates. Programs here are compiled for a few row counts, and a step pads
  its rows to the next of them: if the table has the row counts (`RowSizes`), a batch takes the time of the padded
  batch. Times are interpolated only where a padded batch was not profiled.
- The profile is corrected online (the paper's is not): machines are shared, and dummy batches differ from real ones.
- The paper looks a prefill up by its rows and their context, and for rows of different lengths takes the root of their
  mean square (equation 3), which keeps the sum of their attention. Here tokens and (query, key) pairs are summed and
  looked up: chunks of a prefill are as many rows as happen to be in them, each with a context of its own.

Beyond the table, predictions are never negative and never fall as the load grows:

- decode, total context: below a batch's first point, that point's time; above its last point, the slope of its last two
  points (0 if that is negative), or in proportion if it has only one point;
- decode, batch: below the smallest batch, that batch's time; above the largest, the mean growth per row between the
  last two batches (0 if that is negative), or in proportion if there is only one batch;
- prefill: a time for each pair, the same everywhere (`_Prefill`); without it, over tokens as decode over context.

Legend: S decode steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.scheduling.layouts.latency_profile import NEW_PROFILE, Measurement, Profile, SwitchCost
from jaxrl.types import check_schema

if TYPE_CHECKING:
    from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts

MAX_CORRECTION = 2.0
"""Measured step times count as at most this many times the predicted ones, and at least as this part of them."""


def causal_pairs(tokens: float, start: float = 0.0) -> float:
    """(query, key) pairs of `tokens` tokens at positions `start`, `start + 1`, ...: each attends those up to itself."""
    return tokens * start + tokens * (tokens + 1) / 2


class _Curve:
    """Seconds over tokens, piecewise linear: [N], ascending, [N]."""

    def __init__(self, tokens: np.ndarray, seconds: np.ndarray) -> None:
        self.tokens, self.seconds = tokens, seconds
        if len(tokens) > 1:
            self.slope = max(float((seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])), 0.0)
        else:
            self.slope = float(seconds[0] / tokens[0])

    @classmethod
    def of_batch(cls, points: Sequence[Measurement]) -> _Curve:
        """The step time of one batch over its total context."""
        points = sorted(points, key=lambda point: point.context)
        return cls(np.array([point.batch * point.context for point in points], float), _seconds_of(points))

    def at(self, tokens_S: np.ndarray) -> np.ndarray:
        beyond_S = np.maximum(tokens_S - self.tokens[-1], 0.0)
        return np.interp(tokens_S, self.tokens, self.seconds) + self.slope * beyond_S


class _Prefill:
    """Seconds of a prefill of one degree, over its tokens and (query, key) pairs.

    Long rows take longer than many short ones with as many tokens. That gives the time of a pair (least squares), 0
    if no two such loads were measured. What is left of the points is a curve over tokens. It need not be a line: a
    small pass takes as long as reading the weights.
    """

    def __init__(self, points: Sequence[Measurement]) -> None:
        points = sorted(points, key=lambda point: point.batch * point.context)
        batch_P = np.array([point.batch for point in points], float)
        tokens_P = np.array([point.batch * point.context for point in points], float)
        pairs_P, seconds_P = batch_P * [causal_pairs(point.context) for point in points], _seconds_of(points)
        long_P = batch_P == min(batch_P)
        tokens, pairs, seconds = tokens_P[long_P], pairs_P[long_P], seconds_P[long_P]
        short_P = ~long_P & (tokens_P >= tokens[0]) & (tokens_P <= tokens[-1])
        more_s = np.interp(tokens_P[short_P], tokens, seconds) - seconds_P[short_P]
        more_pairs = np.interp(tokens_P[short_P], tokens, pairs) - pairs_P[short_P]
        pair_s = more_s @ more_pairs / max(more_pairs @ more_pairs, 1.0)
        self.pair_s = float(np.clip(pair_s, 0.0, min(seconds_P / pairs_P)))
        tokens_N, place_P = np.unique(tokens_P, return_inverse=True)
        left_N = np.bincount(place_P, seconds_P - self.pair_s * pairs_P) / np.bincount(place_P)
        self.curve = _Curve(tokens_N, np.maximum.accumulate(left_N))

    def at(self, tokens: float, pairs: float) -> float:
        return float(self.curve.at(np.array(tokens))) + self.pair_s * pairs


class _Surface:
    """Step time of one degree over batch and total context."""

    def __init__(self, points: Sequence[Measurement]) -> None:
        batches = sorted({point.batch for point in points})
        self.batches = np.array(batches, np.float64)
        self.curves = [_Curve.of_batch([point for point in points if point.batch == batch]) for batch in batches]
        last = self.curves[-1]
        # One growth for all contexts: a growth for each context could make the time fall as the context grows.
        self.growth: float | None = None
        if len(batches) > 1:
            rise = float(np.mean(last.seconds - self.curves[-2].at(last.tokens)))
            self.growth = max(rise / (batches[-1] - batches[-2]), 0.0)

    def at(self, batch_S: np.ndarray, tokens_S: np.ndarray) -> np.ndarray:
        below_S = np.clip(np.searchsorted(self.batches, batch_S, side="right") - 1, 0, len(self.batches) - 1)
        seconds_S = np.empty(batch_S.shape, np.float64)
        for i in np.unique(below_S):
            here = below_S == i
            batch, tokens, known = batch_S[here], tokens_S[here], self.batches[i]
            lower = self.curves[i].at(tokens)
            if i + 1 < len(self.batches):
                part = np.clip((batch - known) / (self.batches[i + 1] - known), 0.0, 1.0)
                seconds_S[here] = (1.0 - part) * lower + part * self.curves[i + 1].at(tokens)
            elif self.growth is not None:
                seconds_S[here] = lower + self.growth * np.maximum(batch - known, 0.0)
            else:
                seconds_S[here] = lower * np.maximum(batch / known, 1.0)
        return seconds_S


def _seconds_of(points: Sequence[Measurement]) -> np.ndarray:
    return np.array([point.seconds for point in points], float)


class LatencyPredictor:
    """Predicts from a profile, corrected by what the engine measures.

    Args:
      profile: checked by the caller (`Profile.check`).
      options: its `correction_weight` says how fast observations move the predictions.
      row_sizes: row counts of the programs that run now, by degree; None: the profiled programs' counts.
    """

    SCHEMA = 1

    def __init__(
        self,
        profile: Profile,
        options: AdaptiveLayouts.Options | None = None,
        row_sizes: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        if not profile.decode:
            raise ValueError(f"the latency profile has no decode points: {NEW_PROFILE}")
        self.profile = profile
        self._correction_weight = 0.1 if options is None else options.correction_weight
        self._surfaces = {tp: _Surface([p for p in profile.decode if p.tp == tp]) for tp in profile.degrees}
        self._verify = {
            tp: _Surface(points)
            for tp in profile.degrees
            if (points := [point for point in profile.verify if point.tp == tp])
        }
        if row_sizes is None:
            row_sizes = {rows.tp: rows.sizes for rows in profile.row_sizes}
        self._row_sizes = {tp: np.array(sizes) for tp, sizes in row_sizes.items()}
        self._prefill = {
            tp: _Prefill([point for point in profile.prefill if point.tp == tp])
            for tp in {point.tp for point in profile.prefill}
        }
        self._switches = {(cost.from_tp, cost.to_tp): cost for cost in profile.switches}
        self._log_ratios: dict[int, float] = {}  # of the degrees that have been observed

    @property
    def num_devices(self) -> int:
        return self.profile.identity.device_count

    @property
    def degrees(self) -> tuple[int, ...]:
        return self.profile.degrees

    def decode_step_s(self, tp: int, batch: int, context: float) -> float:
        """Seconds of a decode step with `batch` rows in the fullest dp group, which have `context` tokens together."""
        return float(self.decode_steps_s(tp, np.array([batch]), np.array([context]))[0])

    def decode_steps_s(self, tp: int, batch_S: np.ndarray, context_S: np.ndarray) -> np.ndarray:
        """`decode_step_s` of many steps at once: [S], [S] -> [S]. Raises ValueError if tp has not been profiled."""
        return self._profiled_s(tp, batch_S, context_S) * self.ratio(tp)

    def verify_step_s(self, tp: int, batch: int, context: float) -> float:
        """Seconds of a step that verifies; of a decode step where the programs for these rows verify nothing."""
        padded = int(self._padded(tp, np.array([batch], np.float64))[0])
        if padded not in self.profile.verify_widths(tp):
            return self.decode_step_s(tp, batch, context)
        return float(self._verify[tp].at(np.array([padded]), np.array([context], np.float64))[0]) * self.ratio(tp)

    def prefill_s(self, tp: int, tokens: float, pairs: float) -> float:
        """Seconds to prefill `tokens` tokens, which attend `pairs` (query, key) pairs, in every dp group."""
        if tp not in self._prefill:
            raise ValueError(f"the latency profile has no prefill points for tp {tp}: {NEW_PROFILE}")
        return self._prefill[tp].at(tokens, pairs)

    def switch_cost(self, from_tp: int, to_tp: int) -> SwitchCost:
        cost = self._switches.get((from_tp, to_tp))
        if cost is None:
            raise ValueError(
                f"the latency profile has no costs for a switch from tp {from_tp} to {to_tp}: {NEW_PROFILE}"
            )
        return cost

    def move_s(self, from_tp: int, to_tp: int, tokens: int) -> float:
        """T_move: seconds to migrate KV when the fullest dp group has `tokens` live tokens."""
        return tokens * self.switch_cost(from_tp, to_tp).kv_s_per_token

    def recompute_s(self, to_tp: int, lengths: Sequence[int]) -> float:
        """T_recomp (equation 4): a prefill of a dp group's rows after the switch."""
        return self.prefill_s(to_tp, sum(lengths), sum(map(causal_pairs, lengths))) if lengths else 0.0

    def ratio(self, tp: int) -> float:
        """Real over profiled step time. A degree not observed yet has the geometric mean of the observed ones: if only
        the layout in use were corrected, every slow-down would look like a reason to leave it."""
        return math.exp(self._log_ratio(tp))

    def observe(self, tp: int, batch: int, context: float, step_s: float) -> float:
        """Takes in a measured step (seconds, mean of a plan); returns the ratio of this degree thereafter."""
        if not 0 < step_s < math.inf:
            raise ValueError(f"observed step time ({step_s}) at tp {tp} must be > 0 and finite")
        predicted = float(self._profiled_s(tp, np.array([batch]), np.array([context]))[0])
        limit = math.log(MAX_CORRECTION)
        seen = min(max(math.log(step_s / predicted), -limit), limit)
        before = self._log_ratio(tp)
        self._log_ratios[tp] = before + self._correction_weight * (seen - before)
        return self.ratio(tp)

    def state_dict(self) -> dict[str, Any]:
        """The correction: degrees [N], logarithms of their ratios [N], and the profile that it belongs to."""
        degrees = sorted(self._log_ratios)
        return {
            "schema": self.SCHEMA,
            "profile": self.profile.digest,
            "tp": np.asarray(degrees, np.int64),
            "log_ratio": np.asarray([self._log_ratios[tp] for tp in degrees], np.float64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a saved correction, unless it is of another profile."""
        check_schema("latency correction", state, self.SCHEMA)
        self._log_ratios = {}
        if state["profile"] == self.profile.digest:
            pairs = zip(state["tp"], state["log_ratio"], strict=True)
            self._log_ratios = {int(tp): float(log_ratio) for tp, log_ratio in pairs}

    def _log_ratio(self, tp: int) -> float:
        if tp in self._log_ratios or not self._log_ratios:
            return self._log_ratios.get(tp, 0.0)
        return math.fsum(self._log_ratios.values()) / len(self._log_ratios)

    def _profiled_s(self, tp: int, batch_S: np.ndarray, context_S: np.ndarray) -> np.ndarray:
        surface = self._surfaces.get(tp)
        if surface is None:
            raise ValueError(
                f"the latency profile has no decode points for tp {tp}, only {self.degrees}: {NEW_PROFILE}"
            )
        padded_S = self._padded(tp, np.asarray(batch_S, np.float64))
        return surface.at(padded_S, np.asarray(context_S, np.float64))

    def _padded(self, tp: int, batch_S: np.ndarray) -> np.ndarray:
        sizes = self._row_sizes.get(tp)
        if sizes is None:
            return batch_S
        return np.maximum(batch_S, sizes[np.minimum(np.searchsorted(sizes, batch_S), len(sizes) - 1)])
