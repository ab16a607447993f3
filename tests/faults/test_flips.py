"""Random flips and cuts in the files of checkpoints: each is found, and each run goes on from a good step to the
same end.

The runs are in processes of their own. Quick ones: tests/training/test_damage.py, tests/record/test_journal.py.
"""

import random
import shutil
from pathlib import Path

import pytest
from damage import harm
from runs import Runs, assert_same_end, end

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Runs, Path]:
    runs = Runs(tmp_path_factory.mktemp("flips"), tiny_model)
    run_dir = runs.folder / "whole"
    runs.finish(run_dir)  # leaves the checkpoints 4 and 6
    return runs, run_dir


def test_runs_go_on_from_the_good_step_to_the_same_end(whole: tuple[Runs, Path]):
    runs, run_dir = whole
    moments = random.Random(17)
    for i in range(10):
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
