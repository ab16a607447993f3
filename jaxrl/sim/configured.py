"""The machine, the cost model and the workload that section `simulate` describes, together with what a real run reads.

Every model comes with a sentence about the source of its numbers. Errors name options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl.config import Config, ConfigError
from jaxrl.config.checks import across_hosts, host_problem
from jaxrl.config.inputs import read_json
from jaxrl.config.options import HostsSection
from jaxrl.config.simulation import SimulatedTask
from jaxrl.mechanisms.reward_timeouts import AdaptiveTimeouts
from jaxrl.models.config import ModelConfig
from jaxrl.models.kv_layers import kv_layers
from jaxrl.models.shapes import SHAPES
from jaxrl.scheduling.layouts.batch_state import GroupCapacity, fastest_degree
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import Profile
from jaxrl.scheduling.tokens.plan import Capacity
from jaxrl.schema.limits import BYTES
from jaxrl.sim.cost_model import CostModel, Efficiency, TableCost, modelled_profile
from jaxrl.sim.hardware import hardware
from jaxrl.sim.recorded import RecordedWorkload
from jaxrl.sim.workload import ModelledWorkload

_NODE = 8  # devices, if no option says how many


def with_simulated_hosts(config: Config) -> Config:
    """The configuration with the hosts of section `simulate`, and nothing else of section `hosts` but the devices of
    each. Raises ConfigError for options that exclude several hosts."""
    num_hosts, spanned = config.simulate.num_hosts or config.hosts.num, config.rollout.hosts_per_worker
    if spanned > 1:
        raise ConfigError(
            f"rollout.hosts_per_worker ({spanned}): a worker that spans hosts cannot be simulated; set 1, and "
            "hosts of as many devices as the worker has: only that a step's sums cross hosts is left out then"
        )
    hosts = HostsSection(num=num_hosts, devices_per_host=config.hosts.devices_per_host)
    config = config.replace(hosts=hosts)
    if problems := across_hosts(config, "simulate.num_hosts", "simulate.num_devices"):
        raise ConfigError(*problems)
    return config


def num_devices_of(config: Config) -> int:
    num_hosts = config.hosts.num
    of_hosts = num_hosts * (config.hosts.devices_per_host or _NODE) if num_hosts > 1 else _NODE
    return config.simulate.num_devices or config.trainer.num_devices or of_hosts


def rollout_devices_of(config: Config) -> int:
    """How many devices roll out: all, in turns with training, or only the rollout's own."""
    total, num_hosts = num_devices_of(config), config.hosts.num
    if total % num_hosts:
        raise ConfigError(
            f"simulate.num_devices ({total}) must be a multiple of simulate.num_hosts ({num_hosts}): all hosts have as "
            "many devices"
        )
    problem = host_problem(config, total // num_hosts, "simulate.num_devices")
    if problem is not None:
        raise ConfigError(problem)
    return config.num_own_devices or total


def worker_devices_of(config: Config) -> int:
    return rollout_devices_of(config) // config.num_workers


def model_sizes(config: Config) -> ModelConfig:
    """The shape of `simulate.model` or `model.path`. Raises ConfigError if unknown."""
    option = "simulate.model" if config.simulate.model else "model.path"
    name = (config.simulate.model or config.model.path).removeprefix("random:")
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name).expanduser()
    if (path.is_dir() and (path / "config.json").is_file()) or (path.is_file() and path.suffix == ".json"):
        return ModelConfig.from_hf(path)
    raise ConfigError(
        f"{option} ({name}) must be a folder with a config.json, or one of {', '.join(sorted(SHAPES))}, to simulate "
        "it; set simulate.model where model.path names something else"
    )


def cost_model(config: Config) -> tuple[CostModel, str]:
    """The cost model of section `simulate`, and where its numbers come from."""
    chosen = config.simulate
    machine = _option("simulate.hardware", hardware, chosen.hardware)
    rollout = config.with_types("gpu").rollout
    narrow = 0 if rollout.quantization == "none" else BYTES[rollout.quantization]
    model = model_sizes(config)
    parts = model, machine, Efficiency(), BYTES[rollout.dtype], narrow, rollout.kv_head_bytes(model.head_dim)
    described = f"roofline of {machine.name} data sheet peaks, default efficiency factors"
    if not chosen.profile:
        return CostModel(*parts), described
    predictor = _profiled(config)
    identity = predictor.profile.identity
    measured_on = f"({identity.model} on {identity.device_kind})"
    return TableCost(*parts, predictor=predictor), (
        f"{predictor.profile.source} table {chosen.profile} {measured_on} for decode and prefill; the rest: {described}"
    )


