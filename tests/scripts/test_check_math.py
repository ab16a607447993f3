"""The script that measures the math reward: that it knows right from wrong itself, and the rates on real data."""

import json
from pathlib import Path

import check_math
import pytest


def test_counts_what_comes_out_wrong(capsys: pytest.CaptureFixture[str]):
    cases = [("a", True, [("1", "1"), ("2", "1")]), ("b", False, [("1", "1"), ("2", "1"), ("3", "1")])]
    assert check_math.check("X", cases, lambda text, reference: text == reference) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["X", "a", "right", "1", "of", "2"]
    assert lines[2].split() == ["X", "b", "wrong", "2", "of", "3"]


def test_a_few_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    gsm8k, deepmath = tmp_path / "g.jsonl", tmp_path / "d.jsonl"
    gsm8k.write_text("".join(json.dumps({"answer": f"so\n#### {x}"}) + "\n" for x in ("12", "1,200", "-3", "0.5", "0")))
    truths = ("12", r"\dfrac{11}{16}", r"-\frac{7}{2}", "Yes", r"\pi", r"12,\!000", "(1, 2)", "0")
    deepmath.write_text("".join(json.dumps({"ground_truth": x}) + "\n" for x in truths))
    assert check_math.main(["--gsm8k", str(gsm8k), "--deepmath", str(deepmath)]) == 0
    out = capsys.readouterr().out
    assert "GSM8K     reference solutions  right       5 of      5" in out
    assert "DeepMath  as 1/2               right       5 of      5" in out


def test_pairs_are_judged_rightly(capsys: pytest.CaptureFixture[str]):
    assert check_math.main(["--pairs"]) == 0
    (last,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("in all"))
    assert last[:4] == ["in", "all", "500", "0"]
    assert int(last[4]) > 0, "math-verify alone is wrong about some"


@pytest.mark.slow
def test_real_data(data_folder: Path):
    paths = ["--gsm8k", str(data_folder / "gsm8k_train.jsonl"), "--deepmath", str(data_folder / "deepmath_1980.jsonl")]
    assert check_math.main(paths) == 0
