"""A cost model with measured inference: a latency profile, and another model for everything else.

Purpose: `jaxrl.sim.cost_model.CostModel` from a table of `jaxrl profile`, to simulate the machine it was measured on.

Source: PAT equation 3 for prefill in terms of equal rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import SwitchCost
from jaxrl.sim.cost_model import CostModel, TrainLoad


@dataclass(frozen=True, slots=True)
class TableCost:
    """`CostModel` of the measured table in `predictor`: decode, prefill and switches; `rest` answers the rest.

    Measured values hold for the devices that they were measured on and are not scaled to another number of devices.
    """

    predictor: LatencyPredictor
    rest: CostModel

    def decode_step_s(self, tp: int, batch: int, context: float) -> float:
        return self.predictor.decode_step_s(tp, batch, context) if batch > 0 else 0.0

    def decode_steps_s(self, tp: int, batch_S: np.ndarray, context_S: np.ndarray) -> np.ndarray:
        return self.predictor.decode_steps_s(tp, batch_S, context_S)

    def verify_steps_s(self, tp: int, batch_S: np.ndarray, width: int, context_S: np.ndarray) -> np.ndarray:
        """What was measured for so many rows, at the width that they had; where no such steps were measured, the
        measured decode step times what `rest` says that verification makes of one."""
        if width and self.predictor.profile.verify_widths(tp):
            steps = zip(batch_S.tolist(), context_S.tolist(), strict=True)
            return np.array([self.predictor.verify_step_s(tp, rows, context) for rows, context in steps])
        of_rest_S = self.rest.verify_steps_s(tp, batch_S, width, context_S)
        longer_S = of_rest_S / self.rest.decode_steps_s(tp, batch_S, context_S)
        return self.decode_steps_s(tp, batch_S, context_S) * longer_S

    def prefill_s(self, tp: int, tokens: int, pairs: float = 0.0) -> float:
        """The time of equal rows with the same tokens and pairs (PAT equation 3); each is 2 pairs / tokens long. Tokens
        of a later chunk attend to more than such rows can; the chunk counts as one row of its own length."""
        if tokens <= 0:
            return 0.0
        context = min(max(2.0 * pairs / tokens - 1.0, 1.0), tokens) if pairs > 0 else float(tokens)
        rows = max(round(tokens / context), 1)
        return self.predictor.prefill_s(tp, rows, context) * tokens / (rows * context)

    def switch_cost(self, tp: int, new_tp: int) -> SwitchCost:
        return self.predictor.switch_cost(tp, new_tp)

    def move_s_per_token(self, tp: int, new_tp: int, num_devices: int) -> float:
        return self.rest.move_s_per_token(tp, new_tp, num_devices)

    def train_step_s(self, load: TrainLoad, num_devices: int) -> float:
        return self.rest.train_step_s(load, num_devices)

    def forward_s(self, tokens: float, pairs: float, num_devices: int) -> float:
        return self.rest.forward_s(tokens, pairs, num_devices)

    def gradients_s(self, tokens: float, pairs: float, num_devices: int) -> float:
        return self.rest.gradients_s(tokens, pairs, num_devices)

    def regroup_s(self, num_devices: int, part: int) -> float:
        return self.rest.regroup_s(num_devices, part)

    def swap_s(self, num_devices: int) -> float:
        return self.rest.swap_s(num_devices)

    def weight_sync_s(self, tp: int, num_devices: int) -> float:
        return self.rest.weight_sync_s(tp, num_devices)

    def rollout_fixed_s(self) -> float:
        return self.rest.rollout_fixed_s()

    def num_kv_blocks(self, tp: int, block_size: int, memory_fraction: float, reserved_bytes: float = 0.0) -> int:
        return self.rest.num_kv_blocks(tp, block_size, memory_fraction, reserved_bytes)
