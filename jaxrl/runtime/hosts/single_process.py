"""Commands that run in one process: each refuses to be one of several.

Purpose: `eval`, `export` and `profile` use the devices of one host, read a run of any number of hosts, and have no use
for `hosts`. Started on several hosts, as a run is, each process would do the whole work and write the same files; and
one that is in a world of jax already would meet the others in no collective.

What tells: the variable that our launcher sets, and those that launchers set for several tasks. Under Slurm
that is inside a step of several tasks (`srun`), so a batch script may run these commands by themselves.
"""

from __future__ import annotations

import os

import jax

from jaxrl.config import ConfigError
from jaxrl.runtime.hosts.environment import PROCESS_ID

_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_NUMBERS = ("JOB_COMPLETION_INDEX",)  # of a Kubernetes Job's pods; that of a single one is 0


def require_single_process(command: str) -> None:
    """Raises ConfigError where this process is one of several, by its environment or by jax."""
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        raise ConfigError(f"{_why(command)} (jax has {jax.process_count()}): call it where jax has one")
    name = next(filter(_tells, (PROCESS_ID, *_COUNTS, *_NUMBERS)), None)
    if name is not None:
        raise ConfigError(
            f"{_why(command)} ({name}={os.environ[name]}): each would do all of it and write the same files; start it "
            f"once, on one host, with the same configuration (hosts has no effect on it), or unset {name} where each "
            "has work of its own"
        )


def _why(command: str) -> str:
    return f"{command} runs in one process, and this is one of several"


def _tells(name: str) -> bool:
    """Whether an environment variable says that there are others."""
    value = os.environ.get(name)
    if value is None or name == PROCESS_ID:
        return value is not None
    return value.isdecimal() and int(value) > (1 if name in _COUNTS else 0)
