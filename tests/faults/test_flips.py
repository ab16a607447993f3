"""Random flips and cuts in the files of checkpoints of a run: each is found, and the run goes on to the same end.

Quick ones, file by file: tests/training/test_damage.py, tests/record/test_journal.py.
"""

import random
import shutil
from pathlib import Path

import pytest
from damage import harm
from runs import Runs, assert_same_end


@pytest.mark.slow
def test_runs_go_on_from_the_good_step_to_the_same_end(tmp_path: Path, tiny_model: Path):
    runs, whole, moments = Runs(tmp_path, tiny_model), tmp_path / "whole", random.Random(17)
    runs.finish(whole)  # leaves the checkpoints 4 and 6
    for i in range(8):
        copy = tmp_path / f"copy-{i}"
        shutil.copytree(whole, copy)
        done = harm(copy / "checkpoints" / "6", moments)
        output = runs.finish(copy)
        assert f"checkpoint 6 is damaged and is passed over: {done.split(':')[0]} " in output
        assert "after step 4 of 6" in output
        assert (copy / "checkpoints" / "6.damaged").is_dir()
        assert_same_end(copy, whole)
        shutil.rmtree(copy)
