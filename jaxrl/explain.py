"""What a configuration amounts to, before anything is allocated: counts, steps, and the memory of both phases.

Purpose: `jaxrl explain-config`, and `plan_num_blocks`, the one place where the size of the KV pool is decided.

Source: design §5 (which weight is split how) and §6 (memory has phases). The bytes of weights, optimizer, gradients and
KV follow exactly from the table of weights and the sharding rules. Activations are an estimate: what the backward pass
keeps of each layer, and one layer's working set. Against the temporaries that XLA reports for the gradient of
SmolLM2-135M's layers (5 rows of 384 tokens, float32, CPU, jax 0.10.2, attention in tiles):
  full: 241 MiB estimated, 265 reported; dots: 1380, 1375; none: 3575, 3710.

What lives when, per device. All the time: master weights, the optimizer's moments (unless `actor.offload_optimizer`),
and the frozen reference (where there is a KL term). In rollout also: the rollout weights and the KV pool. In the update
also: gradients and activations; the KV pool and the rollout weights are released. `rollout.memory_fraction` bounds the
rollout phase as a whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl.config import Config
from jaxrl.models.config import ModelConfig
from jaxrl.scheduling.batches import provisioned
from jaxrl.sharding.mesh import prime_factors
from jaxrl.sharding.rules import TENSOR_DIMS, padded_config

_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
_RESERVED_BLOCKS = 1  # block 0 of each pool belongs to nobody
# float32 arrays of [tokens, tokens] scores that attention in plain jnp holds at once in the backward pass
_SCORE_COPIES = 3


@dataclass(frozen=True, slots=True)
class Counts:
    """Sizes of a step, each in the unit that its name ends with; `max_` where it depends on the lengths drawn."""

    step_prompts: int
    step_samples: int
    launched_prompts: int  # under way at once in a round, as far as rows allow; rules that speculate launch more
    launched_samples: int
    step_max_response_tokens: int
    step_max_tokens: int
    update_prompts: int  # one optimizer update, that is, one minibatch
    update_samples: int
    update_max_tokens: int
    updates_per_step: int
    microbatch_device_tokens: int
    microbatch_device_rows: int  # rows of the longest length; each holds one sample or several short ones
    microbatch_rows: int  # over all devices
    update_max_microbatches: int
    rollout_rows: int  # samples that decode at once, over all dp groups
    evaluation_samples: int
    epoch_prompts: int | None  # None: not known before the files are read
    epoch_steps: float | None
    total_steps: int | None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes per device: what is there all the time, and what each phase adds; and the KV pool that results."""

    resident: dict[str, int]
    rollout: dict[str, int]
    update: dict[str, int]
    num_blocks: int  # per dp group, the reserved one included
    pool_tokens: int  # per dp group
    pool_requests: int  # of the longest length, per dp group
    device_bytes: int | None

    @property
    def rollout_bytes(self) -> int:
        return sum(self.resident.values()) + sum(self.rollout.values())

    @property
    def update_bytes(self) -> int:
        return sum(self.resident.values()) + sum(self.update.values())


@dataclass(frozen=True, slots=True)
class Explanation:
    """A configuration, worked out. `str()` of it is what `jaxrl explain-config` prints."""

    num_params: int
    num_devices: int
    dp: int
    tp: int
    counts: Counts
    memory: MemoryPlan
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return render(self)


def explain(
    config: Config,
    model_config: ModelConfig,
    num_devices: int,
    device_bytes: int | None = None,
    num_prompts: int | None = None,
    fused_attention: bool = False,
) -> Explanation:
    """Works a configuration out.

    Args:
      device_bytes: memory of one device; None where it is not known (then nothing is compared with it).
      num_prompts: prompts of the training set; default: `data.task_size` where the problems come from a task.
      fused_attention: whether training's attention runs in a kernel that never holds the scores.
    """
    dp, tp = _layout(config, num_devices)
    memory = _memory(config, model_config, num_devices, device_bytes, fused_attention)
    counts = _counts(config, num_devices, num_prompts)
    return Explanation(
        num_params=model_config.num_params(),
        num_devices=num_devices,
        dp=dp,
        tp=tp,
        counts=counts,
        memory=memory,
        warnings=tuple(_warnings(config, counts, memory)),
    )


