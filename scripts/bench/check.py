"""Is what a device draws and differentiates right? The engine and the trainer against float32 and float64 of a CPU.

    python scripts/bench.py check [--json FOLDER] [--prompts N]

A process that sees no GPU makes the reference first, half a minute: tokens and log-probabilities in float32, gradients
in float64. Both sides make the same weights and requests, with numpy and from seeds. The model has what the kernels
must cope with: biases of q, k and v, grouped heads, rotary positions, tied embeddings. Its weights are drawn three
times as wide as usual, so that its distributions are not flat. Then, for float32 (as jaxrl's programs make it: in full
precision) and bfloat16:

- engine: responses unlike the CPU's, per thousand tokens; the error of each drawn token's log-probability, against
  float64 on the CPU with weights of that dtype, worst and mean; responses of a second run that are not equal bit for
  bit, tokens and log-probabilities; responses that differ where few rows decode at once and sequences are preempted.
- trainer: the error of the gradient, as a share of its norm, against float64; how many of a second trainer's gradient
  arrays are not equal bit for bit.

Each is a process of its own, and they run side by side: compiling is what takes the time. What is no number counts as
infinitely wrong (1e300 in the records). Bars are the battery's: the exit status says only that everything ran.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.harness import Bench, Case, num_cores, prepare_devices
from bench.worker import Ask, once
from jaxrl.config import from_mapping
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
from jaxrl.training.programs import TrainPrograms
from jaxrl.training.trainer import MeshTrainer
from jaxrl.types import Prompt, Sample, SampleKey, SamplingParams, TrainBatch

LONGEST_PROMPT, LONGEST_RESPONSE = 72, 120
LONGEST = LONGEST_PROMPT + LONGEST_RESPONSE
SAMPLES, BLOCK, STEPS = 4, 16, 8
DTYPES = ("float32", "bfloat16")
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

    def generate(self, device: Any, dtype: str, *, slots: int = 0) -> list[Sample]:
        """By the real engine. With `slots`, requests queue for so few rows, and are preempted for want of blocks."""
        wanted = self.requests()
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
        executor.sync_weights(jax.device_put(self.weights(), device), 0)
        executor.allocate()
        samples = Engine(executor, BatcherConfig(decode_steps=STEPS)).generate(wanted)
        executor.release(weights=True)
        return samples

    def exact_logprobs(self, samples: Sequence[Sample], dtype: str) -> list[np.ndarray]:
        """Of every drawn token, in float64 on the CPU, with weights as they are in `dtype`."""
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            wide = jax.tree.map(lambda x: jnp.asarray(x.astype(jnp.dtype(dtype)), jnp.float64), self.weights())

            @jax.jit
            def full(ids: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
                def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                    return reference.packed_attention(q, k, v, reference.MaskInputs(segments, positions, segments))

                hidden = decoder.forward_scan(wide, ids, positions, attend, self.model, dtype=jnp.dtype("float64"))
                return jax.nn.log_softmax(decoder.logits(wide, hidden, self.model))

            found = []
            for request, sample in zip(self.requests(), samples, strict=True):
                ids, length = np.zeros((1, LONGEST), np.int32), len(request.prompt_ids) + len(sample)
                ids[0, :length] = [*request.prompt_ids, *sample.token_ids]
                at = np.arange(LONGEST)[None]
                table = np.asarray(full(ids, (at < length).astype(np.int32), at))
                drawn = np.arange(len(request.prompt_ids), length)
                found.append(table[0, drawn - 1, sample.token_ids])
            return found

    def gradients(
        self, samples: Sequence[Sample], device: Any, dtype: str, attention: str = "auto"
    ) -> list[np.ndarray]:
        """Of one minibatch whose advantages alternate in sign, by the real trainer, in float64."""
        actor = {
            "dtype": dtype,
            "param_dtype": "float64" if dtype == "float64" else "float32",
            "attention": attention,
            "old_logprobs": "rollout",
            "remat": "dots",
            "ppo_max_token_len_per_gpu": 1024,  # rows of one to several samples, with shared prompts among them
        }
        data = {"max_prompt_length": LONGEST_PROMPT, "max_response_length": LONGEST_RESPONSE}
        config = from_mapping({"model": {"path": "check"}, "data": data, "actor": actor})
        trainer = MeshTrainer(TrainPrograms(config, self.model, make_mesh([device])), self.weights())
        prompts = [Prompt(0, each.key.prompt_index, each.prompt_ids, "", "check") for each in self.requests()]
        signs = [np.full(len(sample), 1.0 if i % 2 else -1.0, np.float32) for i, sample in enumerate(samples)]
        trainer.accumulate(TrainBatch(prompts, list(samples), signs))
        return [np.asarray(x, np.float64) for x in jax.tree.leaves(trainer.gradients())]


def make_reference(task: Task, ask: Ask) -> None:
    """What a CPU makes of the task: `samples`, and the `gradient`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    jax.config.update("jax_platforms", "cpu")
    (cpu,) = prepare_devices(1)
    samples = task.generate(cpu, "float32")
    with jax.enable_x64(True):
        gradient = task.gradients(samples, cpu, "float64")
    ask({"samples": samples, "gradient": gradient})


