"""The memory of training, per device, before anything is allocated: resident parts, and what an update adds.

`resident_parts` and `update_parts` are the trainer's share of `jaxrl.run.memory`; `planned_update` decides what the
update recomputes, and how many tokens have their logits at once.

The bytes of weights, optimizer and gradients follow exactly from the table of weights and the sharding rules.
Activations are an estimate: what the backward pass keeps of each layer, and one layer's working set. The update has
phases (the head, the layers' backward pass, the embedding's gradient, the optimizer), and the plan is that of the
largest one.

The temporaries that XLA reports for an H100 are within 5 % of the plan (`tests/training/test_compiled_for_gpu.py`), and
on CPUs within 15 % (`test_update_memory.py`).

A critic's weights and moments are resident. Its updates come before the actor's and need less: they have the same
layers and tokens, and neither vocabulary head nor logits. The weights of a teacher and a reference are resident, except
layers in host memory; their passes come before the first gradient, and a reference's needs less than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxrl.config import Config, OptimSection
from jaxrl.kernels.attention import Heads, PackedAttention, choose_packed
from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import adapters_alone, is_trained
from jaxrl.models.streaming import STREAMED
from jaxrl.models.weights import Weight, leaves
from jaxrl.schema.devices import mesh_factors
from jaxrl.schema.limits import BYTES, Narrow
from jaxrl.sharding.mesh import dividing_factors
from jaxrl.sharding.narrow_weights import Scale, inputs
from jaxrl.sharding.rules import axes_of_dims
from jaxrl.training.logprobs import DEFAULT_CHUNK
from jaxrl.training.objectives import critic_config
from jaxrl.training.packing import BatchShape, microbatch_shapes
from jaxrl.training.vocabulary import group_of

_PLANNED_SHARE = 0.8  # of a device's memory: the rest is for fragments and what lies beside the plan
# float32 arrays of [tokens, tokens] scores that attention in plain jnp holds at once in the backward pass
_SCORE_COPIES = 3
_LOGITS_SHARE = 0.5  # of what the update leaves of that: larger chunks read the head's gradient less often


def full_microbatch(config: Config, model_config: ModelConfig, num_devices: int, platform: str) -> BatchShape:
    """The largest microbatch of an update, on one of `num_devices`, or on those that share its rows."""
    return microbatch_shapes(config, model_config, num_devices, _attention(config, model_config, platform))[-1]


def _attention(config: Config, m: ModelConfig, platform: str) -> PackedAttention:
    heads = Heads(m.num_heads, m.num_kv_heads, m.head_dim, config.actor.dtype, m.attn_logit_softcapping)
    return choose_packed(config.actor.attention, platform, heads)


def splits(size: int, degree: int, num_hosts: int = 1) -> int:
    """The number of shards into which a dim of `size` is split on a mesh of `degree` devices."""
    return math.prod(dividing_factors(mesh_factors(degree, num_hosts), size))


def device_numbers(model_config: ModelConfig, degree: int, num_hosts: int = 1, *, offload: bool = False) -> int:
    """How many of a model's parameters one device holds when training splits them over `degree` devices. `offload`:
    layers' matrices lie in host memory."""
    weights = model_config.weights()
    if offload:
        weights = {**weights, "layers": {n: w for n, w in weights["layers"].items() if n not in STREAMED}}
    return sum(_shard_numbers(weight, degree, num_hosts) for weight in leaves(weights))


def rollout_bytes(padded: ModelConfig, degree: int, dtype: str, quantization: Narrow = "none") -> int:
    """The bytes of one device's part of rollout weights, as tensor parallelism splits them."""
    total = 0
    for weight in leaves(padded.weights()):
        numbers = _shard_numbers(weight, degree, 1, in_rollout=True)
        if quantization == "none" or not inputs(weight):
            total += numbers * BYTES[dtype]
        else:
            scales = _shard_numbers(Scale.of(weight), degree, 1, in_rollout=True)
            total += numbers * BYTES[quantization] + scales * BYTES["float32"]
    return total


def device_bytes(config: Config, model_config: ModelConfig, degree: int, num_hosts: int = 1) -> int:
    """The bytes of those parameters, each in its type in training."""
    types = leaves(model_config.dtypes(config.actor.param_dtype, config.actor.dtype))
    weights = zip(leaves(model_config.weights()), types, strict=True)
    return sum(_shard_numbers(weight, degree, num_hosts) * BYTES[dtype] for weight, dtype in weights)


