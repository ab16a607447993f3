"""jaxrl's training step and other work that needs jax, each in a process of its own (`worker.Work`).

The parent process never starts jax's backend: on a GPU it would hold memory that the cases need.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.config import Config, from_mapping
from jaxrl.models.config import ModelConfig
from jaxrl.types import Prompt, Sample, SampleKey, TrainBatch

from . import profiles
from .ceilings import Ceilings, measure_ceilings
from .records import Model, describe_devices, prepare_devices
from .worker import Ask, once, peak_bytes, resident_bytes


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """One update of `microbatches` times `rows` rows of `tokens` tokens, the last `response` of which are learnt from.

    `attention`, `numerics`, `chunk` and `remat` are `actor.attention`, `actor.numerics`, `actor.logprob_chunk_tokens`
    (None: its default) and `actor.remat`.
    """

    model: Model
    dtype: str
    devices: int
    rows: int
    microbatches: int
    tokens: int
    response: int
    attention: str
    numerics: str
    chunk: int | str | None
    remat: str
    lr: float
    clip: float
    grad_clip: float
    seed: int


def described(count: int = 0) -> dict[str, Any]:
    """Of so many devices, or of all: found in a process that then ends."""
    return once("devices", _describe, count)


def _describe(count: int, ask: Ask) -> None:
    devices = prepare_devices(count or 1)
    if not count:
        import jax

        devices = jax.devices()
    ask(describe_devices(devices))


def survey(num_devices: int, quick: bool) -> tuple[dict[str, Any], Callable[[], Ceilings]]:
    """The devices' description, and what measures the machine's ceilings, each time in a process that then ends (the
    first time in that which has described the devices)."""

    def found() -> dict[str, Any]:
        return once("ceilings", _survey, (num_devices, quick))

    first = found()
    kept = [first["ceilings"]]
    return first["device"], lambda: kept.pop() if kept else found()["ceilings"]


def _survey(spec: tuple[int, bool], ask: Ask) -> None:
    devices = prepare_devices(spec[0])
    ask({"device": describe_devices(devices), "ceilings": measure_ceilings(*spec)})


def build_params(model: Model, config: ModelConfig, mesh: Any, dtype: str, seed: int) -> Any:
    """Weights in training form on the mesh: those of a path, or random ones of a shape."""
    import jax

    from jaxrl.models.decoder import init
    from jaxrl.models.loading import load_model
    from jaxrl.sharding.rules import train_shardings

    if model.path:
        return load_model(model.resolved(), mesh, dtype)[1]
    make = jax.jit(lambda key: init(config, key, dtype), out_shardings=train_shardings(config, mesh))
    return make(jax.random.key(seed))


def export(spec: tuple[Model, str, str], ask: Ask) -> None:
    """Writes a model's weights as a Hugging Face folder (without a tokenizer): spec is (model, folder, dtype)."""
    import jax.numpy as jnp

    from jaxrl.models.loading import load_model
    from jaxrl.models.safetensors import export_hf

    model, folder, dtype = spec
    config, params = load_model(model.resolved())
    export_hf(params, config, folder, dtype=jnp.dtype(dtype))
    ask({})


def train(spec: TrainSpec, ask: Ask) -> None:
    """The real `MeshTrainer`: `accumulate` and `apply`, packing included. Master weights and moments are float32.

    A request with `profile` adds the kernels of one update.
    """
    import jax

    from jaxrl.runtime.memory import memory_plan
    from jaxrl.sharding.mesh import make_mesh
    from jaxrl.train.packing import pack
    from jaxrl.train.trainer import MeshTrainer

    devices = prepare_devices(spec.devices)
    mesh = make_mesh(devices)
    model = spec.model.config()
    config, batch = train_config(spec), _batch(spec, model.vocab_size)
    plan = memory_plan(config, model, mesh.size, None, devices[0].platform)
    baseline = resident_bytes()
    trainer = MeshTrainer(config, model, build_params(spec.model, model, mesh, "float32", spec.seed), mesh)
    packed = pack(
        batch,
        shapes=trainer.programs.microbatches,
        max_model_length=config.max_model_length,
        num_row_groups=mesh.size,
    )
    shapes = [list(micro.tokens.shape) for micro in packed.microbatches]
    values: dict[str, Any] = {"microbatches": shapes, "optimizer": "AdamW, optax, float32 master weights"}
    values["planned_bytes"] = plan.update_bytes
    metrics: dict[str, float] = {}

    def update() -> None:
        trainer.accumulate(batch)
        metrics.update(trainer.apply())
        jax.block_until_ready(trainer.params)

    while (request := ask(values)) is not None:
        if request.get("profile"):
            values = {"profile": profiles.during(update)}
            continue
        began = time.perf_counter()
        update()
        seconds = time.perf_counter() - began
        peak = float(_peak(devices, baseline))
        values = {"seconds": seconds, "loss": metrics["actor/pg_loss"], "peak_bytes": peak}


def train_config(spec: TrainSpec) -> Config:
    """The options of an update. Raises ValueError for those that jaxrl refuses."""
    actor: dict[str, Any] = {
        "dtype": spec.dtype,
        "remat": spec.remat,
        "attention": spec.attention,
        "numerics": spec.numerics,
        "old_logprobs": "rollout",
        "ppo_max_token_len_per_gpu": -(-spec.rows // spec.devices) * spec.tokens,
        "clip_ratio_low": spec.clip,
        "clip_ratio_high": spec.clip,
        "grad_clip": spec.grad_clip,
        "optim": {"lr": spec.lr},
    }
    if spec.chunk is not None:
        actor["logprob_chunk_tokens"] = spec.chunk
    data = {"max_prompt_length": spec.tokens - spec.response, "max_response_length": spec.response}
    data["train_batch_size"] = spec.rows * spec.microbatches
    # samples are not compared; rollout.dtype: as actor.numerics=invariant wants it
    single = {"rollout": {"n": 1, "dtype": spec.dtype}, "algorithm": {"adv_estimator": "reinforce_plus_plus"}}
    return from_mapping({"model": {"path": spec.model.name}, "data": data, "actor": actor, **single})


def _batch(spec: TrainSpec, vocab_size: int) -> TrainBatch:
    """Random tokens; the recorded log-probabilities are those of a uniform guess, advantages alternate in sign."""
    rows = spec.rows * spec.microbatches
    draw = np.random.default_rng(spec.seed).integers(vocab_size, size=(rows, spec.tokens), dtype=np.int32)
    split = spec.tokens - spec.response
    guess = np.full((spec.response,), -np.log(vocab_size), np.float32)
    versions = np.zeros((spec.response,), np.int32)
    prompts = [Prompt(0, i, tuple(row[:split].tolist()), "", "bench") for i, row in enumerate(draw)]
    samples = [Sample(SampleKey(0, i, 0), row[split:], guess, guess, versions) for i, row in enumerate(draw)]
    advantages = [np.full((spec.response,), 1.0 if i % 2 == 0 else -1.0, np.float32) for i in range(rows)]
    return TrainBatch(prompts, samples, advantages)


def _peak(devices: list[Any], baseline: int) -> int:
    """The process's peak above what it held before the model; on an accelerator, the peak of the first device."""
    stats = devices[0].memory_stats()
    return peak_bytes() - baseline if not stats else stats["peak_bytes_in_use"]
