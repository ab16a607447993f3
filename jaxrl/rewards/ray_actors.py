"""Ray's side of the reward pool on Ray: a process of its own, which has the actors (`jaxrl.processes.ray_process` says
why), and is started again if it ends. It runs nothing of the user's: actors do, in worker processes below them.

An actor that dies was not ended by a scorer, so its sample is scored again elsewhere, at most `reward.max_retries`
times. Actors that the cluster has no room for are waited for while others work; where none works, it ends with a
sentence. Nothing here waits without a limit.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import queue
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from jaxrl.processes.messages import MAX_REQUEST_BYTES, BadMessage, Channel, read_message, to_bytes
from jaxrl.processes.ray_process import begin, connect
from jaxrl.processes.worker_supervisor import MAX_ATTEMPTS
from jaxrl.rewards.domain_limits import DomainLimits, FairQueue
from jaxrl.rewards.pool_base import crashed, taken
from jaxrl.rewards.scorers import Scored
from jaxrl.rewards.verdict_messages import read_scored, verdict_message
from jaxrl.rewards.worker import WorkerSettings
from jaxrl.rewards.worker_pool import WorkerPool
from jaxrl.types import RunFailed

SLACK_S = 60.0
"""Beyond a scorer's own limits, for ray to start an actor, or to carry a request and a verdict."""
GET_S = 30.0
"""For a value that ray says is there."""
ALIVE_EVERY_S = 5.0
_LOOK_EVERY_S = 1.0  # whether an actor's workers can still answer
_POLL_S = 0.02

Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class RaySetup:
    """What the process must know; `address`: of a cluster that the trainer itself uses, else ray finds one."""

    settings: WorkerSettings
    limits: DomainLimits
    env: Mapping[str, str]
    num_workers: int
    address: str | None = None


class RayHost:
    """What one ray actor does: it has one worker process, and runs nothing of the user's itself."""

    def __init__(self, settings: bytes, env: dict[str, str], limits: bytes):
        self._workers = WorkerPool(
            pickle.loads(settings), num_workers=1, env=env, limits=pickle.loads(limits), clock=time.monotonic
        )
        self._numbers = itertools.count()
        self._scoring = -1

    def start(self) -> bytes:
        try:
            self._workers.wait_ready()
        except (ValueError, RunFailed) as error:
            return to_bytes({"error": str(error), "users": isinstance(error, ValueError)})
        return to_bytes({"error": ""})

    def score(self, request: bytes, source: str) -> bytes:
        """Scores one request; one at a time, while `drop` may be called beside it."""
        number = self._scoring = next(self._numbers)
        self._workers.submit(number, request, source)
        while True:
            try:
                ended, scored, _ = self._workers.ended.get(timeout=_LOOK_EVERY_S)
                if ended == number:
                    break
            except queue.Empty:
                self._workers.check()
        return to_bytes({**verdict_message(scored), "retries": taken(self._workers.retries)})

    def drop(self) -> None:
        """Ends the scoring under way if it does not end by itself at once; `score` returns then, whatever it says."""
        self._workers.drop({self._scoring})


@dataclass(slots=True)
class _Task:
    number: int
    source: str
    domain: str
    limit_s: float  # with which a worker may be replaced, and so load the scorer, before each scoring
    request: bytes
    losses: int = 0  # actors that were lost with it
    dropped: bool = False


@dataclass(slots=True)
class _Running:
    task: _Task
    actor: Any
    since_s: float


