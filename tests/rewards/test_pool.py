"""Reward pools: whatever a scorer does costs its own sample, and nothing else."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from reward_pools import SCORER, TIMEOUT_S, Opened, collect, make, submit

from jaxrl.rewards.reward_pool import RewardPool
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import RunFailed, SampleKey

ON_RAY = pytest.param("ray", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["process", ON_RAY])
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    if request.param == "ray":
        pytest.importorskip("ray")
    pool = make(tmp_path_factory.mktemp("rewards"), request.param)
    pool.warm()
    yield pool
    pool.close()


def test_many_at_once(pool: RewardPool):
    submit(pool, *(f"say {i}" for i in range(300)))
    verdicts = collect(pool)
    assert [verdicts[i].reward for i in range(300)] == [float(i) for i in range(300)]
    assert {verdict.status for verdict in verdicts.values()} == {"ok"}
    assert all(0 <= verdict.duration_s <= TIMEOUT_S for verdict in verdicts.values())
    submit(pool, "asked", "cut 1", "cut 0", "say 1", "raise")
    verdicts = collect(pool)
    assert [verdicts[i].outside for i in range(5)] == [True, True, False, False, False], "of what may be otherwise"


def test_cancelled_samples_get_no_verdict(pool: RewardPool):
    submit(pool, "sleep 0.3", "say 1", "sleep 0.3", "say 3", "say 4")
    pool.cancel({SampleKey(0, 7, i) for i in (0, 3)})
    assert pool.num_pending == 3
    assert sorted(collect(pool)) == [1, 2, 4]
    submit(pool, "say 5")
    assert collect(pool)[0].reward == 5.0, "asked for again: the new answer, once"


def test_each_failure_costs_its_own_sample_on_ray(opened: Opened):
    """`tests/refusals/test_rewards.py` has many more, in processes of this machine."""
    pool = opened("ray")
    statuses = {"die": "crash", "native": "timeout", "raise": "error", "nan": "error", "odd": "ok"}
    submit(pool, *(response for i, bad in enumerate(statuses) for response in (bad, f"say {i}")))
    verdicts = collect(pool)
    assert [verdicts[2 * i].status for i in range(5)] == list(statuses.values())
    assert [(verdicts[2 * i + 1].status, verdicts[2 * i + 1].reward) for i in range(5)] == [
        ("ok", float(i)) for i in range(5)
    ]
    assert pool.take_metrics()["reward/retries"] == 1, "each death was tried once more"


def test_waiting_in_the_queue_costs_nothing(pool: RewardPool):
    """Two workers, six samples of 0.6 s each, a limit of 1.5 s: the last ones end later than the limit."""
    submit(pool, *["sleep 0.6"] * 6)
    verdicts = collect(pool)
    assert [verdicts[i].status for i in range(6)] == ["ok"] * 6
    assert all(0.5 < verdict.duration_s < TIMEOUT_S for verdict in verdicts.values())


def test_completion_order_and_polling(opened: Opened, tmp_path: Path):
    gate, pool = tmp_path / "gate", opened(timeout_s=60.0)
    assert pool.completed() == []
    assert pool.wait(0.5) == []  # nothing is pending: returns at once
    submit(pool, f"until {gate}", "say 1")  # returns before there is a verdict of the first
    assert [verdict.key.sample_index for verdict in pool.wait()] == [1]
    assert pool.num_pending == 1
    assert pool.completed() == []
    assert pool.wait(0.01) == []
    gate.touch()
    assert collect(pool)[0].reward == 0.8


def test_closing_waits_for_no_worker(tmp_path: Path):
    pool = make(tmp_path, num_workers=1, timeout_s=60.0)
    pool.warm()
    submit(pool, "spin")
    time.sleep(0.3)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 20


def test_memory_that_earlier_samples_left_taken(opened: Opened):
    """A worker that leaks is replaced, and the sample that found no room has its verdict from a new one."""
    pool = opened(num_workers=1, max_memory_gib=1.0, timeout_s=60.0)  # to take memory is slow at times
    submit(pool, "hoard 600", "hoard 600", "hoard 600", "hoard 1600", "say 4")
    verdicts = collect(pool)
    expected = [*[("ok", 0.5)] * 3, ("error", 0.0), ("ok", 4.0)]
    assert [(verdicts[i].status, verdicts[i].reward) for i in range(5)] == expected
    assert verdicts[3].info["error"] == "MemoryError (reward.max_memory_gib is 1)", "alone in its worker as well"
    assert pool.take_metrics()["reward/retries"] == 3


@pytest.mark.parametrize("kind", ["process", ON_RAY])
def test_a_cancelled_scoring_gives_its_worker_back(opened: Opened, tmp_path: Path, kind: str):
    began, pool = tmp_path / "began", opened(kind, num_workers=1, timeout_s=0.0)
    submit(pool, f"once {began}", "spin")  # without a time limit it would never end
    while [verdict.key.sample_index for verdict in pool.wait(0.1)] != [0]:
        pass
    pool.cancel({SampleKey(0, 7, 1)})
    submit(pool, "say 5")
    assert [(verdict.reward, verdict.status) for verdict in collect(pool).values()] == [(5.0, "ok")]


def test_a_slow_domain_leaves_a_worker_to_a_fast_one(opened: Opened, tmp_path: Path):
    """No clock: the slow samples wait for a gate that is opened when the fast ones have their verdicts."""
    path, gate = tmp_path / "reward.py", tmp_path / "gate"
    own = {"kind": "custom", "path": str(path)}
    pool = opened(timeout_s=0.0, domains={"fast": {**own, "weight": 2.0}, "slow": own})
    submit(pool, "say 1", source="fast")
    assert collect(pool)[0].reward == 2.0
    submit(pool, *[f"until {gate}"] * 5, source="slow")
    submit(pool, "say 1", "say 2", "say 3", source="fast", first=5)
    fast: list[Verdict] = []
    while len(fast) < 3:
        fast += pool.wait(1.0)
    assert sorted((verdict.key.sample_index, verdict.reward) for verdict in fast) == [(5, 2.0), (6, 4.0), (7, 6.0)]
    gate.touch()
    assert [verdict.reward for verdict in collect(pool).values()] == [0.8] * 5


def test_worker_killed_as_it_is_given_a_sample(opened: Opened):
    pool = opened(num_workers=1)
    for _ in range(5):
        submit(pool, "modules")
        info = collect(pool)[0].info
        assert info["jax"] is False, "which this process has"
        os.kill(info["pid"], signal.SIGKILL)
        submit(pool, "say 3", "say 4")
        assert [verdict.reward for _, verdict in sorted(collect(pool).items())] == [3.0, 4.0]


def test_no_worker_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr("jaxrl.rewards.pool._started", refuse)
    monkeypatch.setattr("jaxrl.rewards.pool.PAUSES_S", (0.01, 0.01))
    pool = make(tmp_path, num_workers=1)
    submit(pool, "say 1")
    with pytest.raises(RunFailed, match=r"host ended 3 times .* because no process can be started: no more processes"):
        pool.warm()
    with pytest.raises(RunFailed, match="no worker process can be started"):
        pool.wait()
    pool.close()


def test_a_worker_that_hangs_while_it_starts_is_replaced(opened: Opened, tmp_path: Path):
    flag = tmp_path / "hung"
    source = SCORER + (f"\nif os.path.exists({str(flag)!r}):\n    os.remove({str(flag)!r})\n    time.sleep(60)\n")
    pool = opened(source=source, num_workers=1, start_timeout_s=1.0)
    flag.touch()
    submit(pool, "die", "say 1")
    verdicts = collect(pool)
    assert [verdicts[i].status for i in range(2)] == ["crash", "ok"]
    assert not flag.exists()


def test_nothing_of_the_users_runs_in_the_trainer(tmp_path: Path):
    path = tmp_path / "reward.py"
    source = f"import os\nassert os.getpid() != {os.getpid()}\ndef compute_score(**kwargs): return 1.0\n"
    pool = make(tmp_path, source=source)
    pool.warm()
    pool.close()
    pool = make(tmp_path, source=source.replace("!=", "=="))
    error = f"reward.path: importing {path} failed in line 2 with AssertionError"
    with pytest.raises(ValueError, match=re.escape(error) + "$"):
        pool.warm()
    submit(pool, "x")  # without `warm`, each sample reports it
    verdict = collect(pool)[0]
    assert (verdict.status, verdict.info) == ("error", {"error": error})
    pool.close()
