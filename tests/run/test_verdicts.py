"""Verdicts at a backend over replayed lengths: their order, what of them is journalled and replayed, and which never
come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from replayed_backend import (
    LENGTHS,
    PARAMS,
    PROMPTS,
    Bytes,
    House,
    Pool,
    begin,
    finished,
    key,
    next_finished,
    opened,
    scored,
)

from jaxrl.config import from_mapping
from jaxrl.rewards.reward_metrics import RewardMetrics
from jaxrl.run.verdicts import Verdicts
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.events import AwaitVerdict, CancelScore, RoundStarted, SampleFinished, Score, Verdict
from jaxrl.scheduling.rounds.round import Round
from jaxrl.types import Episode, Prompt, Sample, SampleKey, Turn


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def houses(tmp_path: Path, request: Any) -> Iterator[Any]:
    with opened(tmp_path, request.param) as build:
        yield build


@pytest.mark.parametrize("hold", [[], [key(0)], [key(0), key(1), key(4, 1)], list(LENGTHS)])
def test_verdicts_come_in_the_order_of_completion_however_late(houses: Any, hold: list[SampleKey]):
    house = houses(LENGTHS, Pool(hold=hold))
    round, events = house.run_round(PROMPTS, 2)
    assert isinstance(events[0], RoundStarted)
    assert scored(events) == finished(events)
    assert sorted(finished(events)) == sorted(LENGTHS)
    dispatches = [event.dispatch for event in events if isinstance(event, SampleFinished)]
    assert dispatches == sorted(dispatches)
    for group in round.groups():
        for sample in group.samples:
            assert sample.reward == sample.key.prompt_index + sample.key.sample_index / 10
            assert len(sample) == LENGTHS[sample.key]
            assert sample.text == Bytes().decode(sample.token_ids.tolist())
    metrics = house.backend.end()
    assert metrics["reward/num_scored"] == len(LENGTHS)
    assert 0 < metrics["rollout/bubble_ratio"] < 1


def test_what_an_environment_has_failed_is_not_scored(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """It is a failed verdict in its place, counted and told; half of a group, and one behind another that is late."""
    failed = {key(0): "error", key(0, 1): "timeout", key(1): "crash"}
    pool = Pool(hold=[key(1, 1)])
    metrics = RewardMetrics()
    verdicts = Verdicts(pool, lambda: 4.0)
    verdicts.begin(1, 0)
    for one in (key(1, 1), *failed, key(2)):
        made = Sample.empty(one)
        turns = (Turn(0, "x", reward=1.0), Turn(0, "y"))
        made.text, stop = "x", failed.get(one, "done")
        made.episode = Episode(turns, stop=stop, error="the simulator is down" if one in failed else "")
        verdicts.send(PROMPTS[0], made)
    assert pool.submitted == [key(1, 1), key(2)]
    assert verdicts.completed() == [], "the first is late"
    found = verdicts.wait(1.0)
    assert [each.key for each in found] == [key(1, 1), *failed, key(2)]
    assert [(each.status, each.reward) for each in found[1:4]] == [(status, 0.0) for status in failed.values()]
    assert {each.failure for each in found[1:4]} == {"the simulator is down"}
    assert [each.status for each in (found[0], found[4])] == ["ok", "ok"]
    where = "reward 0 for epoch 0, prompt {}, sample {}: the simulator is down"
    told = [where.format(one.prompt_index, one.sample_index) for one in failed]
    assert [record.getMessage() for record in caplog.records] == told
    for each in found:
        metrics.add("game", each)
    counts = {"num_scored": 5.0, "errors": 1.0, "timeouts": 1.0, "crashes": 1.0}
    assert metrics.take({"reward/num_scored": 2.0}).items() >= {f"reward/{k}": v for k, v in counts.items()}.items()
    assert not pool.num_pending


def test_a_verdict_of_the_clock_is_on_the_disk_before_the_round_hears_of_it(houses: Any, tmp_path: Path):
    bad = {key(1): "timeout", key(3, 1): "crash", key(2): "error"}
    house = houses(LENGTHS, Pool(bad=bad))
    round = Round.of(PROMPTS, 2)
    house.backend.begin(RoundInfo(7), PARAMS)
    heard = []
    while not round.done:
        event = house.backend.wait()
        if isinstance(event, Verdict) and event.status in ("timeout", "crash"):
            heard.append(event.key)
            text = (tmp_path / "journal.jsonl").read_text()
            place = f'"key":[0,0,{event.key.prompt_index},{event.key.sample_index},0]'
            assert f'{{"step":7,"kind":"verdict",{place},"status":"{event.status}"' in text
        house.backend.apply(round.handle(event))
    assert sorted(heard) == [key(1), key(3, 1)]
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 3, "an error is the scorer's own, no clock's"


def test_a_step_that_runs_again_hears_what_a_clock_or_something_outside_decided(houses: Any):
    """Verdicts, their counts by domain and of parts, and the order of all; the pool is not asked for them."""
    reward = {"domains": {"test": {"kind": "math"}, "others": {"kind": "math"}}}
    config = from_mapping({"model": {"path": "x"}, "data": {"answer_key": "answer"}, "reward": reward})
    said = {"cut_off": 2, "case_s": [0.5, 2.0, 2.0], "judge": "good", "parts": {"tags": 1.0}, "long": "x" * 10_000}
    bad = {key(1): "timeout", key(3, 1): "crash"}
    outside = {key(2): (0.25, said), key(4, 1): (-1.5, {"outside": True})}

    def played(house: House, step: int = 7) -> tuple[list[SampleKey], dict[SampleKey, Verdict], dict[str, float]]:
        _, events = house.run_round(PROMPTS, 2, step)
        counts = {n: v for n, v in house.backend.end().items() if n.startswith("reward/") and n[-2:] != "_s"}
        return scored(events), {e.key: e for e in events if isinstance(e, Verdict)}, counts

    order, verdicts, counts = played(houses(LENGTHS, Pool(bad=bad, outside=outside), config=config))
    assert (counts["reward/test/timeouts"], counts["reward/test/crashes"]) == (1, 1)
    assert (counts["reward/test/num_scored"], counts["reward/others/num_scored"]) == (len(LENGTHS), 0)
    assert counts["reward/part/tags/mean"] == 1.0
    again = houses(LENGTHS, Pool(), last_step=6, config=config)  # a new process, in which all would be otherwise
    order_again, heard, counts_again = played(again)
    assert (order_again, counts_again) == (order, counts)
    assert set(LENGTHS) - set(again.pool.submitted) == {*bad, *outside}
    assert all((heard[one].reward, heard[one].failure) == (v.reward, v.failure) for one, v in verdicts.items())
    assert all(heard[one].reward == reward and heard[one].outside for one, (reward, _) in outside.items())
    kept = {name: value for name, value in said.items() if name != "long"}
    assert heard[key(2)].info == kept, "a value that is too long for the journal is not kept"
    third = houses(LENGTHS, Pool(), last_step=7, config=config)
    played(third, step=8)
    assert sorted(third.pool.submitted) == sorted(LENGTHS), "another step asks anew"


def test_an_evaluation_does_not_hear_the_training_rounds_verdicts(houses: Any):
    """Held-out prompts are numbered from 0 in epoch 0, like those of the training set. With one-step-off the training
    round of the next step comes before a step's evaluation."""

    def run(house: House, step: int, kind: str) -> Round:
        round, _ = house.run_round(PROMPTS, 2, step, kind)
        house.backend.end()
        return round

    house = houses(LENGTHS, Pool(bad={key(1): "timeout"}))
    run(house, 7, "plain")
    house.pool.bad, house.pool.submitted = {}, []
    run(house, 8, "plain")
    house.pool.bad, house.pool.submitted = {key(2): "crash"}, []
    evaluation = run(house, 7, "eval")
    assert sorted(house.pool.submitted) == sorted(LENGTHS)
    assert {s.key for g in evaluation.groups() for s in g.samples if s.reward_info} == {key(2)}
    # and after a crash each of the two gets its own again
    again = houses(LENGTHS, Pool(), last_step=6)
    run(again, 7, "plain")
    assert set(LENGTHS) - set(again.pool.submitted) == {key(1)}
    run(again, 8, "plain")
    again.pool.submitted = []
    run(again, 7, "eval")
    assert set(LENGTHS) - set(again.pool.submitted) == {key(2)}


