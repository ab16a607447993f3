"""`scripts/bench_accuracy.py`: the task and its reward, the figures made from runs, and (slow) a small run of
everything."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import bench_accuracy
import numpy as np
import pytest
from accuracy import figures, task
from accuracy.runs import RULES, Result

from jaxrl.data.tokenizer import Tokenizer


def test_responses_are_what_the_task_says_and_lengths_have_a_tail():
    random = np.random.default_rng(0)
    problems = [task.problem(random) for _ in range(2000)]
    for one in problems[:50]:
        digits = [int(x) for x in one.question[1::2]]
        steps = [one.response[i : i + 3] for i in range(0, len(one.response), 3)]
        assert [step[0] for step in steps] == list(one.question[::2]) == list(task.LETTERS[: len(digits)])
        assert [int(step[1]) for step in steps] == digits
        assert [int(step[2]) for step in steps] == [sum(digits[: i + 1]) % 10 for i in range(len(digits))]
    lengths = [len(one.response) + 1 for one in problems]
    assert np.quantile(lengths, 0.95) / np.median(lengths) >= 3
    assert max(lengths) < task.MAX_RESPONSE
    assert max(len(one.question) + 1 for one in problems) <= task.MAX_PROMPT


def test_files_share_no_problem_and_the_reward_wants_the_last_sum(tmp_path: Path):
    task.write_files(tmp_path, 300, 100, seed=0)
    train, held_out = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    )
    assert (len(train), len(held_out)) == (300, 100)
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    spec = importlib.util.spec_from_file_location("reward", tmp_path / "reward.py")
    assert spec is not None
    assert spec.loader is not None
    reward = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reward)
    assert reward.compute_score("", "a33b58c20", "0", {}) == 1.0
    assert reward.compute_score("", "a33b58c21", "0", {}) == 0.0
    assert reward.compute_score("", "", "0", {}) == 0.0


def test_the_tokenizer_has_a_token_for_each_character(tmp_path: Path):
    task.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = Tokenizer.from_path(str(tmp_path))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a3b5"}], add_generation_prompt=True)
    ids = tokenizer.encode(text)
    assert (text, [task.tokens()[i] for i in ids]) == ("a3b5=", [*"a3b5="])
    assert tokenizer.decode(tokenizer.encode("a33b58")) == "a33b58"


def results(**accuracy: list[float]) -> list[Result]:
    names = {rule.replace(" ", "_"): rule for rule in RULES}
    return [
        Result(names[name], seed, value, value - 0.2, 3.5, 0.1, [0.5, value] * 5, [20.0] * 10)
        for name, values in accuracy.items()
        for seed, value in enumerate(values)
    ]


def test_a_rule_is_harmed_when_it_lies_two_errors_below():
    plain = [0.80, 0.82, 0.84]
    same = results(plain=plain, tail_batching=[0.79, 0.82, 0.83], partial_rollout=[0.9, 0.9, 0.91])
    assert figures.harmed(same) == []
    low = results(plain=plain, tail_batching=[0.70, 0.72, 0.71], partial_rollout=[0.9, 0.9, 0.91])
    assert figures.harmed(low) == ["tail batching"]
    one, other = figures.mean([0.7, 0.72, 0.71]), figures.mean(plain)
    assert figures.below(one, other) == pytest.approx((0.82 - 0.71) / np.hypot(0.01, 0.02) * np.sqrt(3))
    assert figures.below(other, one) < 0


def test_the_table_and_the_page():
    found = results(plain=[0.8, 0.82], tail_batching=[0.79, 0.82], partial_rollout=[0.9, 0.91])
    rows = figures.table(found, (0.6, 0.3))
    assert [row[0] for row in rows] == ["rule", "before", *RULES]
    assert rows[2][1] == "0.810 ± 0.010"
    page = figures.page(found, (0.6, 0.3))
    assert page.count("<figure>") == 2
    assert "Longest response of a batch" in page
    lone = [replace(one, seed=0) for one in found if one.seed == 0]
    assert "±" in figures.table(lone, (0.6, 0.3))[2][1], "one seed has no error, and says nan"


@pytest.mark.slow
def test_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A warm start of one update, two steps of each rule; called again, nothing runs again."""
    sizes = ("--steps=2", "--prompts=2", "--samples=2", "--num-train=20", "--num-held-out=4", "--eval-samples=1")
    arguments = ["--out", str(tmp_path / "runs"), "--seeds=1", "--start-loss=100", *sizes, "--json", str(tmp_path)]
    bench_accuracy.main(arguments)
    said = capsys.readouterr().out
    assert all(f"{rule}, seed 0: accuracy" in said for rule in RULES)
    assert (tmp_path / "runs" / "accuracy.html").exists()
    bench_accuracy.main(arguments)
    (file,) = tmp_path.glob("accuracy-*.jsonl")
    first, again = (json.loads(line) for line in file.read_text().splitlines())
    assert first["results"] == again["results"]
    assert [one["rule"] for one in first["results"]] == [*RULES]
    assert all(len(one["rewards"]) == 2 for one in first["results"])
    assert bench_accuracy.main([*arguments, "--steps=3"]) == 2
    assert "holds runs of other sizes" in capsys.readouterr().err
