"""What the system refuses in the middle of a run ends it with one sentence that says how to go on."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxrl.runtime.training import Training
from jaxrl.types import RunFailed

LAST = "the last good checkpoint is step 4"


def fail(error: Exception) -> None:
    """Has a run end with an error while it trains."""

    def train(_: object) -> None:
        raise error

    run = Training.__new__(Training)
    run.__dict__ |= {
        "resuming": False,
        "_train": train,
        "run_dir": SimpleNamespace(path=Path("run")),
        "store": SimpleNamespace(last_good=lambda: LAST),
        "devices": SimpleNamespace(kind="NVIDIA H100"),
    }
    run.go(lambda stack: {})


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("name", [None, "run/metrics.jsonl"])
def test_a_file_that_the_system_refuses(number: int, name: str | None):
    said = os.strerror(number).lower()
    with pytest.raises(RunFailed) as caught:
        fail(OSError(number, os.strerror(number), name))
    assert str(caught.value) == f"{name or 'run'}: {said}; {LAST}: mend that and run again"


def test_a_device_without_memory():
    said = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."
    with pytest.raises(RunFailed) as caught:
        fail(jax.errors.JaxRuntimeError(f"{said}\nBufferAssignment OOM Debugging."))
    assert str(caught.value) == (
        f"the memory of the device is full (NVIDIA H100; {said}); {LAST}: lower rollout.memory_fraction or "
        "actor.ppo_max_token_len_per_gpu, or set actor.remat=full, and run again"
    )


def test_another_error_of_jax_is_a_bug():
    with pytest.raises(jax.errors.JaxRuntimeError):
        fail(jax.errors.JaxRuntimeError("INTERNAL: broken"))
