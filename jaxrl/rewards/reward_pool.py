"""Rewards beside the rollout: samples are scored while others still decode (RollPacker, section 4.3).

A domain's kind (`reward.domains`) says where its samples are scored: in worker processes, by an endpoint, or by a model
on the run's devices. `RewardPool` sends each sample there, and adds the parts of its reward. A scorer is foreign code:
what it does costs only the sample at hand, and only values of JSON, which are checked, reach the trainer.

`duration_s` is measured in the worker; for a sample that timed out it is the limit, for a crashed one 0. Verdicts come
in the order in which scoring ended; a round wants them in the order in which samples completed, and the backend sorts
them.

Source: RollPacker §4.3 (rewards of several kinds beside the rollout). Departure: its workers belong to a kind of reward
each; here a worker process holds the scorers of all domains.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import queue
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from jaxrl.config import Config
from jaxrl.config.domains import Domain, domains, needs_workers
from jaxrl.config.rewards import Place
from jaxrl.rewards.pool import Pool
from jaxrl.rewards.pool_worker import PoolSettings
from jaxrl.rewards.request import as_reward
from jaxrl.rewards.reward_metrics import FailureWarnings, describe_sample, timeouts_of
from jaxrl.rewards.scorers import Scored, Scorer, ScoreRequest, describe
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, Sample, SampleKey


class ScoringPlace(Protocol):
    """Where samples are scored. It does not know domains, weights and parts: a result has the scorer's own reward. One
    with the status `crash` says that nothing was learnt of the response."""

    def warm(self) -> None:
        """Waits until it can score. Raises ValueError where it never will, with a sentence that names the option, and
        the file and line if it is the user's; RunFailed: it is out of order."""
        ...

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> Future[Scored]:
        """Queues a finished sample; returns at once. To cancel the future frees what scores the sample, at once or when
        it has ended or timed out. `limits_s`: as in `jaxrl.rewards.scorers.ScoreRequest`."""
        ...

    def step(self) -> bool:
        """Does a piece of the work that no other thread does; whether there was any."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Pending:
    prompt: Prompt
    sample: Sample
    limits_s: tuple[float, ...]
    domain: Domain
    futures: dict[Place, Future[Scored]] = field(default_factory=dict)
    came: dict[Place, Verdict] = field(default_factory=dict)


class RewardPool:
    """Scores samples in the background. Used from one thread. `domains`: by source; that of sources without their own
    has the empty name. `parts`: weights. `where`: how warnings name a sample. `clock`: stamps the verdicts."""

    def __init__(
        self,
        domains: Mapping[str, Domain],
        *,
        parts: Mapping[str, float],
        where: Callable[[SampleKey], str] = describe_sample,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._domains, self._parts, self._clock = domains, parts, clock
        self._places: dict[Place, ScoringPlace] = {}
        self._pending: dict[SampleKey, _Pending] = {}
        self._ended: queue.SimpleQueue[tuple[_Pending, Place, Future[Scored], float]] = queue.SimpleQueue()
        self._warnings = FailureWarnings(where)
        self._seconds = 0.0  # of scoring, since `take_metrics` was last called

    def join(self, place: Place, scoring: ScoringPlace) -> None:
        """Has `scoring` score the domains of this place. It is closed with the pool."""
        assert place not in self._places, f"{place} has a pool"
        self._places[place] = scoring

    @property
    def places(self) -> set[Place]:
        return {domain.place for domain in self._domains.values()}

    def warm(self) -> None:
        """As `ScoringPlace.warm`, of all places."""
        for place in self._places.values():
            place.warm()

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        """Queues a finished sample; returns at once. Exactly one verdict follows, unless it is cancelled."""
        domain = self._domains.get(prompt.source) or self._domains[""]
        pending = self._pending[sample.key] = _Pending(prompt, sample, limits_s, domain)
        self._ask(pending, domain.place)
        if self._parts and domain.place != "workers":
            self._ask(pending, "workers")

    def _ask(self, pending: _Pending, place: Place) -> None:
        domain = pending.domain
        assert place in self._places, f"nothing scores what {domain.option}.kind={domain.kind} asks for"
        future = self._places[place].submit(pending.prompt, pending.sample, pending.limits_s)
        pending.futures[place] = future
        future.add_done_callback(lambda ended: self._ended.put((pending, place, ended, self._clock())))

    def cancel(self, keys: Collection[SampleKey]) -> None:
        """No verdict follows on those of these samples that were submitted before."""
        for key in keys:
            if (pending := self._pending.pop(key, None)) is not None:
                for future in pending.futures.values():
                    future.cancel()

    def completed(self) -> list[Verdict]:
        """The verdicts that have come in since the last call; never waits."""
        found: list[Verdict] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found += self._came(*self._ended.get_nowait())
        return found

    def wait(self, timeout_s: float | None = None) -> list[Verdict]:
        """Waits for at least one verdict; empty when nothing is pending or the time is up."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        verdicts = self.completed()
        while self._pending and not verdicts and (left := deadline - time.monotonic()) > 0:
            has_worked = any(place.step() for place in self._places.values())
            with contextlib.suppress(queue.Empty):
                verdicts += self._came(*self._ended.get(timeout=0.0 if has_worked else min(left, 1.0)))
            verdicts += self.completed()
        return verdicts

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call: `reward/{pool_restarts,retries,seconds}`, and what the places count."""
        measured = Counter({"reward/pool_restarts": 0.0, "reward/retries": 0.0, "reward/seconds": self._seconds})
        for place in self._places.values():
            measured.update(place.take_metrics())
        self._seconds = 0.0
        return dict(measured)

    def close(self) -> None:
        self._pending.clear()
        with ExitStack() as stack:
            for place in self._places.values():
                stack.callback(place.close)

    def _came(self, pending: _Pending, place: Place, future: Future[Scored], time_s: float) -> list[Verdict]:
        """Notes a result; the verdict if it was the last one of its sample."""
        key = pending.sample.key
        if self._pending.get(key) is not pending:
            return []
        pending.came[place] = verdict_of(time_s, key, future.result())
        if len(pending.came) < len(pending.futures):
            return []
        del self._pending[key]
        own, *parts = (pending.came[each] for each in pending.futures)
        found = self._warnings.add(combined(pending.domain, self._parts, own, *parts))
        self._seconds += found.duration_s
        return [found]


def verdict_of(time_s: float, key: SampleKey, scored: Scored) -> Verdict:
    """The verdict on a sample. A scorer says that a clock decided it with `cut_off` above 0 in its info, and that
    something outside the run did with `outside` true."""
    status, reward, info, duration_s = scored
    cut_off = info.get("cut_off", 0)
    outside = info.get("outside") is True or (type(cut_off) in (int, float) and cut_off > 0)
    return Verdict(time_s, key, reward, status, info, duration_s, outside)


def combined(domain: Domain, weights: Mapping[str, float], own: Verdict, parts: Verdict | None = None) -> Verdict:
    """The scorer's reward times its domain's weight, plus each part times its own; a sample of which one half failed
    has failed. `info` keeps the unweighted values: of parts under `parts`, of the scorer under `own_reward`, which
    evaluations take, and `acc`, unless the scorer gives one.

    `parts`: the workers' verdict, where another place has scored.
    """
    parts = own if parts is None else parts
    if own.status != "ok" or (domain.weight == 1 and not weights):
        return own
    outside, time_s = own.outside or parts.outside, max(own.time_s, parts.time_s)
    if parts.status != "ok":
        limits = dict(timeouts_of(own) + timeouts_of(parts))
        info = {**parts.info, "timeouts": limits} if limits else parts.info
        return replace(parts, time_s=time_s, info=info, outside=outside)
    values = parts.info.get("parts", {})
    info = {"acc": own.reward, **own.info, "own_reward": own.reward, **({"parts": values} if values else {})}
    try:  # a worker runs foreign code, and may say anything
        shaped = sum(weight * as_reward(values[name]) for name, weight in weights.items())
        reward = as_reward(domain.weight * own.reward + shaped, f"{domain.option}: the weighted sum must be")
    except (ValueError, TypeError, KeyError) as error:
        return replace(own, time_s=time_s, reward=0.0, status="error", info={"error": describe(error)}, outside=outside)
    return Verdict(time_s, own.key, reward, "ok", info, max(own.duration_s, parts.duration_s), outside)


class WorkerScoring:
    """Scores in the worker processes of a `Pool`, which begin to start when this is made."""

    def __init__(self, settings: PoolSettings) -> None:
        self._pool = Pool(settings)

    def warm(self) -> None:
        self._pool.wait_ready()

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> Future[Scored]:
        return self._pool.submit(pickle.dumps(ScoreRequest.of(prompt, sample, limits_s)), prompt.source)

    def step(self) -> bool:
        return False

    def take_metrics(self) -> dict[str, float]:
        kinds = [kind for kind, _ in self._pool.take_notes()]
        return {
            "reward/pool_restarts": float(kinds.count("restarted")),
            "reward/retries": float(kinds.count("retried")),
        }

    def close(self) -> None:
        self._pool.close()


def build_pool(
    config: Config,
    scorer: Scorer,
    log: Path | None = None,
    where: Callable[[SampleKey], str] = describe_sample,
) -> RewardPool:
    """The pool of a run, with its worker processes where anything needs them; an endpoint and the run's devices join.
    It begins to start the workers, and does not wait for them. Raises ValueError where `reward.env` names a variable
    that is not set, or ray is not installed.

    `scorer`: of the worker processes (`jaxrl.rewards.domains.build_scorer`); `log`: the file for what it prints and for
    tracebacks; none: it is dropped; `where`: how warnings name a sample whose reward failed."""
    reward = config.reward
    parts = {name: part.weight for name, part in reward.parts.items()}
    pool = RewardPool(domains(reward), parts=parts, where=where)
    if needs_workers(reward):
        pool.join("workers", WorkerScoring(_worker_settings(config, scorer, log)))
    return pool


def _worker_settings(config: Config, scorer: Scorer, log: Path | None) -> PoolSettings:
    reward, on_ray = config.reward, config.reward.pool == "ray"
    return PoolSettings(
        scorer=pickle.dumps(scorer),
        loads=scorer.loads,
        preload=_libraries(config),
        num_workers=reward.num_workers,
        start_timeout_s=reward.start_timeout_s,
        max_retries=reward.max_retries,
        limits={source: (each.timeout_s, each.timeout_option) for source, each in domains(reward).items()},
        max_memory_gib=reward.max_memory_gib,
        env=named_variables("reward.env", reward.env),
        log=str(log.resolve()) if log is not None else "",
        on_ray=on_ray,
        ray_address=_address_in_use() if on_ray else None,
    )


def _libraries(config: Config) -> tuple[str, ...]:
    """What scorers import, as far as it is not the user's."""
    kinds, task = config.reward.kinds, config.data.task
    by_task = bool(task and kinds & {"auto", "task"})
    by_math = "math" in kinds or ("auto" in kinds and (not task or bool(config.data.val_files)))
    return ("math_verify",) * by_math + ("reasoning_gym",) * by_task


def _address_in_use() -> str | None:
    """The address of the Ray cluster that this process itself uses; None if it uses none."""
    ray = sys.modules.get("ray")
    return ray.get_runtime_context().gcs_address if ray is not None and ray.is_initialized() else None


def named_variables(option: str, names: Sequence[str]) -> dict[str, str]:
    """The variables that `option` names, with their values. Raises ValueError where one is not set."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(f"{option}: the environment has no variable {missing[0]!r}")
    return {name: os.environ[name] for name in names}