def plan_num_blocks(config: Config, model_config: ModelConfig, devices: int, memory_bytes: int | None) -> int:
    """KV blocks per dp group, the reserved one included.

    `rollout.num_blocks` where it is set. Otherwise what `rollout.memory_fraction` of a device leaves, at most what
    `max_num_seqs` requests of the longest length can use; that most where the memory is not known (`memory_bytes`
    None).

    Raises:
      ValueError: not even one request of the longest length fits.
    """
    rollout = config.rollout
    if rollout.num_blocks:
        return rollout.num_blocks
    per_request = -(-config.max_model_length // rollout.block_size)
    useful = rollout.max_num_seqs * per_request + _RESERVED_BLOCKS
    if memory_bytes is None:
        return useful
    taken = sum(_resident(config, model_config, devices).values()) + _rollout_weights(config, model_config, devices)
    left = int(memory_bytes * rollout.memory_fraction) - taken
    block = _block_bytes(config, model_config, devices)
    fitting = max(left, 0) // block
    if fitting < per_request + _RESERVED_BLOCKS:
        raise ValueError(
            f"rollout.memory_fraction ({rollout.memory_fraction}) of {_bytes(memory_bytes)} leaves "
            f"{_bytes(max(left, 0))} for the KV pool beside {_bytes(taken)} of weights and training state, but one "
            "request of "
            f"{config.max_model_length} tokens needs {_bytes((per_request + _RESERVED_BLOCKS) * block)}: lower "
            "data.max_response_length, raise rollout.tensor_model_parallel_size, or set actor.offload_optimizer"
        )
    return min(useful, fitting)


def layout_degrees(config: Config, num_devices: int) -> tuple[int, ...]:
    """The tp degrees that rollout may use, ascending; the configured one alone where nothing adapts.

    Raises:
      ValueError: a degree is not one of the mesh's, or leaves a host.
    """
    layout, tp = config.rollout.layout, config.rollout.tensor_model_parallel_size
    if not layout.adapts:
        return (tp,)
    possible = tuple(itertools.accumulate((1, *prime_factors(num_devices)), operator.mul))
    host = layout.devices_per_host or num_devices
    degrees = tuple(layout.degrees) or tuple(degree for degree in possible if degree <= host)
    for degree in (*degrees, tp):
        if degree not in possible or degree > host or degree not in degrees:
            raise ValueError(
                f"rollout.layout.degrees: tp {degree} must be one of {', '.join(map(str, possible))} (which the "
                f"{num_devices} devices can be factored into), at most the {host} devices of a host, and the first tp "
                f"({tp}) one of the degrees {degrees}"
            )
    return degrees


def layout_sizes(
    config: Config, model_config: ModelConfig, num_devices: int, memory_bytes: int | None
) -> dict[int, tuple[int, int]]:
    """By tp degree: rows and KV blocks per dp group, as `rollout.layout.scale_rows` has them and the memory allows."""
    rollout, tp = config.rollout, config.rollout.tensor_model_parallel_size
    degrees = layout_degrees(config, num_devices)
    sizes: dict[int, tuple[int, int]] = {}
    for degree in degrees:
        rows, blocks = rollout.max_num_seqs, rollout.num_blocks
        if rollout.layout.scale_rows:
            rows = max(rows * degree // tp, 1)
            blocks = max((blocks - _RESERVED_BLOCKS) * degree // tp, 1) + _RESERVED_BLOCKS if blocks else 0
        scaled = dataclasses.replace(rollout, tensor_model_parallel_size=degree, max_num_seqs=rows, num_blocks=blocks)
        own = dataclasses.replace(config, rollout=scaled)
        sizes[degree] = rows, plan_num_blocks(own, model_config, num_devices, memory_bytes)
        needed = -(-config.max_model_length // rollout.block_size)
        if sizes[degree][1] - _RESERVED_BLOCKS < needed:
            raise ValueError(
                f"rollout.layout: at tp {degree} a pool has {sizes[degree][1]} blocks, one of them reserved, and one "
                f"request of {config.max_model_length} tokens needs {needed}: raise rollout.num_blocks "
                f"({rollout.num_blocks}), or leave tp {degree} out of rollout.layout.degrees"
            )
    return sizes


def total_steps(config: Config, num_prompts: int | None) -> int | None:
    """The run's last step: `trainer.total_training_steps`, or what `total_epochs` fill; None while that is unknown.

    Batches cross the ends of epochs; the last one that would need prompts of a further epoch is not run.
    """
    if config.trainer.total_training_steps:
        return config.trainer.total_training_steps
    if num_prompts is None:
        return None
    return max(config.trainer.total_epochs * num_prompts // config.data.train_batch_size, 1)


# ---------------------------------------------------------------- counts


def _layout(config: Config, num_devices: int) -> tuple[int, int]:
    tp = config.rollout.tensor_model_parallel_size
    if num_devices < 1 or num_devices % tp:
        raise ValueError(f"rollout.tensor_model_parallel_size ({tp}) must divide the number of devices ({num_devices})")
    return num_devices // tp, tp


def _row_tokens(config: Config) -> int:
    """Tokens of a packed row of the longest length (`jaxrl.train.packing` rounds up to 16)."""
    return -(-config.max_model_length // 16) * 16


def _counts(config: Config, num_devices: int, num_prompts: int | None) -> Counts:
    data, n = config.data, config.rollout.n
    prompts, mini = data.train_batch_size, config.mini_batch_prompts
    if num_prompts is None and data.task:
        num_prompts = data.task_size
    device_rows = max(config.actor.ppo_max_token_len_per_gpu // _row_tokens(config), 1)
    evaluated = (data.val_size or 0) if (data.task or data.val_files) else 0
    dp, _ = _layout(config, num_devices)
    launched_prompts, launched_samples = _launched(config)
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
        updates_per_step=prompts // mini * config.actor.ppo_epochs,
        microbatch_device_tokens=config.actor.ppo_max_token_len_per_gpu,
        microbatch_device_rows=device_rows,
        microbatch_rows=device_rows * num_devices,
        update_max_microbatches=-(-mini * n // (device_rows * num_devices)),
        rollout_rows=config.rollout.max_num_seqs * dp,
        evaluation_samples=evaluated * config.rollout.val_kwargs.n,
        epoch_prompts=num_prompts,
        epoch_steps=None if num_prompts is None else num_prompts / prompts,
        total_steps=total_steps(config, num_prompts),
    )


def _launched(config: Config) -> tuple[int, int]:
    """The most prompts and samples that a round of the configured rule has under way."""
    rollout, prompts, samples = config.rollout, config.data.train_batch_size, config.rollout.n
    if rollout.partial_rollout.enable:
        prompts = provisioned("rollout.partial_rollout.over_provision", rollout.partial_rollout.over_provision, prompts)
    for name in ("tail_batching", "over_provisioning"):
        section = getattr(rollout, name)
        if section.enable:
            prompts = provisioned(f"rollout.{name}.prompt_factor", section.prompt_factor, prompts)
            samples = provisioned(f"rollout.{name}.response_factor", section.response_factor, samples)
    return prompts, min(prompts * samples, rollout.max_active_requests or prompts * samples)


# ---------------------------------------------------------------- memory, in bytes per device


def _weights(tree: Mapping[str, Any]) -> Iterator[Any]:
    for value in tree.values():
        if isinstance(value, Mapping):
            yield from _weights(value)
        else:
            yield value


def _splits(size: int, degree: int) -> int:
    """Into how many shards a dim of `size` goes: over the longest prefix of the degree's axes that divides it."""
    shards = 1
    for factor in prime_factors(degree):
        if size % (shards * factor):
            break
        shards *= factor
    return shards


def _device_numbers(model_config: ModelConfig, degree: int) -> int:
    """How many of a model's numbers one device holds when tensor dims are split over `degree` devices."""
    total = 0
    for weight in _weights(model_config.weights()):
        shards = [
            _splits(size, degree) for dim, size in zip(weight.dims, weight.shape, strict=True) if dim in TENSOR_DIMS
        ]
        total += math.prod(weight.shape) // math.prod(shards)
    return total


def _block_bytes(config: Config, model_config: ModelConfig, num_devices: int) -> int:
    """One KV block on one device: all layers, keys and values, this device's share of the heads."""
    tp = config.rollout.tensor_model_parallel_size
    kv_heads = padded_config(model_config, layout_degrees(config, num_devices)[-1]).num_kv_heads
    heads = kv_heads // _splits(kv_heads, tp)
    positions = config.rollout.block_size * model_config.num_layers * model_config.head_dim
    return 2 * positions * heads * _BYTES[config.rollout.dtype]


def _rollout_weights(config: Config, model_config: ModelConfig, num_devices: int) -> int:
    padded = padded_config(model_config, layout_degrees(config, num_devices)[-1])
    return _device_numbers(padded, config.rollout.tensor_model_parallel_size) * _BYTES[config.rollout.dtype]


def _resident(config: Config, model_config: ModelConfig, num_devices: int) -> dict[str, int]:
    numbers, size = _device_numbers(model_config, num_devices), _BYTES[config.actor.param_dtype]
    parts = {"master weights": numbers * size}
    if not config.actor.offload_optimizer:
        parts["optimizer (adam m, v)"] = 2 * numbers * size
    if config.needs_ref:
        parts["reference weights"] = numbers * size
    return parts


def _update(config: Config, model_config: ModelConfig, num_devices: int, fused_attention: bool) -> dict[str, int]:
    m, actor = model_config, config.actor
    numbers, size, wide = _device_numbers(m, num_devices), _BYTES[actor.param_dtype], _BYTES[actor.dtype]
    row = _row_tokens(config)
    rows = max(actor.ppo_max_token_len_per_gpu // row, 1)
    tokens = rows * row
    products = (2 * m.num_heads + 2 * m.num_kv_heads) * m.head_dim + 3 * m.intermediate_size  # q k v out, gate up act
    # numbers per token: what a layer keeps for the backward pass, and what one layer needs while it is computed
    working = 2 * products + 6 * m.hidden_size
    match actor.remat:
        case "full":
            kept = m.hidden_size
        case "dots":
            kept = 2 * (m.num_heads + m.num_kv_heads) * m.head_dim + 2 * m.intermediate_size + 2 * m.hidden_size
        case "none":
            kept = working
    scores = 0 if fused_attention else rows * m.num_heads * row * row * max(wide, 4) * _SCORE_COPIES
    score_layers = m.num_layers if actor.remat == "none" else 1
    head = m.vocab_size * m.hidden_size
    chunk = min(actor.logprob_chunk_tokens, tokens) * m.vocab_size * max(wide, 4)
    parts = {
        "gradients": numbers * size,
        f"activations kept (remat {actor.remat}, estimate)": m.num_layers * tokens * kept * wide,
        "one layer at work (estimate)": tokens * working * wide,
        "attention scores (no fused kernel)": scores * score_layers,
        "logits of a chunk and their gradient": 2 * chunk,
        "vocabulary head, gathered, and its gradient": head * (wide + size),
    }
    if actor.offload_optimizer:
        parts["optimizer (adam m, v), from the host"] = 2 * numbers * size
    return {name: count for name, count in parts.items() if count}


def _memory(
    config: Config, model_config: ModelConfig, num_devices: int, device_bytes: int | None, fused_attention: bool
) -> MemoryPlan:
    num_blocks = plan_num_blocks(config, model_config, num_devices, device_bytes)
    block_size = config.rollout.block_size
    usable = num_blocks - _RESERVED_BLOCKS
    return MemoryPlan(
        resident=_resident(config, model_config, num_devices),
        rollout={
            "rollout weights": _rollout_weights(config, model_config, num_devices),
            "KV pool": num_blocks * _block_bytes(config, model_config, num_devices),
        },
        update=_update(config, model_config, num_devices, fused_attention),
        num_blocks=num_blocks,
        pool_tokens=usable * block_size,
        pool_requests=usable // -(-config.max_model_length // block_size),
        device_bytes=device_bytes,
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
                f"the {phase} phase needs about {_bytes(needed)} of the device's {_bytes(memory.device_bytes)}: "
                f"lower {option}"
            )


# ---------------------------------------------------------------- text


def render(e: Explanation) -> str:
    """The explanation as text of at most 100 columns or so."""
    c, m = e.counts, e.memory
    devices = f"{e.num_devices} {_plural(e.num_devices, 'device')}"
    lines = [
        f"{_count(e.num_params)} parameters; {devices}, rollout dp {e.dp} × tp {e.tp}",
        "",
        *_table(
            ("", "prompts", "samples", "tokens, at most"),
            ("a step", f"{c.step_prompts:,}", f"{c.step_samples:,}", f"{c.step_max_tokens:,}"),
            *(
                [("a round has under way", f"{c.launched_prompts:,}", f"{c.launched_samples:,}", "")]
                if c.launched_samples != c.step_samples
                else []
            ),
            ("an optimizer update", f"{c.update_prompts:,}", f"{c.update_samples:,}", f"{c.update_max_tokens:,}"),
            (
                "a microbatch, per device",
                "",
                f"{c.microbatch_device_rows:,} or more",
                f"{c.microbatch_device_tokens:,}",
            ),
            ("rows that decode at once", "", f"{c.rollout_rows:,}", ""),
        ),
        "",
        f"{c.updates_per_step} {_plural(c.updates_per_step, 'update')} per step, at most "
        f"{c.update_max_microbatches} {_plural(c.update_max_microbatches, 'microbatch')} per update"
        + (f"; {c.evaluation_samples:,} samples per evaluation" if c.evaluation_samples else ""),
        _steps_line(c),
        "",
        "memory per device",
        *_memory_table(m),
        "",
        f"KV pool per dp group: {m.num_blocks:,} blocks (one reserved), {m.pool_tokens:,} tokens, "
        f"{m.pool_requests:,} {_plural(m.pool_requests, 'request')} of the longest length",
        *(f"note: {text}" for text in e.warnings),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _steps_line(c: Counts) -> str:
    total = (
        "number of steps not known before the files are read" if c.total_steps is None else f"{c.total_steps:,} steps"
    )
    if c.epoch_steps is None:
        return total
    return f"{total}; an epoch of {c.epoch_prompts:,} prompts takes {c.epoch_steps:,.1f}"


def _memory_table(m: MemoryPlan) -> list[str]:
    rows = [("", "rollout", "update")]
    rows += [(name, _bytes(size), _bytes(size)) for name, size in m.resident.items()]
    rows += [(name, _bytes(size), "") for name, size in m.rollout.items()]
    rows += [(name, "", _bytes(size)) for name, size in m.update.items()]
    rows.append(("total", _bytes(m.rollout_bytes), _bytes(m.update_bytes)))
    if m.device_bytes is not None:
        rows.append(("of", _bytes(m.device_bytes), _bytes(m.device_bytes)))
    return _table(*rows)


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


def _bytes(value: int) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"
