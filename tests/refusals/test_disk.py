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
from jaxrl.train.checkpoint import Checkpointer
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
@pytest.mark.parametrize("kib", [0, 24, 200], ids=["no room at all", "none for run.json", "none for a checkpoint"])
def test_a_run_that_does_not_fit(disk: SmallDisk, tmp_path: Path, tiny_model: Path, kib: int):
    runs = Runs(tmp_path, tiny_model)
    disk.leave(kib)
    said = ended(disk, train_command(runs, disk.path / "run"))
    assert re.search(NO_SPACE, said)
    if kib:
        assert said.endswith(NOTHING_YET)


@pytest.mark.parametrize("kib", [0, 24], ids=["no room at all", "none for run.json"])
def test_a_simulated_run_that_does_not_fit(disk: SmallDisk, kib: int):
    disk.leave(kib)
    assert NO_SPACE in ended(disk, jaxrl("simulate", SIMULATE, f"simulate.run_dir={disk.path}/run"))


@pytest.mark.slow
def test_an_export_that_does_not_fit(disk: SmallDisk, tiny_model: Path):
    """What it leaves behind is tested in `test_concurrency.py` as well, with an error that is made up."""
    disk.leave(60)
    said = ended(disk, jaxrl("export", f"random:{tiny_model}", f"{disk.path}/exported"))
    assert NO_SPACE in said
    assert not [name for name in disk.names() if name.startswith("exported")]


def test_a_report_that_does_not_fit(disk: SmallDisk, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "critic/rewards/mean": 0.5}\n')
    disk.leave(0)
    assert NO_SPACE in ended(disk, jaxrl("report", str(run), f"--out={disk.path}/page.html"))
