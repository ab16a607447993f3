"""The cost model whose inference was measured: a latency profile, and another model for what it does not hold.

Purpose: `jaxrl.sim.cost_model.CostModel` from a table of `jaxrl profile`, to simulate the machine it was measured on.

Source: PAT equation 3 for prefill in terms of equal rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from jaxrl.sim.cost_model import CostModel, SwitchTimes, TrainLoad


class TimePredictor(Protocol):
    """What is asked of a measured table (`jaxrl.scheduling.layouts.latency.LatencyPredictor`), one dp group at a
    time."""

    def decode_step_s(self, tp: int, batch: int, context: float) -> float:
        """Seconds of one decode step of `batch` rows with `context` tokens together."""
        ...

    def decode_steps_s(self, tp: int, batch_S: np.ndarray, context_S: np.ndarray) -> np.ndarray:
        """`decode_step_s` of many steps at once: [S], [S] -> [S]."""
        ...

    def prefill_s(self, tp: int, batch: int, context: float) -> float:
        """Seconds to prefill `batch` rows of `context` tokens each."""
        ...


class MeasuredSwitch(Protocol):
    """Measured costs of a layout switch (`jaxrl.scheduling.layouts.latency.SwitchCost`)."""

    @property
    def weights_s(self) -> float: ...
    @property
    def kv_s_per_token(self) -> float: ...
    @property
    def fixed_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class TableCost:
    """`CostModel` whose inference comes from a measured table, and the rest from another cost model.

    Attributes:
      predictor: the table.
      rest: what the table does not hold.
      switch: (tp, new tp) -> measured costs of that switch; None: those of `rest`, recomputation from the table.
      train_s_per_token: measured seconds of training per token of the batch.
      train_fixed_s: measured seconds of a training step whatever its size; counts with `train_s_per_token` only.
      forward_s_per_token: measured seconds per token of a pass for log-probabilities.
      sync_s: measured seconds of a weight sync.

    Measured values stand for the devices they were measured on: they are not scaled to another number of them.
    """

    predictor: TimePredictor
    rest: CostModel
    switch: Callable[[int, int], MeasuredSwitch] | None = None
    train_s_per_token: float | None = None
    train_fixed_s: float = 0.0
    forward_s_per_token: float | None = None
    sync_s: float | None = None

    def decode_step_s(self, tp: int, batch: int, context: float) -> float:
        return self.predictor.decode_step_s(tp, batch, context) if batch > 0 else 0.0

    def decode_steps_s(self, tp: int, batch_S: np.ndarray, context_S: np.ndarray) -> np.ndarray:
        return self.predictor.decode_steps_s(tp, batch_S, context_S)

    def prefill_s(self, tp: int, tokens: int, pairs: float = 0.0) -> float:
        """By the equal rows that have as many tokens and pairs (PAT equation 3): 2 pairs / tokens long. The tokens of a
        later chunk attend more than any such rows do; it counts as one row of its own length."""
        if tokens <= 0:
            return 0.0
        context = min(max(2.0 * pairs / tokens - 1.0, 1.0), tokens) if pairs > 0 else float(tokens)
        rows = max(round(tokens / context), 1)
        return self.predictor.prefill_s(tp, rows, context) * tokens / (rows * context)

    def train_step_s(self, load: TrainLoad, num_devices: int) -> float:
        if self.train_s_per_token is None:
            return self.rest.train_step_s(load, num_devices)
        forward = load.extra_forwards * self.forward_s(load.tokens, load.pairs, num_devices)
        return self.train_s_per_token * load.tokens * load.epochs + forward + self.train_fixed_s

    def forward_s(self, tokens: float, pairs: float, num_devices: int) -> float:
        if self.forward_s_per_token is None:
            return self.rest.forward_s(tokens, pairs, num_devices)
        return self.forward_s_per_token * tokens

    def weight_sync_s(self, tp: int, num_devices: int) -> float:
        return self.rest.weight_sync_s(tp, num_devices) if self.sync_s is None else self.sync_s

    def layout_switch(self, tp: int, new_tp: int, context: float, pairs: float) -> SwitchTimes:
        if tp == new_tp:
            return SwitchTimes(0.0, 0.0, 0.0, 0.0)
        growth = new_tp / tp
        again = self.prefill_s(new_tp, math.ceil(context * growth), pairs * growth)
        if self.switch is None:
            return replace(self.rest.layout_switch(tp, new_tp, context, pairs), recompute_s=again)
        measured = self.switch(tp, new_tp)
        return SwitchTimes(measured.weights_s, measured.kv_s_per_token * context, again, measured.fixed_s)

    def kv_bytes_per_token(self, tp: int) -> int:
        return self.rest.kv_bytes_per_token(tp)

    def num_kv_blocks(self, tp: int, block_size: int, memory_fraction: float, reserved_bytes: float = 0.0) -> int:
        return self.rest.num_kv_blocks(tp, block_size, memory_fraction, reserved_bytes)
