"""Small random models of three families, engines over them and requests to them, for tests that compare tokens bit for
bit; and the one that is trained."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from drawn_models import draw

from jaxrl.mechanisms.speculation.index import DraftIndex
from jaxrl.mechanisms.speculation.rule import DraftConfig, DraftRule
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.rules import train_shardings
from jaxrl.types import Sample, SampleKey, SamplingParams

VOCABULARY = 300
TRAINED = ModelConfig("llama", 64, 32, 48, 2, 4, 2, 8, tie_word_embeddings=True)
MODELS = {"llama": (8, 4), "qwen2": (14, 2), "smollm2": (9, 3)}


@functools.cache
def model_of(name: str) -> ModelConfig:
    """One of `MODELS`, or a drawn one: `family:seed`."""
    if ":" in name:
        family, seed = name.split(":")
        return ModelConfig.from_hf(draw(family, int(seed)) | {"vocab_size": VOCABULARY})
    heads = MODELS[name]
    return ModelConfig.from_hf(
        {
            "architectures": ["Qwen2ForCausalLM" if name == "qwen2" else "LlamaForCausalLM"],
            "model_type": "qwen2" if name == "qwen2" else "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 8 * heads[0],
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1],
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
            "tie_word_embeddings": name != "llama",
            "max_position_embeddings": 512,
        }
    )


@functools.cache
def weights_of(name: str, dtype: str) -> Any:
    """Random weights, large enough for distributions that are far from flat; biases that are not zero."""
    params = jax.jit(lambda key: decoder.init(model_of(name), key, jnp.dtype(dtype)))(jax.random.key(0))
    random = np.random.default_rng(1)

    def one(path: Any, x: jax.Array) -> np.ndarray:
        if "bias" in jax.tree_util.keystr(path):
            return random.normal(size=x.shape).astype(dtype)
        return np.asarray(x) * jnp.dtype(dtype).type(5 if x.ndim > 1 else 1)

    return jax.tree_util.tree_map_with_path(one, params)


def requests(num_prompts: int = 9, n: int = 3, longest: int = 64, first_id: int = 0) -> list[Request]:
    """More than there are rows. The first sample of each prompt goes on to the end, others stop anywhere."""
    random = np.random.default_rng(first_id)
    made: list[Request] = []
    for p in range(num_prompts):
        prompt = tuple(random.integers(1, VOCABULARY, (23, 3, 17, 9, 2, 16)[p % 6]).tolist())
        for s in range(n):
            limit = int(random.integers(4, longest)) if s else longest
            params = SamplingParams(max_tokens=limit, temperature=(1.0, 0.7, 0.0)[s % 3], stop_token_ids=(7,) * bool(s))
            key = SampleKey(0, first_id + p, s)
            made.append(Request(first_id + len(made), key, prompt, params, share=first_id + p))
    return made


KINDS: tuple[dict[str, Any], ...] = (
    *({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7}, {"top_k": 5}),
    *({"top_p": 0.8, "temperature": 1.3}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}),
)


def mixed(num_prompts: int, n: int, longest: int = 40) -> list[Request]:
    """Requests with every kind of sampling; all but the first sample of a prompt may stop at one of eight tokens."""
    plain = {"temperature": 1.0}
    return [
        replace(
            each,
            params=replace(
                each.params,
                **(plain | KINDS[i % len(KINDS)]),
                stop_token_ids=tuple(range(7, 15)) * bool(each.params.stop_token_ids),
            ),
        )
        for i, each in enumerate(requests(num_prompts, n, longest))
    ]


def ready(name: str, layout: Layout, sizes: ExecutorConfig) -> MeshExecutor:
    """An executor of one of the models, with its weights in the type of `sizes`, and with a pool."""
    weights = weights_of(name, jnp.dtype(sizes.dtype).name)
    params = jax.device_put(weights, train_shardings(model_of(name), layout.mesh))
    executor = MeshExecutor(model_of(name), layout, sizes, weights=lambda: params)
    executor.sync_weights(params, 0)
    executor.allocate()
    return executor


def engine_over(executor: Any, drafts: bool = True, **more: Any) -> Engine:
    """Where the executor has a proposer, and unless there are to be no drafts, plans with a history verify."""
    proposer, rule = executor.config.proposer, None
    if drafts and proposer is not None:
        rule = functools.partial(DraftRule, DraftConfig(proposer.window, proposer.verify_tokens))
    return Engine(executor, BatcherConfig(decode_steps=executor.config.decode_steps, verify_rule=rule), **more)


def with_drafts(asked: list[Request], drawn: list[Sample]) -> list[Request]:
    """The requests with the very responses as history, but one token in ten: drafts are long, and rejected at times."""
    random, made = np.random.default_rng(5), []
    for request, response in zip(asked, drawn, strict=True):
        other = random.integers(0, VOCABULARY, len(response))
        text = np.where(random.random(len(response)) < 0.1, other, response.token_ids)
        made.append(replace(request, history=DraftIndex.build([text], [1.0])))
    return made