@pytest.mark.parametrize("houses", [1], indirect=True)  # which plan brings what is that of one
def test_a_verdict_is_awaited_without_a_plan_and_one_that_is_cancelled_never_comes(houses: Any):
    house = houses({key(0, 0): 2, key(0, 1): 3, key(0, 2): 30}, Pool(hold=[key(0, 0)]))
    keys = (key(0, 0), key(0, 1), key(0, 2))
    backend = begin(house, keys)
    for _ in range(2):
        backend.apply([Score(PROMPTS[0], next_finished(backend))])
    backend.apply([AwaitVerdict(keys[0])])
    num_plans = len(house.progress)
    verdict = backend.wait()
    assert isinstance(verdict, Verdict)
    assert verdict.key == keys[0]
    assert len(house.progress) == num_plans, "no plan was made while the verdict was awaited"
    backend.apply([CancelScore(keys[1:2])])  # it has come in and has not been told
    assert next_finished(backend).key == keys[2], "and not the verdict"
    backend.end()


def test_a_pool_that_loses_a_sample_is_found_out(houses: Any):
    class Leaky(Pool):
        def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
            if sample.key != key(2, 1):
                super().submit(prompt, sample)

    house = houses(LENGTHS, Leaky())
    with pytest.raises(RuntimeError, match=r"pool has lost SampleKey\(.*prompt_index=2, sample_index=1"):
        house.run_round(PROMPTS, 2)


def test_the_verdict_behind_cancelled_ones_comes():
    """One that its scorer has, and one whose environment has failed."""
    verdicts = Verdicts(Pool(hold=[key(0)]), lambda: 4.0)
    verdicts.begin(1, 0)
    for one in (key(0), key(1), key(0, 1)):
        made = Sample.empty(one)
        made.text = "x"
        made.episode = Episode((Turn(0, "x"),), stop="error", error="down") if one == key(1) else None
        verdicts.send(PROMPTS[0], made)
    verdicts.cancel([key(0), key(1)])
    assert [each.key for each in verdicts.completed()] == [key(0, 1)]


def test_a_pool_that_is_asked_for_a_slow_verdict_is_progress(houses: Any):
    house = houses({key(0): 2}, Pool())
    beats, answers = [], iter([[], [], [Verdict(1.0, key(0), 1.0)]])
    house.pool.completed, house.pool.wait = list, lambda timeout_s: next(answers)
    house.run.beat = lambda _: beats.append(1)
    house.run_round([PROMPTS[0]], 1)
    assert len(beats) == 3
