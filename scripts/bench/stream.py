"""Gradients beside the rollout: whole steps with the stream trainer and without it, on two devices.

    python scripts/bench.py stream [--hidden 256] [--prompts 8] [--samples 4] [--mean 64] [--new 512] [--json]

Each case lives in a process of its own and runs one step when it is asked to. A CPU's devices get one core each (XLA's
products are kept in one thread), so that two programs on two devices can run at the same time. Both cases have two
workers, one on each device, and draw the same responses: weights are random, so each token is about as likely as any
other, and a few of them end a response. So lengths are geometric, with a few long ones (`--mean`, `--new`).

- stream: `trainer.stream.enable`. Once enough responses are done, one worker is freed, and computes gradients of
  complete prompts while the other decodes the rest; the update does what is left.
- plain: rollout, then the update on both devices.

Figures: seconds of a step, and of its phases (`timing_s/*`); update_s: its phases after the rollout; hidden_s: seconds
of gradients under the rollout; hidden_share: of both together; beside_s: seconds in which the timeline shows gradients
on one device and a plan on the other; streamed_share: of the prompts; done_share: of the responses, when a worker was
freed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import steps
from bench.harness import Bench, Case
from bench.worker import Worker

from jaxrl.models.config import ModelConfig

STOP_IDS = tuple(range(1, 9))
BLOCK = 16


def _check(options: argparse.Namespace) -> None:
    options.devices = 2
    if options.hidden % 64:
        raise ValueError(f"--hidden ({options.hidden}) must be a multiple of 64, the width of a head")
    if options.samples < 2:
        raise ValueError(f"--samples ({options.samples}) must be at least 2: GRPO compares a prompt's responses")


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = steps.write_tokenizer(_model(options), folder / "model")
        count = (options.warmup + options.repetitions + 1) * options.prompts
        steps.write_inputs(folder, path, count, options.prompt_tokens, options.seed)
        made = []
        for name in ("stream", "plain"):
            spec = steps.Steps(_run_options(options, folder, path, name == "stream"), 2, STOP_IDS)
            worker = stack.enter_context(Worker(name, steps.run, spec))
            made.append(Case({"case": name}, lambda turn, worker=worker: worker(), extra=worker.info))
        yield made


def _model(options: argparse.Namespace) -> ModelConfig:
    """A Llama of heads of 64 with half as many for keys and values."""
    return ModelConfig(
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


def _run_options(options: argparse.Namespace, folder: Path, path: str, is_streamed: bool) -> dict[str, Any]:
    """Each worker has rows and blocks for all samples: one can take over from the other."""
    rows, prompt = options.prompts * options.samples, options.prompt_tokens + steps.PROMPT_SLACK
    longest = prompt + options.new
    return steps.run_options(
        options,
        folder,
        path,
        model={"random_init": True},
        rollout={
            "dtype": "float32",
            "num_workers": 2,
            "max_num_seqs": rows,
            "num_blocks": 2 + rows * -(-longest // BLOCK),
            "block_size": BLOCK,
            "decode_steps": options.decode_steps,
            "max_num_batched_tokens": max(64, prompt),  # few programs
        },
        actor={
            "dtype": "float32",
            "ppo_mini_batch_size": 0,
            "ppo_max_token_len_per_gpu": max(options.train_tokens, longest),
        },
        reward={"num_workers": 1},
        trainer={"num_devices": 2, "stream": {"enable": is_streamed}},
    )


OPTIONS = {
    "hidden": (256, "width of the model, a multiple of 64"),
    "layers": (4, "layers of the model"),
    "prompts": (8, "prompts per step"),
    "samples": (4, "responses to each prompt"),
    "prompt_tokens": (16, "tokens of a prompt, about"),
    "mean": (64, "tokens of a response, on average"),
    "new": (512, "tokens of a response, at most"),
    "train_tokens": (768, "the most tokens of a microbatch"),
    "decode_steps": (8, "decode steps of a plan"),
    "warmup": (2, "steps of each case before the timed ones"),
    "seed": (0, "of weights, prompts and tokens"),
}
QUICK = {"hidden": 64, "layers": 2, "prompts": 4, "samples": 2, "prompt_tokens": 8, "mean": 16, "new": 48,
         "train_tokens": 128, "decode_steps": 2, "warmup": 1}  # fmt: skip
BENCH = Bench(__doc__, cases, OPTIONS, QUICK, place="apart", has_model=False, check=_check)
