"""190 random flips and cuts in the files of checkpoints: each is found, and each run goes on from a good step or ends.

Most are done to the checkpoints of a real run, and read back in this process; some runs then go on in processes of
their own, and end as if nothing had happened. Quick ones: tests/training/test_damage.py, tests/record/test_journal.py.
"""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from damage import harm
from runs import Runs, assert_same_end, end, state_of

from jaxrl.training.steps import choose

pytestmark = pytest.mark.slow
NUM_READ, NUM_RUNS = 180, 10


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Runs, Path]:
    runs = Runs(tmp_path_factory.mktemp("flips"), tiny_model)
    run_dir = runs.folder / "whole"
    runs.finish(run_dir)  # leaves the checkpoints 4 and 6
    return runs, run_dir


def test_each_is_found_and_the_older_checkpoint_read(whole: tuple[Runs, Path], tmp_path: Path):
    _, run_dir = whole
    moments, damaged, found = random.Random(15), tmp_path / "run", 0
    older = tmp_path / "older"
    shutil.copytree(run_dir / "checkpoints" / "4", older / "checkpoints" / "4")
    expected, expected_values = state_of(older)
    for i in range(NUM_READ):
        shutil.copytree(run_dir / "checkpoints", damaged / "checkpoints")
        done = harm(damaged / "checkpoints" / "6", moments)
        chosen = choose(damaged / "checkpoints")
        assert chosen is not None, done
        assert (chosen.step, list(chosen.faults)) == (4, [6]), done
        assert done.split(":")[0] in chosen.faults[6], done
        found += 1
        if i % 20 == 0:  # reading all of it costs more than finding the fault
            arrays, values = state_of(damaged)
            assert values == expected_values
            assert all(np.array_equal(arrays[name], array) for name, array in expected.items())
        shutil.rmtree(damaged)
    print(f"{found} of {NUM_READ} found, the older checkpoint chosen")


def test_runs_go_on_from_the_good_step_to_the_same_end(whole: tuple[Runs, Path]):
    runs, run_dir = whole
    moments = random.Random(17)
    for i in range(NUM_RUNS):
        copy = runs.folder / f"copy-{i}"
        shutil.copytree(run_dir, copy)
        done = harm(copy / "checkpoints" / "6", moments)
        if i % 5 == 4:
            harm(copy / "checkpoints" / "4", moments)
            before = (copy / "metrics.jsonl").read_bytes()
            with runs.start(copy) as process:
                output = end(process, status=2)
            assert output.count("\n") == 1
            assert "holds no checkpoint that is whole (6: " in output
            assert (copy / "metrics.jsonl").read_bytes() == before
            continue
        output = runs.finish(copy)
        assert f"checkpoint 6 is damaged and is passed over: {done.split(':')[0]} " in output
        assert "after step 4 of 6" in output
        assert (copy / "checkpoints" / "6.damaged").is_dir()
        assert_same_end(copy, run_dir)
        shutil.rmtree(copy)
