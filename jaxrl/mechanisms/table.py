"""Which options make which mechanisms, and which of them go together: the one file that knows them all.

Purpose: `ROOMS` has what each declares (`jaxrl.mechanisms.room`), from which `composition_problem` follows;
`batch_rule`, `of_run` and `of_simulation` make what a configuration asks for, and `rollout_memory` and `freed_memory`
say what it takes. docs/mechanisms.md lists them for readers, each with a page; docs/rollout-rules.md says which batch
rules combine.

Imports no jax before a run is built: what can be refused is refused before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from jaxrl.config import Config, ConfigError
from jaxrl.mechanisms.adaptive_layouts import declaration as adaptive_layouts
from jaxrl.mechanisms.dynamic_sampling import build as build_dynamic_sampling
from jaxrl.mechanisms.dynamic_sampling import declaration as dynamic_sampling
from jaxrl.mechanisms.judge import declaration as judge
from jaxrl.mechanisms.judge.endpoint import join_endpoint
from jaxrl.mechanisms.judge.verdict_text import refuse_fields
from jaxrl.mechanisms.one_step_off import declaration as one_step_off
from jaxrl.mechanisms.over_provisioning import build as build_over_provisioning
from jaxrl.mechanisms.over_provisioning import declaration as over_provisioning
from jaxrl.mechanisms.partial_rollout import build as build_partial_rollout
from jaxrl.mechanisms.partial_rollout import declaration as partial_rollout
from jaxrl.mechanisms.ranking_groups import declaration as ranking_groups
from jaxrl.mechanisms.reward_timeouts import build as build_reward_timeouts
from jaxrl.mechanisms.reward_timeouts import declaration as reward_timeouts
from jaxrl.mechanisms.room import FreedMemory, RolloutMemory, Room
from jaxrl.mechanisms.speculation import declaration as speculation
from jaxrl.mechanisms.stream_trainer import declaration as stream_trainer
from jaxrl.mechanisms.tail_batching import build as build_tail_batching
from jaxrl.mechanisms.tail_batching import declaration as tail_batching
from jaxrl.mechanisms.turns import declaration as turns
from jaxrl.rewards.pool_base import RewardPool, describe_sample
from jaxrl.rewards.request import ScoreRequest
from jaxrl.scheduling.mechanism import Mechanism
from jaxrl.scheduling.rounds.batches import BatchRule, FreshBatches
from jaxrl.scheduling.rounds.race import BatchSettings
from jaxrl.schema.limits import FloatType
from jaxrl.types import SampleKey

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxrl.data.tokenizer import Tokenizer
    from jaxrl.mechanisms.parts import RunParts
    from jaxrl.mechanisms.simulated_parts import SimulatedParts
    from jaxrl.mechanisms.turns.pool import EnvironmentPool
    from jaxrl.models.config import ModelConfig
    from jaxrl.report.curves import PagePart
    from jaxrl.rollout.executor import MeshExecutor
    from jaxrl.rollout.proposals import Proposer
    from jaxrl.rollout.remote import RemoteExecutor
    from jaxrl.scheduling.layouts.latency_profile import Profile
    from jaxrl.scheduling.tokens.plan import VerifyRule
    from jaxrl.sim.cost_model import CostModel
    from jaxrl.sim.scoring import DeviceScoring
    from jaxrl.sim.verification import Proposals
    from jaxrl.sim.workload import Workload

T = TypeVar("T")

ROOMS: tuple[Room, ...] = (
    tail_batching.ROOM,
    partial_rollout.ROOM,
    over_provisioning.ROOM,
    dynamic_sampling.ROOM,
    one_step_off.ROOM,
    ranking_groups.ROOM,
    stream_trainer.ROOM,
    adaptive_layouts.ROOM,
    speculation.ROOM,
    reward_timeouts.ROOM,
    judge.ROOM,
    turns.ROOM,
)

RULES = (
    (tail_batching.ROOM, build_tail_batching.rule),
    (partial_rollout.ROOM, build_partial_rollout.rule),
    (over_provisioning.ROOM, build_over_provisioning.rule),
)
"""The batch rules of mechanisms, of which a run has one at the most."""


def rooms_of(config: Config) -> list[Room]:
    """The mechanisms that a configuration asks for."""
    return [room for room in ROOMS if room.is_on(config)]


def composition_problem(config: Config) -> str | None:
    """Why mechanisms do not go together, or with other options, as a sentence; None if they do."""
    return next(_problems(config), None)


def _problems(config: Config) -> Iterator[str]:
    on = rooms_of(config)
    for what in dict.fromkeys(what for room in on for what in sorted(room.decides)):
        rivals = [room.name for room in on if what in room.decides]
        if len(rivals) > 1:
            yield f"{' and '.join(rivals)} exclude each other: each decides {what}"
    racing = [room.name for room in on if room.races]
    for room in on:
        problem = room.problem(config, racing)
        if problem is not None:
            yield problem
        if config.rollout.hosts_per_worker > 1 and room.excludes_spanning:
            yield (
                f"{room.option} excludes rollout.hosts_per_worker ({config.rollout.hosts_per_worker}): "
                f"{room.excludes_spanning}"
            )
        for what, why in room.relies_on.items():
            for other in on:
                if what in other.changes:
                    yield f"{room.option} excludes {other.option}: {why}"


def is_timeless(config: Config) -> bool:
    """Whether a round brings the same batch whichever of its responses end first; so a clock may decide where and when
    they run."""
    return not any(room.races or room.orders for room in rooms_of(config))


def batch_rule(config: Config) -> BatchRule:
    """A new rule, with nothing carried. Raises ConfigError for settings that exclude each other."""
    problem = composition_problem(config)
    if problem is not None:
        raise ConfigError(problem)
    try:
        batch = BatchSettings(
            config.data.train_batch_size,
            config.rollout.n,
            config.reward.score_when,
            build_dynamic_sampling.group_filter(config),
            config.rollout.max_active_requests,
            version_lag=int(config.trainer.one_step_off),
            max_response_length=config.data.max_response_length,
        )
        for room, rule in RULES:
            if room.is_on(config):
                return rule(config, batch)
        return FreshBatches(batch)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def proposer(config: Config, platform: str) -> Proposer | None:
    """What proposes the tokens that steps verify, for executors on these devices; None: nothing does."""
    from jaxrl.mechanisms.speculation import build

    return build.proposer(config, platform)


def verify_rule(
    config: Config,
    executor: MeshExecutor | RemoteExecutor,
    profile: Profile | None,
    row_sizes: Mapping[int, Sequence[int]] | None,
) -> Callable[[], VerifyRule] | None:
    """Makes what says which plans of an executor verify; None: none does. `profile`: of the run, where one is read."""
    from jaxrl.mechanisms.speculation import build

    return build.verify_rule(config, executor, profile, row_sizes)


def simulated_proposals(config: Config, workload: Workload) -> Proposals | None:
    """What proposes tokens on simulated devices; None: nothing does."""
    from jaxrl.mechanisms.speculation import simulated

    return simulated.proposals(config, workload)


def simulated_turn_end(config: Config, workload: Workload) -> Callable[[SampleKey, int, int], int] | None:
    """Where simulated responses end their turns (`jaxrl.sim.executor.SimulatedExecutor`); None: they have one."""
    if not turns.ROOM.is_on(config):
        return None
    from jaxrl.mechanisms.turns.simulated import turn_model

    return turn_model(config, workload).end


def simulated_verify_rule(config: Config, cost: CostModel) -> Callable[[], VerifyRule] | None:
    """Makes what says which plans of a simulated worker verify; None: none does."""
    from jaxrl.mechanisms.speculation import simulated

    return simulated.verify_rule(config, cost)


def reads_profile(config: Config) -> bool:
    """Whether a mechanism reads `rollout.layout.profile`."""
    return any(room.reads_profile(config) for room in ROOMS)


def notes(config: Config) -> list[str]:
    """What a start says about the mechanisms that it has."""
    return [note for room in ROOMS if (note := room.note(config)) is not None]


def refuse_devices(config: Config, num_devices: int) -> None:
    """Raises ConfigError for a run's devices if a mechanism cannot have them."""
    for room in rooms_of(config):
        if (problem := room.devices_problem(num_devices)) is not None:
            raise ConfigError(problem)


