"""`jaxrl explain-config`: counts, steps, and the memory of each phase, before anything is allocated.

`jaxrl sft` and `jaxrl dpo` have no rollout, so their page has the update alone. The bytes are those of
`jaxrl.run.memory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from jaxrl.commands.supervised import method_of
from jaxrl.config import Config
from jaxrl.config.algorithm import uncorrected
from jaxrl.config.checks import host_problem
from jaxrl.config.options import total_steps
from jaxrl.mechanisms import batch_rule, refuse_devices
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import config_of, resolve_path
from jaxrl.models.shapes import SHAPES
from jaxrl.rewards.explained import part_lines, reward_rows
from jaxrl.run.build import refuse_sharing, share_notes, with_planned_update
from jaxrl.run.degree import planned_degree
from jaxrl.run.devices import prepare_jax, with_types
from jaxrl.run.memory import MemoryPlan, memory_plan, memory_problem, update_problem
from jaxrl.run.weights import adapted
from jaxrl.schema.limits import BYTES
from jaxrl.sharding.explain import step_traffic
from jaxrl.sharding.memory import (
    DEFAULT_SHARE,
    DeviceMemory,
    device_bytes,
    in_bytes,
    memory_of,
    share_variable,
)
from jaxrl.sharding.mesh import platform_of
from jaxrl.sharding.rules import padded_config
from jaxrl.training.update_memory import full_microbatch, host_parts, resident_parts, trained_numbers, update_parts


@dataclass(frozen=True, slots=True)
class Explanation:
    """A configuration, worked out; `str()` of it is the page.

    Attributes:
      columns: what `sizes` counts. sizes: by what has them: prompts, samples and tokens (rows, conversations and tokens
        where files are learnt from), each `""` where it says nothing.
      phases: lines about the memory of each phase. memory: of a command with a rollout, the plan that they show.
    """

    summary: tuple[str, ...]
    columns: tuple[str, str, str]
    sizes: Mapping[str, tuple[int | str, int | str, int | str]]
    steps: tuple[str, ...]
    phases: tuple[str, ...]
    details: tuple[str, ...]
    rewards: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    memory: MemoryPlan | None = None

    def __str__(self) -> str:
        sizes = [(name, *(f"{n:,}" if isinstance(n, int) else n for n in row)) for name, row in self.sizes.items()]
        notes = [f"note: {text}" for text in self.warnings]
        parts = (
            self.summary,
            _table(("", *self.columns), *sizes),
            self.steps,
            ("memory per device", *self.phases),
            self.details,
            self.rewards,
            notes,
        )
        return "\n\n".join("\n".join(line.rstrip() for line in part) for part in parts if part)


def explain_config(config: Config, num_devices: int, memory_bytes: int | None, command: str = "train") -> Explanation:
    """Works a configuration out for devices that are here (0) or that many others, without loading weights or data.
    `command`: that reads the configuration, as in `jaxrl.config.checks.as_read`."""
    learns_alone = command in ("sft", "dpo")
    if not learns_alone:
        batch_rule(config)  # its settings may be refused
    devices = [] if num_devices else prepare_jax(config)
    model = adapted(config, SHAPES.get(config.model.path) or config_of(resolve_path(config.model.path)))
    memory = memory_bytes or (device_bytes(devices) if devices else None)
    platform = platform_of(devices[0]) if devices else "gpu"
    notes: list[str] = []
    config = with_types(config, platform, notes.append, command=command)
    num_devices = num_devices or len(devices) * config.hosts.num
    # of devices that are not here, what a CPU's share of a host would be is not known
    each = memory or (memory_of(devices).share if devices else None)
    if learns_alone:
        explained = _explain_learning(config, model, num_devices, DeviceMemory(platform, memory, each or 0), command)
        return replace(explained, warnings=(*explained.warnings, *notes))
    refuse_devices(config, num_devices)
    refuse_sharing(config, num_devices - config.num_own_devices)
    rolling = config.rollout.num_devices or num_devices // config.num_host_groups
    config, chosen = planned_degree(config, model, rolling, memory)
    explained = explain(config, model, num_devices, memory, platform)
    assert explained.memory is not None
    too_large = memory_problem(config, model, explained.memory, num_devices, each) if each else None
    notes += filter(None, (chosen, uncorrected(config)))
    notes += explained.warnings
    if devices:
        notes += share_notes(config, devices)
    elif memory_bytes is not None:
        notes.append(
            f"--device-gib is what JAX is given of a device: {DEFAULT_SHARE:g} of a GPU, unless {share_variable()} in "
            "the run's environment says otherwise"
        )
    refused = [f"a run is refused: {too_large}"] if too_large else []
    return replace(explained, warnings=(*refused, *notes))


def _explain_learning(
    config: Config, model: ModelConfig, num_devices: int, memory: DeviceMemory, command: str
) -> Explanation:
    method, platform = method_of(command, config), memory.platform
    trained = with_planned_update(method.trained(config), model, num_devices, memory)
    actor, rows, length = trained.actor, config.data.train_batch_size, config.max_model_length
    steps = config.trainer.total_training_steps
    full = full_microbatch(trained, model, num_devices, platform)
    resident = resident_parts(trained, model, num_devices)
    update = update_parts(trained, model, num_devices, platform)
    own = trained_numbers(model, 1)
    part = "" if own == model.num_params() else f", {_short(own)} of them trained"
    too_large = memory.share and update_problem(trained, model, num_devices, platform, memory.share)
    sequences = rows * method.examples
    return Explanation(
        summary=(f"{_short(model.num_params())} parameters{part}; {_count(num_devices, 'device')}", method.explained),
        columns=("rows", "conversations", "tokens, at most"),
        sizes={
            "a step, which is an optimizer update": (rows, sequences, sequences * length),
            _microbatch(actor.context_parallel_size): (
                "",
                f"{full.rows * (full.length // length):,} or more",
                full.tokens,
            ),
        },
        steps=(_steps(steps or None),),
        phases=_phases({"update": resident | update}, memory.reported),
        details=(_update_line(trained),),
        warnings=(f"a run is refused: {too_large}",) if too_large else (),
    )


def explain(
    config: Config,
    model: ModelConfig,
    num_devices: int,
    device_bytes: int | None = None,
    platform: str = "gpu",
) -> Explanation:
    """Works out a configuration with a rollout. `platform`: of the devices; it decides from which row length on
    attention runs in tiles."""
    config = config.with_types(platform)
    _refuse_number(config, num_devices)
    data, actor, n, length = config.data, config.actor, config.rollout.n, config.max_model_length
    tp = config.rollout.tp
    rolling = config.num_own_devices or num_devices
    dp, training = rolling // tp, num_devices - config.num_own_devices
    memory = memory_plan(config, model, num_devices, device_bytes, platform)

    full, sharing = full_microbatch(config, model, training, platform), actor.context_parallel_size
    device_samples = full.rows * (full.length // length)
    prompts, mini = data.train_batch_size, config.mini_batch_prompts
    limits = batch_rule(config).limits
    under_way = limits.max_under_way * limits.num_responses
    rows = config.rollout.max_num_seqs * dp
    sizes: dict[str, tuple[int | str, int | str, int | str]] = {"a step": (prompts, prompts * n, prompts * n * length)}
    if under_way != prompts * n:
        sizes["a round has under way, at most"] = (limits.max_under_way, under_way, "")
    sizes["an optimizer update"] = (mini, mini * n, mini * n * length)
    sizes[_microbatch(sharing)] = ("", f"{device_samples:,} or more", full.tokens)
    sizes["rows that decode at once"] = ("", rows, "")

    active, workers = model.num_active_params(), config.num_workers
    of_a_token = "" if active == model.num_params() else f", {_short(active)} of them a token"
    place = "rollout" if memory.shared else f"rollout alone on {dp * tp}:"
    cut = "" if workers == 1 else f", as {workers} workers of dp {memory.worker_devices // tp} × tp {tp}"
    used = memory.resident | memory.rollout if memory.shared else memory.rollout
    phases = {"rollout": used, "update": memory.resident | memory.update}
    phases |= {each.column: {**memory.resident, **each.parts} for each in memory.freed}
    return Explanation(
        summary=(
            f"{_short(model.num_params())} parameters{of_a_token}; {_count(num_devices, 'device')}, {place} dp {dp} × "
            f"tp {tp}{cut}",
        ),
        columns=("prompts", "samples", "tokens, at most"),
        sizes=sizes,
        steps=tuple(_step_lines(config, -(-mini * n // (device_samples * (training // sharing))))),
        phases=_phases(phases, memory.device_bytes),
        details=(
            *_rollout_lines(config, model, memory, under_way),
            *_host_lines(config, model, num_devices),
            *_seconds_lines(config, model, memory, num_devices, platform),
        ),
        rewards=(*_table(*reward_rows(config)), *part_lines(config)),
        warnings=tuple(_warnings(config, memory, rows, under_way)),
        memory=memory,
    )


def _refuse_number(config: Config, num_devices: int) -> None:
    if num_devices % config.hosts.num:
        raise ValueError(
            f"the number of devices ({num_devices}) must be a multiple of hosts.num ({config.hosts.num}): all hosts "
            "have as many"
        )
    if (problem := host_problem(config, num_devices // config.hosts.num)) is not None:
        raise ValueError(problem)


def _step_lines(config: Config, microbatches: int) -> Iterator[str]:
    data, updates = config.data, config.updates_per_step
    evaluated = (data.val_size or 0) * config.rollout.val_kwargs.n if data.task or data.val_files else 0
    yield (
        f"{_count(updates, 'update')} per step, at most {_count(microbatches, 'microbatch')} per update"
        + (f"; {evaluated:,} samples per evaluation" if evaluated else "")
    )
    if config.has_critic:
        updates, prompts = config.critic_updates_per_step, config.critic_mini_batch_prompts
        yield f"critic: {_count(updates, 'update')} per step, of {_count(prompts, 'prompt')} each"
    of_epoch = data.task_size if data.task else None
    steps = _steps(total_steps(config, of_epoch))
    if of_epoch is not None:
        steps += f"; an epoch of {of_epoch:,} prompts takes {of_epoch / data.train_batch_size:,.1f}"
    yield steps


def _rollout_lines(config: Config, model: ModelConfig, memory: MemoryPlan, under_way: int) -> Iterator[str]:
    workers, num_hosts, tp = config.num_workers, config.rollout.hosts_per_worker, config.rollout.tp
    devices = memory.worker_devices
    yield (
        f"KV pool per dp group: {memory.num_blocks:,} blocks (one reserved), {memory.pool_tokens:,} tokens, "
        f"{_count(memory.pool_requests, 'request')} of the longest length"
    )
    if workers > 1:
        dp = devices // tp
        weights, pools = (in_bytes(memory.rollout[name] * devices) for name in ("rollout weights", "KV pool"))
        yield (
            f"each of {workers} workers: {_count(devices, 'device')}, rollout weights of {weights} and KV pools of "
            f"{pools} together,"
        )
        yield (
            f"  rows for {memory.num_rows * dp:,} samples and KV for {memory.pool_requests * dp:,} of the longest "
            f"length; about {-(-under_way // workers):,} of the {under_way:,} samples under way are its own"
        )
    if num_hosts > 1:
        traffic = step_traffic(padded_config(model, tp), tp, num_hosts, BYTES[config.rollout.dtype])
        yield f"a worker spans {num_hosts} hosts; into each come {traffic}"
    yield from (each.line for each in memory.beside if each.line)
    yield _update_line(memory.config)


def _update_line(planned: Config) -> str:
    return f"update: logits of {planned.actor.logprob_chunk_tokens} tokens at a time, remat {planned.actor.remat}"


def _host_lines(config: Config, model: ModelConfig, num_devices: int) -> Iterator[str]:
    if parts := host_parts(config, model, num_devices):
        of_each = " of each host" if config.hosts.num > 1 else ""
        yield f"host memory{of_each}: " + ", ".join(f"{name} {in_bytes(size)}" for name, size in parts.items())


def _seconds_lines(
    config: Config, model: ModelConfig, memory: MemoryPlan, num_devices: int, platform: str
) -> Iterator[str]:
    """A step's seconds on `simulate.hardware`, where every response has half of the tokens that it may have."""
    if platform != "gpu":
        return
    from jaxrl.scheduling.layouts.latency import causal_pairs
    from jaxrl.sim.cost_model import CostModel, TrainLoad
    from jaxrl.sim.hardware import hardware

    rollout, data = config.rollout, config.data
    card, tp = hardware(config.simulate.hardware), rollout.tp
    cost = CostModel(model.base, card, number_bytes=BYTES[rollout.dtype])
    samples, length = data.train_batch_size * rollout.n, data.max_response_length / 2
    prompt = data.max_prompt_length / 2
    groups = (config.num_own_devices or num_devices) // tp
    rows = max(min(rollout.max_num_seqs, memory.pool_requests * 2, -(-samples // groups)), 1)
    waves = samples / groups / rows
    step_s = cost.decode_step_s(tp, rows, rows * (prompt + length / 2))
    rolling_s = waves * length * step_s + cost.weight_sync_s(tp, num_devices)
    tokens, forwards = samples * (prompt + length), (config.actor.old_logprobs == "recompute") + config.needs_ref
    load = TrainLoad(tokens, samples * causal_pairs(prompt + length), config.updates_per_step, forwards)
    update_s = cost.train_step_s(load, num_devices - config.num_own_devices)
    yield (
        f"a step on {card.name}: about {_seconds(rolling_s + update_s)} (rollout {_seconds(rolling_s)}, update "
        f"{_seconds(update_s)}) if responses have {length:,.0f} tokens each,"
    )
    yield "  by the cost model of `jaxrl simulate`, which was 10 to 12 % too slow on one H200"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.0f} min"


def _warnings(config: Config, memory: MemoryPlan, all_rows: int, under_way: int) -> Iterator[str]:
    rows = config.rollout.max_num_seqs
    if memory.pool_requests < rows:
        yield (
            f"the KV pool holds {memory.pool_requests} requests of the longest length, rollout.max_num_seqs is {rows}: "
            "requests will be preempted if many grow long"
        )
    if all_rows > under_way:
        yield (
            f"rollout.max_num_seqs ({rows} per dp group, {all_rows} in all) exceeds the samples of a round "
            f"({under_way}): rows stay empty"
        )


def _phases(phases: Mapping[str, Mapping[str, int]], device_bytes: int | None) -> tuple[str, ...]:
    """The bytes of each phase's parts, as a table."""
    names = dict.fromkeys(name for parts in phases.values() for name in parts)
    rows = [(name, *(in_bytes(each[name]) if name in each else "" for each in phases.values())) for name in names]
    rows.append(("total", *(in_bytes(sum(each.values())) for each in phases.values())))
    if device_bytes is not None:
        rows.append(("of", *[in_bytes(device_bytes)] * len(phases)))
    return tuple(_table(("", *phases), *rows))


def _table(*rows: Iterable[str]) -> list[str]:
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    first = [f"  {cell.ljust(widths[0])}" for cell in columns[0]]
    others = [[cell.rjust(width) for cell in column] for column, width in zip(columns[1:], widths[1:], strict=True)]
    return ["  ".join(row) for row in zip(first, *others, strict=True)]


def _steps(total: int | None) -> str:
    return "number of steps not known before the files are read" if total is None else f"{total:,} steps"


def _microbatch(sharing: int) -> str:
    return "a microbatch, per device" if sharing == 1 else f"a microbatch, per {sharing} devices that share its rows"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def _short(value: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return str(value)
