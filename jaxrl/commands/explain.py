"""What follows from a configuration before anything is allocated: counts, steps, and the memory of both phases; of
`jaxrl sft` and `jaxrl dpo`, which have no rollout, of the update.

Purpose: `jaxrl explain-config`.

Source: docs/architecture.md (The mesh, Memory phases); the bytes are `jaxrl.runtime.memory`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from annotated_types import Interval

from jaxrl.commands.supervised import method_of
from jaxrl.config import Config
from jaxrl.config.checks import host_problem
from jaxrl.config.options import total_steps
from jaxrl.config.rollout_correction import uncorrected
from jaxrl.mechanisms import batch_rule, refuse_devices
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import config_of, resolve_path
from jaxrl.models.shapes import SHAPES
from jaxrl.rewards.explained import part_lines, reward_rows
from jaxrl.runtime.build import refuse_sharing, share_notes, with_planned_update
from jaxrl.runtime.degree import planned_degree
from jaxrl.runtime.devices import prepare_jax, with_types
from jaxrl.runtime.memory import MemoryPlan, memory_plan, memory_problem, update_problem
from jaxrl.runtime.weights import adapted
from jaxrl.schema.declared import Declared, number_problem
from jaxrl.schema.devices import MAX_DEVICES
from jaxrl.schema.limits import BYTES
from jaxrl.sharding.memory import (
    DEFAULT_SHARE,
    DeviceMemory,
    device_bytes,
    in_bytes,
    memory_of,
    memory_share,
    share_variable,
)
from jaxrl.sharding.mesh import platform_of
from jaxrl.sharding.rules import padded_config
from jaxrl.sharding.traffic import step_traffic
from jaxrl.train.update_memory import full_microbatch, resident_parts, trained_numbers, update_parts

MAX_MEMORY_BYTES = 1 << 50  # a million GiB
_UNKNOWN_STEPS = "number of steps not known before the files are read"


@dataclass(frozen=True, slots=True)
class Counts:
    """Sizes of a step. A name ends with its unit; `max_` stands where the size depends on the lengths drawn."""

    step_prompts: int
    step_samples: int
    launched_prompts: int  # under way at once in a round, as far as rows allow; some rules launch more than a step
    launched_samples: int
    step_max_response_tokens: int
    step_max_tokens: int
    update_prompts: int  # one optimizer update, that is, one minibatch
    update_samples: int
    update_max_tokens: int
    updates_per_step: int
    critic_updates_per_step: int  # 0: there is no critic
    critic_update_prompts: int
    sharing_devices: int  # have a part of each row: the sizes of a microbatch are of so many devices together
    microbatch_device_tokens: int
    microbatch_device_samples: int  # of the longest length, each with a prompt of its own
    microbatch_samples: int  # over all devices
    update_max_microbatches: int
    rollout_rows: int  # samples that decode at once, over all dp groups
    evaluation_samples: int
    epoch_prompts: int | None  # None: not known before the files are read
    epoch_steps: float | None
    total_steps: int | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """A configuration, worked out. `str()` of it is what `jaxrl explain-config` prints."""

    num_params: int
    num_active: int  # that a token is multiplied with: with experts, fewer
    num_devices: int
    dp: int
    tp: int
    counts: Counts
    memory: MemoryPlan
    warnings: tuple[str, ...]
    rewards: tuple[str, ...] = ()  # lines of text: how each domain is scored
    spanning: str = ""  # what a worker's hosts send each other; empty: it is inside one
    share: float | None = None  # of a GPU's memory, that JAX is given; None: all, or of devices that are not here

    def __str__(self) -> str:
        return render(self)


@dataclass(frozen=True, slots=True)
class LearningExplanation:
    """A configuration of `jaxrl sft` or `jaxrl dpo`, worked out. `str()` of it is what `jaxrl explain-config` prints.

    Attributes:
      learnt: what, and compared with what.
      step_rows, step_sequences, max_length: rows of an update, their conversations, and tokens of the longest one.
      sharing_devices, microbatch_sequences, microbatch_tokens: of the largest, per so many devices; conversations of
        the longest length.
      total_steps: 0: not known before the files are read.
      resident, update: bytes per device that are always there, and that an update adds.
      remat, chunk_tokens: `actor.remat` and `actor.logprob_chunk_tokens`, resolved.
    """

    num_params: int
    num_trained: int
    num_devices: int
    learnt: str
    step_rows: int
    step_sequences: int
    max_length: int
    sharing_devices: int
    microbatch_sequences: int
    microbatch_tokens: int
    total_steps: int
    resident: dict[str, int]
    update: dict[str, int]
    device_bytes: int | None
    remat: str
    chunk_tokens: int
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        trained = "" if self.num_trained == self.num_params else f", {_count(self.num_trained)} of them trained"
        step = f"{self.step_rows:,}", f"{self.step_sequences:,}", f"{self.step_sequences * self.max_length:,}"
        part = f"{self.microbatch_sequences:,} or more", f"{self.microbatch_tokens:,}"
        lines = [
            f"{_count(self.num_params)} parameters{trained}; {self.num_devices} {_plural(self.num_devices, 'device')}",
            self.learnt,
            "",
            *_table(
                ("", "rows", "conversations", "tokens, at most"),
                ("a step, which is an optimizer update", *step),
                (_microbatch(self.sharing_devices), "", *part),
            ),
            "",
            f"{self.total_steps:,} steps" if self.total_steps else _UNKNOWN_STEPS,
            "",
            "memory per device",
            *_phase_table(self.resident, {"update": self.resident | self.update}, self.device_bytes),
            "",
            f"update: logits of {self.chunk_tokens} tokens at a time, remat {self.remat}",
            *([""] if self.warnings else []),
            *(f"note: {text}" for text in self.warnings),
        ]
        return "\n".join(line.rstrip() for line in lines)


def explain_config(
    config: Config, num_devices: int, memory_bytes: int | None, command: str = "train"
) -> Explanation | LearningExplanation:
    """Derived sizes and the memory of both phases, without loading weights or data.

    Args:
      command: that reads the configuration, as in `jaxrl.config.commands.as_read`.
    """
    problem = number_problem("--devices", num_devices, Declared(int, Interval(ge=0), cap=MAX_DEVICES))
    if problem is not None:
        raise ValueError(problem)
    if memory_bytes is not None and not 1 <= memory_bytes <= MAX_MEMORY_BYTES:
        raise ValueError(f"--device-gib must be from 1 to {MAX_MEMORY_BYTES} bytes, found {memory_bytes}")
    learns_alone = command in ("sft", "dpo")
    if not learns_alone:
        batch_rule(config)  # its settings may be refused
    devices = [] if num_devices else prepare_jax(config)
    model = adapted(config, SHAPES.get(config.model.path) or config_of(resolve_path(config.model.path)))
    memory = memory_bytes or (device_bytes(devices) if devices else None)
    platform = platform_of(devices[0]) if devices else "gpu"
    types: list[str] = []
    config = with_types(config, platform, types.append, command=command)
    num_devices = num_devices or len(devices) * config.hosts.num
    # of devices that are not here, what a CPU's share of a host would be is not known
    each = memory or (memory_of(devices).share if devices else None)
    if learns_alone:
        explained = _explain_learning(config, model, num_devices, DeviceMemory(platform, memory, each or 0), command)
        return replace(explained, warnings=(*types, *explained.warnings))
    refuse_devices(config, num_devices)
    refuse_sharing(config, num_devices - config.num_own_devices)
    rolling = config.rollout.num_devices or num_devices // config.num_host_groups
    config, said = planned_degree(config, model, rolling, memory)
    explained = explain(config, model, num_devices, memory, platform=platform)
    too_large = memory_problem(config, model, explained.memory, num_devices, each) if each else None
    refused = f"a run is refused: {too_large}" if too_large else ""
    notes = [*types, said, uncorrected(config), refused, *explained.warnings]
    if devices:
        notes += share_notes(config, devices)
    elif memory_bytes is not None:
        notes.append(
            f"--device-gib is what JAX is given of a device: {DEFAULT_SHARE:g} of a GPU, unless {share_variable()} in "
            "the run's environment says otherwise"
        )
    return replace(explained, share=memory_share(platform) if devices else None, warnings=tuple(filter(None, notes)))


def _explain_learning(
    config: Config, model: ModelConfig, num_devices: int, memory: DeviceMemory, command: str
) -> LearningExplanation:
    method = method_of(command, config)
    trained = with_planned_update(method.trained(config), model, num_devices, memory)
    actor, rows = trained.actor, config.data.train_batch_size
    chunk = actor.logprob_chunk_tokens
    assert chunk != "auto", "it is planned"
    full = full_microbatch(trained, model, num_devices, memory.platform)
    too_large = memory.share and update_problem(trained, model, num_devices, memory.platform, memory.share)
    return LearningExplanation(
        num_params=model.num_params(),
        num_trained=trained_numbers(model, 1),
        num_devices=num_devices,
        learnt=method.explained,
        step_rows=rows,
        step_sequences=rows * method.examples,
        max_length=config.max_model_length,
        sharing_devices=actor.context_parallel_size,
        microbatch_sequences=full.rows * (full.length // config.max_model_length),
        microbatch_tokens=full.tokens,
        total_steps=config.trainer.total_training_steps,
        resident=resident_parts(trained, model, num_devices),
        update=update_parts(trained, model, num_devices, memory.platform, actor.remat, chunk),
        device_bytes=memory.reported,
        remat=actor.remat,
        chunk_tokens=chunk,
        warnings=(f"a run is refused: {too_large}",) if too_large else (),
    )


def explain(
    config: Config,
    model_config: ModelConfig,
    num_devices: int,
    device_bytes: int | None = None,
    num_prompts: int | None = None,
    platform: str = "gpu",
) -> Explanation:
    """Works a configuration out.

    Args:
      device_bytes: memory of one device; None where it is not known (then no warning compares with it).
      num_prompts: prompts of the training set; default: `data.task_size` where the problems come from a task.
      platform: of the devices; it decides from which row length on attention runs in tiles.
    """
    config = config.with_types(platform)
    dp, tp = _layout(config, num_devices)
    memory = memory_plan(config, model_config, num_devices, device_bytes, platform)
    counts = _counts(config, model_config, num_devices, num_prompts, platform)
    return Explanation(
        num_params=model_config.num_params(),
        num_active=model_config.num_active_params(),
        num_devices=num_devices,
        dp=dp,
        tp=tp,
        counts=counts,
        memory=memory,
        warnings=tuple(_warnings(config, counts, memory)),
        rewards=(*_table(*reward_rows(config)), *part_lines(config)),
        spanning=_spanning(config, model_config),
    )


def _spanning(config: Config, model_config: ModelConfig) -> str:
    if (num_hosts := config.rollout.hosts_per_worker) == 1:
        return ""
    tp, num_bytes = config.rollout.tp, BYTES[config.rollout.dtype]
    traffic = step_traffic(padded_config(model_config, tp), tp, num_hosts, num_bytes)
    return f"a worker spans {num_hosts} hosts; into each come {traffic}"


def _layout(config: Config, num_devices: int) -> tuple[int, int]:
    """(dp, tp) of the rollout on all of `num_devices` or on its own."""
    rollout = config.rollout
    tp, own = rollout.tp, config.num_own_devices
    if num_devices < 1:
        raise ValueError(f"the number of devices ({num_devices}) must be >= 1")
    if num_devices % config.hosts.num:
        raise ValueError(
            f"the number of devices ({num_devices}) must be a multiple of hosts.num ({config.hosts.num}): all hosts "
            "have as many"
        )
    problem = host_problem(config, num_devices // config.hosts.num)
    if problem is not None:
        raise ValueError(problem)
    return (own or num_devices) // tp, tp


def _counts(
    config: Config, model_config: ModelConfig, num_devices: int, num_prompts: int | None, platform: str
) -> Counts:
    data, n = config.data, config.rollout.n
    prompts, mini = data.train_batch_size, config.mini_batch_prompts
    if num_prompts is None and data.task:
        num_prompts = data.task_size
    training = num_devices - config.num_own_devices
    full = full_microbatch(config, model_config, training, platform)
    device_samples, sharing = full.rows * (full.length // config.max_model_length), config.actor.context_parallel_size
    evaluated = (data.val_size or 0) if (data.task or data.val_files) else 0
    dp, _ = _layout(config, num_devices)
    launched_prompts, launched_samples = batch_rule(config).max_under_way
    return Counts(
        step_prompts=prompts,
        step_samples=prompts * n,
        launched_prompts=launched_prompts,
        launched_samples=launched_samples,
        step_max_response_tokens=prompts * n * data.max_response_length,
        step_max_tokens=prompts * n * config.max_model_length,
        update_prompts=mini,
        update_samples=mini * n,
        update_max_tokens=mini * n * config.max_model_length,
        updates_per_step=config.updates_per_step,
        critic_updates_per_step=config.critic_updates_per_step,
        critic_update_prompts=config.critic_mini_batch_prompts if config.has_critic else 0,
        sharing_devices=sharing,
        microbatch_device_tokens=full.tokens,
        microbatch_device_samples=device_samples,
        microbatch_samples=device_samples * (training // sharing),
        update_max_microbatches=-(-mini * n // (device_samples * (training // sharing))),
        rollout_rows=config.rollout.max_num_seqs * dp,
        evaluation_samples=evaluated * config.rollout.val_kwargs.n,
        epoch_prompts=num_prompts,
        epoch_steps=None if num_prompts is None else num_prompts / prompts,
        total_steps=total_steps(config, num_prompts),
    )


def _warnings(config: Config, counts: Counts, memory: MemoryPlan) -> Iterator[str]:
    rows = config.rollout.max_num_seqs
    if memory.pool_requests < rows:
        yield (
            f"the KV pool holds {memory.pool_requests} requests of the longest length, rollout.max_num_seqs is {rows}: "
            "requests will be preempted if many grow long"
        )
    if counts.rollout_rows > counts.launched_samples:
        yield (
            f"rollout.max_num_seqs ({rows} per dp group, {counts.rollout_rows} in all) exceeds the samples of a round "
            f"({counts.launched_samples}): rows stay empty"
        )
    if memory.device_bytes is None:
        return
    for phase, needed in (("rollout", memory.rollout_bytes), ("update", memory.update_bytes)):
        if needed > memory.device_bytes:
            option = {
                "rollout": "rollout.num_blocks",
                "update": "actor.ppo_max_token_len_per_gpu, actor.logprob_chunk_tokens or actor.remat",
            }[phase]
            yield (
                f"the {phase} phase needs about {in_bytes(needed)} of the device's {in_bytes(memory.device_bytes)}: "
                f"lower {option}"
            )


# ---------------------------------------------------------------- text


def _microbatch(sharing: int) -> str:
    return "a microbatch, per device" if sharing == 1 else f"a microbatch, per {sharing} devices that share its rows"


def render(e: Explanation) -> str:
    """The explanation as text of at most 100 columns or so."""
    c, m = e.counts, e.memory
    devices = f"{e.num_devices} {_plural(e.num_devices, 'device')}"
    rolling = "rollout" if m.shared else f"rollout alone on {e.dp * e.tp}:"
    workers = "" if m.workers.count == 1 else f", as {m.workers.count} workers of dp {m.workers.dp} × tp {e.tp}"
    active = "" if e.num_active == e.num_params else f", {_count(e.num_active)} of them a token"
    lines = [
        f"{_count(e.num_params)} parameters{active}; {devices}, {rolling} dp {e.dp} × tp {e.tp}{workers}",
        "",
        *_table(
            ("", "prompts", "samples", "tokens, at most"),
            ("a step", f"{c.step_prompts:,}", f"{c.step_samples:,}", f"{c.step_max_tokens:,}"),
            *(
                [("a round has under way, at most", f"{c.launched_prompts:,}", f"{c.launched_samples:,}", "")]
                if c.launched_samples != c.step_samples
                else []
            ),
            ("an optimizer update", f"{c.update_prompts:,}", f"{c.update_samples:,}", f"{c.update_max_tokens:,}"),
            (
                _microbatch(c.sharing_devices),
                "",
                f"{c.microbatch_device_samples:,} or more",
                f"{c.microbatch_device_tokens:,}",
            ),
            ("rows that decode at once", "", f"{c.rollout_rows:,}", ""),
        ),
        "",
        f"{c.updates_per_step} {_plural(c.updates_per_step, 'update')} per step, at most "
        f"{c.update_max_microbatches} {_plural(c.update_max_microbatches, 'microbatch')} per update"
        + (f"; {c.evaluation_samples:,} samples per evaluation" if c.evaluation_samples else ""),
        *_critic_line(c),
        _steps_line(c),
        "",
        "memory per device",
        *_memory_table(m),
        *_share_line(e),
        "",
        f"KV pool per dp group: {m.num_blocks:,} blocks (one reserved), {m.pool_tokens:,} tokens, "
        f"{m.pool_requests:,} {_plural(m.pool_requests, 'request')} of the longest length",
        *_worker_lines(e),
        *([e.spanning] if e.spanning else []),
        *(each.line for each in m.beside if each.line),
        f"update: logits of {m.chunk_tokens} tokens at a time, remat {m.remat}",
        "",
        *e.rewards,
        *([""] if e.warnings else []),
        *(f"note: {text}" for text in e.warnings),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _critic_line(c: Counts) -> list[str]:
    updates, prompts = c.critic_updates_per_step, c.critic_update_prompts
    if not updates:
        return []
    return [
        f"critic: {updates} {_plural(updates, 'update')} per step, of {prompts:,} {_plural(prompts, 'prompt')} each"
    ]


def _steps_line(c: Counts) -> str:
    total = _UNKNOWN_STEPS if c.total_steps is None else f"{c.total_steps:,} steps"
    if c.epoch_steps is None:
        return total
    return f"{total}; an epoch of {c.epoch_prompts:,} prompts takes {c.epoch_steps:,.1f}"


def _memory_table(m: MemoryPlan) -> list[str]:
    phases = {"rollout": m.resident | m.rollout if m.shared else m.rollout, "update": m.resident | m.update}
    phases |= {each.column: {**m.resident, **each.parts} for each in m.freed}
    return _phase_table(m.resident, phases, m.device_bytes)


def _phase_table(
    resident: Mapping[str, int], phases: Mapping[str, Mapping[str, int]], device_bytes: int | None
) -> list[str]:
    rows = [("", *phases)]
    for name in dict.fromkeys(name for parts in (resident, *phases.values()) for name in parts):
        rows.append((name, *(in_bytes(phase[name]) if name in phase else "" for phase in phases.values())))
    rows.append(("total", *(in_bytes(sum(phase.values())) for phase in phases.values())))
    if device_bytes is not None:
        rows.append(("of", *[in_bytes(device_bytes)] * len(phases)))
    return _table(*rows)


def _worker_lines(e: Explanation) -> list[str]:
    """Each worker's share of rollout, where there are several."""
    workers, m = e.memory.workers, e.memory
    if workers.count == 1:
        return []
    weights = in_bytes(m.rollout["rollout weights"] * workers.num_devices)
    pools = in_bytes(m.rollout["KV pool"] * workers.num_devices)
    per_worker = -(-e.counts.launched_samples // workers.count)
    return [
        f"each of {workers.count} workers: {workers.num_devices} {_plural(workers.num_devices, 'device')}, rollout "
        f"weights of {weights} and KV pools of {pools} together,",
        f"  rows for {workers.num_rows * workers.dp:,} samples and KV for {m.pool_requests * workers.dp:,} of the "
        f"longest length; about {per_worker:,} of the {e.counts.launched_samples:,} samples under way are its own",
    ]


def _share_line(e: Explanation) -> list[str]:
    if e.share is None:
        return []
    size = e.memory.device_bytes
    of = "" if size is None else f": {in_bytes(size)} of about {in_bytes(size / e.share)}"
    return [f"JAX is given {e.share:g} of a GPU's memory ({share_variable()}){of}"]


def _table(*rows: tuple[str, ...]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else noun + ("es" if noun.endswith("ch") else "s")


def _count(value: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return str(value)