def _shard_numbers(weight: Weight | Scale, degree: int, num_hosts: int, *, in_rollout: bool = False) -> int:
    factors = mesh_factors(degree, num_hosts)
    shards = math.prod(math.prod(factors[own]) for own in axes_of_dims(weight, factors, in_rollout=in_rollout))
    return math.prod(weight.shape) // shards


def trained_numbers(model_config: ModelConfig, degree: int, num_hosts: int = 1) -> int:
    """How many of those parameters are trained: all, or those of adapters and a critic's head."""
    return sum(_shard_numbers(weight, degree, num_hosts) for weight in leaves(_trained_weights(model_config)))


def _trained_weights(m: ModelConfig) -> dict[str, Any]:
    weights = m.weights()
    if m.lora is None:
        return weights
    others = {name: weight for name, weight in weights.items() if name != "layers" and is_trained(name)}
    return adapters_alone(weights) | others


def optimizer_part(
    config: Config, optim: OptimSection, model_config: ModelConfig, degree: int, num_hosts: int
) -> tuple[str, int]:
    """An optimizer's state: a description, and its bytes on one device."""
    weights = leaves(_trained_weights(model_config))
    kind = "" if optim.state_dtype == "float32" else f", {optim.state_dtype}"
    muon = "muon m, " if any(_is_orthogonalised(optim, weight) for weight in weights) else ""
    kept = sum(_moments(config, optim, weight, degree, num_hosts) for weight in weights)
    return f"optimizer ({muon}adam m, v{kind})", kept


def _is_orthogonalised(optim: OptimSection, weight: Weight) -> bool:
    return optim.name == "muon" and weight.stacked and weight.is_matrix


def _block_of(weight: Weight) -> Any:
    from jaxrl.training.moments import block_of

    return block_of(weight)


def _moments(config: Config, optim: OptimSection, weight: Weight, degree: int, num_hosts: int) -> int:
    """Bytes of a weight's moments; Muon's matrices have one."""
    numbers = (1 if _is_orthogonalised(optim, weight) else 2) * _shard_numbers(weight, degree, num_hosts)
    if optim.state_dtype == "int8" and (block := _block_of(weight)) is not None:
        return numbers + numbers // block.size * 4
    return numbers * BYTES[optim.state_dtype if optim.state_dtype == "bfloat16" else config.actor.param_dtype]


def resident_parts(config: Config, model_config: ModelConfig, num_devices: int) -> dict[str, int]:
    """Bytes that are always on a device: weights and moments of the policy and a critic, weights of a reference and a
    teacher. With adapters the base is there once for all of them."""
    kept = _kept_parts(config, model_config, num_devices)
    return {name: size for name, size, is_on_host in kept if not is_on_host}


def host_parts(config: Config, model_config: ModelConfig, num_devices: int) -> dict[str, int]:
    """Bytes in each host's memory of what is kept there instead of on its devices."""
    each, kept = num_devices // config.hosts.num, _kept_parts(config, model_config, num_devices)
    return {name: size * each for name, size, is_on_host in kept if is_on_host}


def _kept_parts(config: Config, model_config: ModelConfig, num_devices: int) -> Iterator[tuple[str, int, bool]]:
    """(what is kept between updates, the bytes of one device's part, whether they lie in the host's memory)."""
    hosts, actor, teacher = config.hosts.num, config.actor, config.algorithm.teacher

    def frozen(name: str, model: ModelConfig, dtype: str, offload: bool) -> Iterator[tuple[str, int, bool]]:
        here = device_numbers(model, num_devices, hosts, offload=offload)
        yield name, here * BYTES[dtype], False
        if offload:
            yield name, (device_numbers(model, num_devices, hosts) - here) * BYTES[dtype], True

    yield "master weights", device_bytes(config, model_config, num_devices, hosts), False
    name, size = optimizer_part(config, actor.optim, model_config, num_devices, hosts)
    yield name, size, actor.offload_optimizer
    if config.has_critic:
        critic = critic_config(model_config)
        yield "critic: master weights", trained_numbers(critic, num_devices, hosts) * BYTES[actor.param_dtype], False
        name, size = optimizer_part(config, config.critic_optim, critic, num_devices, hosts)
        yield f"critic: {name}", size, actor.offload_optimizer
    if config.needs_ref and model_config.lora is None:
        yield from frozen("reference weights", model_config, actor.dtype, actor.offload_reference)
    if teacher.path:
        from jaxrl.training.teacher import shares_base, teacher_model

        if not shares_base(config):
            yield from frozen("teacher: weights", teacher_model(config), teacher.dtype, teacher.offload)


