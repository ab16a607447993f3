"""The ray pool's limits, with a stand-in for ray: actors that die, a cluster that is gone, and the handlers of signals.

`tests/rewards/test_pool.py` runs the pool on ray itself, where it is installed.
"""

import itertools
import queue
import signal
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxrl.config import from_mapping
from jaxrl.rewards import ray_pool
from jaxrl.rewards.domains import build_scorer
from jaxrl.rewards.frames import message_of, to_bytes
from jaxrl.rewards.pool import RewardPool, build_pool
from jaxrl.types import Prompt, RunFailed, Sample, SampleKey


class Died(Exception): ...


class FakeRay(types.ModuleType):
    """Answers are made when they are asked for; an answer `None` never comes."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = types.SimpleNamespace(RayError=Died, GetTimeoutError=TimeoutError)
        self.starts: list[Any] = []  # what each actor's start comes to; then b'{"error": ""}'
        self.scores: list[Any] = []
        self.num_killed = 0

    def is_initialized(self) -> bool:
        return False

    def init(self, **_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def remote(self, **_: Any) -> Any:
        return lambda _: types.SimpleNamespace(remote=self._actor)

    def _actor(self, *_: Any) -> Any:
        ok = to_bytes(message_of(("ok", 1.0, {}, 0.1), ""))
        return types.SimpleNamespace(start=Ref(self.starts, b'{"error": ""}'), score=Ref(self.scores, ok))

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        ready = [ref for ref in refs if ref.answer is not None]
        if not ready:
            time.sleep(timeout)
        return ready, [ref for ref in refs if ref.answer is None]

    def get(self, ref: Any, timeout: float) -> bytes:
        if isinstance(ref.answer, Exception):
            raise ref.answer
        return ref.answer

    def kill(self, actor: Any) -> None:
        self.num_killed += 1

    def shutdown(self) -> None: ...


class Answer:
    def __init__(self, answer: Any) -> None:
        self.answer = answer


class Ref:
    def __init__(self, answers: list[Any], default: bytes) -> None:
        self._answers, self._default = answers, default

    def remote(self, *_: Any) -> Answer:
        return Answer(self._answers.pop(0) if self._answers else self._default)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr("jaxrl.rewards.ray_pool.SLACK_S", 0.2)
    before = signal.getsignal(signal.SIGTERM)
    yield fake
    signal.signal(signal.SIGTERM, before)


def make(folder: Path) -> RewardPool:
    path = folder / "reward.py"
    path.write_text("def compute_score(**kwargs):\n    return 1.0\n")
    reward = {
        **{"kind": "custom", "path": str(path), "pool": "ray", "num_workers": 2},
        **{"timeout_s": 0.2, "start_timeout_s": 0.2, "max_retries": 2},
    }
    config = from_mapping({"model": {"path": "x"}, "reward": reward})
    return build_pool(config, build_scorer(config))


def submit(pool: RewardPool) -> None:
    pool.submit(Prompt(0, 0, (1,), "?", "test", "a"), Sample.empty(SampleKey(0, 0, 0)))


def test_our_handlers_come_back(ray: FakeRay, tmp_path: Path):
    def ours(*_: Any) -> None: ...

    signal.signal(signal.SIGTERM, ours)
    make(tmp_path).close()
    assert signal.getsignal(signal.SIGTERM) is ours


def test_an_actor_that_dies_is_replaced(ray: FakeRay, tmp_path: Path):
    ray.starts[:] = [Died()]
    ray.scores[:] = [Died(), Died()]
    pool = make(tmp_path)
    pool.warm()
    submit(pool)
    assert [verdict.status for verdict in pool.wait(5)] == ["ok"]
    metrics = pool.take_metrics()
    assert (metrics["reward/pool_restarts"], metrics["reward/retries"]) == (3, 2)
    ray.scores[:] = [Died(), None, b"\x80garbage"]  # the second is silent
    submit(pool)
    (verdict,) = pool.wait(9)
    assert (verdict.status, verdict.info["error"]) == ("crash", "a ray actor failed: BadFrame (3 times in a row)")
    pool.close()


def test_a_lost_cluster_ends_the_run(ray: FakeRay, tmp_path: Path):
    pool = make(tmp_path)
    pool.warm()
    ray.scores[:], ray.starts[:] = [Died()] * 9, [None] * 9
    for _ in range(3):
        submit(pool)
    start = time.monotonic()
    with pytest.raises(
        RunFailed, match=r"^reward: the ray cluster gives no worker: a ray actor was not ready after 0 s"
    ):
        pool.wait(5)
    assert time.monotonic() - start < 3
    killed = ray.num_killed
    pool.close()
    assert ray.num_killed == killed, "a call to a cluster that is gone blocks"


def test_actors_that_die_at_once(ray: FakeRay, tmp_path: Path):
    ray.starts[:] = [Died()] * 99
    pool = make(tmp_path)
    with pytest.raises(RunFailed, match=r"the ray cluster is lost: 6 actors in a row failed"):
        pool.warm()
    pool.close()


def test_a_scorer_that_cannot_be_loaded_is_the_users(ray: FakeRay, tmp_path: Path):
    ray.starts[:] = [b'{"error": "reward.path: importing a.py failed", "users": true}']
    pool = make(tmp_path)
    with pytest.raises(ValueError, match=r"^reward.path: importing a.py failed \(in a ray actor\)$"):
        pool.warm()
    pool.close()


def test_an_actor_whose_workers_are_gone_does_not_wait_for_ever():
    def check() -> None:
        raise RunFailed("reward: the pool's own thread ended")

    host = ray_pool.RayHost.__new__(ray_pool.RayHost)
    host._numbers = itertools.count()
    host._workers = types.SimpleNamespace(submit=lambda *_: None, ended=queue.SimpleQueue(), check=check)  # pyright: ignore
    with pytest.raises(RunFailed, match="own thread ended"):
        host.score(b"", "")


def test_signals_when_ray_does_not_start(monkeypatch: pytest.MonkeyPatch):
    earlier = signal.getsignal(signal.SIGTERM)

    @ray_pool._our_signals()
    def fails() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        fails()
    assert signal.getsignal(signal.SIGTERM) is earlier
    monkeypatch.setattr(signal, "getsignal", lambda _: None)  # as for a handler in C
    with ray_pool._our_signals():
        monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)
