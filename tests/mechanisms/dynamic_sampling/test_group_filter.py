"""Which groups dynamic sampling keeps: by a metric, or by a function of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_rollout import FakePrompts
from rounds import START, filtering, finish, fresh_batches, key

from jaxrl.config import from_mapping
from jaxrl.mechanisms import batch_rule
from jaxrl.mechanisms.dynamic_sampling import FILTER_ARGUMENTS
from jaxrl.scheduling.rounds.batches import BatchRule, RoundTime
from jaxrl.scheduling.rounds.events import Launch, Verdict
from jaxrl.types import SampleKey


def said(k: SampleKey, reward: float, status: Any = "ok", **info: Any) -> Verdict:
    return Verdict(2.0, k, reward, status, info)


def kept(rule: BatchRule, *verdicts: Verdict) -> bool:
    """Whether prompt 0 with two samples is kept, P0 being 1."""
    current = rule.plan(FakePrompts(10), RoundTime(1, 0))
    for event in (START, *(finish(key(0, i)) for i in (1, 0))):
        current.handle(event)
    for each in sorted(verdicts, key=lambda verdict: -verdict.key.sample_index):
        current.handle(each)
    return current.done


def configured(**options: Any) -> BatchRule:
    values = {"model": {"path": "x"}, "data": {"train_batch_size": 1}, "rollout": {"n": 2}}
    return batch_rule(from_mapping(values | {"algorithm": {"filter_groups": {"enable": True, **options}}}))


def by_metric(metric: str) -> BatchRule:
    return fresh_batches(1, 2, **filtering(metric=metric))


@pytest.mark.parametrize(
    ("metric", "first", "second", "expected"),
    [
        ("reward", (0.0, {}), (1.0, {}), True),
        ("acc", (0.1, {"acc": True}), (0.9, {"acc": True}), False),  # a length penalty alone teaches nothing here
        ("answer", (0.0, {"answer": "7"}), (0.0, {"answer": "8"}), True),
    ],
)
def test_a_metric_that_is_equal_in_all_samples_filters(metric: str, first: Any, second: Any, expected: bool):
    verdicts = [said(key(0, i), reward, **info) for i, (reward, info) in enumerate((first, second))]
    assert kept(by_metric(metric), *verdicts) == expected


def test_a_scoring_that_failed_has_the_value_of_its_reward():
    assert kept(by_metric("acc"), said(key(0, 0), 0.0, "timeout"), said(key(0, 1), 1.0, acc=1))
    assert not kept(by_metric("acc"), said(key(0, 0), 0.0, "timeout"), said(key(0, 1), 0.0, acc=0))


def own(folder: Path, source: str, **options: Any) -> BatchRule:
    file = folder / "filters.py"
    file.write_text(source)
    return configured(path=str(file), **options)


SEES = f"def keep_group({', '.join(FILTER_ARGUMENTS)}):\n    "


def test_a_function_of_the_users_decides(tmp_path: Path):
    source = SEES + "return (data_source, rewards, infos, responses, extra_info['index']) == "
    seen = ("test", [0.25, 0.25], [{"acc": 3}, {"acc": 4}], ["", ""], 0)
    verdicts = [said(key(0, 0), 0.25, acc=3), said(key(0, 1), 0.25, acc=4)]
    assert kept(own(tmp_path, source + repr(seen)), *verdicts)
    (tmp_path / "b").mkdir()
    named = own(tmp_path / "b", source.replace("keep_group", "hard") + "0", name="hard")
    assert not kept(named, *verdicts)


def test_mistakes_in_the_function_stop_the_run_and_name_the_file(tmp_path: Path):
    rule = own(tmp_path, SEES + "return 1 / 0")
    with pytest.raises(ValueError, match=r"filters\.py: keep_group failed on prompt \(0, 0\) with ZeroDivisionError"):
        kept(rule, said(key(0, 0), 0.0), said(key(0, 1), 1.0))


def test_prompts_are_launched_by_the_generation_batch():
    """Three at a time: at the start, and again when fewer are under way than are expected to be needed."""
    rule = fresh_batches(2, 2, **filtering(3, max_num_gen_batches=2))
    current = rule.plan(FakePrompts(50), RoundTime(1, 0))
    assert len(current.handle(START)) == 3
    told = [(finish(key(p, 0)), finish(key(p, 1)), said(key(p, 0), 0.0), said(key(p, 1), 0.0)) for p in range(5)]
    events = [event for each in told for event in each]
    launched = [sum(isinstance(c, Launch) for c in current.handle(event)) for event in events[:-1]]
    assert (sum(launched), max(launched)) == (3, 3)
    with pytest.raises(ValueError, match=r"6 prompts launched in one round, 5 of them filtered, and 0 of 2"):
        current.handle(events[-1])
