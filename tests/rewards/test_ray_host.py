"""The host over Ray actors, with a stand-in for ray whose actors die, are silent, or never start.

`tests/rewards/test_pool.py` runs it on ray itself, where it is installed, and `test_ray_cluster.py` breaks a cluster.
"""

import asyncio
import pickle
import socket
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

from jaxrl.processes.messages import receive_message, send_message
from jaxrl.rewards.domain_limits import MAIN, DomainLimit, DomainLimits
from jaxrl.rewards.pool_host import Host
from jaxrl.rewards.pool_worker import PoolSettings
from jaxrl.rewards.ray_host import RayWorker

OK = ("ok", 1.0, {}, 0.1), []
READY = "", False


class Died(Exception): ...


class FakeRay:
    """Answers are taken from these lists, and then are good ones; an answer `None` never comes."""

    def __init__(self) -> None:
        self.exceptions = types.SimpleNamespace(RayError=Died)
        self.starts: list[Any] = []
        self.scores: list[Any] = []
        self.num_killed = 0

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def remote(self, _: bytes) -> Any:
        """An actor."""
        calls = {
            "start": lambda: self._answer(self.starts, READY),
            "score": lambda *_: self._answer(self.scores, OK),
        }
        return types.SimpleNamespace(**{name: types.SimpleNamespace(remote=call) for name, call in calls.items()})

    async def _answer(self, answers: list[Any], default: Any) -> Any:
        answer = answers.pop(0) if answers else default
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, actor: Any) -> None:
        self.num_killed += 1


class Trainer:
    """The other side of a host's socket."""

    def __init__(self, ray: Any, max_retries: int) -> None:
        self._sock, theirs = socket.socketpair()
        limits = DomainLimits({MAIN: DomainLimit(0, 0.2)})
        settings = PoolSettings(
            scorer=b"", loads="", preload=(), num_workers=2, start_timeout_s=0.2, max_retries=max_retries, limits=limits
        )
        host = Host(settings, lambda host: RayWorker(host, ray, ray), beat_s=0.1)
        self._thread = threading.Thread(target=lambda: asyncio.run(host.run(theirs)))
        self._thread.start()
        self.heard: list[tuple[Any, ...]] = []

    def score(self, *numbers: int) -> None:
        for number in numbers:
            send_message(self._sock, pickle.dumps(("score", number, "a", b"")))

    def until(self, kind: str, count: int = 1) -> list[tuple[Any, ...]]:
        """The messages of a kind, once there are so many of them."""
        self._sock.settimeout(20)
        while len(found := self.of(kind)) < count:
            self.heard += pickle.loads(receive_message(self._sock) or b"")
        return found

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [message for message in self.heard if message[0] == kind]

    def close(self) -> None:
        self._sock.close()
        self._thread.join()


@pytest.fixture
def ray() -> FakeRay:
    return FakeRay()


@pytest.fixture
def trainer(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("jaxrl.rewards.ray_host.SLACK_S", 0.2)
    made: list[Trainer] = []
    yield lambda max_retries=2: made.append(Trainer(ray, max_retries)) or made[-1]
    for each in made:
        each.close()


def test_an_actor_that_dies_is_replaced(ray: FakeRay, trainer: Any):
    ray.starts[:] = [Died()]
    ray.scores[:] = [Died(), Died()]
    made = trainer()
    made.score(7)
    ((_, number, (status, *_)),) = made.until("ended")
    assert (number, status, len(made.of("retried")), ray.num_killed) == (7, "ok", 2, 3)
    ray.scores[:] = [Died(), Died(), Died()]
    made.score(8)
    scored = made.until("ended", 2)[1][2]
    assert scored == ("crash", 0.0, {"error": "a ray actor failed: Died (3 times in a row)"}, 0.0)


def test_an_actor_that_is_silent_is_counted_as_that(ray: FakeRay, trainer: Any):
    ray.scores[:] = [None, Died()]
    made = trainer(max_retries=0)
    made.score(1, 2)
    found = {number: (status, info.get("timeouts")) for _, number, (status, _, info, _) in made.until("ended", 2)}
    assert sorted(map(str, found.values())) == ["('crash', None)", "('crash', {'watchdog': 1})"]


def test_a_cluster_without_room_ends_the_run(ray: FakeRay, trainer: Any):
    ray.starts[:] = [None, None]
    ((_, why),) = trainer().until("fatal")
    assert why.startswith("reward: the ray cluster gives no worker: a ray actor was not ready after 0 s; it has 2 CPUs")


def test_an_actor_without_room_is_waited_for_while_another_works(ray: FakeRay, trainer: Any):
    ray.starts[:] = [READY, None]
    made = trainer()
    made.until("ready", 2)
    assert made.of("restarted") == [("restarted", "ray has no room for an actor, which waits")]
    made.score(1, 2)
    assert {scored[0] for _, _, scored in made.until("ended", 2)} == {"ok"}
    assert ray.num_killed == 0
