"""One training run of the comparison and its evaluation, each `python -m jaxrl` in a process of its own.

A run that has a result already is not run again, and one that was cut off goes on from its checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from accuracy import task
from jaxrl.record.metrics import read_metrics

RULES: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "tail batching": ("rollout.tail_batching.enable=true",),
    "partial rollout": ("rollout.partial_rollout.enable=true",),
}
LONG_SHARE = 0.25  # the longest held-out prompts, with an accuracy of their own


@dataclass(frozen=True, slots=True)
class Sizes:
    """prompts, samples: of a batch. num_train, num_held_out: problems. eval_samples: per held-out problem.
    start_loss: at which the warm start ends, nats a token."""

    steps: int = 100
    prompts: int = 16
    samples: int = 8
    num_train: int = 2000
    num_held_out: int = 256
    eval_samples: int = 8
    start_loss: float = 0.15


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run of `rule` with `seed`.

    accuracy: mean reward over held-out prompts and samples, `long_accuracy` over the longest quarter of them;
    spread: p95 / median of the response lengths that were trained on; rewards: of each step's batch, mean;
    stale: share of trained tokens that an earlier version wrote; longest: of each step's batch, tokens.
    """

    rule: str
    seed: int
    accuracy: float
    long_accuracy: float
    spread: float
    stale: float
    rewards: list[float]
    longest: list[float]


def write_config(folder: Path, sizes: Sizes) -> Path:
    """run.yaml: plain batches; rules and seeds come on top."""
    config: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "val_files": [str(folder / "held_out.jsonl")],
            "max_prompt_length": task.MAX_PROMPT,
            "max_response_length": task.MAX_RESPONSE,
            "train_batch_size": sizes.prompts,
        },
        "rollout": {
            "n": sizes.samples,
            "max_num_seqs": 2 * sizes.prompts * sizes.samples,
            "max_num_batched_tokens": 1024,
            "decode_steps": 4,
            "val_kwargs": {"n": sizes.eval_samples, "temperature": 1.0},
        },
        "actor": {
            "optim": {"lr": 3.0e-4, "lr_warmup_steps": 5},
            "old_logprobs": "rollout",
            "ppo_max_token_len_per_gpu": 4096,
        },
        "reward": {"kind": "custom", "path": str(folder / "reward.py")},
        "trainer": {"total_training_steps": sizes.steps, "save_freq": 0},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return file


def evaluate(folder: Path, config: Path, run: Path | None, name: str) -> tuple[float, float]:
    """Accuracy on the held-out problems, all and the longest: of a run's last checkpoint, or of the model that runs
    start from."""
    out = folder / f"{name}.samples.jsonl"
    _jaxrl("eval", "--config", str(config), "--out", str(out), *(["--checkpoint", str(run)] if run else []))
    samples = list(_json_lines(out))
    lengths = np.array([len(sample["prompt"]) for sample in samples])
    rewards = np.array([sample["reward"] for sample in samples])
    long = lengths >= np.quantile(lengths, 1 - LONG_SHARE)
    return float(rewards.mean()), float(rewards[long].mean())


def train(folder: Path, config: Path, rule: str, seed: int) -> Result:
    """Trains and evaluates a run, or reads its result if there is one."""
    name = f"{rule.replace(' ', '_')}-{seed}"
    file = folder / f"{name}.json"
    if file.exists():
        return Result(**json.loads(file.read_text(encoding="utf-8")))
    run = folder / name
    seeds = (f"trainer.seed={seed}", f"data.seed={seed}", f"trainer.run_dir={run}")
    _jaxrl("train", "--config", str(config), *seeds, *RULES[rule])
    accuracy, long_accuracy = evaluate(folder, config, run, name)
    steps = [one for one in read_metrics(run) if "critic/rewards/mean" in one]
    lengths = [sample["length"] for sample in _json_lines(run / "samples.jsonl")]
    result = Result(
        rule,
        seed,
        accuracy,
        long_accuracy,
        float(np.quantile(lengths, 0.95) / np.median(lengths)),
        float(np.mean([one["training/off_policy/share"] for one in steps])),
        [one["critic/rewards/mean"] for one in steps],
        [one["response_length/max"] for one in steps],
    )
    file.write_text(json.dumps(asdict(result)), encoding="utf-8")
    return result


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _jaxrl(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "jaxrl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"jaxrl {arguments[0]} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
