"""`jaxrl explain-config --fit`: a configuration that fits given devices, as YAML."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import yaml

from jaxrl.config import Config
from jaxrl.config.files import checked, put
from jaxrl.config.inputs import Options
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import config_of, resolve_path
from jaxrl.models.shapes import SHAPES
from jaxrl.run.memory import memory_plan, memory_problem
from jaxrl.run.weights import adapted

SHARE = 0.92
"""The share of a GPU's memory for JAX: the rest is for the CUDA context, graphs and libraries."""
_QLORA = {"model.lora_rank": 16, "model.base_quantization": "nf4"}
_WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("all weights are trained", {}),
    ("all weights are trained, their optimizer lies in the host's memory", {"actor.offload_optimizer": True}),
    ("adapters are trained (LoRA)", {"model.lora_rank": 16}),
    ("adapters are trained over a base of four bits (QLoRA)", _QLORA),
    ("adapters over a base of four bits, rollout in int8", {**_QLORA, "rollout.quantization": "int8"}),
)
_ROWS = (256, 128, 64, 32, 16, 8)
_LEAST_ROWS = 16
"""Responses that decode at once, below which the next way is tried first."""


def fit(name: str, num_devices: int, gib: float, length: int) -> str:
    """A GRPO configuration with the first of `_WAYS` that fits.

    Args:
      name: a model's shape, or as `model.path`.
      gib: GiB of a card. length: tokens of the longest response.

    Raises ValueError where nothing fits.
    """
    model = SHAPES.get(name) or config_of(resolve_path(name))
    memory = int(gib * SHARE * 2**30)
    for least, (way, options) in itertools.product((_LEAST_ROWS, 1), _WAYS):
        for given in _tried(name, options, num_devices, length, least):
            config = checked(_options(given))
            plan = _plan(config, adapted(config, model), num_devices, memory)
            if plan is not None:
                return _text(given, way, plan, num_devices, gib)
    raise ValueError(
        f"--fit: nothing fits {num_devices} × {gib:g} GiB for {name} with responses of {length} tokens: take more "
        "devices, a smaller model or a smaller --length"
    )


def _tried(name: str, options: dict[str, Any], num_devices: int, length: int, least: int) -> Iterator[dict[str, Any]]:
    """Options by name."""
    degrees = [tp for tp in (1, 2, 4, 8) if num_devices % tp == 0]
    prompt = min(1024, length)
    tokens = 2 ** math.ceil(math.log2(prompt + length))
    for rows, tp, budget in itertools.product(_ROWS, degrees, (max(tokens, 16384), tokens)):
        if rows < least:
            return
        yield {
            "model.path": name,
            "data.max_prompt_length": prompt,
            "data.max_response_length": length,
            "data.train_batch_size": 32,
            "rollout.n": 8,
            "rollout.max_num_seqs": rows,
            "rollout.max_num_batched_tokens": 4096,
            "rollout.tensor_model_parallel_size": tp,
            "actor.optim.lr": 1e-5 if "model.lora_rank" in options else 1e-6,
            "actor.ppo_max_token_len_per_gpu": budget,
            "trainer.num_devices": num_devices,
            **options,
        }


def _plan(config: Config, model: ModelConfig, num_devices: int, memory: int) -> Any:
    typed = config.with_types("gpu")
    try:
        plan = memory_plan(typed, model, num_devices, memory, "gpu")
    except ValueError:  # not one response fits beside the weights
        return None
    too_large = memory_problem(typed, model, plan, num_devices, memory) or plan.update_bytes > memory
    return None if too_large or plan.pool_requests < typed.rollout.max_num_seqs // 4 else plan


def _options(given: dict[str, Any]) -> Options:
    options = Options()
    for option, value in given.items():
        put(options, option, value, "--fit")
    return options


def _text(given: dict[str, Any], way: str, plan: Any, num_devices: int, gib: float) -> str:
    given = given | {"data.train_files": ["my_data.jsonl"], "reward.kind": "math"}
    given |= {"trainer.run_dir": "runs/fit", "trainer.total_training_steps": 100}
    used = f"{plan.rollout_bytes / 2**30:.1f} GiB in the rollout, {plan.update_bytes / 2**30:.1f} in the update"
    return (
        f"# {way}; on each of {num_devices} × {gib:g} GiB: {used}, of {gib * SHARE:.1f} that JAX gets\n"
        f"# XLA_PYTHON_CLIENT_MEM_FRACTION={SHARE} jaxrl train --config FILE\n"
        + yaml.safe_dump(_options(given).values, sort_keys=False, default_flow_style=False)
    )
