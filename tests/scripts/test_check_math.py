"""The script that measures the math reward: that it knows right from wrong itself, and the rates on real data."""

from pathlib import Path

import check_math
import pytest


@pytest.mark.slow  # tests/rewards/test_math_pairs.py has them for our reward alone
def test_pairs_are_judged_rightly(capsys: pytest.CaptureFixture[str]):
    assert check_math.main(["--pairs"]) == 0
    (last,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("in all"))
    assert last[:4] == ["in", "all", "500", "0"]
    assert int(last[4]) > 0, "math-verify alone is wrong about some"


@pytest.mark.slow
def test_real_data(data_folder: Path):
    paths = ["--gsm8k", str(data_folder / "gsm8k_train.jsonl"), "--deepmath", str(data_folder / "deepmath_1980.jsonl")]
    assert check_math.main(paths) == 0
