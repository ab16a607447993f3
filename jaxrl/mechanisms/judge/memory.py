"""The memory of a judge on the rollout's devices, per device, before anything is allocated.

Purpose: `judge_memory` decides how many of a judge's layers stay resident and how large its KV pool is, from
`reward.judge` and the judge's shapes alone. `jaxrl.runtime.memory` counts its parts (`rollout_memory`) with the
rollout's, so the actor's KV pool takes what the judge leaves, and with those of gradients on freed devices.

Source: RollPacker §4.3: the number of offloaded layers follows from memory and input lengths.

The judge's layout is one tensor-parallel group of all of the rollout's devices: each streams its own share of a layer,
over its own link, and the host keeps one copy of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxrl.config import Config
from jaxrl.mechanisms.judge import judge_kind
from jaxrl.models.config import ModelConfig
from jaxrl.models.kv_layers import kv_layers
from jaxrl.models.loading import config_of, resolve_path
from jaxrl.models.streaming import STREAMED
from jaxrl.models.weights import Weight, leaves
from jaxrl.scheduling.mechanism import RolloutMemory
from jaxrl.schema.limits import BYTES
from jaxrl.sharding.memory import in_bytes
from jaxrl.sharding.rules import TENSOR_DIMS, padded_config
from jaxrl.train.update_memory import splits

_LOGITS_COPIES = 2  # float32 arrays of [rows, vocabulary] while a step samples
_BUFFERS = 2  # streamed layers that are on the devices at a time: one computes while the other's copy is under way
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class JudgeMemory:
    """A judge's sizes. Bytes are per device.

    Attributes:
      resident_layers, num_layers: layers whose matrices stay on the devices, of how many.
      num_blocks: of its KV pool, the reserved one included.
      layer_bytes: the matrices of one layer.
      parts: what it adds to the rollout, by name.
      host_bytes: its weights in the host's memory, for each device.
    """

    resident_layers: int
    num_layers: int
    num_blocks: int
    layer_bytes: int
    parts: dict[str, int]
    host_bytes: int


def rollout_memory(config: Config, num_devices: int) -> RolloutMemory:
    """Of the model that `reward.judge.model` names, of which the config is read.

    Raises:
      ValueError: as `judge_memory`, and what reading the model's config may raise.
    """
    judge, option = config.reward.judge, "reward.judge.model"
    sizes = judge_memory(config, config_of(resolve_path(judge.model, option), option), num_devices)
    return RolloutMemory(
        "the judge",
        sizes.parts,
        "reward.judge.max_memory_gib",
        f"reward.judge.max_memory_gib ({judge.max_memory_gib:g}), max_num_seqs or max_prompt_tokens",
        stays=True,  # it goes on with all devices
        line=f"judge: {sizes.resident_layers} of {sizes.num_layers} layers stay, the others are streamed; "
        f"{in_bytes(sizes.host_bytes)} of the host's memory per device",
    )


def judge_length(config: Config) -> int:
    """Tokens of the judge's longest sequence."""
    judge = config.reward.judge
    return judge.max_prompt_tokens + (1 if judge_kind(config.reward) == "model" else judge.max_tokens)


def judge_memory(config: Config, model: ModelConfig, num_devices: int) -> JudgeMemory:
    """The judge's sizes on each of so many devices.

    Raises:
      ValueError: reward.judge.max_memory_gib is too small for one verdict, or for the resident layers asked for.
    """
    judge, size = config.reward.judge, BYTES[config.reward.judge.dtype]
    padded = padded_config(model, num_devices)
    layers = padded.weights()["layers"]
    matrices = sum(_bytes(weight, num_devices, size) for name, weight in layers.items() if name in STREAMED)
    whole = sum(_bytes(weight, num_devices, size) for weight in leaves(padded.weights()))
    layer, always = matrices // model.num_layers, whole - matrices
    rollout = config.rollout
    kv = kv_layers(model, judge_length(config), rollout.max_num_batched_tokens, rollout.decode_steps)
    block = _block_bytes(config, padded, num_devices, size) // model.num_layers * kv.size
    each = kv.stacks.most_blocks(judge_length(config), rollout.block_size)
    blocks = judge.max_num_seqs * each + 1
    budget = int(judge.max_memory_gib * _GIB) or max(whole // 2, always + _BUFFERS * layer) + blocks * block
    resident = max(judge.resident_layers, 0)

    def held(count: int, num_blocks: int) -> int:
        return always + layer * (count + min(_BUFFERS, model.num_layers - count)) + num_blocks * block

    if resident > model.num_layers:
        raise ValueError(
            f"reward.judge.resident_layers ({resident}) must be at most the judge's layers ({model.num_layers})"
        )
    least = held(resident, each + 1)
    if judge.max_memory_gib and least > budget:
        raise ValueError(
            f"reward.judge.max_memory_gib ({judge.max_memory_gib:g}, {budget} bytes) must be at least {least} bytes: "
            f"{always + resident * layer} of weights that stay on the devices, {least - always - resident * layer} of "
            f"buffers and of KV for one verdict of {judge_length(config)} tokens; raise it, or lower "
            "reward.judge.max_prompt_tokens or resident_layers"
        )
    if judge.max_memory_gib:
        blocks = min(blocks, (budget - held(resident, 0)) // block)
    if judge.resident_layers < 0:
        resident = max(count for count in range(model.num_layers + 1) if held(count, blocks) <= budget)
    buffers = layer * min(_BUFFERS, model.num_layers - resident)
    logits = 0 if model.scalar_head else _LOGITS_COPIES * 4 * judge.max_num_seqs * padded.vocab_size // num_devices
    return JudgeMemory(
        resident,
        model.num_layers,
        blocks,
        layer,
        {
            "judge: weights that stay": always + resident * layer,
            "judge: buffers of two layers": buffers,
            "judge: KV pool": blocks * block,
            "judge: logits": logits,
        },
        whole,
    )


def _bytes(weight: Weight, num_devices: int, size: int) -> int:
    """Of one device's part of a weight in rollout form; norms have at least float32."""
    dims = zip(weight.dims, weight.shape, strict=True)
    shards = [splits(length, num_devices) for dim, length in dims if dim in TENSOR_DIMS]
    return math.prod(weight.shape) // math.prod(shards) * (max(size, 4) if weight.is_norm else size)


def _block_bytes(config: Config, padded: ModelConfig, num_devices: int, size: int) -> int:
    """One KV block on one device, of all layers."""
    heads = padded.num_kv_heads // splits(padded.num_kv_heads, num_devices)
    return 2 * config.rollout.block_size * padded.num_layers * padded.head_dim * heads * size
