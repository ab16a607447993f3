#!/usr/bin/env python3
"""Prints which models of a family train on one card: in full, with adapters, and with adapters on a base in 4 bits. Or
how long responses may be in training on several cards, where each has whole rows of tokens and where all share them;
or in rollout and training, by number of cards and by what becomes of the optimizer's state.

    python scripts/what_fits.py
    python scripts/what_fits.py --devices 8
    python scripts/what_fits.py --states

The bytes are those of `jaxrl explain-config`: what is always there and what the update adds, and beside it what a
rollout has. No device is asked and no weight is read. docs/benchmarks/adapters-2026-11-27.md has the first table, and
docs/performance.md the others.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from jaxrl.config import from_mapping
from jaxrl.models.config import ModelConfig
from jaxrl.models.shapes import named_shape
from jaxrl.runtime.memory import memory_plan, memory_problem
from jaxrl.runtime.weights import adapted
from jaxrl.train.update_memory import resident_parts, update_parts

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


RESPONSES = (8192, 32768, 131072)
LONG: tuple[tuple[str, bool], ...] = (("1.5B", False), ("7B", False), ("7B", True), ("32B", True))
"""Sizes, and whether the optimizer's state is in the host's memory."""
LARGER, DEVICES = ("1.5B", "7B", "32B", "72B"), (1, 2, 8, 64)
STATES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"optim": {"state_dtype": "bfloat16"}},
    "int8": {"optim": {"state_dtype": "int8"}},
    "in the host's memory": {"offload_optimizer": True},
}


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="cards of 80 GB; several: the second table (1)")
    parser.add_argument("--states", action="store_true", help="the third table")
    options = parser.parse_args(arguments)
    if options.states:
        return with_states()
    return on_one_card() if options.devices == 1 else responses_on(options.devices)


def responses_on(devices: int) -> int:
    given, columns = _given(CARDS[-1]), [f"{response // 1024}k" for response in RESPONSES]
    print(f"| Qwen2.5 | rows on | {' | '.join(columns)} | longest |")
    print(f"| --- | --- |{' --: |' * (len(columns) + 1)}")
    for size, offload in LONG:
        model = named_shape(f"Qwen2.5-{size}")
        for sharing in (1, devices):
            needs = [_update_bytes(model, devices, sharing, response, offload) for response in RESPONSES]
            each = [f"{need / 2**30:.1f}{'' if need <= given else ' (no)'}" for need in needs]
            steps, longest = 1 << 9, 0  # the longest in steps of 1,024 tokens, by halving
            while steps:
                if _update_bytes(model, devices, sharing, 1024 * (longest + steps), offload) <= given:
                    longest += steps
                steps //= 2
            name = f"{size}, optimizer in the host's memory" if offload else size
            where = "one card" if sharing == 1 else f"{sharing} cards"
            most = "over 1000k" if longest > 1000 else f"{longest}k" if longest else "none"
            print(f"| {' | '.join((name, where, *each, most))} |")
    return 0


def _update_bytes(model: ModelConfig, devices: int, sharing: int, response: int, offload: bool) -> int:
    """Of each device, with a row of the longest sample."""
    longest = SETTINGS["data"]["max_prompt_length"] + response
    config = from_mapping(SETTINGS | {"model": {"path": "unused"}})
    actor = config.actor.replace(
        ppo_max_token_len_per_gpu=-(-longest // sharing),
        context_parallel_size=sharing,
        offload_optimizer=offload,
    )
    config = config.replace(actor=actor, data=config.data.replace(max_response_length=response))
    parts = resident_parts(config, model, devices)
    return sum(parts.values()) + sum(update_parts(config, model, devices, "gpu", "full", 512).values())


def with_states() -> int:
    print(f"| Qwen2.5 | optimizer's state | {' | '.join(f'{devices} x 80 GB' for devices in DEVICES)} |")
    print(f"| --- | --- |{' --- |' * len(DEVICES)}")
    for size in LARGER:
        for name, state in STATES.items():
            longest = [_longest(named_shape(f"Qwen2.5-{size}"), state, devices) for devices in DEVICES]
            print(f"| {' | '.join((size, name, *longest))} |")
    return 0


def _longest(model: ModelConfig, state: dict[str, Any], devices: int) -> str:
    """Of RESPONSES, what both phases have room for, with the fewest devices that share rows and the least tp."""
    given, inside = _given(CARDS[-1]), [degree for degree in (1, 2, 4, 8) if degree <= devices]
    for response in reversed(RESPONSES):
        for sharing, tp in itertools.product(inside, inside):
            longest = SETTINGS["data"]["max_prompt_length"] + response
            row = {"ppo_max_token_len_per_gpu": -(-longest // sharing), "context_parallel_size": sharing}
            values = SETTINGS | {
                "model": {"path": "unused"},
                "data": SETTINGS["data"] | {"max_response_length": response},
                "actor": SETTINGS["actor"] | row | state,
                "rollout": SETTINGS["rollout"] | {"max_num_seqs": 4, "tensor_model_parallel_size": tp},
                "hosts": {"num": max(1, devices // 8)},
            }
            config = from_mapping(values)
            try:
                plan = memory_plan(config, model, devices, given, "gpu")
            except ValueError:  # the rollout has no room for one request
                continue
            if plan.update_bytes <= given and memory_problem(config, model, plan, devices, given) is None:
                return f"{response // 1024}k (tp {tp}{f', rows on {sharing}' if sharing > 1 else ''})"
    return "no"


def on_one_card() -> int:
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
    sys.exit(main(sys.argv[1:]))
