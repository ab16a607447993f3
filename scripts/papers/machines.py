"""Constants of decoding and training that several calibration problems share, with their priors; and cost models."""

from __future__ import annotations

from jaxrl.models.shapes import named_shape
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.hardware import HARDWARE
from papers.calibration import efficiency_of
from papers.facts import Setup
from papers.solver import Constant, Values


def cost_of(setup: Setup, values: Values) -> CostModel:
    """The cost model of a published set-up."""
    return CostModel(named_shape(setup.model), HARDWARE[setup.hardware], efficiency_of(values))


def inference(*names: str) -> tuple[Constant, ...]:
    """Constants of decoding and training, with priors that all machines share.

    `rollout_fixed_s`: vLLM's sleep mode wakes up in 0.1 to 6 s (https://blog.vllm.ai/2025/10/26/sleep-mode.html), and
    weights are sent and requests drained besides.
    """
    known = {
        "memory": Constant("efficiency.memory", "share", 0.8, 0.15, 0.3, 1.0),
        "kv": Constant("efficiency.kv", "share", 0.6, 0.6, 0.03, 1.0),
        "launch_s": Constant("efficiency.launch_s", "s per layer", 50e-6, 0.8, 2e-6, 1e-3),
        "collective_s": Constant("efficiency.collective_s", "s", 10e-6, 0.8, 1e-6, 3e-4),
        "link": Constant("efficiency.link", "share", 0.5, 0.5, 0.05, 1.0),
        "mfu": Constant("efficiency.mfu", "share", 0.3, 0.5, 0.02, 0.7),
        "train_fixed_s": Constant("efficiency.train_fixed_s", "s", 10.0, 0.7, 0.1, 200.0),
        "rollout_fixed_s": Constant("efficiency.rollout_fixed_s", "s", 5.0, 0.7, 0.1, 60.0),
    }
    return tuple(known[name] for name in names)
