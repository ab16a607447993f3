"""The memory of a run, per device, before anything is allocated: what lives when, and how large the KV pool is.

The bytes of weights and KV follow exactly from the table of weights and the sharding rules; what training needs, and
keeps between updates, is in `jaxrl.training.update_memory`. In rollout there are also the rollout weights, the KV pool
and what mechanisms have beside them, which the update finds released. `rollout.memory_fraction` bounds the rollout
phase as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxrl.config import Config
from jaxrl.mechanisms import enabled, is_timeless
from jaxrl.models.config import ModelConfig
from jaxrl.models.kv_layers import KvLayers, kv_layers
from jaxrl.scheduling.mechanism import FreedMemory, RolloutMemory
from jaxrl.sharding.memory import in_bytes
from jaxrl.sharding.rules import padded_config
from jaxrl.training.update_memory import planned_update, resident_parts, rollout_bytes, splits, update_parts

_LARGER = "use more devices, or a smaller model"
_RESERVED_BLOCKS = 1  # block 0 of each pool takes what is written for no row
_LOGITS_COPIES = 2  # float32 arrays of [rows, vocabulary] while a decode step samples
_ESTIMATE_ROOM = 1.25  # an update is refused only where it exceeds the memory by more than the estimate may be off


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes per device: those that are always there, and those that each phase adds; and the resulting KV pool.
    `config`: with `auto` of the update resolved."""

    config: Config
    resident: dict[str, int]
    rollout: dict[str, int]
    update: dict[str, int]
    num_blocks: int  # per dp group, the reserved one included
    pool_tokens: int  # per dp group, in requests of the longest length
    pool_requests: int  # of the longest length, per dp group
    device_bytes: int | None
    num_rows: int  # per dp group
    worker_devices: int  # of each of the rollout's workers
    shared: bool = True  # both phases have the same devices
    beside: Sequence[RolloutMemory] = ()  # the parts of `rollout` that are mechanisms'
    freed: Sequence[FreedMemory] = ()  # each with the parts of `beside` that stay; there is no KV of the actor then

    @property
    def rollout_bytes(self) -> int:
        return (sum(self.resident.values()) if self.shared else 0) + sum(self.rollout.values())

    @property
    def update_bytes(self) -> int:
        return sum(self.resident.values()) + sum(self.update.values())


def plan_num_blocks(config: Config, model_config: ModelConfig, devices: int, memory_bytes: int | None) -> int:
    """KV blocks per dp group, the reserved one included: `rollout.num_blocks` if it is set. Otherwise as many as
    `rollout.memory_fraction` of a device leaves room for, but no more than `max_num_seqs` requests of the longest
    length can use; exactly that many if the memory is not known (`memory_bytes` None). Raises ValueError where not even
    one such request fits."""
    rollout = config.rollout
    if rollout.num_blocks:
        return rollout.num_blocks
    per_request = kv_layers_of(config, model_config).stacks.most_blocks(config.max_model_length, rollout.block_size)
    useful = rollout.max_num_seqs * per_request + _RESERVED_BLOCKS
    if memory_bytes is None:
        return useful
    resident = {} if rollout.num_devices else resident_parts(config, model_config, devices * config.num_host_groups)
    weights = _rollout_weights(config, model_config, devices)
    beside = _beside(config, devices, "cpu", weights)  # bytes are the same on every platform
    taken = sum(resident.values()) + weights + sum(each.total for each in beside)
    left = int(memory_bytes * rollout.memory_fraction) - taken
    block = _block_bytes(config, model_config, devices)
    fitting = max(left, 0) // block
    if fitting < per_request + _RESERVED_BLOCKS:
        advice = [f"lower {each.lower}" for each in beside if each.lower]
        if left > 0:  # else a shorter response would not help
            advice = ["lower data.max_response_length", *advice]
        if (workers := config.workers_per_group) > 1 and rollout.tp == devices // workers:
            advice += [
                f"cut the rollout into fewer workers (rollout.num_workers: {config.num_workers}) for a larger tp"
            ]
        elif rollout.tp < devices:
            advice += ["raise rollout.tensor_model_parallel_size"]
        advice = [*smaller_state(config, resident), *advice]
        raise ValueError(
            f"rollout.memory_fraction ({rollout.memory_fraction}) of {in_bytes(memory_bytes)} leaves "
            f"{in_bytes(max(left, 0))} for the KV pool beside {in_bytes(taken)} of weights and training state, "
            + "".join(f"{in_bytes(each.total)} of {each.name} with them, " for each in beside)
            + f"but one request of {config.max_model_length} tokens needs "
            f"{in_bytes((per_request + _RESERVED_BLOCKS) * block)}: {'; or '.join(advice)}"
        )
    return min(useful, fitting)


