"""The ray pool's limits, with stand-ins: for ray, whose actors die; and for the process that uses ray, which ends.

`tests/rewards/test_pool.py` runs the pool on ray itself, where it is installed, and `test_ray_cluster.py` breaks one.
"""

import itertools
import queue
import time
import types
from pathlib import Path
from typing import Any

import pytest
from jaxrl.rewards.ray_actors import RayActors, RaySetup
from jaxrl.rewards.verdict_messages import verdict_message
from jaxrl.rewards.worker import WorkerSettings
from reward_pools import collect, submit

from jaxrl.config import from_mapping
from jaxrl.config.domains import domains
from jaxrl.processes import python_child, ray_process
from jaxrl.processes.messages import to_bytes
from jaxrl.rewards import ray_actors, ray_pool
from jaxrl.rewards.domain_limits import DomainLimits
from jaxrl.rewards.domains import build_scorer
from jaxrl.rewards.reward_pool import RewardPool, build_pool
from jaxrl.types import RunFailed, SampleKey


class Died(Exception): ...


class FakeRay(types.ModuleType):
    """Answers are made when they are asked for; an answer `None` never comes."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = types.SimpleNamespace(RayError=Died, GetTimeoutError=TimeoutError)
        self.starts: list[Any] = []  # what each actor's start comes to; then b'{"error": ""}'
        self.scores: list[Any] = []
        self.num_killed = self.num_dropped = 0

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def remote(self, **_: Any) -> Any:
        return lambda _: types.SimpleNamespace(remote=self._actor)

    def _actor(self, *_: Any) -> Any:
        ok = to_bytes(verdict_message(("ok", 1.0, {}, 0.1)))
        return types.SimpleNamespace(
            start=Ref(self.starts, b'{"error": ""}'),
            score=Ref(self.scores, ok),
            drop=types.SimpleNamespace(remote=self._drop),
        )

    def _drop(self) -> None:
        self.num_dropped += 1

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


class Answer:
    def __init__(self, answer: Any) -> None:
        self.answer = answer


class Ref:
    def __init__(self, answers: list[Any], default: bytes) -> None:
        self._answers, self._default = answers, default

    def remote(self, *_: Any) -> Answer:
        return Answer(self._answers.pop(0) if self._answers else self._default)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    monkeypatch.setattr("jaxrl.rewards.ray_actors.SLACK_S", 0.2)
    return FakeRay()


def actors(ray: FakeRay, max_retries: int = 2) -> tuple[RayActors, list[dict[str, Any]]]:
    limits = DomainLimits.of(domains(from_mapping({"model": {"path": "x"}, "reward": {"timeout_s": 0.2}}).reward))
    settings = WorkerSettings(scorer=b"", loads="", preload=(), start_timeout_s=0.2, max_retries=max_retries)
    said: list[dict[str, Any]] = []
    return RayActors(ray, RaySetup(settings, limits, {}, 2), said.append), said


def ended(made: RayActors, said: list[dict[str, Any]], count: int, limit_s: float = 9.0) -> list[dict[str, Any]]:
    """The first verdicts that are said."""
    deadline = time.monotonic() + limit_s
    while len(found := [message for message in said if "number" in message]) < count and time.monotonic() < deadline:
        made.poll(0.01)
    return found


def names(said: list[dict[str, Any]]) -> list[str]:
    return [next(iter(message)) for message in said]


def test_an_actor_that_dies_is_replaced(ray: FakeRay):
    ray.starts[:] = [Died()]
    ray.scores[:] = [Died(), Died()]
    made, said = actors(ray)
    made.submit(7, "a", b"")
    assert [(each["number"], each["status"]) for each in ended(made, said, 1)] == [(7, "ok")]
    assert [names(said).count(name) for name in ("ready", "restarted", "retried")] == [1, 3, 2]
    ray.scores[:] = [Died(), None, b"\x80garbage"]  # the second is silent
    said.clear()
    made.submit(8, "a", b"")
    (verdict,) = ended(made, said, 1)
    error = "a ray actor failed: BadMessage (3 times in a row)"
    assert (verdict["status"], verdict["info"]["error"]) == ("crash", error)


def test_an_actor_that_is_silent_is_counted_as_that(ray: FakeRay):
    made, said = actors(ray, max_retries=0)
    ray.scores[:] = [None, Died()]
    for number in (1, 2):
        made.submit(number, "a", b"")
    found = {each["number"]: (each["status"], each["info"].get("timeouts")) for each in ended(made, said, 2)}
    assert found == {1: ("crash", {"watchdog": 1}), 2: ("crash", None)}


def test_a_lost_cluster_ends(ray: FakeRay):
    made, said = actors(ray)
    ended(made, said, 0)
    made.poll(0.01)
    ray.scores[:], ray.starts[:] = [Died()] * 9, [None] * 9
    for number in range(3):
        made.submit(number, "a", b"")
    start = time.monotonic()
    with pytest.raises(RunFailed, match=r"^reward: the ray cluster gives no worker: a ray actor was not ready after 0"):
        ended(made, said, 3)
    assert time.monotonic() - start < 3


def test_actors_that_die_at_once(ray: FakeRay):
    ray.starts[:] = [Died()] * 99
    made, said = actors(ray)
    with pytest.raises(RunFailed, match=r"the ray cluster is lost: 6 actors in a row failed"):
        ended(made, said, 1)


def test_an_actor_without_room_is_waited_for_while_another_works(ray: FakeRay):
    ray.starts[:] = [b'{"error": ""}', None]
    made, said = actors(ray)
    made.submit(1, "a", b"")
    ended(made, said, 1)
    assert "ready" not in names(said), "the other may still come"
    time.sleep(0.5)
    made.poll(0.01)
    assert said[-2:] == [{"restarted": "ray has no room for 1 of 2 actors, which wait"}, {"ready": True}]
    assert ray.num_killed == 0
    made.submit(2, "a", b"")
    assert len(ended(made, said, 2)) == 2
    made.poll(0.01)
    assert names(said).count("restarted") == 1, "said once"


def test_a_scorer_that_cannot_be_loaded_is_the_users(ray: FakeRay):
    ray.starts[:] = [b'{"error": "reward.path: importing a.py failed", "users": true}']
    made, _ = actors(ray)
    with pytest.raises(ValueError, match=r"^reward.path: importing a.py failed \(in a ray actor\)$"):
        made.poll(0.01)


def test_a_dropped_sample(ray: FakeRay):
    ray.scores[:] = [None, None]
    made, _ = actors(ray)
    for number in range(3):
        made.submit(number, "a", b"")
    made.poll(0.01)
    made.drop({0, 2})
    made.drop({0})
    assert ray.num_dropped == 1, "the actor that has it is told once"


def test_an_actor_whose_workers_are_gone_does_not_wait_for_ever():
    def check() -> None:
        raise RunFailed("reward: the pool's own thread ended")

    host = ray_actors.RayHost.__new__(ray_actors.RayHost)
    host._numbers = itertools.count()
    host._workers = types.SimpleNamespace(submit=lambda *_: None, ended=queue.SimpleQueue(), check=check)  # pyright: ignore
    with pytest.raises(RunFailed, match="own thread ended"):
        host.score(b"", "")


# ---------------------------------------------------------------- the process that uses ray

DRIVER = """
import json, os, pickle, socket, sys, time
sys.path[:] = json.loads(sys.argv[1])
from jaxrl.processes.messages import receive_message, to_bytes, send_message
from jaxrl.rewards.verdict_messages import verdict_message
sock = socket.socket(fileno=int(sys.argv[2]))
receive_message(sock)
say = lambda message: send_message(sock, to_bytes(message))
folder = {folder!r}
lives = len(os.listdir(folder))
open(folder + "/" + str(lives), "w").close()
{code}
say({{"ready": True}})
while (frame := receive_message(sock)) is not None:
    what, *values = pickle.loads(frame)
    if what == "score":
        number, source, request = values
        sample = pickle.loads(request)
        {each}
        say({{"number": number, **verdict_message(("ok", float(sample.response), {{"lives": lives}}, 0.1))}})
