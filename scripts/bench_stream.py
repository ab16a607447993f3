#!/usr/bin/env python3
"""Gradients beside the rollout: whole steps with the stream trainer and without it, on two devices.

    python scripts/bench_stream.py [--hidden 256] [--prompts 8] [--samples 4] [--mean 64] [--new 512] [--json]

Each case lives in a process of its own and runs one step when it is asked to: steps take turns and never run at once. A
CPU's devices get one core each (XLA's products are kept in one thread), so that two programs on two devices can run at
the same time. Both cases have two workers, one on each device, and draw the same responses: weights are random, so each
token is about as likely as any other, and a few of them end a response. So lengths are geometric, with a few long ones
(`--mean`, `--new`).

- plain: rollout, then the update on both devices.
- stream: `trainer.stream.enable`. Once enough responses are done, one worker is freed, and computes gradients of
  complete prompts while the other decodes the rest; the update does what is left.

Figures: seconds of a step; of its phases (`timing_s/*`); update: its phases after the rollout; hidden: seconds of
gradients under the rollout; sum: all phases and what was hidden, which is what the step would have taken one after
another; share hidden: hidden over hidden and update; beside: seconds in which the timeline shows gradients on one
device and a plan on the other.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import jax_cases, step_case
from bench.frame import Benchmark, Record, Session
from bench.measure import Summary, say
from bench.worker import Worker

from jaxrl.models.config import ModelConfig

QUICK = {
    "repetitions": 2,
    "hidden": 64,
    "layers": 2,
    "prompts": 4,
    "samples": 2,
    "prompt_tokens": 8,
    "mean": 16,
    "new": 48,
    "train_tokens": 128,
    "decode_steps": 2,
    "warmup": 1,
}
SIZES = [name for name in QUICK if name not in ("repetitions", "warmup")]
BLOCK = 16
STOP_IDS = tuple(range(1, 9))


def _options(made: argparse.ArgumentParser) -> None:
    made.set_defaults(dtypes=["float32"])
    made.add_argument("--hidden", type=int, default=256, help="width of the model, a multiple of 64 (256)")
    made.add_argument("--layers", type=int, default=4, help="layers of the model (4)")
    made.add_argument("--prompts", type=int, default=8, help="prompts per step (8)")
    made.add_argument("--samples", type=int, default=4, help="responses to each prompt (4)")
    made.add_argument("--prompt-tokens", type=int, default=16, help="tokens of a prompt, about (16)")
    made.add_argument("--mean", type=int, default=64, help="tokens of a response, on average (64)")
    made.add_argument("--new", type=int, default=512, help="tokens of a response, at most (512)")
    made.add_argument("--train-tokens", type=int, default=768, help="the most tokens of a microbatch (768)")
    made.add_argument("--decode-steps", type=int, default=8, help="decode steps of a plan (8)")
    made.add_argument("--warmup", type=int, default=2, help="steps of each case before the timed ones (2)")


def _check(options: argparse.Namespace) -> None:
    if options.model or options.shape not in ("tiny", "SmolLM2-135M"):
        raise ValueError("--model and --shape are of no use here: --hidden and --layers make the model")
    if options.dtypes != ["float32"]:
        raise ValueError(f"--dtypes ({' '.join(options.dtypes)}) must be float32")
    if options.devices != 1:
        raise ValueError(f"--devices ({options.devices}) is settled: two")
    if options.hidden % 64:
        raise ValueError(f"--hidden ({options.hidden}) must be a multiple of 64, the width of a head")
    if options.samples < 2:
        raise ValueError(f"--samples ({options.samples}) must be at least 2: GRPO compares a prompt's responses")


def _measure(options: argparse.Namespace, session: Session) -> Record:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    with session.on(jax_cases.described(2)), contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _write_inputs(options, folder)
        specs = {
            name: step_case.StepSpec(_run_options(options, folder, name == "stream"), 2, STOP_IDS)
            for name in ("plain", "stream")
        }
        workers = {name: stack.enter_context(Worker(name, step_case.run, spec)) for name, spec in specs.items()}
        info = workers["plain"].info
        session.bench.interleave(workers, options.repetitions, options.warmup, same=("response_tokens", "longest"))
    results = _results(session.summaries())
    say(f"{info['parameters'] / 1e6:.2f} million parameters, {info['programs']} programs")
    sizes = {name: getattr(options, name) for name in SIZES}
    return session.record(sizes | {"parameters": info["parameters"]} | results, model="random", devices=2)


def _write_inputs(options: argparse.Namespace, folder: Path) -> None:
    """A model folder (a Llama of heads of 64 with half as many for keys and values), prompts and a reward."""
    model = ModelConfig(
        family="llama",
        vocab_size=len(STOP_IDS) * options.mean,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_layers=options.layers,
        num_heads=options.hidden // 64,
        num_kv_heads=max(options.hidden // 128, 1),
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_ids=(0,),
    )
    step_case.write_tokenizer(model, folder / "model")
    count = (options.warmup + options.repetitions + 1) * options.prompts
    step_case.write_inputs(folder, str(folder / "model"), count, options.prompt_tokens, options.seed)


def _run_options(options: argparse.Namespace, folder: Path, is_streamed: bool) -> dict[str, Any]:
    """Of the run. Each worker has rows and blocks for all samples: one can take over from the other."""
    rows = options.prompts * options.samples
    longest = options.prompt_tokens + step_case.PROMPT_SLACK + options.new
    return {
        "model": {"path": str(folder / "model"), "random_init": True},
        "data": step_case.data_options(str(folder), options.prompts, options.prompt_tokens, options.new, options.seed),
        "rollout": {
            "n": options.samples,
            "dtype": "float32",
            "num_workers": 2,
            "max_num_seqs": rows,
            "num_blocks": 2 + rows * -(-longest // BLOCK),
            "block_size": BLOCK,
            "decode_steps": options.decode_steps,
            "max_num_batched_tokens": max(64, options.prompt_tokens + step_case.PROMPT_SLACK),  # few programs
        },
        "actor": {
            "dtype": "float32",
            "old_logprobs": "rollout",
            "ppo_mini_batch_size": 0,
            "ppo_max_token_len_per_gpu": max(options.train_tokens, longest),
            "optim": {"lr": 1e-6},
        },
        "reward": {"kind": "custom", "path": str(folder / "reward.py"), "num_workers": 1},
        "trainer": {"seed": options.seed, "num_devices": 2, "save_freq": 0, "stream": {"enable": is_streamed}},
    }


def _results(summaries: Mapping[str, Summary]) -> dict[str, Any]:
    cases = []
    for name, summary in summaries.items():
        found = summary.medians
        phases = {
            phase: value for phase, value in found.items() if phase.startswith("timing_s/") and phase != "timing_s/step"
        }
        found["sum_s"] = sum(phases.values()) + found["hidden_s"]
        say(
            f"{name:<7}{found['seconds']:>8.3f} s a step, sum {found['sum_s']:.3f} s, update {found['update_s']:.3f} "
            f"s, hidden {found['hidden_s']:.3f} s ({found['hidden_share']:.0%} of the update, "
            f"{found['streamed_share']:.0%} of its prompts), gradients beside plans {found['beside_s']:.3f} s"
            f"{summary.mark}"
        )
        for phase, value in phases.items():
            say(f"  {phase:<26}{value:>9.3f} s{value / found['seconds']:>8.1%}")
        cases.append({"case": name} | found | summary.judged)
    by_name = {case["case"]: case for case in cases}
    speed = by_name["plain"]["seconds"] / by_name["stream"]["seconds"]
    say(f"plain / stream, seconds of a step: {speed:.3f}")
    return {"cases": cases, "speed": speed}


COUNTS = [name for name in QUICK if name != "repetitions"]
BENCHMARK = Benchmark("stream", __doc__, _measure, _options, QUICK, COUNTS, _check)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
