"""The same GRPO step by TRL's GRPOTrainer, in a process of its own (`worker.Work`).

Written against TRL's documented API. Options that the installed version does not know are left out and named in the
case's record. TRL generates with transformers (no vLLM), in the process that trains. A step is what lies between the
trainer's callbacks `on_step_begin` and `on_step_end`: generation, rewards, gradients and the update.
"""

from __future__ import annotations

import inspect
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .measure import num_cores
from .worker import Ask, foreign_imports, peak_bytes, resident_bytes


@dataclass(frozen=True, slots=True)
class TrlSpec:
    """One GRPO step.

    Attributes:
      weights: a Hugging Face folder with weights and tokenizer.
      data: train.jsonl with a column `question`.
      dtype: float32, or bfloat16: autocast over float32 weights, as jaxrl has it.
      device: "cpu" or "cuda".
      prompts, samples, new: prompts per step, responses to each, tokens of a response.
    """

    weights: str
    data: str
    dtype: str
    device: str
    prompts: int
    samples: int
    new: int
    lr: float
    seed: int


def run(spec: TrlSpec, ask: Ask) -> None:
    """Trains step by step: per request one step's seconds, tokens and peak memory."""
    with foreign_imports():
        import datasets  # pyright: ignore[reportMissingImports]
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]
        import trl  # pyright: ignore[reportMissingImports]

        torch.set_num_threads(num_cores())
        baseline = resident_bytes()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            spec.weights, dtype=torch.float32, attn_implementation="sdpa"
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(spec.weights, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        lines = Path(spec.data).read_text(encoding="utf-8").splitlines()
        rows = [{"prompt": json.loads(line)["question"]} for line in lines]
        with tempfile.TemporaryDirectory() as scratch:
            arguments, left_out = _known(trl.GRPOConfig, _options(spec, scratch))
            config = trl.GRPOConfig(**arguments)
            steps = _steps(transformers.TrainerCallback, torch, spec, ask, baseline)
            trainer = trl.GRPOTrainer(
                model=model,
                reward_funcs=_reward,
                args=config,
                train_dataset=datasets.Dataset.from_list(rows),
                processing_class=tokenizer,
                callbacks=[steps],
            )
            if ask({"optimizer": str(config.optim), "unknown_options": left_out}) is not None:
                trainer.train()


def _options(spec: TrlSpec, scratch: str) -> dict[str, Any]:
    return {
        "output_dir": scratch,
        "per_device_train_batch_size": spec.prompts * spec.samples,  # TRL counts responses
        "gradient_accumulation_steps": 1,
        "num_generations": spec.samples,
        "num_iterations": 1,
        "max_completion_length": spec.new,
        "generation_kwargs": {"min_new_tokens": spec.new},
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "learning_rate": spec.lr,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "max_steps": 1 << 20,  # the callback ends it
        "bf16": spec.dtype == "bfloat16",
        "fp16": False,
        "gradient_checkpointing": False,
        "use_cpu": spec.device == "cpu",
        "use_vllm": False,
        "seed": spec.seed,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def _known(made: Any, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The options that `made` takes, and the names of the others."""
    names = inspect.signature(made).parameters
    return {n: v for n, v in options.items() if n in names}, [n for n in options if n not in names]


def _reward(completions: list[str], **_: Any) -> list[float]:
    """What reward.py of the jaxrl case computes."""
    return [sum(text.encode()) % 7 / 6 for text in completions]


def _steps(callback: Any, torch: Any, spec: TrlSpec, ask: Ask, baseline: int) -> Any:
    """A TrainerCallback that times a step and waits for the next request after it."""

    class Steps(callback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            on_gpu = spec.device == "cuda"
            if on_gpu:
                torch.cuda.synchronize()
            values = {
                "seconds": time.perf_counter() - self.began,
                "response_tokens": float(spec.prompts * spec.samples * spec.new),
                "peak_bytes": float(torch.cuda.max_memory_allocated() if on_gpu else peak_bytes()),
                "peak_above_baseline_bytes": float(
                    torch.cuda.max_memory_allocated() if on_gpu else peak_bytes() - baseline
                ),
            }
            control.should_training_stop = ask(values) is None
            return control

    return Steps()