def float_types(config: Config) -> list[FloatType]:
    """In which mechanisms compute, beside those of the policy."""
    return [each for room in rooms_of(config) for each in room.float_types(config)]


def rollout_memory(config: Config, num_devices: int, platform: str, weight_bytes: int) -> list[RolloutMemory]:
    """What mechanisms have on the rollout's devices, so many on a host, each with weights of so many bytes. Raises
    ValueError where one cannot work with the memory that it may have."""
    from jaxrl.mechanisms.judge import memory as memory_of_judge
    from jaxrl.mechanisms.ranking_groups import memory as memory_of_ranking_groups
    from jaxrl.mechanisms.speculation import memory as memory_of_speculation

    return _there(
        memory_of_ranking_groups.rollout_memory(config, weight_bytes, is_timed=is_timeless(config)),
        memory_of_speculation.rollout_memory(config, platform),
        memory_of_judge.rollout_memory(config, num_devices),
    )


def freed_memory(
    config: Config, model: ModelConfig, num_devices: int, platform: str, remat: str, chunk: int
) -> list[FreedMemory]:
    """What mechanisms have on devices that leave the rollout early; the arguments are those of
    `jaxrl.train.update_memory.update_phases`."""
    from jaxrl.mechanisms.stream_trainer import memory as memory_of_stream_trainer

    return _there(memory_of_stream_trainer.freed_memory(config, model, num_devices, platform, remat, chunk))


