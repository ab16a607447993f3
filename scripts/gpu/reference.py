"""What a CPU makes of a small model: tokens and log-probabilities in float32, gradients in float64.

    python -m gpu.reference FILE        # with JAX_PLATFORMS=cpu; half a minute

`gpu.check` holds a device against the file. Both sides make the same weights and requests, with numpy and from seeds,
so that the file holds results alone, and is made on the spot by a process that sees no GPU. The model has what the
kernels must cope with: biases of q, k and v, grouped heads, rotary positions, tied embeddings. Its weights are drawn
three times as wide as usual, so that its distributions are not flat.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config import Config, from_mapping
from jaxrl.kernels import reference
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.weights import Weight
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.train.trainer import MeshTrainer
from jaxrl.types import Prompt, Sample, SampleKey, SamplingParams, TrainBatch

LONGEST_PROMPT, LONGEST_RESPONSE = 72, 120
LONGEST = LONGEST_PROMPT + LONGEST_RESPONSE
SAMPLES = 4
BLOCK, STEPS = 16, 8

Tree = Any


@dataclass(frozen=True, slots=True)
class Task:
    """How much is drawn, by a model of how many layers. Fewer are for a trial."""

    prompts: int = 12
    layers: int = 3

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(
            family="qwen2",
            vocab_size=1000,
            hidden_size=128,
            intermediate_size=256,
            num_layers=self.layers,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            rope_theta=1e4,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            qkv_bias=True,
            max_position_embeddings=512,
            bos_token_id=0,
            eos_token_ids=(0,),
        )

    def weights(self) -> Tree:
        """Training form, float32, the same bits wherever it is asked."""
        rng = np.random.default_rng(0)

        def made(weight: Weight) -> np.ndarray:
            scale = {"normal": 0.06, "zeros": 0.1, "ones": 0.1}[weight.init]
            return (rng.standard_normal(weight.shape) * scale + (weight.init == "ones")).astype(np.float32)

        return jax.tree.map(made, self.model.weights(), is_leaf=lambda x: isinstance(x, Weight))

    def requests(self) -> list[Request]:
        """Prompts of 5 to 70 tokens, four responses to each, of 20 to 119 tokens; none ends early."""
        rng = np.random.default_rng(0)
        made: list[Request] = []
        for prompt in range(self.prompts):
            ids = tuple(rng.integers(1, self.model.vocab_size, rng.integers(5, LONGEST_PROMPT - 1)).tolist())
            for sample in range(SAMPLES):
                params = SamplingParams(max_tokens=int(rng.integers(20, LONGEST_RESPONSE)))
                made.append(Request(len(made), SampleKey(0, prompt, sample), ids, params, share=prompt))
        return made

    def generate(
        self, params: Tree, wanted: Sequence[Request], device: Any, dtype: str, *, slots: int = 0
    ) -> list[Sample]:
        """By the real engine. With `slots`, requests queue for so few rows, and are preempted for want of blocks."""
        blocks = 2 * slots // 3 * (LONGEST // BLOCK) if slots else len(wanted) * (LONGEST // BLOCK)
        sizes = ExecutorConfig(
            num_slots=slots or len(wanted),
            num_blocks=blocks + 1,
            block_size=BLOCK,
            max_length=LONGEST,
            max_prefill_tokens=128,
            decode_steps=STEPS,
            dtype=dtype,
        )
        executor = MeshExecutor(self.model, Layout(make_mesh([device]), 1), sizes)
        executor.sync_weights(jax.device_put(params, device), 0)
        executor.allocate()
        samples = Engine(executor, BatcherConfig(decode_steps=STEPS)).generate(wanted)
        executor.release(weights=True)
        return samples

    def exact_logprobs(
        self, params: Tree, wanted: Sequence[Request], samples: Sequence[Sample], dtype: str
    ) -> list[np.ndarray]:
        """Of every drawn token, in float64 on the CPU, with weights as they are in `dtype`."""
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(jnp.dtype(dtype)), jnp.float64), params)

            @jax.jit
            def full(ids: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
                def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                    return reference.packed_attention(q, k, v, segments, positions)

                hidden = decoder.forward_scan(wide, ids, positions, attend, self.model, dtype=jnp.dtype("float64"))
                return jax.nn.log_softmax(decoder.logits(wide, hidden, self.model))

            found = []
            for request, sample in zip(wanted, samples, strict=True):
                ids, length = np.zeros((1, LONGEST), np.int32), len(request.prompt_ids) + len(sample)
                ids[0, :length] = [*request.prompt_ids, *sample.token_ids]
                at = np.arange(LONGEST)[None]
                table = np.asarray(full(ids, (at < length).astype(np.int32), at))
                drawn = np.arange(len(request.prompt_ids), length)
                found.append(table[0, drawn - 1, sample.token_ids])
            return found

    def gradients(self, params: Tree, batch: TrainBatch, device: Any, dtype: str, attention: str = "auto") -> Tree:
        """Of one minibatch, by the real trainer; numpy arrays of float64."""
        trainer = MeshTrainer(train_config(dtype, attention), self.model, params, make_mesh([device]))
        trainer.accumulate(batch)
        return jax.tree.map(lambda x: np.asarray(x, np.float64), trainer.gradients())


def batch_of(wanted: Sequence[Request], samples: Sequence[Sample]) -> TrainBatch:
    """Advantages alternate in sign."""
    prompts = [Prompt(0, request.key.prompt_index, request.prompt_ids, "", "check") for request in wanted]
    signs = [np.full(len(sample), 1.0 if i % 2 else -1.0, np.float32) for i, sample in enumerate(samples)]
    return TrainBatch(prompts, list(samples), signs)


def train_config(dtype: str, attention: str) -> Config:
    """Rows of one to several samples, with shared prompts among them."""
    return from_mapping(
        {
            "model": {"path": "check"},
            "data": {"max_prompt_length": LONGEST_PROMPT, "max_response_length": LONGEST_RESPONSE},
            "actor": {
                "dtype": dtype,
                "param_dtype": "float64" if dtype == "float64" else "float32",
                "attention": attention,
                "old_logprobs": "rollout",
                "remat": "dots",
                "ppo_max_token_len_per_gpu": 1024,
            },
        }
    )


def flat(tree: Tree) -> dict[str, np.ndarray]:
    """By path, with slashes."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def make(file: Path, task: Task) -> str:
    """Writes the file; returns a sentence about it."""
    cpu = jax.devices("cpu")[0]
    params, wanted = task.weights(), task.requests()
    samples = task.generate(params, wanted, cpu, "float32")
    exact = task.exact_logprobs(params, wanted, samples, "float32")
    with jax.enable_x64(True):
        gradient = task.gradients(params, batch_of(wanted, samples), cpu, "float64")
    arrays = {f"gradient/{path}": leaf.astype(np.float32) for path, leaf in flat(gradient).items()}
    for i, sample in enumerate(samples):
        arrays |= {f"tokens/{i}": sample.token_ids, f"logprobs/{i}": sample.rollout_logprobs}
    np.savez_compressed(file, allow_pickle=False, **arrays)
    worst = max(float(np.abs(a - s.rollout_logprobs).max()) for a, s in zip(exact, samples, strict=True))
    tokens = sum(len(sample) for sample in samples)
    return f"{tokens} tokens; float32 on the CPU is within {worst:.1e} of float64; {os.path.getsize(file)} bytes"


def load(file: Path, wanted: Sequence[Request]) -> tuple[list[Sample], dict[str, np.ndarray]]:
    """The samples of the CPU, and the gradient by path."""
    saved = np.load(file)
    samples = []
    for i, request in enumerate(wanted):
        tokens, logprobs = saved[f"tokens/{i}"], saved[f"logprobs/{i}"]
        samples.append(Sample(request.key, tokens, logprobs, logprobs, np.zeros(len(tokens), np.int32)))
    prefix = "gradient/"
    return samples, {name.removeprefix(prefix): saved[name] for name in saved.files if name.startswith(prefix)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes what a CPU makes of the small model of gpu.check.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", type=int, default=Task().prompts, help=f"with {SAMPLES} responses each")
    parser.add_argument("--layers", type=int, default=Task().layers, help="of the model")
    options = parser.parse_args()
    print(make(options.file, Task(options.prompts, options.layers)))