def planned_update(
    config: Config, model_config: ModelConfig, num_devices: int, memory_bytes: int | None, platform: str
) -> Config:
    """`config` with `auto` of the update resolved, by the memory of one of the trainer's devices (None: not known).

    `actor.remat`: `dots` if the update then fits into 0.8 of a device's memory, or if that is not known, else `full`.
    `actor.logprob_chunk_tokens`: the largest power of two from 128 to 4096 whose logits take at most half of what the
    rest of the update leaves of that share; `DEFAULT_CHUNK` if the memory is not known.
    """
    actor, chunk = config.actor, config.actor.logprob_chunk_tokens
    given = model_config, num_devices, platform
    left = math.inf
    if memory_bytes is not None:
        left = _PLANNED_SHARE * memory_bytes - sum(resident_parts(config, model_config, num_devices).values())
    if actor.remat == "auto":
        actor = actor.replace(remat="dots", logprob_chunk_tokens=DEFAULT_CHUNK if chunk == "auto" else chunk)
        fits = sum(update_parts(config.replace(actor=actor), *given).values()) <= left
        actor = actor.replace(remat="dots" if fits else "full")
    if chunk == "auto" and memory_bytes is not None:
        others = update_phases(config.replace(actor=actor.replace(logprob_chunk_tokens=0)), *given)["head"]
        room = _LOGITS_SHARE * (left - sum(others.values()))
        chunks = [1 << i for i in range(7, 13)]
        chunk = max((c for c in chunks if _chunk_bytes(config, model_config, c) <= room), default=chunks[0])
    return config.replace(actor=actor.replace(logprob_chunk_tokens=DEFAULT_CHUNK if chunk == "auto" else chunk))


def update_parts(config: Config, model_config: ModelConfig, num_devices: int, platform: str) -> dict[str, int]:
    """Bytes that an update adds to the resident ones in its largest phase."""
    return largest(update_phases(config, model_config, num_devices, platform).values())


