"""Bad inputs of the class "disk": what is to be written does not fit. One sentence, status 1, no temporary file.

Runs that are well under way are in tests/faults/test_disk_full.py.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest
from runs import ROOT, Runs
from small_disk import SmallDisk, train_command

NO_SPACE = "no space left on the device"
NOTHING_YET = f"{NO_SPACE}; there is no checkpoint yet: make room and run again"
SIMULATE = (
    "model.path=m model.random_init=true simulate.model=SmolLM2-135M simulate.num_devices=1 data.task=leg_counting "
    "data.max_prompt_length=64 data.max_response_length=64 data.train_batch_size=2 trainer.total_training_steps=2"
)


@pytest.fixture
def disk(tmp_path: Path):
    with SmallDisk(tmp_path / "disk", 4 << 10) as disk:
        yield disk


def ended(disk: SmallDisk, command: str) -> str:
    """Runs a command that has no room; returns its sentence."""
    before = disk.names()
    status, output = disk.run(command)
    *_, said = (line for line in output.splitlines() if line.startswith("jaxrl: "))  # Orbax may add errors behind it
    assert status == 1, output
    assert f"{ROOT}/" not in output, output
    assert not [name for name in set(disk.names()) - set(before) if re.search("partial|tmp", name)], output
    return said.removeprefix("jaxrl: ")


def jaxrl(*words: str) -> str:
    environment = f"JAX_PLATFORMS=cpu PYTHONPATH={shlex.quote(str(ROOT))}"
    return f"{environment} {shlex.quote(sys.executable)} -m jaxrl {' '.join(words)}"


SAVE = """
import logging, sys
from damage import state_at
from jaxrl.training.checkpoint import Checkpointer
from jaxrl.types import RunFailed
logging.disable(logging.ERROR)  # Orbax's own words, as on the command line
try:
    with Checkpointer(sys.argv[1]) as checkpoints:
        checkpoints.save(4, *state_at(4))
except RunFailed as error:
    print(f"jaxrl: {error}")
    sys.exit(1)
"""


def test_a_checkpoint_that_does_not_fit(disk: SmallDisk):
    (disk.path.parent / "save.py").write_text(SAVE)
    disk.leave(12)
    words = f"PYTHONPATH={ROOT}:{ROOT}/tests/support {sys.executable} {disk.path.parent}/save.py"
    folder = disk.path / "checkpoints"
    said = ended(disk, f"JAX_PLATFORMS=cpu {words} {folder}")
    assert said == f"checkpoint 4 cannot be written to {folder}: {NOTHING_YET}"


@pytest.mark.slow
def test_a_run_that_does_not_fit(disk: SmallDisk, tmp_path: Path, tiny_model: Path):
    disk.leave(200)
    assert ended(disk, train_command(Runs(tmp_path, tiny_model), disk.path / "run")).endswith(NOTHING_YET)


def test_a_simulated_run_that_does_not_fit(disk: SmallDisk):
    disk.leave(24)
    assert NO_SPACE in ended(disk, jaxrl("simulate", SIMULATE, f"simulate.run_dir={disk.path}/run"))