"""


def pool_on(
    driver: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, each: str = "pass", code: str = ""
) -> RewardPool:
    lives = folder / "lives"
    lives.mkdir()
    monkeypatch.setattr(python_child, "_BOOT", driver.format(folder=str(lives), code=code, each=each))
    monkeypatch.setattr(ray_pool, "PAUSES_S", (0.0, 0.1, 0.1))
    monkeypatch.setattr(ray_process, "SILENT_S", 20.0)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    config = from_mapping({"model": {"path": "x"}, "reward": {"pool": "ray", "kind": "math"}})
    return build_pool(config, build_scorer(config))


def test_a_process_that_ends_is_started_again_with_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dies = "os._exit(1) if number == 2 and lives == 0 else None"
    pool = pool_on(DRIVER, tmp_path, monkeypatch, each=dies)
    pool.warm()
    submit(pool, "0", "1", "2", "3")
    found = collect(pool, 60.0)
    assert {i: verdict.reward for i, verdict in found.items()} == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}
    assert [found[i].info["lives"] for i in (2, 3)] == [1, 1]
    assert pool.take_metrics()["reward/pool_restarts"] == 1
    pool.cancel({SampleKey(0, 7, 0)})
    pool.close()


def test_a_process_that_ends_again_and_again_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pool = pool_on(DRIVER, tmp_path, monkeypatch, code="sys.exit('no head')")
    why = r"the process that uses it ended 3 times in a row, the last time because it ended \(no head\)"
    with pytest.raises(RunFailed, match=f"^reward: the ray cluster is lost: {why}$"):
        pool.warm()
    pool.close()


def test_a_process_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pool = pool_on(DRIVER, tmp_path, monkeypatch, each="time.sleep(99 if lives == 0 else 0)")
    pool.warm()
    monkeypatch.setattr(ray_process, "SILENT_S", 0.5)
    monkeypatch.setattr(ray_process, "_CLOSE_S", 0.1)
    submit(pool, "5")
    monkeypatch.setattr(ray_process, "SILENT_S", 1.5)
    assert collect(pool, 60.0)[0].info == {"lives": 1}
    pool.close()


@pytest.mark.parametrize(("users", "kind"), [("True", ValueError), ("False", RunFailed)])
def test_what_ends_the_pool_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: str, kind: type[Exception]):
    code = f"say({{'fatal': 'no CPUs', 'users': {users}}}); sys.exit()"
    pool = pool_on(DRIVER, tmp_path, monkeypatch, code=code)
    with pytest.raises(kind, match=r"^no CPUs$"):
        pool.warm()
    pool.close()


def test_garbage_costs_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    garbage = "send_message(sock, pickle.dumps(3)) if lives == 0 else None"
    pool = pool_on(DRIVER, tmp_path, monkeypatch, each=garbage)
    submit(pool, "4")
    assert collect(pool, 60.0)[0].info == {"lives": 1}
    pool.close()
