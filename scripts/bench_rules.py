#!/usr/bin/env python3
"""Seconds per trained sample of the rollout rules on the real engine, against what the simulator had predicted.

    python scripts/bench_rules.py [--repetitions 10] [--dtypes float32] [--json]

Plain batches, tail batching and partial rollout with their default factors, over responses with forced lengths:
lognormal, seeded, capped; a prompt decides part of its responses' lengths, so a long prompt is long again. First the
machine is profiled, as `jaxrl profile` does. From that table, and lengths by identity, the simulator predicts every
round; the predictions are printed before anything is measured. Then the real rounds run, the rules in turns.

- seconds per sample: a rule's seconds of rollout, all rounds together, over the samples that its batches hold. Weight
  syncs and updates are left out, which are the same for every rule.
- speed: the plain rounds' seconds per sample over the rule's. Above 1 the rule is faster.
- error: the measured speed over the predicted one, less 1; once over all rounds, and once over those rounds that the
  gauge let pass (both sides over the same rounds, as measured seconds per predicted second).

On a CPU a decode step's time nearly follows its rows, so rules that launch more than they keep may well be slower.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench import records, rule_rounds
from bench.decode_cases import Setting, build_executor
from bench.frame import Benchmark, Record, Session
from bench.measure import Run, keep, say

from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh

QUICK = {
    "prompts": 2,
    "samples": 2,
    "prompt": 8,
    "max_length": 24,
    "median_length": 6,
    "repetitions": 6,
    "decode_steps": 4,
    "dtypes": ["float32"],
}
COUNTS = ("prompts", "samples", "prompt", "max_length", "median_length", "decode_steps", "tp")

Rounds = dict[str, list[dict[str, float]]]
"""By rule: each of its rounds."""


def _options(made: argparse.ArgumentParser) -> None:
    made.set_defaults(repetitions=10)
    made.add_argument("--prompts", type=int, default=4, help="prompts of a batch (4)")
    made.add_argument("--samples", type=int, default=4, help="responses to each (4)")
    made.add_argument("--prompt", type=int, default=32, help="tokens of a prompt (32)")
    made.add_argument("--median-length", type=int, default=48, help="of the lognormal lengths, tokens (48)")
    made.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of a length (1.0)")
    made.add_argument("--correlation", type=float, default=0.5, help="the part that the prompt decides, 0 to 1 (0.5)")
    made.add_argument("--max-length", type=int, default=512, help="cap on a length, tokens (512)")
    made.add_argument("--decode-steps", type=int, default=16, help="the engine's decode steps per plan (16)")
    made.add_argument("--tp", type=int, default=1, help="tensor parallelism of the engine (1)")


def _measure(options: argparse.Namespace, session: Session) -> Record:
    model = records.model_of(options)
    devices = records.prepare_devices(options.devices)
    layout = Layout(make_mesh(devices), options.tp)
    results: list[dict[str, Any]] = []
    with session.on(records.describe_devices(devices)):
        setting = Setting(options, model, model.config(), layout, session.bench)
        for dtype in options.dtypes:
            results += _of_dtype(setting, dtype)
    for one in results:
        _print(one)
    return session.record({"cases": results}, model=model.name, devices=len(devices), tp=options.tp)


def _of_dtype(setting: Setting, dtype: str) -> list[dict[str, Any]]:
    options = setting.options
    names = rule_rounds.rules(options.prompts, options.samples)
    lengths = (options.seed, options.median_length, options.sigma, options.max_length, options.correlation)
    workload = rule_rounds.modelled(*lengths, options.prompt)
    prompts = {name: rule_rounds.Prompts(options.seed, options.prompt, setting.config.vocab_size) for name in names}
    params = setting.params(dtype)
    launched = 2 * options.prompts * options.samples  # partial rollout's, the most of all
    slots, longest = -(-launched // setting.layout.dp), options.prompt + options.max_length
    executor = build_executor(setting, params, dtype, slots=slots, length=longest, prefill_tokens=8 * options.prompt)
    say(f"{dtype}: {executor.warm_up()} programs")
    cost = rule_rounds.measured_cost(executor, setting.config, setting.model.name, say)
    predicted = _predict(options, cost, rule_rounds.machine_sizes(executor), workload, setting.config.vocab_size)
    for name, rounds in predicted.items():
        say(f"predicted, {name}: {_per_sample(rounds):.4f} s a sample")
    with contextlib.ExitStack() as stack:
        real = {
            f"{name} {dtype}": stack.enter_context(
                rule_rounds.real_rounds(rule, prompts[name], executor, params, workload, options.max_length)
            )
            for name, rule in names.items()
        }
        executor.release(weights=True)
        first = len(setting.bench.runs)
        setting.bench.interleave(real, options.repetitions)
    return compare(predicted, setting.bench.runs[first:], dtype)


def _predict(options: argparse.Namespace, cost: Any, sizes: Any, workload: Any, vocab_size: int) -> Rounds:
    predicted: Rounds = {}
    for name, rule in rule_rounds.rules(options.prompts, options.samples).items():
        prompts = rule_rounds.Prompts(options.seed, options.prompt, vocab_size)
        rounds = rule_rounds.simulated_rounds(
            rule, prompts, sizes, cost, options.decode_steps, workload, options.max_length
        )
        predicted[name] = [rounds() for _ in range(options.repetitions)]
    return predicted


def _per_sample(rounds: Sequence[Mapping[str, float]]) -> float:
    return sum(each["seconds"] for each in rounds) / sum(each["samples"] for each in rounds)


def compare(predicted: Rounds, runs: Sequence[Run], dtype: str) -> list[dict[str, Any]]:
    """Every rule's seconds per sample and speed, measured and predicted.

    Raises ValueError if real and simulated rounds kept different samples: then they cannot be compared.
    """
    good = keep([run.brackets for run in runs])
    cases: list[dict[str, Any]] = []
    for name, foretold in predicted.items():
        own = [(run.values, passed) for run, passed in zip(runs, good, strict=True) if run.case == f"{name} {dtype}"]
        measured = [values for values, _ in own]
        for number, (a, b) in enumerate(zip(measured, foretold, strict=True), start=1):
            if (a["samples"], a["long"]) != (b["samples"], b["long"]):
                raise ValueError(f"{name}, round {number}: the simulator predicted another round ({b}) than ran ({a})")
        passed = [(a["seconds"], b["seconds"]) for (a, ok), b in zip(own, foretold, strict=True) if ok]
        foretold_s = sum(b for _, b in passed)  # 0 where the batch of the only such round had been complete before
        cases.append(
            {
                "case": name,
                "dtype": dtype,
                "rounds": len(measured),
                "kept": len(passed),
                "long_rounds": int(sum(each["long"] for each in measured)),
                "s_per_sample": _per_sample(measured),
                "predicted_s_per_sample": _per_sample(foretold),
                "real_over_predicted": sum(a for a, _ in passed) / foretold_s if foretold_s else None,
                "seconds": [each["seconds"] for each in measured],
                "predicted_seconds": [each["seconds"] for each in foretold],
            }
        )
    plain = cases[0]
    for case in cases:
        speed = plain["s_per_sample"] / case["s_per_sample"]
        foretold_speed = plain["predicted_s_per_sample"] / case["predicted_s_per_sample"]
        quiet = [each["real_over_predicted"] for each in (plain, case)]
        case |= {
            "speed": speed,
            "predicted_speed": foretold_speed,
            "error": speed / foretold_speed - 1,
            "undisturbed_error": None if None in quiet else quiet[0] / quiet[1] - 1,
        }
    return cases


def _print(case: Mapping[str, Any]) -> None:
    quiet = case["undisturbed_error"]
    print(
        f"{case['case']:<16} {case['dtype']}: {case['rounds']} rounds ({case['long_rounds']} long, {case['kept']} "
        f"undisturbed), {case['s_per_sample']:.4f} s a sample (predicted {case['predicted_s_per_sample']:.4f}), speed "
        f"{case['speed']:.3f} (predicted {case['predicted_speed']:.3f}): error {case['error']:+.1%}, in undisturbed "
        f"rounds {'unknown' if quiet is None else f'{quiet:+.1%}'}"
    )


BENCHMARK = Benchmark("rules", __doc__, _measure, _options, QUICK, COUNTS)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
