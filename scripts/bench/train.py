"""A training update: forward, backward and AdamW on one minibatch. jaxrl's trainer beside PyTorch.

    python scripts/bench.py train [--rows 16] [--tokens 192] [--response 128] [--microbatches 1] [--json]

Every case lives in a process of its own and runs one update when it is asked to: updates take turns.

- jaxrl: `MeshTrainer.accumulate` and `apply`, packing included. Master weights, moments and gradients are float32.
- torch: the same masked, clipped loss, clipping and fused AdamW on transformers' model with SDPA, weights and moments
  in the dtype; it takes part where torch and transformers are installed.
- mfu: forward and backward, nothing that is computed again, over measured products of that dtype; mfu_datasheet: over
  the data sheet's rate.
- peak_bytes: the most that the process ever held, less what it held before the model (on GPUs what the framework says
  of the device); of jaxrl also over the plan of `jaxrl explain-config`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench import costs, profiles
from bench.harness import Bench, Case, Values, model_of, prepare_devices, say
from bench.worker import Ask, Worker, memory
from jaxrl.config import Config, from_mapping
from jaxrl.types import Prompt, Sample, SampleKey, TrainBatch

LR, CLIP, GRAD_CLIP = 1e-6, 0.2, 1.0


def _check(options: argparse.Namespace) -> None:
    if options.response >= options.tokens:
        raise ValueError(f"--response ({options.response}) must be below --tokens ({options.tokens})")
    if options.rows % options.devices:
        raise ValueError(f"--rows ({options.rows}) must be a multiple of --devices ({options.devices})")
    for dtype in options.dtypes:
        train_config(options, dtype)  # refuses what a run would refuse


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    has_torch = not options.without_torch and options.devices == 1 and not options.model
    has_torch = has_torch and all(map(importlib.util.find_spec, ("torch", "transformers")))
    if not has_torch:
        say("torch is left out: it takes part with --shape on one device, where torch and transformers are installed")
    from bench.torch_update import update as torch_update

    works = {"jaxrl": update} | ({"torch": torch_update} if has_torch else {})
    named = [(name, dtype, work) for dtype in options.dtypes for name, work in works.items()]
    for group in [[each] for each in named] if options.one_at_a_time else [named]:
        with contextlib.ExitStack() as stack:
            made: list[tuple[Case, Worker]] = []
            for name, dtype, work in group:
                worker = stack.enter_context(Worker(f"{name} {dtype}", work, (options, dtype)))
                facts = {"case": name, "dtype": dtype}
                case = Case(facts, lambda turn, worker=worker: worker(), _figures(options, dtype, worker.info))
                made.append((case, worker))
            yield [case for case, _ in made]
            for case, worker in made:
                case.extra |= worker.info
                if options.profile and case.facts["case"] == "jaxrl":
                    case.extra |= worker(profile=True)
                    say(profiles.table(case.extra["profile"]))


def _figures(options: argparse.Namespace, dtype: str, info: dict[str, Any]) -> Any:
    rows = options.rows * options.microbatches
    flops = costs.train_flops(model_of(options).config(), rows, options.tokens, options.response)

    def figures(average: Values, ceilings: Any, runs: Any) -> dict:
        rate = flops / average["seconds"]
        found = {"flops": flops, "tokens_per_s": rows * options.tokens / average["seconds"]}
        found |= {"mfu": rate / ceilings.products(dtype), "mfu_datasheet": None}
        if ceilings.nominal is not None and dtype == "bfloat16":  # what its rate is of
            found["mfu_datasheet"] = rate / (ceilings.nominal.flops_per_s * ceilings.devices)
        if "planned_bytes" in info:
            found["peak_over_plan"] = average["peak_bytes"] / info["planned_bytes"]
        return found

    return figures


def train_config(options: argparse.Namespace, dtype: str) -> Config:
    """The options of an update. Raises ValueError for those that jaxrl refuses."""
    actor: dict[str, Any] = {
        "dtype": dtype,
        "remat": options.remat,
        "attention": options.attention,
        "numerics": options.numerics,
        "old_logprobs": "rollout",
        "ppo_max_token_len_per_gpu": -(-options.rows // options.devices) * options.tokens,
        "clip_ratio_low": CLIP,
        "clip_ratio_high": CLIP,
        "grad_clip": GRAD_CLIP,
        "optim": {"lr": LR},
    }
    if options.chunk:
        actor["logprob_chunk_tokens"] = int(options.chunk) if options.chunk.isdigit() else options.chunk
    data = {"max_prompt_length": options.tokens - options.response, "max_response_length": options.response}
    data["train_batch_size"] = options.rows * options.microbatches
    # samples are not compared; rollout.dtype: as actor.numerics=invariant wants it
    single = {"rollout": {"n": 1, "dtype": dtype}, "algorithm": {"adv_estimator": "reinforce_plus_plus"}}
    return from_mapping({"model": {"path": model_of(options).name}, "data": data, "actor": actor, **single})


def random_tokens(options: argparse.Namespace, vocab_size: int) -> np.ndarray:
    """int32 [rows of all microbatches, tokens]."""
    shape = (options.rows * options.microbatches, options.tokens)
    return np.random.default_rng(options.seed).integers(vocab_size, size=shape, dtype=np.int32)


def _batch(options: argparse.Namespace, vocab_size: int) -> TrainBatch:
    """The recorded log-probabilities are those of a uniform guess, advantages alternate in sign."""
    draw, split = random_tokens(options, vocab_size), options.tokens - options.response
    guess = np.full((options.response,), -np.log(vocab_size), np.float32)
    versions = np.zeros((options.response,), np.int32)
    prompts = [Prompt(0, i, tuple(row[:split].tolist()), "", "bench") for i, row in enumerate(draw)]
    samples = [Sample(SampleKey(0, i, 0), row[split:], guess, guess, versions) for i, row in enumerate(draw)]
    signs = [np.full((options.response,), 1.0 if i % 2 == 0 else -1.0, np.float32) for i in range(len(draw))]
    return TrainBatch(prompts, samples, signs)


def update(spec: tuple[argparse.Namespace, str], ask: Ask) -> None:
    """The case of jaxrl. A request with `profile` adds the kernels of one update."""
    import jax

    from bench.engines import build_params
    from jaxrl.run.memory import memory_plan
    from jaxrl.sharding.mesh import make_mesh
    from jaxrl.training.programs import TrainPrograms
    from jaxrl.training.trainer import MeshTrainer

    options, dtype = spec
    devices = prepare_devices(options.devices)
    mesh, model, config = make_mesh(devices), model_of(options).config(), train_config(options, dtype)
    batch, plan = _batch(options, model.vocab_size), memory_plan(config, model, mesh.size, None, devices[0].platform)
    baseline = memory()[0]
    params = build_params(model_of(options), model, mesh, "float32", options.seed)
    trainer = MeshTrainer(TrainPrograms(config, model, mesh), params)
    del params
    metrics: dict[str, float] = {}

    def one() -> None:
        trainer.accumulate(batch)
        metrics.update(trainer.apply())
        jax.block_until_ready(trainer.params)

    planned = sum(plan.resident.values()) + sum(plan.update.values())
    values: dict[str, Any] = {"planned_bytes": planned, "optimizer": "AdamW, optax, float32 master weights"}
    while (request := ask(values)) is not None:
        if request.get("profile"):
            values = {"profile": profiles.during(one)}
            continue
        began = time.perf_counter()
        one()
        seconds, stats = time.perf_counter() - began, devices[0].memory_stats()
        peak = stats["peak_bytes_in_use"] if stats else memory()[1] - baseline
        values = {"seconds": seconds, "loss": metrics["actor/pg_loss"], "peak_bytes": float(peak)}


OPTIONS = {
    "rows": (16, "rows of a microbatch"),
    "tokens": (192, "tokens of a row"),
    "response": (128, "its last tokens, which are learnt from"),
    "microbatches": (1, "of an update"),
    "remat": ("dots", "actor.remat of jaxrl"),
    "attention": ("auto", "actor.attention of jaxrl"),
    "numerics": ("fast", "actor.numerics of jaxrl"),
    "chunk": ("", "actor.logprob_chunk_tokens of jaxrl"),
    "profile": (False, "an update more of jaxrl under its profiler"),
    "without_torch": (False, "leave torch out"),
    "one_at_a_time": (False, "end a case's process before the next begins: for models of which no two fit"),
}
QUICK = {"rows": 2, "tokens": 32, "response": 16}
BENCH = Bench(__doc__, cases, OPTIONS, QUICK, place="apart", warm_up=2, has_ceilings=True, check=_check)
