"""A disk that is full at random moments of a run: one sentence, no temporary file, and the same end after.

Seven times the disk has too little room from the start, so that some write in the run does not fit; three times it is
filled while the run goes. A quick one, with an error in place of the disk, is in tests/commands/test_train.py.
"""

import random
import re
import shlex
from pathlib import Path

import pytest
from runs import Runs, assert_same_end
from small_disk import SmallDisk, train_command

SENTENCE = re.compile(
    r"jaxrl: .*no space left on the device; "
    r"(the last good checkpoint is step \d+|there is no checkpoint yet): make room and run again"
)


def assert_ends_well(disk: SmallDisk, runs: Runs, run_dir: Path, command: str, whole: Path) -> str:
    """The run ends for want of space; with room it goes on to the same end. Returns what it said."""
    status, output = disk.run(command)
    assert status == 1, output
    # beside it may stand what asyncio and TensorStore say of the other arrays
    said = next(filter(SENTENCE.fullmatch, output.splitlines()), "")
    assert said, output
    left = [name for name in disk.names() if re.search(r"tmp|partial|removed", name)]
    assert left == [], said
    disk.make_room()
    status, output = disk.run(train_command(runs, run_dir))
    assert status == 0, output
    copy = runs.folder / run_dir.name
    disk.copy_out(run_dir.name, copy)
    assert_same_end(copy, whole)
    disk.run(f"rm -rf {shlex.quote(str(run_dir))}")
    return said


def size_kib(folder: Path) -> int:
    """In blocks of a tmpfs."""
    return sum(-(-path.stat().st_size // 4096) * 4 for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_disk_that_is_full_at_ten_moments(tmp_path: Path, tiny_model: Path):
    runs, moments = Runs(tmp_path, tiny_model), random.Random(10)
    whole = tmp_path / "whole"
    runs.finish(whole)
    needed = size_kib(whole)
    with SmallDisk(tmp_path / "disk", 16 << 10) as disk:
        for i in range(10):
            run_dir = disk.path / f"run-{i}"
            command = train_command(runs, run_dir)
            if i < 7:
                disk.leave(int(moments.uniform(0.02, 0.9) * needed))
            else:  # a line of metrics more than before, and it is full
                steps, wait_s = moments.randrange(1, 5), moments.uniform(0, 0.3)
                metrics, ballast = (
                    shlex.quote(str(path)) for path in (run_dir / "metrics.jsonl", disk.path / "ballast")
                )
                command = (
                    f"{{ until [ $(wc -l < {metrics} || echo 0) -ge {steps} ]; do sleep 0.02; done; sleep {wait_s}; "
                    f"cat /dev/zero > {ballast}; }} 2>/dev/null & {command}"
                )
            print(assert_ends_well(disk, runs, run_dir, command, whole))