def _profiled(config: Config) -> LatencyPredictor:
    path, tp = Path(config.simulate.profile), config.rollout.tp
    if not path.is_file():
        raise ConfigError(f"simulate.profile ({path}) must be a file of `jaxrl profile`, and there is no such file")
    try:
        predictor = LatencyPredictor(Profile.from_json(read_json(path)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"simulate.profile: {path} is not a latency profile ({error})") from None
    if tp not in predictor.degrees or not any(point.tp == tp for point in predictor.profile.prefill):
        raise ConfigError(
            f"rollout.tensor_model_parallel_size ({tp}) must be a degree that {path} holds decode and prefill times of "
            f"(decode: {', '.join(map(str, predictor.degrees))})"
        )
    return predictor


def _scoring_limit_s(config: Config, task: str) -> float:
    timeouts = AdaptiveTimeouts.configured(config)
    if timeouts is not None and timeouts.has_tests(task):
        return timeouts.rule.max_s
    return config.reward.timeout_s or math.inf


def check_scoring(task: SimulatedTask, timeout_s: float) -> None:
    """Raises ConfigError for scoring that would never end."""
    if task.scoring.hang_share and timeout_s == math.inf:
        raise ConfigError(
            f"simulate.tasks.{task.name}.scoring.hang_share ({task.scoring.hang_share}) needs reward.timeout_s: that "
            "scoring would never end"
        )


def tasks_of(config: Config) -> tuple[SimulatedTask, ...]:
    """The tasks of section `simulate`, in their order."""
    given = config.simulate.tasks
    return tuple(SimulatedTask(name=name, **dict(task)) for name, task in given.items()) or (SimulatedTask(),)


def workload_of(config: Config) -> tuple[ModelledWorkload, str]:
    """The workload of section `simulate`, and where its lengths come from."""
    chosen, seed = config.simulate, config.trainer.seed
    tasks = tasks_of(config)
    if chosen.recorded_run:
        timeout_s = _scoring_limit_s(config, "")
        check_scoring(tasks[0], timeout_s)
        recorded = RecordedWorkload.read(chosen.recorded_run, seed, tasks[0], timeout_s)
        return recorded, (
            f"recorded: {len(recorded.lengths)} responses to {len(recorded.prompts)} prompts of {chosen.recorded_run}, "
            f"drawn by rank; {recorded.num_truncated} of them had reached that run's token limit"
        )
    longest = config.data.max_response_length
    limits_s = [_scoring_limit_s(config, task.name) for task in tasks]
    for task, limit_s in zip(tasks, limits_s, strict=True):
        check_scoring(task, limit_s)
    text = "; ".join(
        f"{task.name} (median {task.response.median:g}, sigma {task.response.sigma:g}, cap {longest} tokens)"
        for task in tasks
    )
    limits = longest, config.data.max_prompt_length, max(limits_s)
    return ModelledWorkload(seed, tasks, *limits), f"modelled: {text}, seed {seed}"


def with_degree(config: Config) -> tuple[Config, str]:
    """The configuration with a number in place of `rollout.tensor_model_parallel_size=auto`, and a sentence about it
    (empty: it has one). The degree is the fastest by the table that step times come from, or by a profile of the
    modelled devices; `rollout.layout.profile` belongs to the real machine and is not read."""
    rollout, data = config.rollout, config.data
    if not config.is_tp_open:
        return config, ""
    possible: dict[int, GroupCapacity] = {}
    refused: ValueError | None = None
    num_devices = worker_devices_of(config.with_tp(1))
    for degree in _option("", rollout.layout.possible_on, num_devices):
        own = config.with_tp(degree)
        try:
            sizes = machine_sizes(own, cost_model(own)[0], model_sizes(own))
        except ValueError as error:
            refused = error  # not in the table, or weights and one request do not fit: another degree may do
            continue
        tokens = sizes.stacks.num_tokens(sizes.num_blocks - 1, sizes.block_size)
        possible[degree] = GroupCapacity(tokens, sizes.num_slots)
    if not possible:
        assert refused is not None, "a machine has a smallest degree"
        raise refused
    own = config.with_tp(min(possible))
    predictor = worker_predictor(own, cost_model(own)[0], tuple(possible))
    rows = -(-data.train_batch_size * rollout.n // config.num_workers)
    chosen = fastest_degree(predictor, possible, rows, data.max_prompt_length, data.max_response_length)
    return config.with_tp(chosen.degree), (
        f"rollout.tensor_model_parallel_size: auto is {chosen.degree} (a batch of {rows} longest samples decodes in "
        f"{chosen})"
    )


def machine(config: Config) -> tuple[CostModel, dict[int, Capacity]]:
    """The cost model, and the sizes of a worker's executor by the TP degrees of its layouts. Raises ValueError for a
    configuration that cannot be simulated."""
    cost = cost_model(config)[0]
    return cost, layout_sizes(config, cost, model_sizes(config))


def _option(place: str, make: Callable[..., Any], *values: Any, **options: Any) -> Any:
    """`make(...)`; its ValueError names the option at `place`, or where that is empty names it itself."""
    try:
        return make(*values, **options)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}" if place else str(error)) from None


def machine_sizes(config: Config, cost: CostModel, model: ModelConfig | None = None) -> Capacity:
    """The sizes of a worker's executor; the KV pool as `jaxrl.run.memory.plan_num_blocks` sizes a real one. `model`:
    for the training state beside the pool; None: only what `cost` counts."""
    rollout = config.rollout
    kv = kv_layers(cost.model, config.max_model_length, rollout.max_num_batched_tokens, rollout.decode_steps)
    num_devices = worker_devices_of(config)
    sizes = Capacity(
        num_groups=num_devices // rollout.tp,
        num_slots=rollout.max_num_seqs,
        num_blocks=rollout.num_blocks,
        block_size=rollout.block_size,
        max_prefill_tokens=rollout.max_num_batched_tokens,
        stacks=kv.stacks,
    )
    if rollout.num_blocks:
        return sizes
    per_request = kv.stacks.most_blocks(config.max_model_length, rollout.block_size)
    size, state = BYTES[config.actor.param_dtype], config.actor.optim.state_dtype
    moments = {"float32": size, "bfloat16": 2, "int8": 1 + 4 / 256}[state] * (not config.actor.offload_optimizer)
    # master weights, Adam's moments, reference
    each = size + 2 * moments + size * (config.needs_ref and not config.actor.offload_reference)
    resident = 0 if model is None or rollout.num_devices else each * model.num_params() / rollout_devices_of(config)
    fitting = cost.num_kv_blocks(rollout.tp, rollout.block_size, rollout.memory_fraction, resident, kv.size)
    if fitting < per_request + 1:
        raise ConfigError(
            f"rollout.memory_fraction ({rollout.memory_fraction}) leaves {fitting} KV blocks beside weights and "
            f"training state, but one request of {config.max_model_length} tokens needs {per_request} and the pool one "
            "more: lower data.max_response_length, raise rollout.tensor_model_parallel_size or simulate.num_devices, "
            "or set actor.offload_optimizer"
        )
    return replace(sizes, num_blocks=min(fitting, rollout.max_num_seqs * per_request + 1))


def layout_sizes(config: Config, cost: CostModel, model: ModelConfig | None = None) -> dict[int, Capacity]:
    """`machine_sizes` by TP degree, of the layouts that `rollout.layout` may use; rows and blocks as
    `jaxrl.run.memory.layout_sizes` scales them."""
    rollout, num_devices, tp = config.rollout, worker_devices_of(config), config.rollout.tp
    found: dict[int, Capacity] = {}
    degrees = _option("", rollout.layout.degrees_on, tp, num_devices)
    for degree in degrees:
        rows, blocks = rollout.layout.scaled(rollout.max_num_seqs, rollout.num_blocks, tp, degree)
        own = rollout.replace(tensor_model_parallel_size=degree, max_num_seqs=rows, num_blocks=blocks)
        found[degree] = machine_sizes(config.replace(rollout=own), cost, model)
        pool = found[degree].num_blocks, rollout.block_size, config.max_model_length
        _option("", found[degree].stacks.refuse_small, *pool, degree, degrees)
    return found


def worker_predictor(config: Config, cost: CostModel, degrees: Sequence[int]) -> LatencyPredictor:
    """Predicts a worker's steps, over the table that step times come from, or over a profile of the modelled devices.
    `rollout.layout.profile` belongs to the real machine and is not read."""
    options, num_devices = config.rollout.layout, worker_devices_of(config)
    if config.simulate.profile:
        table = _profiled(config).profile  # of one dp group, for any number of groups
        missing = sorted(set(degrees) - set(table.degrees))
        if missing:
            raise ConfigError(
                f"rollout.layout.degrees: simulate.profile ({config.simulate.profile}) holds tp "
                f"{', '.join(map(str, table.degrees))}, and rounds may use {missing[0]} as well"
            )
        identity = replace(table.identity, device_count=num_devices)
        return LatencyPredictor(_option("simulate.profile", replace, table, identity=identity), options)
    rows, name = config.data.train_batch_size * config.rollout.n, f"{num_devices} x {config.simulate.hardware}"
    return LatencyPredictor(modelled_profile(cost, name, degrees, num_devices, rows, config.max_model_length), options)