class RayActors:
    """Worker processes anywhere in a ray cluster, one CPU each. `say` sends the trainer a message: `ready`, `number`
    with a verdict, `retried` or `restarted` with the reason."""

    def __init__(self, ray: Any, setup: RaySetup, say: Say):
        self._ray, self._say = ray, say
        self._settings, self._limits, self._num_workers = setup.settings, setup.limits, setup.num_workers
        # two calls at once: one that scores, and one that says that it is not wanted any more
        actor_class = ray.remote(num_cpus=1, max_restarts=0, max_concurrency=2)(RayHost)
        there = replace(setup.settings, log="")  # a path of the trainer's machine
        arguments = pickle.dumps(there), dict(setup.env), pickle.dumps(setup.limits)
        self._new_actor = lambda: actor_class.remote(*arguments)
        self._start_limit_s = setup.settings.start_timeout_s + SLACK_S
        self._waiting = FairQueue[_Task](setup.limits, setup.num_workers)
        self._starting: dict[Any, tuple[Any, float]] = {}  # ref of start() -> actor, since when
        self._idle: list[Any] = []
        self._running: dict[Any, _Running] = {}  # by ref of score()
        self._lost_in_a_row = 0
        self._is_ready = False
        self._num_cpus = ray.cluster_resources().get("CPU", 0)
        for _ in range(setup.num_workers):
            self._start_actor()

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self._starting)

    def submit(self, number: int, source: str, request: bytes) -> None:
        domain = self._limits.domain(source)
        once_s = (self._limits.by_source[domain].timeout_s or math.inf) + self._settings.start_timeout_s
        limit_s = once_s * (1 + self._settings.max_retries) + SLACK_S
        self._waiting.put(domain, _Task(number, source, domain, limit_s, request))

    def drop(self, numbers: Collection[int]) -> None:
        self._waiting.keep(lambda task: task.number not in numbers)
        for running in self._running.values():
            if running.task.number in numbers and not running.task.dropped:
                running.task.dropped = True
                running.actor.drop.remote()

    def poll(self, timeout_s: float) -> None:
        """Hands samples over, and says what has come of others; waits so long for a verdict. Raises ValueError where
        the scorer cannot be loaded; RunFailed: the cluster gives no worker, or takes all of them."""
        self._take_started(0.0 if self._running else timeout_s)
        self._hand_over()
        for ref in self._finished(list(self._running), timeout_s):
            running = self._running.pop(ref)
            try:
                message = read_message(self._ray.get(ref, timeout=GET_S))
                scored = read_scored(message)
            except (*self._failures, BadMessage) as error:
                self._try_again(running, f"a ray actor failed: {type(error).__name__}")
                continue
            for why in message.get("retries", ()):
                self._say({"retried": str(why)})
            self._lost_in_a_row = 0
            self._idle.append(running.actor)
            self._end(running.task, scored)
        for ref, running in list(self._running.items()):
            if time.monotonic() - running.since_s > running.task.limit_s:
                del self._running[ref]
                self._try_again(running, f"a ray actor was silent for {running.task.limit_s:.0f} s", is_silent=True)
        self._hand_over()

    def close(self) -> None:
        actors = [*self._idle, *(actor for actor, _ in self._starting.values())]
        for actor in actors + [running.actor for running in self._running.values()]:
            self._kill(actor)

    def _start_actor(self) -> None:
        actor = self._new_actor()
        self._starting[actor.start.remote()] = actor, time.monotonic()

    def _take_started(self, timeout_s: float) -> None:
        for ref in self._finished(list(self._starting), timeout_s) if self._starting else ():
            actor, _ = self._starting.pop(ref)
            try:
                report = read_message(self._ray.get(ref, timeout=GET_S))
            except (*self._failures, BadMessage) as error:
                self._lost(actor, f"a ray actor failed while it started: {type(error).__name__}")
                continue
            if report.get("error"):
                raise (ValueError if report.get("users") else RunFailed)(f"{report['error']} (in a ray actor)")
            self._idle.append(actor)
        overdue = [s for _, s in self._starting.values() if time.monotonic() - s > self._start_limit_s]
        works = bool(self._idle or self._running)
        if self._starting and len(overdue) == len(self._starting):
            if not works:
                raise RunFailed(
                    "reward: the ray cluster gives no worker: a ray actor was not ready after "
                    f"{self._start_limit_s:.0f} s; it began with {self._num_cpus:g} CPUs, of which reward.num_workers "
                    f"asks for {self._num_workers}"
                )
            if not self._is_ready:  # they may still come: the cluster may grow, or lose what takes its room
                count = len(overdue)
                self._say({"restarted": f"ray has no room for {count} of {self._num_workers} actors, which wait"})
        if not self._is_ready and works and len(overdue) == len(self._starting):
            self._is_ready = True
            self._say({"ready": True})

    def _hand_over(self) -> None:
        while self._idle and (task := self._waiting.pop()) is not None:
            actor = self._idle.pop()
            ref = actor.score.remote(task.request, task.source)
            self._running[ref] = _Running(task, actor, time.monotonic())

    @property
    def _failures(self) -> tuple[type[Exception], ...]:
        return self._ray.exceptions.RayError, self._ray.exceptions.GetTimeoutError

    def _try_again(self, running: _Running, why: str, *, is_silent: bool = False) -> None:
        self._lost(running.actor, why)
        task = running.task
        task.losses += 1
        if task.losses > self._settings.max_retries or task.dropped:
            self._end(task, crashed(why, task.losses, is_silent=is_silent))
            return
        self._say({"retried": why})
        self._waiting.put_back(task.domain, task)

    def _end(self, task: _Task, scored: Scored) -> None:
        self._waiting.done(task.domain)
        self._say({"number": task.number, **verdict_message(scored)})

    def _lost(self, actor: Any, why: str) -> None:
        """Another actor for one that is gone; all ends when none has come to anything for too long."""
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= MAX_ATTEMPTS * self._num_workers:
            raise RunFailed(
                f"reward: the ray cluster is lost: {self._lost_in_a_row} actors in a row failed, the last one because "
                f"{why}"
            )
        self._say({"restarted": f"{why}; started again"})
        self._kill(actor)
        self._start_actor()

    def _kill(self, actor: Any) -> None:
        with contextlib.suppress(*self._failures):  # of one that is gone
            self._ray.kill(actor)

    def _finished(self, refs: list[Any], timeout_s: float) -> list[Any]:
        if not refs:
            return []
        self._ray.wait(refs, num_returns=1, timeout=timeout_s)
        return self._ray.wait(refs, num_returns=len(refs), timeout=0)[0]


def main() -> NoReturn:
    sock, setup = begin()
    assert isinstance(setup, RaySetup)
    ray = connect(setup.address)
    channel = Channel(sock, MAX_REQUEST_BYTES)

    def say(message: dict[str, Any]) -> None:
        channel.send(to_bytes(message))

    try:
        actors = RayActors(ray, setup, say)
        _serve(actors, channel, say)
        actors.close()
    except (ValueError, RunFailed) as error:
        say({"fatal": str(error), "users": isinstance(error, ValueError)})
        while channel.wants_write and not channel.ended:
            time.sleep(_POLL_S)
            channel.flush()
    ray.shutdown()
    os._exit(0)


def _serve(actors: RayActors, channel: Channel, say: Say) -> None:
    said_s = time.monotonic()
    while not channel.ended:
        for frame in channel.receive():
            what, *values = pickle.loads(frame)
            (actors.submit if what == "score" else actors.drop)(*values)
        actors.poll(_POLL_S)
        if not actors.is_busy:
            time.sleep(_POLL_S)
        if time.monotonic() - said_s > ALIVE_EVERY_S:
            said_s = time.monotonic()
            say({"alive": True})
        channel.flush()
