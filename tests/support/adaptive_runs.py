"""Requests, and whole simulated runs of a large model on eight devices, whose layouts may adapt."""

from __future__ import annotations

import random
from typing import Any

from sim_machine import STOP
from simulated_runs import played

from jaxrl.config import SimulatedLengths, SimulatedTask, from_mapping
from jaxrl.models.shapes import named_shape
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.hardware import H100
from jaxrl.sim.workload import ModelledWorkload
from jaxrl.types import SampleKey, SamplingParams

LARGE = named_shape("Llama-3.1-8B")
TASK = SimulatedTask(name="t", response=SimulatedLengths(median=400, sigma=1.2), prompt_median=60, prompt_sigma=0.3)
WORKLOAD = ModelledWorkload(5, (TASK,), max_response_length=4096, max_prompt_length=100)


def config(**layout: Any) -> Any:
    return from_mapping(
        {
            "model": {"path": "Llama-3.1-8B"},
            "data": {"train_batch_size": 4, "max_prompt_length": 100, "max_response_length": 4096},
            "rollout": {
                "n": 8,
                "dtype": "bfloat16",
                "num_blocks": 4000,
                "decode_steps": 64,
                "tensor_model_parallel_size": 1,
                "layout": {"profile": "of the modelled devices", **layout},
            },
            "actor": {"offload_optimizer": True, "ppo_max_token_len_per_gpu": 8192},
            "trainer": {"total_training_steps": 4, "save_freq": 1, "num_devices": 8},
            "simulate": {"num_prompts": 100},
        }
    )


def run(made: Any, state: str | None = None) -> Any:
    """As `simulated_runs.played`."""
    return played(made, CostModel(LARGE, H100), WORKLOAD, state)


def requests(seed: int) -> tuple[list[Request], dict[SampleKey, int]]:
    rng = random.Random(seed)
    made = []
    for i in range(24):
        of = SampleKey(0, i // 2, i % 2)
        params = SamplingParams(max_tokens=40, stop_token_ids=(STOP,))
        made.append(Request(i, of, (0,) * (1 + 5 * (i // 2) % 17), params, share=(0, i // 2)))
    return made, {request.key: rng.randint(5, 40) for request in made}
