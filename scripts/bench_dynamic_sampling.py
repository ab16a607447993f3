#!/usr/bin/env python3
"""What dynamic sampling costs: simulated seconds of a rollout, and prompts launched, with most groups filtered.

    python scripts/bench_dynamic_sampling.py [--seeds 5] [--steps 20] [--prompts 16] [section.option=value ...]

Runs what `jaxrl simulate` runs (Qwen2.5-7B on eight H100, 8 samples a prompt, lognormal lengths with a cap, 0.05 s a
score) with each of several settings and seeds. Per setting: seconds from the launch of a round to its batch, mean and
standard deviation over seeds; the share of judged groups that was filtered; and prompts launched over those that this
share makes necessary, P0 / (1 - share).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench import records
from bench.measure import say

from jaxrl.config import from_mapping
from jaxrl.config.files import apply_override
from jaxrl.loop import Hooks
from jaxrl.runtime.simulation import build, rare_collections
from jaxrl.sim.configured import cost_model, machine_sizes, model_sizes, workload_of

ON = {"filter_groups": {"enable": True}}
TAIL = {"tail_batching": {"enable": True}}
CASES: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {  # options of rollout and of algorithm
    "plain, no filter": ({}, {}),
    "plain": ({}, ON),
    "plain, max_unscored_groups=8": ({}, {"filter_groups": {"enable": True, "max_unscored_groups": 8}}),
    "plain, max_unscored_groups=0": ({}, {"filter_groups": {"enable": True, "max_unscored_groups": 0}}),
    "over-provisioning x2": ({"over_provisioning": {"enable": True, "prompt_factor": 2.0, "response_factor": 1.0}}, ON),
    "tail batching, no filter": (TAIL, {}),
    "tail batching": (TAIL, ON),
    "partial rollout, no filter": ({"partial_rollout": {"enable": True}}, {}),
    "partial rollout": ({"partial_rollout": {"enable": True}}, ON),
}
Steps = list[dict[str, float]]


def run(options: argparse.Namespace, case: str, seed: int) -> Steps:
    """The metrics of each step."""
    rollout, algorithm = CASES[case]
    shape = {"n": 8, "max_num_seqs": 64, "max_num_batched_tokens": 4096, "dtype": "bfloat16"}
    task = {
        "response": {"median": 300.0, "sigma": 1.0},
        "pass_spread": options.pass_spread,
        "scoring": {"median_s": 0.05},
    }
    values: dict[str, Any] = {
        "model": {"path": "Qwen2.5-7B"},
        "data": {
            "task": "simulated",
            "train_batch_size": options.prompts,
            "max_prompt_length": 512,
            "max_response_length": 2560,
            "task_size": 1_000_000,
        },
        "rollout": {**shape, **rollout},
        "actor": {"ppo_max_token_len_per_gpu": 4096},
        "algorithm": algorithm,
        "reward": {"num_workers": 8},
        "trainer": {"total_training_steps": options.steps, "seed": seed},
        "simulate": {"num_devices": 8, "task": task},
    }
    for override in options.overrides:
        apply_override(values, override)
    config = from_mapping(values)
    steps: Steps = []
    hooks = Hooks(
        lambda *_: None, lambda _, measured, __: steps.append(measured), lambda *_: None, lambda *_: None, lambda: False
    )
    cost, _ = cost_model(config)
    workload, _ = workload_of(config)
    simulation = build(config, cost, workload, hooks, sizes=machine_sizes(config, cost, model_sizes(config)))
    with rare_collections():
        simulation.loop.run()
    simulation.phases.close()
    return steps


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16, help="of a batch (P0)")
    parser.add_argument("--pass-spread", type=float, default=4.2, help="4.2 filters about 60 %%")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    say(f"command: {records.command()}")
    plain = None
    for case in options.cases:
        runs = [run(options, case, seed) for seed in range(options.seeds)]
        for kind, text in ((0.0, "long rounds apart"), (1.0, "long rounds alone")):
            chosen = [[step for step in steps if step["rollout/long_round"] == kind] for steps in runs]
            if any(step["rollout/long_round"] for steps in runs for step in steps):
                if all(chosen):
                    _print(f"{case}, {text}", chosen, options.prompts, plain)
            elif kind == 0.0:
                plain = plain or statistics.fmean(map(_seconds, chosen))
                _print(case, chosen, options.prompts, plain)
        if any(step["rollout/long_round"] for steps in runs for step in steps):
            _print(f"{case}, all rounds", runs, options.prompts, plain)
    return 0


def _seconds(steps: Steps) -> float:
    return statistics.fmean(step["timing_s/gen"] + step["timing_s/reward"] for step in steps)


def _print(name: str, runs: Sequence[Steps], prompts: int, plain: float | None) -> None:
    seconds = [_seconds(steps) for steps in runs]
    every = [step for steps in runs for step in steps]
    filtered = sum(step["rollout/filtered_prompts"] for step in every)
    share = filtered / (filtered + prompts * len(every))
    launched = sum(step["rollout/launched_prompts"] for step in every) / len(every)
    spread = statistics.stdev(seconds) if len(seconds) > 1 else 0.0
    beside = "" if plain is None else f" ({statistics.fmean(seconds) / plain:.2f} of plain)"
    say(
        f"{name:<48} {statistics.fmean(seconds):6.1f} ± {spread:.1f} s{beside}, filtered {share:.0%}, launched "
        f"{launched:.1f}: {launched * (1 - share) / prompts:.2f} of the necessary"
    )


if __name__ == "__main__":
    sys.exit(main())
