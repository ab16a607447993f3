"""Commands that run in one process, started as one of several: refused before anything is read or written."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import pytest
from refusals import Refusal

from jaxrl.config import ConfigError
from jaxrl.runtime.hosts.single_process import require_single_process

MODEL = ("model.path=random:{model}", "data.task=leg_counting")
COMMANDS = (
    ("eval", *MODEL, "--out", "{tmp}/out.jsonl", "hosts.num=4"),
    ("profile", *MODEL, "--out", "{tmp}/table.json", "hosts.num=4"),
    ("export", "random:{model}", "{tmp}/exported"),
)
SAID = (
    "{command} runs in one process, and this is one of several ({name}={value}): each would do all of it and write the "
    "same files; start it once, on one host, with the same configuration (hosts has no effect on it), or unset {name} "
    "where each has work of its own"
)


def test_one_of_several_is_refused(refused: Callable[[Iterable[Refusal]], None], monkeypatch: pytest.MonkeyPatch):
    for name, value, commands in (
        ("JAXRL_PROCESS_ID", "0", COMMANDS),
        ("SLURM_STEP_NUM_TASKS", "4", COMMANDS[:1]),
        ("OMPI_COMM_WORLD_SIZE", "2", COMMANDS[:1]),
        ("PMI_SIZE", "3", COMMANDS[:1]),
        ("JOB_COMPLETION_INDEX", "1", COMMANDS[:1]),
    ):
        monkeypatch.setenv(name, value)
        refused(Refusal(each, SAID.format(command=each[0], name=name, value=value)) for each in commands)
        monkeypatch.delenv(name)


def test_one_process_of_its_own_is_not(monkeypatch: pytest.MonkeyPatch):
    """A Slurm batch script is no task of a step, and its first line may be such a command."""
    for name, value in (
        ("SLURM_NTASKS", "4"),
        ("SLURM_STEP_NUM_TASKS", "1"),
        ("OMPI_COMM_WORLD_SIZE", "1"),
        ("JOB_COMPLETION_INDEX", "0"),
    ):
        monkeypatch.setenv(name, value)
        require_single_process("eval")
        monkeypatch.delenv(name)


def test_a_world_of_jax_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"eval runs in one process, and this is one of several \(jax has 2\)"):
        require_single_process("eval")
