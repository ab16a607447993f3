"""The judge of a real run from its configuration: sizes, model, tokenizer, weights in the host's memory, engine, pool.

`judge_memory` decides how many of a judge's layers stay resident and how large its KV pool is, from `reward.judge` and
the judge's shapes alone, before anything is allocated. `jaxrl.run.memory` counts its parts with the rollout's, so
the actor's KV pool takes what the judge leaves, and with those of gradients on freed devices.

Source: RollPacker §4.3: the number of offloaded layers follows from memory and input lengths.

The judge's layout is one tensor-parallel group of all of the rollout's devices: each streams its own share of a layer,
over its own link, and the host keeps one copy of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.config import Config, ConfigError
from jaxrl.data.stops import stop_ids
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.mechanisms.judge import judge_kind
from jaxrl.mechanisms.judge.device import DeviceJudge, JudgeMachine
from jaxrl.mechanisms.judge.verdicts import Scalars, WrittenVerdicts
from jaxrl.models.config import ModelConfig
from jaxrl.models.fit import check_length, check_vocabulary
from jaxrl.models.kv_layers import kv_layers
from jaxrl.models.loading import checked_path, config_of, load_layerwise, resolve_path
from jaxrl.models.streaming import STREAMED
from jaxrl.models.weights import Weight, leaves
from jaxrl.rewards.reward_pool import RewardPool
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.host_weights import HostWeights
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.mechanism import RolloutMemory
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.schema.limits import BYTES
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.memory import host_bytes, in_bytes
from jaxrl.sharding.mesh import platform_of
from jaxrl.sharding.rules import TENSOR_DIMS, padded_config
from jaxrl.training.update_memory import splits

if TYPE_CHECKING:
    from jaxrl.run.run import Run

_LOGITS_COPIES = 2  # float32 arrays of [rows, vocabulary] while a step samples
_BUFFERS = 2  # streamed layers that are on the devices at a time: one computes while the other's copy is under way
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class JudgeMemory:
    """A judge's sizes. Bytes are per device."""

    resident_layers: int  # whose matrices stay on the devices
    num_layers: int
    num_blocks: int  # of its KV pool, the reserved one included
    layer_bytes: int  # the matrices of one
    parts: dict[str, int]  # that it adds to the rollout, by name
    host_bytes: int  # its weights in the host's memory, for each device


def rollout_memory(config: Config, num_devices: int) -> RolloutMemory:
    """The memory of the model that `reward.judge.model` names; reads its config. Raises as `judge_memory`."""
    judge, option = config.reward.judge, "reward.judge.model"
    sizes = judge_memory(config, config_of(resolve_path(judge.model, option), option), num_devices)
    return RolloutMemory(
        "the judge",
        sizes.parts,
        "reward.judge.max_memory_gib",
        f"reward.judge.max_memory_gib ({judge.max_memory_gib:g}), max_num_seqs or max_prompt_tokens",
        stays=True,  # it continues with all devices
        line=f"judge: {sizes.resident_layers} of {sizes.num_layers} layers stay, the others are streamed; "
        f"{in_bytes(sizes.host_bytes)} of the host's memory per device",
    )


def judge_length(config: Config) -> int:
    """Tokens of the judge's longest sequence."""
    judge = config.reward.judge
    return judge.max_prompt_tokens + (1 if judge_kind(config.reward) == "model" else judge.max_tokens)


def judge_memory(config: Config, model: ModelConfig, num_devices: int) -> JudgeMemory:
    """The judge's sizes on each of `num_devices` devices. Raises ValueError if reward.judge.max_memory_gib is too small
    for one verdict, or for the requested resident layers."""
    judge, size = config.reward.judge, BYTES[config.reward.judge.dtype]
    padded = padded_config(model, num_devices)
    layers = padded.weights()["layers"]
    matrices = sum(_bytes(weight, num_devices, size) for name, weight in layers.items() if name in STREAMED)
    whole = sum(_bytes(weight, num_devices, size) for weight in leaves(padded.weights()))
    layer, always = matrices // model.num_layers, whole - matrices
    rollout = config.rollout
    kv = kv_layers(model, judge_length(config), rollout.max_num_batched_tokens, rollout.decode_steps)
    heads = padded.num_kv_heads // splits(padded.num_kv_heads, num_devices)
    block = 2 * rollout.block_size * padded.head_dim * heads * size * kv.size  # of all layers of a stack
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
    """The bytes of one device's part of a weight in rollout form; norms have at least float32."""
    dims = zip(weight.dims, weight.shape, strict=True)
    shards = [splits(length, num_devices) for dim, length in dims if dim in TENSOR_DIMS]
    return math.prod(weight.shape) // math.prod(shards) * (max(size, 4) if weight.is_norm else size)


