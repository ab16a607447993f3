"""The model that all runs start from: a small decoder that got some supervised training and is often wrong.

A model of random weights earns no reward on this task, and without reward there is nothing to learn from. So it gets a
minute of supervised training on separate problems, far less than it could learn from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from accuracy import task
from jaxrl.kernels import reference
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.safetensors import export_hf

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(task.tokens()),
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": task.tokens().index(task.END),
}
ROWS, LENGTH = 16, 192  # of a batch
LEARNING_RATE = 3e-3
SMOOTHED, MAX_STEPS = 20, 3000  # updates


class Batch(NamedTuple):
    """Examples one after another in rows [ROWS, LENGTH]; `learnt` is 1 where a token belongs to a response."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    learnt: np.ndarray


def batches(seed: int) -> Iterator[Batch]:
    ids = {token: i for i, token in enumerate(task.tokens())}
    random = np.random.default_rng(seed)
    while True:
        batch = Batch(*(np.zeros((ROWS, LENGTH), dtype) for dtype in (np.int32, np.int32, np.int32, np.float32)))
        for row in range(ROWS):
            begin, number = 0, 1
            while True:
                one = task.problem(random)
                text = [*(ids[character] for character in f"{one.question}={one.response}"), ids[task.END]]
                end = begin + len(text)
                if end > LENGTH:
                    break
                batch.tokens[row, begin:end] = text
                batch.positions[row, begin:end] = range(len(text))
                batch.segments[row, begin:end] = number
                batch.learnt[row, begin + len(one.question) + 1 : end] = 1
                begin, number = end, number + 1
        yield batch


def write_model(folder: Path, loss: float, seed: int, say: Callable[[str], None]) -> None:
    """Trains until the mean loss of SMOOTHED steps is below `loss` (nats a token), and writes a Hugging Face folder:
    weights, config and tokenizer. Raises ValueError if it never is."""
    folder.mkdir(parents=True, exist_ok=True)
    config = ModelConfig.from_hf(SHAPE)
    params = decoder.init(config, jax.random.key(seed))
    rates = optax.linear_schedule(0.0, LEARNING_RATE, 100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates))
    state = optimizer.init(params)

    def loss_of(params: Any, batch: Batch) -> jax.Array:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return reference.packed_attention(q, k, v, segments, positions)

        tokens, positions, segments = (jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segments))
        hidden = decoder.forward_scan(params, tokens, positions, attend, config, dtype=jnp.float32)
        logits = decoder.logits(params, hidden[:, :-1], config)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.tokens[:, 1:])
        return jnp.sum(losses * batch.learnt[:, 1:]) / jnp.sum(batch.learnt[:, 1:])

    @jax.jit
    def update(params: Any, state: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, loss

    recent: deque[float] = deque(maxlen=SMOOTHED)
    for step, batch in enumerate(islice(batches(seed + 1), MAX_STEPS), 1):
        params, state, latest = update(params, state, batch)
        recent.append(float(latest))
        mean = fmean(recent)
        if step % 100 == 0 or mean < loss:
            say(f"  warm start: step {step}, loss {mean:.3f}")
        if mean < loss:
            break
    else:
        raise ValueError(f"--start-loss ({loss}) was not reached in {MAX_STEPS} steps")
    export_hf(params, config, folder, dtype=jnp.float32)
    task.write_tokenizer(folder)
