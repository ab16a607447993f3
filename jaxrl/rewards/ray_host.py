"""The host of a pool whose workers are anywhere in a Ray cluster (`pip install jaxrl[ray]`).

It is a separate process because Ray installs signal handlers, and ends the process that uses it after losing the
cluster's head for a minute ("The program will terminate"). In the trainer that would end the run without a word.
Nothing of the user's runs here, nor in an actor: each actor has a pool of one worker on its machine.

No scorer ends an actor, so the sample of an actor that dies is scored again elsewhere. The host waits for actors that
the cluster has no room for while others work; if none works, the run ends.

Source: ray 2.60, of which a killed head was tried; https://github.com/ray-project/ray/issues/45570.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
import signal
import socket
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any

from jaxrl.rewards.pool import Pool
from jaxrl.rewards.pool_host import UNWANTED, Answer, Died, Host, StartFailed, Task, crashed, run
from jaxrl.rewards.pool_worker import PoolSettings
from jaxrl.rewards.scorers import Scored
from jaxrl.types import RunFailed

SLACK_S = 60.0
"""Beyond a scorer's own limits, for Ray to start an actor, or to carry a request and a verdict."""


class RayActor:
    """One Ray actor; it runs two calls at a time, one of which may be `drop`."""

    def __init__(self, settings: bytes) -> None:
        self._pool = Pool(pickle.loads(settings))
        self._scoring: dict[int, Future[Scored]] = {}
        self._dropped: set[int] = set()

    def start(self) -> tuple[str, bool]:
        """The error, and whether the user has to mend it; empty: the worker is ready."""
        try:
            self._pool.wait_ready()
        except (ValueError, RunFailed) as error:
            return str(error), isinstance(error, ValueError)
        return "", False

    def score(self, number: int, source: str, request: bytes) -> tuple[Scored, list[str]]:
        """The result, and why it was scored again."""
        self._scoring[number] = future = self._pool.submit(request, source)
        if number in self._dropped:  # calls may change places
            future.cancel()
        try:
            scored = future.result()
        except CancelledError:
            scored = crashed(UNWANTED)
        del self._scoring[number]
        return scored, [why for kind, why in self._pool.take_notes() if kind == "retried"]

    def drop(self, number: int) -> None:
        self._dropped.add(number)
        if (future := self._scoring.get(number)) is not None:
            future.cancel()


class RayWorker:
    """A worker in an actor; implements `jaxrl.rewards.pool_host.Worker`."""

    is_gone = False

    def __init__(self, host: Host, ray: Any, actor_class: Any) -> None:
        self._host, self._settings, self._ray = host, host.settings, ray
        there = replace(self._settings, num_workers=1, on_ray=False, log="")  # a path of the trainer's machine
        self._actor = actor_class.remote(pickle.dumps(there))
        self._number = -1
        self.num_done = 0

    async def start(self) -> None:
        limit_s = self._settings.start_timeout_s + SLACK_S
        starting = asyncio.ensure_future(_answer(self._actor.start.remote()))
        if not (await asyncio.wait([starting], timeout=limit_s))[0]:
            self._wait_for_room(limit_s)
        try:
            error, is_users = await starting
        except self._ray.exceptions.RayError as failed:
            raise StartFailed(f"a ray actor failed while it started: {type(failed).__name__}") from None
        if error:
            raise StartFailed(f"{error} (in a ray actor)", is_final=is_users)

    def _wait_for_room(self, limit_s: float) -> None:
        """The cluster may grow, or lose what takes its room. Raises RunFailed where no actor works."""
        if not self._host.num_ready:
            cpus = self._ray.cluster_resources().get("CPU", 0)
            raise RunFailed(
                f"reward: the ray cluster gives no worker: a ray actor was not ready after {limit_s:.0f} s; it has "
                f"{cpus:g} CPUs, of which reward.num_workers asks for {self._settings.num_workers}"
            )
        self._host.say("restarted", "ray has no room for an actor, which waits")
        self._host.say("ready")  # the run begins without it

    async def ask(self, task: Task) -> Answer:
        settings, self._number = self._settings, task.number
        # the worker may be replaced, and so load the scorer, before each scoring
        once_s = (task.limit_s or math.inf) + settings.start_timeout_s
        limit_s = once_s * (1 + settings.max_retries) + SLACK_S
        try:
            async with asyncio.timeout(limit_s if math.isfinite(limit_s) else None):
                scored, retries = await _answer(self._actor.score.remote(task.number, task.domain, task.request))
        except TimeoutError:
            raise Died(f"a ray actor was silent for {limit_s:.0f} s", is_silent=True) from None
        except self._ray.exceptions.RayError as error:
            raise Died(f"a ray actor failed: {type(error).__name__}") from None
        for why in retries:
            self._host.say("retried", why)
        self.num_done += 1
        return Answer(scored)

    def drop(self) -> None:
        self._actor.drop.remote(self._number)

    async def end(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):  # of one that is gone
            self._ray.kill(self._actor)


async def _answer(ref: Any) -> Any:
    return await ref


async def serve_on_ray(sock: socket.socket, settings: PoolSettings, beat_s: float) -> None:
    import ray as ray_package  # pyright: ignore[reportMissingImports]  (an optional extra)

    ray: Any = ray_package
    ray.init(address=settings.ray_address, include_dashboard=False, log_to_driver=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer decides when this process ends
    actor_class = ray.remote(num_cpus=1, max_restarts=0, max_concurrency=2)(RayActor)
    try:
        await Host(settings, lambda host: RayWorker(host, ray, actor_class), beat_s).run(sock)
    finally:
        ray.shutdown()  # ends the actors


def main() -> None:
    run(serve_on_ray)
