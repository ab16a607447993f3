"""What a rollout must draw: at each token, what the sampler draws from the logits of a whole float64 pass, as training
computes them, with log-probabilities in numpy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from recorder import Recorder
from small_models import model_of, weights_of

from jaxrl.kernels import reference
from jaxrl.models import decoder
from jaxrl.rollout.sampling import SamplingState, request_key, sample
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.types import Sample, SamplingParams

LENGTH = 96
"""Of every sequence, padded: one program for each model."""


@functools.cache
def whole_pass(name: str) -> Any:
    """(tokens [LENGTH], how to sample) -> logits [LENGTH, V], and the tokens that are drawn behind each."""
    model, params = model_of(name), weights_of(name, "float64")
    windows, positions = jnp.asarray([kind.window or 10**6 for kind in model.kinds]), jnp.arange(LENGTH)[None]

    @jax.jit
    def run(tokens: jax.Array, state: SamplingState) -> tuple[jax.Array, jax.Array]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *more: Any) -> jax.Array:
            *kind, sinks = more if model.attention_sinks else (*more, None)
            first, ones = positions - windows[kind[0] if kind else 0] + 1, jnp.ones_like(positions)
            mask = reference.MaskInputs(ones, positions, ones, first)
            return reference.packed_attention(q, k, v, mask, model.attn_logit_softcapping, sinks)

        hidden = decoder.forward_scan(params, tokens[None], positions, attend, model, dtype=jnp.float64)
        logits = decoder.logits(params, hidden, model)[0]
        return logits, sample(logits, positions[0] + 1, state, truncate=True).token

    return run


def distributions(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities [V] before and after truncation, from their definitions."""
    greedy = params.temperature == 0
    scaled = np.asarray(logits, np.float64) / (1.0 if greedy else np.float64(np.float32(params.temperature)))
    before = scaled - scaled.max()
    before -= np.log(np.exp(before).sum())
    if greedy:
        return before, np.where(np.arange(len(before)) == np.argmax(before), 0.0, -np.inf)
    probabilities, kept, mass = np.exp(before), np.zeros(len(before), bool), 0.0
    ranked = np.argsort(-before, kind="stable")[: params.top_k if params.top_k > 0 else None]
    total = probabilities[ranked].sum()
    for token in ranked:
        if params.top_p < 1 and mass >= np.float64(np.float32(params.top_p)) * total:
            break
        kept[token] = True
        mass += probabilities[token]
    kept &= probabilities >= np.float64(np.float32(params.min_p)) * probabilities.max()
    with np.errstate(divide="ignore"):
        return before, np.log(np.where(kept, probabilities, 0) / probabilities[kept].sum())


def check(name: str, asked: Sequence[Request], samples: Sequence[Sample], recorder: Recorder | None = None) -> None:
    """Of one of the small models; with a recorder to 1e-9, else to what a sample keeps."""
    for request, found in zip(asked, samples, strict=True):
        params, begin, drawn = request.params, len(request.prompt_ids), found.token_ids.tolist()
        row = np.zeros(LENGTH, np.int32)
        row[: begin + len(drawn)] = [*request.prompt_ids, *drawn]
        values = (params.temperature, params.top_k, params.top_p, params.min_p)
        arrays = [np.full(LENGTH, each, np.int32 if isinstance(each, int) else np.float32) for each in values]
        state = SamplingState(np.tile(request_key(0, request.key), (LENGTH, 1)), *arrays)
        logits, expected = (np.asarray(x)[begin - 1 : begin - 1 + len(drawn)] for x in whole_pass(name)(row, state))
        assert drawn == expected.tolist(), request
        ends = [token in params.stop_token_ids for token in drawn]
        assert not any(ends[:-1])
        assert found.finish_reason == ("stop" if ends[-1] else "length")
        assert ends[-1] or len(drawn) == params.max_tokens
        for which, kept in enumerate((found.rollout_logprobs, found.sampled_logprobs)):
            wanted = [distributions(own, params)[which][token] for own, token in zip(logits, drawn, strict=True)]
            np.testing.assert_allclose(kept, wanted, rtol=0, atol=1e-5)
            if recorder is not None:
                exact = recorder.logprobs(request.request_id, which)[: len(drawn)]
                np.testing.assert_allclose(exact, wanted, rtol=0, atol=1e-9)
