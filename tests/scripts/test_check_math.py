"""The script that measures the math reward: that it knows right from wrong itself, and the rates on real data."""

import json
from pathlib import Path

import check_math
import pytest
from pairs.drawn import KINDS, Pair, draw


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
    assert "DeepMath  as 50%               right       5 of      5" in out


def test_drawn_pairs_are_judged_rightly(capsys: pytest.CaptureFixture[str]):
    pairs = list(draw(78, 1))
    assert check_math.check_drawn(pairs) == 0
    out = capsys.readouterr().out.splitlines()
    counts = {kind: next(line for line in out if line.startswith(kind)).split() for kind in [*KINDS, "in all"]}
    assert all(counts[kind][1:4] == ["6", "0", "0"] for kind in KINDS)
    assert counts["in all"][2:5] == ["78", "0", "0"]
    assert int(counts["in all"][5]) > 0, "math-verify alone refuses some"
    assert {pair.right for pair in pairs} == {True, False}


def test_a_wrong_verdict_on_a_drawn_pair_is_counted_and_shown(capsys: pytest.CaptureFixture[str]):
    pairs = [Pair("integers", "7", "8", True, "made up"), Pair("integers", "7", "7", False, "made up")]
    assert check_math.check_drawn(pairs) == 2
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines() if line.startswith("in all")] == [["in", "all", *"21111"]]
    assert "    integers, made up: '7', '8': the same; both are wrong" in out


def test_drawn_pairs_are_the_same_as_often_as_not_and_new_with_each_seed():
    first, other, again = (list(draw(260, seed)) for seed in (0, 1, 0))
    assert first == again
    for kind in KINDS:
        own = [pair for pair in first if pair.kind == kind]
        assert own != [pair for pair in other if pair.kind == kind], kind
        assert sum(pair.right for pair in own) == 10, kind
        assert len({pair.how for pair in own}) > 5, kind


@pytest.mark.slow
def test_real_data(data_folder: Path):
    paths = ["--gsm8k", str(data_folder / "gsm8k_train.jsonl"), "--deepmath", str(data_folder / "deepmath_1980.jsonl")]
    assert check_math.main(paths) == 0
