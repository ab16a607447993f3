"""The reward router: one pool over several, by domain, with one verdict for each sample.

A prompt's source names its domain (`reward.domains`), and a domain's kind says where its samples are scored: in worker
processes, by an endpoint, or by a model on the run's devices. `RewardRouter` sends each sample there, adds the parts of
its reward, and scores it again after a fault of the infrastructure.

A pool that joins knows nothing of domains, weights and parts: it returns the scorer's own reward. A verdict of it with
the status `crash` says that nothing was learnt of the response, and is asked for again, at most `reward.max_retries`
times; pools of worker processes do that themselves.

Source: RollPacker §4.3 (rewards of several kinds beside the rollout). Departure: its workers belong to a kind of reward
each; here a worker process holds the scorers of all domains.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jaxrl.config.domains import Domain
from jaxrl.config.rewards import Place
from jaxrl.rewards.reward_metrics import timeouts_of
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, Sample, SampleKey

if TYPE_CHECKING:
    from jaxrl.rewards.reward_pool import RewardPool

_LOOK_S = 0.01  # how long to wait for one of several pools before looking at the next


@dataclass(slots=True)
class _Pending:
    prompt: Prompt
    sample: Sample
    limits_s: tuple[float, ...]
    domain: Domain
    places: tuple[Place, ...]  # the first is where it is scored; another adds its parts
    came: dict[Place, Verdict] = field(default_factory=dict)
    retries: int = 0


class RewardRouter:
    """Implements `jaxrl.rewards.reward_pool.RewardPool`.

    Args:
      workers: the pool of worker processes, which also score parts; None without any.
      parts: names of the parts of a reward, which the workers add.
      max_retries: times that another pool's sample is scored again.
    """

    def __init__(
        self, domains: Mapping[str, Domain], workers: RewardPool | None, *, parts: Collection[str], max_retries: int
    ) -> None:
        self._domains, self._parts, self._max_retries = domains, parts, max_retries
        self._pools: dict[Place, RewardPool] = {} if workers is None else {"workers": workers}
        self._pending: dict[SampleKey, _Pending] = {}
        self._retries = 0  # since `take_metrics` was last called

    def join(self, place: Place, pool: RewardPool) -> None:
        """Has `pool` score the domains of this place. It is closed with the router."""
        assert place not in self._pools, f"{place} has a pool"
        self._pools[place] = pool

    @property
    def places(self) -> set[Place]:
        return {domain.place for domain in self._domains.values()}

    def warm(self) -> None:
        for pool in self._pools.values():
            pool.warm()

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        domain = self._domains.get(prompt.source) or self._domains[""]
        places: tuple[Place, ...] = (domain.place,)
        if self._parts and domain.place != "workers":
            places += ("workers",)
        self._pending[sample.key] = _Pending(prompt, sample, limits_s, domain, places)
        for place in places:
            assert place in self._pools, f"nothing scores what {domain.option}.kind={domain.kind} asks for"
            self._pools[place].submit(prompt, sample, limits_s)

    def cancel(self, keys: Collection[SampleKey]) -> None:
        for key in keys:
            self._pending.pop(key, None)
        for pool in self._pools.values():
            pool.cancel(keys)

    def completed(self) -> list[Verdict]:
        return [each for place, pool in self._pools.items() for each in self._take(place, pool.completed())]

    def wait(self, timeout_s: float | None = None) -> list[Verdict]:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        verdicts = self.completed()
        while self._pending and not verdicts and (left := deadline - time.monotonic()) > 0:
            busy: list[Place] = [place for place, pool in self._pools.items() if pool.num_pending]
            assert busy, "samples wait for verdicts, and no pool has them"
            alone = len(busy) == 1
            for place in busy:
                limit_s = left if alone else min(left, _LOOK_S)
                verdicts += self._take(place, self._pools[place].wait(None if math.isinf(limit_s) else limit_s))
        return verdicts

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def take_metrics(self) -> dict[str, float]:
        """What the pools count together, and the router's own retries. A sample whose parts another pool adds has a
        verdict of each; whole verdicts are counted by `jaxrl.rewards.reward_metrics`."""
        measured: dict[str, float] = {}
        for pool in self._pools.values():
            for name, value in pool.take_metrics().items():
                measured[name] = measured.get(name, 0.0) + value
        measured["reward/retries"] = measured.get("reward/retries", 0.0) + self._retries
        self._retries = 0
        return measured

    def close(self) -> None:
        self._pending.clear()
        with ExitStack() as stack:
            for pool in self._pools.values():
                stack.callback(pool.close)

    def _take(self, place: Place, verdicts: list[Verdict]) -> list[Verdict]:
        """Notes a pool's verdicts; returns those of samples that have all of theirs."""
        ready: list[Verdict] = []
        for verdict in verdicts:
            pending = self._pending.get(verdict.key)
            if pending is None:
                continue
            if verdict.status == "crash" and place != "workers" and pending.retries < self._max_retries:
                pending.retries += 1
                self._retries += 1
                self._pools[place].submit(pending.prompt, pending.sample, pending.limits_s)
                continue
            pending.came[place] = verdict
            if len(pending.came) == len(pending.places):
                del self._pending[verdict.key]
                ready.append(combined(pending.domain, *(pending.came[each] for each in pending.places)))
        return ready


def combined(domain: Domain, scored: Verdict, parts: Verdict | None = None) -> Verdict:
    """One verdict of a domain's own and of what the worker processes made of the parts.

    Worker processes weight and add themselves (`jaxrl.rewards.domains`). A sample of which one half failed has failed.
    """
    if domain.place == "workers" or scored.status != "ok":
        return scored
    if parts is None:
        if domain.weight == 1:
            return scored
        info = {"acc": scored.reward, **scored.info, "own_reward": scored.reward}
        return replace(scored, reward=domain.weight * scored.reward, info=info)
    outside, time_s = scored.outside or parts.outside, max(scored.time_s, parts.time_s)
    if parts.status != "ok":
        limits = dict(timeouts_of(scored) + timeouts_of(parts))
        info = {**parts.info, "timeouts": limits} if limits else parts.info
        return replace(parts, time_s=time_s, info=info, outside=outside)
    return Verdict(
        time_s,
        scored.key,
        domain.weight * scored.reward + parts.reward,
        "ok",
        {"acc": scored.reward, **scored.info, "own_reward": scored.reward, **parts.info},
        max(scored.duration_s, parts.duration_s),
        outside,
    )
