#!/usr/bin/env python3
"""Prints which models of a family train on one card: in full, with adapters, and with adapters on a base in 4 bits.

    python scripts/what_fits.py

The bytes are those of `jaxrl explain-config`: what is always there and what the update adds, and beside it what a
rollout has. No device is asked and no weight is read. docs/benchmarks/adapters-2026-11-27.md has the table.
"""

from __future__ import annotations

import sys
from typing import Any

from jaxrl.config import from_mapping
from jaxrl.models.shapes import named_shape
from jaxrl.runtime.memory import memory_plan, memory_problem
from jaxrl.runtime.weights import adapted

SIZES = ("0.5B", "1.5B", "3B", "7B", "14B", "32B")
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"lora_rank": 16},
    "QLoRA": {"lora_rank": 16, "base_quantization": "nf4"},
}
CARDS, SHARE = (24, 48, 80), 0.92
"""GiB of each, and what JAX is given of them with XLA_PYTHON_CLIENT_MEM_FRACTION."""
SETTINGS: dict[str, Any] = {
    "data": {"max_prompt_length": 1024, "max_response_length": 1024},
    "actor": {
        "dtype": "bfloat16",
        "remat": "full",
        "ppo_max_token_len_per_gpu": 4096,
        "logprob_chunk_tokens": 512,
    },
    "rollout": {"dtype": "bfloat16", "max_num_seqs": 16, "memory_fraction": 0.95},
}


def main() -> int:
    print("| Qwen2.5 | | update | rollout | `jaxrl sft`, `dpo` | `jaxrl train` |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size in SIZES:
        for name, way in WAYS.items():
            config = from_mapping(SETTINGS | {"model": {"path": "unused", **way}})
            model = adapted(config, named_shape(f"Qwen2.5-{size}"))
            plan = memory_plan(config, model, 1, None, "gpu")
            updates = [card for card in CARDS if plan.update_bytes <= _given(card)]
            both = [card for card in updates if memory_problem(config, model, plan, 1, _given(card)) is None]
            needs = (f"{need / 2**30:.1f}" for need in (plan.update_bytes, plan.rollout_bytes))
            least = (f"{cards[0]} GB" if cards else "no" for cards in (updates, both))
            print(f"| {' | '.join((size, name, *needs, *least))} |")
    return 0


def _given(card: int) -> int:
    return int(SHARE * card * 2**30)


if __name__ == "__main__":
    sys.exit(main())
