"""Alarms: a run that does not learn says so at once, and ends after `trainer.max_bad_steps` bad steps in a row.

A step is bad when every update is skipped because a gradient is not finite, or when every reward fails. A batch's worth
of failed rewards in a row counts as one too, because a round that drops every group would never end. A quantised
rollout that has become another policy (`rollout_corr/k3_kl` above `MOST_K3`) is a warning alone, repeated when it has
doubled. A resumed run counts from 0: the counts decide when a run ends, never what it computes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import numpy as np

from jaxrl.config import Config
from jaxrl.config.algorithm import MOST_K3, uncorrected
from jaxrl.types import TrainBatch

_log = logging.getLogger(__name__)


class Alarms:
    """Each method returns why the run has to end, or None."""

    def __init__(self, config: Config) -> None:
        self._limit = config.trainer.max_bad_steps  # 0: none
        self._batch = config.data.train_batch_size * config.rollout.n
        self._failed = 0  # rewards in a row
        self._bad_steps: dict[str, int] = {}  # of a model, in a row without an update
        self._quantized = config.rollout.quantized
        self._is_corrected = uncorrected(config) is None
        self._warned_k3 = 0.0

    def rewarded(self, status: str, error: str) -> str | None:
        self._failed = 0 if status == "ok" else self._failed + 1
        if not self._failed or self._failed % self._batch:
            return None
        worth = self._failed // self._batch
        batches = "one batch" if worth == 1 else f"{worth} batches"
        text = f"the last {self._failed} rewards have all failed, the worth of {batches}; the last one: {error}"
        return self._bad(text, worth)

    def updated(
        self, step: int, updates: Mapping[str, tuple[int, int]], measured: Mapping[str, float], batch: TrainBatch
    ) -> str | None:
        """`updates`: by model (`actor`, `critic`), how many updates the step had, and how many were skipped."""
        failing: str | None = None
        self._mismatched(step, measured)
        failures = [sample.failure for sample in batch.samples]
        is_bad = failures and all(failures) and not self._failed  # each was scored, and its group not compared
        self._bad_steps["group"] = worth = self._bad_steps.get("group", 0) + 1 if is_bad else 0
        if is_bad:
            failing = self._bad(f"step {step}: no reward counts; the last failure: {failures[-1]}", worth)
        for model, (count, skipped) in updates.items():
            in_a_row = self._bad_steps.get(model, 0) + 1 if count and skipped == count else 0
            self._bad_steps[model] = in_a_row
            if not skipped:
                continue
            also = non_finite(batch)
            cause = f"so are {' and '.join(also)}" if also else "all that it was computed from is finite"
            if measured.get("rollout_corr/rollout_rs_masked_fraction") == 1:
                cause = "algorithm.rollout_correction.rollout_rs has rejected every token"
            norm = measured.get(f"{model}/grad_norm", math.nan)
            what = "updates" if model == "actor" else f"updates of the {model}"
            text = f"{skipped} of {count} {what} skipped: the gradient is not finite (norm {norm}); {cause}"
            if in_a_row > 1:
                text += f"; no update in {in_a_row} steps in a row"
            failing = self._bad(f"step {step}: {text}", in_a_row) or failing
        return failing

    def _mismatched(self, step: int, measured: Mapping[str, float]) -> None:
        k3 = measured.get("rollout_corr/k3_kl", 0.0)
        if not self._quantized or k3 <= MOST_K3:
            self._warned_k3 = 0.0
        elif k3 >= 2 * self._warned_k3:
            self._warned_k3 = k3
            stale = measured.get("training/off_policy/share", 0.0)
            _log.warning(
                "step %d: rollout_corr/k3_kl is %.3g nats a token, above %g: %s makes another policy of the "
                "rollout%s%s",
                *(step, k3, MOST_K3, self._quantized),
                f" (earlier weights wrote {stale:.0%} of the tokens, which counts as well)" if stale else "",
                "" if self._is_corrected else "; algorithm.rollout_correction.rollout_is is none",
            )

    def _bad(self, text: str, worth: int) -> str | None:
        if self._limit and worth >= self._limit:
            return f"{text} (trainer.max_bad_steps={self._limit})"
        _log.warning("%s", text)
        return None


def non_finite(batch: TrainBatch) -> list[str]:
    """The parts of a batch with a NaN or an infinity, in words."""
    arrays = {
        "the rollout's log-probabilities": [sample.rollout_logprobs for sample in batch.samples],
        "the old log-probabilities": batch.old_logprobs,
        "the reference's log-probabilities": batch.ref_logprobs,
        "the teacher's log-probabilities": [*(batch.teacher_logprobs or ()), *(batch.teacher_top_logprobs or ())],
        "the critic's values": batch.values,
        "the advantages": batch.advantages,
    }
    return [name for name, found in arrays.items() if found and not all(np.isfinite(x).all() for x in found)]