def read_judge(config: Config) -> tuple[Tokenizer, ModelConfig]:
    """The tokenizer and the config of `reward.judge.model`, which must fit each other, the kind of reward and the
    lengths; no weight is read. Raises ValueError where they do not, or a file is damaged."""
    judge, kind = config.reward.judge, judge_kind(config.reward)
    path = resolve_path(judge.model, "reward.judge.model")
    folder, model = str(checked_path(path, "reward.judge.model")), config_of(path)
    if model.scalar_head != (kind == "model"):
        found = "a reward model with a scalar head" if model.scalar_head else "a language model"
        right = "reward.kind=model" if model.scalar_head else "reward.kind=judge"
        raise ConfigError(f"reward.judge.model ({judge.model}) is {found}, which needs {right}, found {kind}")
    tokenizer = Tokenizer.from_path(folder)
    tokenizer.check_template_arguments(judge.apply_chat_template_kwargs)
    check_vocabulary(tokenizer, model, folder)
    more = "" if kind == "model" else f" + reward.judge.max_tokens ({judge.max_tokens})"
    length = judge_length(config)
    check_length(
        model, length, f"reward.judge.max_prompt_tokens ({judge.max_prompt_tokens}){more} = {length} tokens", folder
    )
    return tokenizer, model


def build_judge(run: Run, mesh: Mesh) -> DeviceJudge:
    """Loads a judge's weights into the host's memory, layer by layer through the devices of a rollout, and joins it to
    the run's reward pool. Raises ValueError as `read_judge` and `judge_memory`, or where the host lacks the memory."""
    config, pool = run.config, run.scoring
    run.beat("loading the judge")
    judge, seed = config.reward.judge, config.trainer.seed
    tokenizer, model = read_judge(config)
    plan = judge_memory(config, model, mesh.size)
    # of the devices of this process, each keeps its share of the weights in the host's memory
    num_local = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    if (needed := plan.host_bytes * num_local) > (there := host_bytes()):
        raise ConfigError(
            f"reward.judge.model needs {in_bytes(needed)} of the host's memory, which has {in_bytes(there)}: use a "
            "smaller judge, or reward.judge.dtype=bfloat16"
        )
    rollout = config.rollout
    sizes = ExecutorConfig(
        num_slots=judge.max_num_seqs,
        num_blocks=plan.num_blocks,
        block_size=rollout.block_size,
        max_length=judge_length(config),
        max_prefill_tokens=rollout.max_num_batched_tokens,
        decode_steps=rollout.decode_steps,
        attention=rollout.attention,
        dtype=judge.dtype,
        seed=seed,
        max_tp=mesh.size,
        resident_layers=plan.resident_layers,
    )
    executor = MeshExecutor(model, Layout(mesh, mesh.size), sizes)
    path = resolve_path(judge.model, "reward.judge.model", weights=True)
    _, outer, layers = load_layerwise(path, mesh, jnp.dtype(judge.dtype))
    if model.scalar_head:
        reading = Scalars(judge, tokenizer, model.pad_token_id)
    else:
        reading = WrittenVerdicts(judge, tokenizer, stop_ids(tokenizer, model.eos_token_ids), seed)
    engine = Engine(executor, BatcherConfig(config.rollout.decode_steps, max_model_len=judge_length(config)))
    # XLA:CPU can hang on two collectives at once
    collectives = mesh.size > 1 and platform_of(mesh.devices.flat[0]) == "cpu"
    machine = JudgeMachine(executor, HostWeights(executor, outer, layers), run.machine.wait_quiet, alone=collectives)
    scoring = DeviceJudge(reading, engine, machine, judge)
    assert isinstance(pool, RewardPool), "a judge scores for a real run"
    pool.join("devices", scoring)
    run.machine.add_programs(machine.programs, of_update=False)
    return scoring
