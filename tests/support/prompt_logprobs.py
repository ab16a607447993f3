"""An endpoint on the loopback which gives a model's log-probabilities of prompts, in vLLM's form."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chat_server import Behaviour, Handler

from jaxrl.kernels.reference import MaskInputs, packed_attention
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig


def gives_prompt_logprobs(params: Any, model: ModelConfig, width: int = 256, dtype: str = "float32") -> Behaviour:
    """Of the model as it is, to prompts of `width` tokens at most."""

    @jax.jit
    def whole(tokens: jax.Array) -> jax.Array:
        places = jnp.arange(width)[None]
        ones = jnp.ones_like(places)
        hidden = decoder.forward_scan(
            params,
            tokens,
            places,
            lambda q, k, v: packed_attention(q, k, v, MaskInputs(ones, places, ones)),
            model,
            dtype=jnp.dtype(dtype),
        )
        return jax.nn.log_softmax(decoder.logits(params, hidden, model), axis=-1)[0]

    def behave(handler: Handler) -> None:
        ids, k = handler.body["prompt"], handler.body["prompt_logprobs"]
        assert handler.path == "/v1/completions"
        log_p = np.asarray(whole(jnp.asarray([ids + [0] * (width - len(ids))])), np.float64)
        entries: list[Any] = [None]
        for before, token in enumerate(ids[1:]):
            named = {token, *np.argsort(-log_p[before], kind="stable")[:k].tolist()}
            entries.append({str(each): {"logprob": log_p[before, each], "rank": 1} for each in named})
        handler.reply(json.dumps({"choices": [{"text": "a", "prompt_logprobs": entries}]}).encode())

    return behave