def refuse_unread(config: Config) -> None:
    """Raises ValueError for files of mechanisms that cannot be used; no weight is read."""
    from jaxrl.mechanisms.judge.build import read_judge

    if judge.ROOM.is_on(config):
        read_judge(config)


def page_parts() -> list[PagePart]:
    """What mechanisms add to a run's page, in its order."""
    from jaxrl.mechanisms.adaptive_layouts import report as adaptive_layouts_report
    from jaxrl.mechanisms.ranking_groups import report as ranking_groups_report
    from jaxrl.mechanisms.speculation import report as speculation_report
    from jaxrl.mechanisms.tail_batching import report as tail_batching_report

    return [
        tail_batching_report.PART,
        speculation_report.PART,
        ranking_groups_report.PART,
        adaptive_layouts_report.PART,
    ]


def refuse_requests(config: Config, requests: Iterable[ScoreRequest]) -> None:
    """Raises ConfigError for data of which a mechanism can score nothing."""
    refuse_fields(config, requests)


def join_pools(config: Config, pool: RewardPool, where: Callable[[SampleKey], str] = describe_sample) -> None:
    """Has mechanisms score what a run's pool has for them. `where`: as in `jaxrl.rewards.pool.build_pool`. Raises
    ValueError for an option that names a variable of the environment that is not set."""
    join_endpoint(config, pool, where)


def environments(config: Config, log: Path | None = None) -> EnvironmentPool | None:
    """The processes of a run's environments, which begin to start; None: it has none. `log`: the file for what they
    print. Raises ValueError for a file that cannot be read."""
    if not turns.ROOM.is_on(config):
        return None
    from jaxrl.mechanisms.turns.pool import EnvironmentPool

    return EnvironmentPool(config, log)


def of_evaluation(
    config: Config,
    mesh: Mesh,
    quiet: Callable[[], None],
    pool: RewardPool,
    tokenizer: Tokenizer,
    acting: EnvironmentPool | None,
) -> list[Mechanism]:
    """Those of an evaluation alone, which score on its devices, and answer turns. `quiet`: waits for what else runs
    there."""
    from jaxrl.mechanisms.judge.build import build_beside
    from jaxrl.mechanisms.turns import build as build_turns

    return [
        *_there(build_beside(config, mesh, quiet, pool)),
        *([] if acting is None else build_turns.build(config, acting, tokenizer)),
    ]


def of_run(parts: RunParts) -> list[Mechanism]:
    """The mechanisms of a real run, in the order in which they are called."""
    from jaxrl.mechanisms.adaptive_layouts import build as build_adaptive_layouts
    from jaxrl.mechanisms.judge import build as build_judge
    from jaxrl.mechanisms.one_step_off import build as build_one_step_off
    from jaxrl.mechanisms.ranking_groups import build as build_ranking_groups
    from jaxrl.mechanisms.speculation import build as build_speculation
    from jaxrl.mechanisms.stream_trainer import build as build_stream_trainer
    from jaxrl.mechanisms.turns import build as build_turns

    acting, told = parts.environments, (parts.journal, parts.timeline, parts.tell_waiting, parts.notes)
    turns_of_run = [] if acting is None else build_turns.build(parts.config, acting, parts.tokenizer, *told)
    return _there(
        *turns_of_run,
        build_judge.build(parts),
        build_adaptive_layouts.build(parts),
        build_stream_trainer.build(parts),
        build_speculation.build(parts),
        build_ranking_groups.build(parts),
        build_reward_timeouts.build(parts.config),
        build_one_step_off.build(parts),
    )


def simulated_scoring(config: Config, occupy: Callable[[int, int], int]) -> DeviceScoring:
    """What scores on the devices of a simulated rollout. `occupy`: as in `DeviceScoring`."""
    from jaxrl.mechanisms.judge.simulated import scoring

    return scoring(config, occupy)


def of_simulation(parts: SimulatedParts) -> list[Mechanism]:
    """The same of a simulated run."""
    from jaxrl.mechanisms.one_step_off import simulated as simulated_one_step_off
    from jaxrl.mechanisms.ranking_groups import simulated as simulated_ranking_groups
    from jaxrl.mechanisms.speculation import simulated as simulated_speculation
    from jaxrl.mechanisms.stream_trainer import simulated as simulated_stream_trainer
    from jaxrl.mechanisms.turns import simulated as simulated_turns

    return _there(
        simulated_turns.build(parts),
        parts.layouts,
        simulated_stream_trainer.build(parts),
        simulated_speculation.build(parts),
        simulated_ranking_groups.build(parts),
        parts.timeouts,
        simulated_one_step_off.build(parts),
    )


def _there(*found: T | None) -> list[T]:
    return [each for each in found if each is not None]
