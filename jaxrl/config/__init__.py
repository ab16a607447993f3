"""The configuration: every option once with its bounds (`options`, `layout`), and files that hold them (`files`)."""

from jaxrl.config.options import (
    ActorSection,
    AlgorithmSection,
    Config,
    ConfigError,
    DataSection,
    OptimSection,
    SimulatedLengths,
    SimulatedScoring,
    SimulatedTask,
    differences,
    flatten,
    from_mapping,
    to_mapping,
)

__all__ = [
    "ActorSection",
    "AlgorithmSection",
    "Config",
    "ConfigError",
    "DataSection",
    "OptimSection",
    "SimulatedLengths",
    "SimulatedScoring",
    "SimulatedTask",
    "differences",
    "flatten",
    "from_mapping",
    "to_mapping",
]
