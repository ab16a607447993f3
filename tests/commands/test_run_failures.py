"""What the system refuses in the middle of a run ends it with one sentence that says how to go on."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxrl.run.training import Training
from jaxrl.types import RunFailed

LAST = "the last good checkpoint is step 4"
FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."
STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE), "run/metrics.jsonl")
BUG = jax.errors.JaxRuntimeError("INTERNAL: broken")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (STALE, f"run/metrics.jsonl: {os.strerror(errno.ESTALE).lower()}; {LAST}: mend that and run again"),
        (
            jax.errors.JaxRuntimeError(f"{FULL}\nBufferAssignment OOM Debugging."),
            f"the memory of the device is full (NVIDIA H100; {FULL}); {LAST}: lower rollout.memory_fraction or "
            "actor.ppo_max_token_len_per_gpu, or set actor.remat=full, and run again",
        ),
        (BUG, "INTERNAL: broken"),
    ],
    ids=["a file", "the device's memory", "a bug"],
)
def test_what_ends_a_run(error: Exception, said: str):
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
    with pytest.raises(type(error) if error is BUG else RunFailed) as caught:
        run.go(lambda stack: {})
    assert str(caught.value) == said