def largest(phases: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The parts of the phase that needs most."""
    return {name: size for name, size in max(phases, key=lambda parts: sum(parts.values())).items() if size}


def update_phases(
    config: Config, model_config: ModelConfig, num_devices: int, platform: str
) -> dict[str, dict[str, int]]:
    """Bytes by phase: the head's gradient, the layers' backward pass, the embedding's gradient, the optimizer's update,
    and a teacher's pass where there is a teacher. `auto` of the update is resolved (`planned_update`)."""
    m, actor = model_config, config.actor
    remat, chunk = actor.remat, actor.logprob_chunk_tokens
    assert chunk != "auto", "planned_update comes before"
    num_hosts, size, wide = config.hosts.num, BYTES[actor.param_dtype], BYTES[actor.dtype]
    numbers, trains_all = trained_numbers(m, num_devices, num_hosts), m.lora is None
    full = full_microbatch(config, m, num_devices, platform)
    rows, row, sharing = full.rows, full.length, actor.context_parallel_size
    tokens = full.tokens // sharing
    kept, working = _layer_bytes(m, remat, platform, wide)
    # of all devices that share rows; without remat each layer's are kept
    others = (full.tokens - tokens) * 2 * m.num_kv_heads * m.head_dim * wide
    if remat == "none":
        kept += others / tokens
    embeddings = m.vocab_size * m.hidden_size * (1 if m.tie_word_embeddings else 2)
    weights = m.base.num_params() - embeddings - m.num_expert_params()
    is_gathered, is_cast = num_devices > 1, trains_all and wide < size
    one_layer = weights // m.num_layers * wide
    if is_gathered and trains_all:  # so is the next one, and the gradient is whole until it is reduced
        one_layer += weights // m.num_layers * (wide + max(wide, BYTES[actor.reduce_dtype]))
    held_experts = sum(_shard_numbers(weight, num_devices, num_hosts) for weight in _experts(m))
    exchanged = 0  # features of the tokens of all devices that share a layer's experts
    if m.num_experts:
        first = _experts(m)[0]
        sharing_experts = math.prod(first.shape) // _shard_numbers(first, num_devices, num_hosts)
        exchanged = tokens * sharing_experts * m.hidden_size
    if remat == "none":
        kept += exchanged * wide / tokens
    if remat == "none" and is_cast:
        kept += (weights + held_experts) // m.num_layers * wide / tokens  # cast once, and kept
    # of a layer: weights in the type of the products, and gradients in float32
    experts = held_experts // m.num_layers * (wide * is_cast + max(wide, 4) * trains_all)
    # inputs, gradients, and the sums of both passes
    experts += exchanged * (wide + 3 * max(wide, 4))
    held = _attention(config, m, platform).holds_scores(row)
    scores = rows * m.num_heads * row // sharing * row * max(wide, 4) * _SCORE_COPIES if held else 0
    score_layers = m.num_layers if remat == "none" else 1
    why_scores = "actor.attention: reference" if actor.attention == "reference" else "rows too short for tiles"
    vocabulary, shards = m.vocab_size * m.hidden_size, splits(m.vocab_size, num_devices, num_hosts)
    total = {"gradients": numbers * size}
    if is_gathered:  # XLA adds to them in another order of dims, and has both at once; experts' are summed nowhere
        total["gradients in the order in which they are added"] = (numbers - trains_all * held_experts) * size
    activations = {f"activations kept (remat {remat}, estimate)": int(m.num_layers * tokens * kept)}
    # of the rows of a group's device, and of the tokens of all of its devices
    group = math.prod(group_of(dividing_factors(mesh_factors(num_devices, num_hosts), m.vocab_size)))
    table = vocabulary // group if m.tie_word_embeddings or group < shards else 0
    table += 2 * tokens * group * m.hidden_size
    has_pass = bool(config.algorithm.teacher.path)
    phases = {"teacher": _teacher_phase(config, num_devices, platform, chunk)} if has_pass else {}
    return phases | {
        "head": total
        | activations
        | {
            "logits of a chunk and their gradient": _chunk_bytes(config, m, min(chunk, tokens)),
            "vocabulary head and its gradient": vocabulary * (wide * (trains_all or is_gathered) + size * trains_all),
            # takes the place of the logits; only what is larger counts
            "a chunk's part of the head's gradient": trains_all
            * max(vocabulary * size - min(chunk, tokens) * m.vocab_size * 4, 0),
            "hidden states and their gradient": 4 * tokens * m.hidden_size * wide,
            # ids, the teacher's log-probabilities, the policy's and their gradient
            "the teacher's likeliest tokens": 16 * tokens * config.algorithm.teacher.top_k,
        },
        "layers": total
        | activations
        | {
            "one layer at work (estimate)": int(tokens * working) + one_layer,
            "experts of one layer, and tokens of all devices (estimate)": experts,
            "keys and values of shared rows, and their gradients": 2 * others,
            # the gradient's shard waits to be added; XLA keeps a tied table from the head on
            "vocabulary head, as it was gathered": is_gathered
            * trains_all
            * (vocabulary // shards * size + m.tie_word_embeddings * vocabulary * wide),
            f"attention scores ({why_scores})": scores * score_layers,
        },
        "embedding": total | {"the embedding's gradient": trains_all * table * size},
        "optimizer": {"gradients": numbers * size} | _step_parts(config, m, num_devices),
    }


def _experts(m: ModelConfig) -> list[Weight]:
    return [weight for weight in leaves(m.base.weights()) if weight.has_experts]


def _teacher_phase(config: Config, num_devices: int, platform: str, chunk: int) -> dict[str, int]:
    """The teacher's pass, before anything of the update is allocated."""
    from jaxrl.training.teacher import teacher_config, teacher_model

    m, own = teacher_model(config), teacher_config(config)
    wide, full = BYTES[own.actor.dtype], full_microbatch(own, m, num_devices, platform)
    tokens = full.tokens // own.actor.context_parallel_size
    table = m.vocab_size * m.hidden_size
    copies = 5 if config.algorithm.teacher.top_k else 1  # sorted with their places; XLA:CPU reports 3
    layer = sum(math.prod(weight.layer_shape) for weight in m.weights()["layers"].values()) * wide
    return {
        "teacher: one layer at work (estimate)": int(tokens * _layer_bytes(m, "full", platform, wide)[1])
        + layer * (2 if config.algorithm.teacher.offload else 1),
        "teacher: vocabulary": table * (1 if m.tie_word_embeddings else 2) * wide,
        "teacher: logits of a chunk": min(chunk, tokens) * m.vocab_size * copies * max(wide, 4),
    }


def _step_parts(config: Config, m: ModelConfig, num_devices: int) -> dict[str, int]:
    """Temporaries of the optimizer's step: of a layer, or of one of the other weights if that is more (`weightwise`).

    A state from host memory is there twice, in and out: 8.72 GB planned and reported by XLA for the untied 7B on an
    H100 (jax 0.10.2); two layers of the 30B-A3B 9.97 and 9.82. Moments in codes are decoded beside them: 4.36 and 4.39
    GB for the 7B. Orthogonalised matrices need five arrays and their Gram matrices: 4.92 and 4.76 GB (jax 0.11.2;
    `tests/training/test_compiled_for_gpu.py`).
    """
    optim, offload = config.actor.optim, config.actor.offload_optimizer
    weights, hosts, size = _trained_weights(m), config.hosts.num, BYTES[config.actor.param_dtype]

    def at_work(weight: Weight) -> int:
        numbers = _shard_numbers(weight, num_devices, hosts)
        state = 2 * offload * _moments(config, optim, weight, num_devices, hosts)
        if not _is_orthogonalised(optim, weight):
            return state + (2 * numbers * BYTES["float32"] if optim.state_dtype == "int8" and _block_of(weight) else 0)
        first, split = weight.num_stacked, weight.num_stacked + weight.num_inputs
        sides = math.prod(weight.shape[first:split]), math.prod(weight.shape[split:])
        return state + (5 * numbers + math.prod(weight.shape[:first]) * min(sides) ** 2) * size

    layer = sum(map(at_work, weights["layers"].values())) // m.num_layers
    others = max((at_work(weight) for name, weight in weights.items() if name != "layers"), default=0)
    state, _ = optimizer_part(config, optim, m, num_devices, hosts)
    if others > layer or not any(_is_orthogonalised(optim, weight) for weight in weights["layers"].values()):
        return {f"{state}, a layer at a time": max(others, layer)}
    return {"orthogonalised matrices (estimate)": layer}


def _chunk_bytes(config: Config, model_config: ModelConfig, chunk: int) -> int:
    """The logits of a chunk in float32 or better, and their gradient in the type of the products; with a teacher's
    tokens also the logits without those."""
    wide = BYTES[config.actor.dtype]
    copies = 2 if config.algorithm.teacher.top_k else 1
    return chunk * model_config.vocab_size * (copies * max(wide, 4) + wide)


def _layer_bytes(m: ModelConfig, remat: str, platform: str, wide: int) -> tuple[float, float]:
    """Bytes per token that a layer keeps for the backward pass, and that one layer needs while it is computed.

    What XLA keeps without remat, and how many of a layer's arrays live at once, differs between its compilers: both
    follow their reports (see the module), in units of the model's dims.
    """
    heads, embed, mlp = 2 * (m.num_heads + m.num_kv_heads) * m.head_dim, m.hidden_size, m.intermediate_size
    if m.num_experts:  # the backward pass keeps nothing of them
        mlp = 0
    # what adapters add, beside what it is added to; and what dropout leaves of the inputs
    added = 0 if m.lora is None else heads + mlp + embed + (mlp + embed if m.lora.dropout else 0)
    normaliser = 4 * m.num_heads  # attention's, in float32
    kept = {"full": embed * wide, "dots": (heads + 2 * mlp + 2 * embed) * wide + normaliser}
    if platform == "cpu":
        products = heads + 3 * mlp  # q k v out, gate up act
        working = (2 * products + 6 * embed + added) * wide
        return kept.get(remat, working), working
    # gate, up, its sigmoid, its product ...; of the two norms the input, its square root's share and the result
    kept["none"] = (heads + 6 * mlp + 3 * embed) * wide + 6 * embed * max(wide, 4) + normaliser
    if m.qk_norm:
        kept["none"] += 3 * heads // 2 * max(wide, 4)
    if m.num_experts:  # the router's input
        kept["none"] += embed * max(wide, 4)
    working = {"full": 6 * mlp + 6 * embed, "dots": 4 * mlp, "none": 3 * mlp}
    return kept[remat], (working[remat] + added) * wide
