"""The configuration: every option, declared once with its bounds and its text, and the files that hold options."""

from jaxrl.config.checks import ConfigError
from jaxrl.config.mapping import differences, flatten, from_mapping, to_mapping
from jaxrl.config.options import (
    AlgorithmSection,
    Config,
    DataSection,
    RolloutCorrectionSection,
)
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
