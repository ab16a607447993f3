"""The script that measures the math reward: that it knows right from wrong itself, and the rates on real data."""

from pathlib import Path

import check_math
import pytest


@pytest.mark.slow
def test_real_data(data_folder: Path):
    paths = ["--gsm8k", str(data_folder / "gsm8k_train.jsonl"), "--deepmath", str(data_folder / "deepmath_1980.jsonl")]
    assert check_math.main(paths) == 0
