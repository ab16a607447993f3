"""The mechanisms, and which of them go together: the only place that lists them.

docs/mechanisms.md has a page for each; docs/rollout-rules.md says which batch rules combine. `composition_problem`
follows from what each declares (`jaxrl.scheduling.mechanism.Mechanism`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts
from jaxrl.mechanisms.dynamic_sampling import DynamicSampling
from jaxrl.mechanisms.judge import Judge
from jaxrl.mechanisms.one_step_off import OneStepOff
from jaxrl.mechanisms.over_provisioning import OverProvisioning
from jaxrl.mechanisms.partial_rollout import PartialRollout
from jaxrl.mechanisms.ranking_groups import RankingGroups
from jaxrl.mechanisms.reward_timeouts import AdaptiveTimeouts
from jaxrl.mechanisms.speculation import Speculation
from jaxrl.mechanisms.stream_trainer import StreamTrainer
from jaxrl.mechanisms.tail_batching import TailBatching
from jaxrl.mechanisms.turns import Turns
from jaxrl.scheduling.mechanism import Mechanism
from jaxrl.scheduling.rounds.batches import BatchRule, FreshBatches
from jaxrl.scheduling.rounds.round import BatchSettings

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.report.curves import PagePart
    from jaxrl.run.run import Run

MECHANISMS: tuple[type[Mechanism], ...] = (
    TailBatching,
    PartialRollout,
    OverProvisioning,
    DynamicSampling,
    Turns,
    Judge,
    AdaptiveLayouts,
    StreamTrainer,
    Speculation,
    RankingGroups,
    AdaptiveTimeouts,
    OneStepOff,
)
"""In the order in which their hooks are called."""


def enabled(config: Config) -> list[type[Mechanism]]:
    return [each for each in MECHANISMS if each.is_on(config)]


def composition_problem(config: Config) -> str | None:
    """Why mechanisms do not go together, or with other options, as a sentence; None if they do."""
    return next(_problems(config), None)


def _problems(config: Config) -> Iterator[str]:
    on = enabled(config)
    for what in dict.fromkeys(what for each in on for what in sorted(each.decides)):
        rivals = [each.title for each in on if what in each.decides]
        if len(rivals) > 1:
            yield f"{' and '.join(rivals)} exclude each other: each decides {what}"
    racing = [each.title for each in on if each.races]
    for each in on:
        if (problem := each.problem(config, racing)) is not None:
            yield problem
        if config.rollout.hosts_per_worker > 1 and each.excludes_spanning:
            yield (
                f"{each.option} excludes rollout.hosts_per_worker ({config.rollout.hosts_per_worker}): "
                f"{each.excludes_spanning}"
            )
        for what, why in each.relies_on.items():
            for other in on:
                if what in other.changes:
                    yield f"{each.option} excludes {other.option}: {why}"


def refuse_devices(config: Config, num_devices: int) -> None:
    """Raises ConfigError for a run's devices where a mechanism does not work on them."""
    from jaxrl.config import ConfigError

    for each in enabled(config):
        if (problem := each.devices_problem(num_devices)) is not None:
            raise ConfigError(problem)


def is_timeless(config: Config) -> bool:
    """Whether a round brings the same batch whichever of its responses end first; so a clock may decide where and when
    they run."""
    return not any(each.races or each.orders for each in enabled(config))


def batch_rule(config: Config) -> BatchRule:
    """A new rule, with nothing carried. Raises ConfigError for settings that exclude each other."""
    from jaxrl.config import ConfigError

    problem = composition_problem(config)
    if problem is not None:
        raise ConfigError(problem)
    try:
        batch = BatchSettings(
            config.data.train_batch_size,
            config.rollout.n,
            config.reward.score_when,
            DynamicSampling.of_config(config),
            version_lag=int(config.trainer.one_step_off),
            max_response_length=config.data.max_response_length,
        )
        rules = (each.batch_rule(config, batch) for each in enabled(config))
        return next((rule for rule in rules if rule is not None), FreshBatches(batch))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def page_parts() -> list[PagePart]:
    return [part for each in MECHANISMS if (part := each.page_part()) is not None]


def build_mechanisms(run: Run, *, evaluates: bool = False) -> tuple[Mechanism, ...]:
    """The mechanisms of a run; `evaluates`: of an evaluation alone."""
    built = (each.build(run) for each in MECHANISMS if each.evaluates or not evaluates)
    return tuple(each for each in built if each is not None)