def engine_case(spec: tuple[Task, str, list[Sample]], ask: Ask) -> None:
    """Two runs in a dtype; in float32 one more with few rows: what few rows draw is promised there alone."""
    task, dtype, expected = spec
    (device,) = prepare_devices(1)
    drawn, again = task.generate(device, dtype), task.generate(device, dtype)
    exact = task.exact_logprobs(drawn, dtype)
    errors = np.concatenate([np.abs(a - s.rollout_logprobs) for a, s in zip(exact, drawn, strict=True)])
    tokens = sum(map(len, drawn))
    found = {
        "tokens": float(tokens),
        "unlike_per_thousand_tokens": _unlike(expected, drawn) / tokens * 1000,
        "worst_error": size(errors.max()),
        "mean_error": size(errors.mean()),
        "again_unlike": float(_unlike(drawn, again, values=True)),
    }
    if dtype == "float32":
        few = task.generate(device, dtype, slots=max(2, len(drawn) // 8))
        found["few_rows_unlike_per_thousand_tokens"] = _unlike(drawn, few) / tokens * 1000
    ask(found)


def _unlike(some: Sequence[Sample], others: Sequence[Sample], *, values: bool = False) -> int:
    """Responses whose tokens differ (with `values`: or whose log-probabilities do)."""
    return sum(
        not np.array_equal(a.token_ids, b.token_ids)
        or (values and not np.array_equal(a.rollout_logprobs, b.rollout_logprobs))
        for a, b in zip(some, others, strict=True)
    )


def trainer_case(spec: tuple[Task, str, str, list[Sample], list[np.ndarray]], ask: Ask) -> None:
    """Two trainers with a kind of attention, in a dtype."""
    task, dtype, kind, samples, expected = spec
    (device,) = prepare_devices(1)
    found, again = (task.gradients(samples, device, dtype, kind) for _ in range(2))
    unlike = sum(not np.array_equal(a, b) for a, b in zip(found, again, strict=True))
    ask({"gradient_error": relative(found, expected), "again_unlike": float(unlike)})


def relative(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The norm of the difference of two gradients over that of the second."""
    off = sum(float(np.sum((a - b) ** 2)) for a, b in zip(found, expected, strict=True))
    return size(np.sqrt(off / sum(float(np.sum(np.square(leaf))) for leaf in expected)))


def size(value: Any) -> float:
    """The value; what is no number, as the largest."""
    return float(value) if np.isfinite(value) else 1e300


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    options.repetitions = 1
    task = Task(options.prompts, options.layers)
    made = once("reference", make_reference, task)
    samples, gradient = made["samples"], made["gradient"]
    asked: list[tuple[dict[str, Any], Any, Any]] = [
        ({"case": "engine", "dtype": dtype}, engine_case, (task, dtype, samples)) for dtype in DTYPES
    ]
    for kind in options.attention:
        for dtype in DTYPES:
            facts = {"case": "trainer", "dtype": dtype, "attention": kind}
            asked.append((facts, trainer_case, (task, dtype, kind, samples, gradient)))
    with ThreadPoolExecutor(max(1, min(len(asked), num_cores() // 2))) as threads:
        running = [(facts, threads.submit(once, str(facts), work, spec)) for facts, work, spec in asked]
        yield [Case(facts, lambda turn, future=future: future.result()) for facts, future in running]


OPTIONS = {
    "prompts": (12, "with four responses each"),
    "layers": (3, "of the small model"),
    "attention": (["auto"], "actor.attention of the trainers"),
}
QUICK = {"prompts": 1, "layers": 1}
BENCH = Bench(__doc__, cases, OPTIONS, QUICK, place="apart", warm_up=0, average="mean", has_model=False)
