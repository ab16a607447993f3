"""What the reward pools share: what a pool is, and the ways in which a sample fails."""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

from jaxrl.rewards.scorers import Scored
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, Sample, SampleKey


def timed_out(limit_s: float) -> Scored:
    return "timeout", 0.0, {"error": f"no score within {limit_s:g} s"}, limit_s


def crashed(why: str, times: int = 1, *, is_silent: bool = False) -> Scored:
    """`times`: how often it happened to the sample. `is_silent`: what scored it said nothing for too long."""
    timeouts = {"timeouts": {"watchdog": 1}} if is_silent else {}
    return "crash", 0.0, {"error": why if times == 1 else f"{why} ({times} times in a row)", **timeouts}, 0.0


def verdict_of(time_s: float, key: SampleKey, scored: Scored) -> Verdict:
    """The verdict on a sample. A scorer says that a clock decided it with `cut_off` above 0 in its info, and that
    something outside the run did with `outside` true."""
    status, reward, info, duration_s = scored
    cut_off = info.get("cut_off", 0)
    outside = info.get("outside") is True or (type(cut_off) in (int, float) and cut_off > 0)
    return Verdict(time_s, key, reward, status, info, duration_s, outside)


class RewardPool(Protocol):
    """Scores samples in the background. Used from one thread."""

    def warm(self) -> None:
        """Waits until the workers have loaded the scorer. Raises ValueError where it cannot be loaded, with a
        sentence that names the option, and the file and line if it is the user's; RunFailed: no workers can be
        started."""
        ...

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        """Queues a finished sample; returns at once. Exactly one verdict follows, unless it is cancelled.
        `limits_s`: as in `jaxrl.rewards.scorers.ScoreRequest`."""
        ...

    def cancel(self, keys: Collection[SampleKey]) -> None:
        """No verdict follows on those of these samples that were submitted before. Their scoring may go on without
        being read: the worker is free again when it ends or times out."""
        ...

    def completed(self) -> list[Verdict]:
        """The verdicts that have come in since the last call; never waits."""
        ...

    def wait(self, timeout_s: float | None = None) -> list[Verdict]:
        """Waits for at least one verdict; empty when nothing is pending or the time is up."""
        ...

    @property
    def num_pending(self) -> int: ...

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call: `reward/{num_scored,errors,timeouts,crashes,pool_restarts,retries,seconds}`."""
        ...

    def close(self) -> None: ...


def describe_sample(key: SampleKey) -> str:
    text = f"epoch {key.epoch}, prompt {key.prompt_index}, sample {key.sample_index}"
    return f"{text}, attempt {key.attempt}" if key.attempt else text


Ended = queue.SimpleQueue[tuple[int, Scored, float]]
"""(number, result of scoring, time) of samples, in the order in which their scoring ended."""


T = TypeVar("T")


def taken(queued: queue.SimpleQueue[T]) -> list[T]:
    """What is in a queue; never waits."""
    found: list[T] = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(queued.get_nowait())
    return found


def wait_for(
    pool: RewardPool,
    ended: Ended,
    verdict: Callable[[int, Scored, float], list[Verdict]],
    check: Callable[[], None],
    timeout_s: float | None,
) -> list[Verdict]:
    """`RewardPool.wait` of a pool to which another thread says what has ended; `check` raises when that is gone."""
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    verdicts = pool.completed()
    while pool.num_pending and not verdicts and (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            verdicts = verdict(*ended.get(timeout=min(left, 1.0)))
        check()
        verdicts += pool.completed()
    return verdicts
