"""The configuration: every option, declared once with its bounds and its text, and the files that hold options.

What is exported is imported where it is first used: a process that scores reads no options.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl.config.algorithm import AlgorithmSection, RolloutCorrectionSection
    from jaxrl.config.inputs import ConfigError
    from jaxrl.config.mapping import differences, flatten, from_mapping, to_mapping
    from jaxrl.config.options import Config, DataSection
    from jaxrl.config.simulation import SimulatedHistory, SimulatedLengths, SimulatedScoring, SimulatedTask, TaskSection
    from jaxrl.config.updates import ActorSection, CriticSection, OptimSection

__all__ = [
    "ActorSection",
    "AlgorithmSection",
    "Config",
    "ConfigError",
    "CriticSection",
    "DataSection",
    "OptimSection",
    "RolloutCorrectionSection",
    "SimulatedHistory",
    "SimulatedLengths",
    "SimulatedScoring",
    "SimulatedTask",
    "TaskSection",
    "differences",
    "flatten",
    "from_mapping",
    "to_mapping",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in ("inputs", "options", "mapping", "simulation", "updates", "algorithm"):
            found = vars(importlib.import_module(f"jaxrl.config.{module}"))
            if name in found:
                return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