def smaller_state(config: Config, resident: Mapping[str, int]) -> list[str]:
    """Options that reduce permanently used memory, with their gains, the largest first."""
    optimizer = sum(size for name, size in resident.items() if "optimizer" in name)
    reference = 0 if config.actor.offload_reference else resident.get("reference weights", 0)
    found: list[tuple[int, str]] = []
    if optimizer and not config.model.has_adapters:
        found += [(optimizer + reference, "train adapters alone (model.lora_rank=16)")]
    if optimizer:
        found += [(optimizer, "set actor.offload_optimizer=true")]
    if reference:
        without = "actor.use_kl_loss=false" if config.actor.use_kl_loss else "algorithm.use_kl_in_reward=false"
        found += [(reference, f"set actor.offload_reference=true, or {without}")]
    found.sort(key=lambda each: -each[0])
    return [f"{what}: {in_bytes(size)} less" for size, what in found]


def _beside(config: Config, num_devices: int, platform: str, weight_bytes: int) -> list[RolloutMemory]:
    given = config, num_devices, platform, weight_bytes, is_timeless(config)
    return [memory for each in enabled(config) if (memory := each.rollout_memory(*given)) is not None]


def layout_degrees(config: Config, num_devices: int) -> tuple[int, ...]:
    """The TP degrees that a worker's rounds may use; `num_devices`: of the rollout, on one host."""
    return config.rollout.layout.degrees_on(config.rollout.tp, num_devices // config.workers_per_group)


def max_tp(config: Config, num_devices: int) -> int:
    """The degree that the rollout's weights are padded for."""
    largest = layout_degrees(config, num_devices)[-1]
    if config.actor.numerics != "invariant":
        return largest
    if config.actor.numerics_tp % largest:
        raise ValueError(
            f"actor.numerics_tp ({config.actor.numerics_tp}) must be a multiple of the largest tp of the rollout "
            f"({largest}) where actor.numerics is invariant"
        )
    return config.actor.numerics_tp


def layout_sizes(
    config: Config, model_config: ModelConfig, num_devices: int, memory_bytes: int | None
) -> dict[int, tuple[int, int]]:
    """By tp degree: rows and KV blocks per dp group, by `rollout.layout.scale_rows` and as far as memory allows. Raises
    ValueError where a pool does not hold one request of the longest length."""
    rollout, tp = config.rollout, config.rollout.tp
    degrees = layout_degrees(config, num_devices)
    sizes: dict[int, tuple[int, int]] = {}
    for degree in degrees:
        rows, blocks = rollout.layout.scaled(rollout.max_num_seqs, rollout.num_blocks, tp, degree)
        scaled = rollout.replace(tensor_model_parallel_size=degree, max_num_seqs=rows, num_blocks=blocks)
        own = config.replace(rollout=scaled)
        sizes[degree] = rows, plan_num_blocks(own, model_config, num_devices, memory_bytes)
        stacks = kv_layers_of(config, model_config).stacks
        stacks.refuse_small(sizes[degree][1], rollout.block_size, config.max_model_length, degree, degrees)
    return sizes


def kv_layers_of(config: Config, model_config: ModelConfig) -> KvLayers:
    """How the model's layers share the KV pool."""
    rollout = config.rollout
    return kv_layers(model_config, config.max_model_length, rollout.max_num_batched_tokens, rollout.decode_steps)


def _block_bytes(config: Config, model_config: ModelConfig, num_devices: int) -> int:
    """One KV block on one device: all layers of a stack, keys and values, this device's share of the heads."""
    tp = config.rollout.tp
    kv_heads = padded_config(model_config, max_tp(config, num_devices)).num_kv_heads
    heads = kv_heads // splits(kv_heads, tp)
    positions = config.rollout.block_size * kv_layers_of(config, model_config).size
    return 2 * positions * heads * config.rollout.kv_head_bytes(model_config.head_dim)


def _rollout_weights(config: Config, model_config: ModelConfig, num_devices: int) -> int:
    padded, rollout = padded_config(model_config.base, max_tp(config, num_devices)), config.rollout
    return rollout_bytes(padded, rollout.tp, rollout.dtype, rollout.quantization)


def _logits(config: Config, model_config: ModelConfig, num_devices: int, positions: int) -> int:
    rolling = config.rollout.num_devices or num_devices // config.num_host_groups
    vocab = padded_config(model_config, max_tp(config, rolling)).vocab_size
    share = vocab // splits(vocab, config.rollout.tp)
    return _LOGITS_COPIES * positions * share * 4


def memory_plan(
    config: Config, model_config: ModelConfig, num_devices: int, device_bytes: int | None, platform: str
) -> MemoryPlan:
    """The bytes of both phases. `num_devices`: of the run, on all hosts; `device_bytes`: of one, None where that is not
    known. Raises ValueError as `layout_sizes` and `Mechanism.rollout_memory`, for what `actor.attention` and
    `actor.numerics` cannot be, and for a KV cache that the platform does not take."""
    own = config.rollout.num_devices
    rolling, training = own or num_devices // config.num_host_groups, num_devices - config.num_own_devices
    if config.actor.numerics == "invariant":
        from jaxrl.models.numerics import refuse_invariant

        refuse_invariant(model_config, platform, config.actor.numerics_tp)
    if platform == "tpu" and config.rollout.kv_codes != "none":
        raise ValueError(
            f"rollout.kv_cache_dtype ({config.rollout.kv_cache_dtype}) must be auto on TPUs, which pad each "
            "position's scale to 128 numbers"
        )
    num_rows, num_blocks = layout_sizes(config, model_config, rolling, device_bytes)[config.rollout.tp]
    config = planned_update(config, model_config, training, device_bytes, platform)
    longest, block_size = config.max_model_length, config.rollout.block_size
    usable, stacks = num_blocks - _RESERVED_BLOCKS, kv_layers_of(config, model_config).stacks
    weights = _rollout_weights(config, model_config, rolling)
    beside = _beside(config, rolling, platform, weights)
    stays = {name: size for each in beside if each.stays for name, size in each.parts.items()}
    given = config, model_config, training, platform
    freed = [memory for each in enabled(config) if (memory := each.freed_memory(*given)) is not None]
    return MemoryPlan(
        config=config,
        resident=resident_parts(config, model_config, training),
        rollout={
            "rollout weights": weights,
            "KV pool": num_blocks * _block_bytes(config, model_config, rolling),
            **{name: size for each in beside for name, size in each.parts.items()},
        },
        update=update_parts(*given),
        num_blocks=num_blocks,
        pool_tokens=stacks.num_tokens(usable, block_size),
        pool_requests=usable // stacks.most_blocks(longest, block_size),
        device_bytes=device_bytes,
        num_rows=num_rows,
        worker_devices=rolling // config.workers_per_group,
        shared=not own,
        beside=beside,
        freed=[dataclasses.replace(each, parts={**each.parts, **stays}) for each in freed],
    )


def memory_problem(
    config: Config, model_config: ModelConfig, plan: MemoryPlan, num_devices: int, bytes_each: int, trains: bool = True
) -> str | None:
    """Why a phase cannot fit into the devices' memory, as a sentence with the options to change. `bytes_each`: of one
    device; of a CPU, its share of the host's; `trains`: an update follows; else the parameters are all that lies beside
    the rollout."""
    rollout, longest = config.rollout, config.max_model_length
    resident = plan.resident if trains else {"master weights": plan.resident["master weights"]}
    positions = rollout.max_num_seqs + sum(each.positions for each in plan.beside)
    logits = _logits(config, model_config, num_devices, positions)
    held = (sum(resident.values()) if plan.shared else 0) + sum(plan.rollout.values())
    needed, pool = held + logits, plan.rollout["KV pool"] + logits
    limit = None
    if held > rollout.memory_fraction * bytes_each:
        limit = f"rollout.memory_fraction ({rollout.memory_fraction}) leaves "
        limit += f"{in_bytes(rollout.memory_fraction * bytes_each)} on each of {num_devices}"
    elif needed > bytes_each:  # logits are temporary: the fraction leaves room for them
        limit = f"each of {num_devices} has {in_bytes(bytes_each)}"
    if limit is not None:
        lower = f"rollout.max_num_seqs ({rollout.max_num_seqs} rows of up to {longest} tokens per dp group"
        lower += f", where a step has {config.data.train_batch_size * rollout.n} samples)"
        if rollout.num_blocks and logits < pool / 2:
            lower = f"rollout.num_blocks ({rollout.num_blocks} blocks of {rollout.block_size} tokens)"
        parts = [(pool, "KV pool and logits", lower), *((each.total, each.name, each.lower) for each in plan.beside)]
        size, name, lower = max(part for part in parts if part[2])
        is_most = size > needed / 2
        advice = f"lower {lower}" if is_most else "; or ".join([*smaller_state(config, resident), _LARGER])
        return (
            f"the rollout needs {in_bytes(needed)} per device, {in_bytes(size)} of it for {name}, and {limit}: {advice}"
        )
    if not trains:
        return None
    of_phases = [_update_problem(config, plan.resident, plan.update, num_devices, bytes_each)]
    for freed in plan.freed:
        advice = [freed.advice, *(f"lower {each.lower}" for each in plan.beside if each.stays)]
        every = {**plan.resident, **freed.parts}
        of_phases.append(_too_large(f"{freed.column} on a freed device", every, num_devices, bytes_each, advice))
    return next(filter(None, of_phases), None)


def update_problem(
    config: Config, model_config: ModelConfig, num_devices: int, platform: str, bytes_each: int
) -> str | None:
    """As `memory_problem`, of a run without a rollout. `config`: with `auto` of the update resolved."""
    resident = resident_parts(config, model_config, num_devices)
    update = update_parts(config, model_config, num_devices, platform)
    return _update_problem(config, resident, update, num_devices, bytes_each)


def _update_problem(
    config: Config, resident: Mapping[str, int], parts: Mapping[str, int], num_devices: int, bytes_each: int
) -> str | None:
    shorter = (
        f"lower actor.ppo_max_token_len_per_gpu ({config.actor.ppo_max_token_len_per_gpu} tokens) or "
        "data.max_response_length; or use more devices, which share long rows with actor.context_parallel_size"
    )
    advice = [*smaller_state(config, resident), shorter]
    if sum(parts.values()) > sum(resident.values()):
        advice = [shorter, *advice[:-1]]
    return _too_large("the update", {**resident, **parts}, num_devices, bytes_each, advice)


def _too_large(
    what: str, parts: Mapping[str, int], num_devices: int, bytes_each: int, advice: Sequence[str]
) -> str | None:
    """The refusal of a phase by an estimate."""
    needed = sum(parts.values())
    if needed <= _ESTIMATE_ROOM * bytes_each:
        return None
    return (
        f"{what} needs about {in_bytes(needed)} per device, most of it for {max(parts, key=lambda n: parts[n])}, and "
        f"each of {num_devices} has {in_bytes(bytes_each)}: {'; or '.join(advice)}"
    )
