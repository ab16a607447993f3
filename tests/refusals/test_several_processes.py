"""Commands that run in one process, started as one of several: refused before anything is read or written."""

from __future__ import annotations

from collections.abc import Callable

import jax
import pytest
from refusals import Refusal

from jaxrl.config import ConfigError
from jaxrl.runtime.hosts.single_process import require_single_process

MODEL = ("model.path=random:{model}", "data.task=leg_counting")
COMMANDS = {
    "eval": ("eval", *MODEL, "--out", "{tmp}/out.jsonl", "hosts.num=4"),
    "profile": ("profile", *MODEL, "--out", "{tmp}/table.json", "hosts.num=4"),
    "export": ("export", "random:{model}", "{tmp}/exported"),
}
SAID = (
    "{command} runs in one process, and this is one of several ({name}={value}): each would do all of it and write the "
    "same files; start it once, on one host, with the same configuration (hosts has no effect on it), or unset {name} "
    "where each has work of its own"
)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JAXRL_PROCESS_ID", "0"),
        ("SLURM_STEP_NUM_TASKS", "4"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("PMI_SIZE", "3"),
        ("JOB_COMPLETION_INDEX", "1"),
    ],
)
def test_one_of_several_is_refused(
    refused: Callable[[Refusal], None], monkeypatch: pytest.MonkeyPatch, command: str, name: str, value: str
):
    monkeypatch.setenv(name, value)
    refused(Refusal(command, COMMANDS[command], SAID.format(command=command, name=name, value=value)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_NTASKS", "4"),
        ("SLURM_STEP_NUM_TASKS", "1"),
        ("OMPI_COMM_WORLD_SIZE", "1"),
        ("JOB_COMPLETION_INDEX", "0"),
    ],
)
def test_one_process_of_its_own_is_not(monkeypatch: pytest.MonkeyPatch, name: str, value: str):
    """A Slurm batch script is no task of a step, and its first line may be such a command."""
    monkeypatch.setenv(name, value)
    require_single_process("eval")


def test_a_world_of_jax_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"eval runs in one process, and this is one of several \(jax has 2\)"):
        require_single_process("eval")
