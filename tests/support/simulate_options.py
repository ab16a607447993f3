"""A small training configuration that is simulated."""

from __future__ import annotations

from typing import Any

import yaml

from jaxrl.config import Config, from_mapping

TRAINING = """
model: {path: tiny}
data: {train_batch_size: 4, max_prompt_length: 64, max_response_length: 96, task: chain_sum, val_size: 2}
rollout: {n: 4, max_num_seqs: 8, decode_steps: 8, tensor_model_parallel_size: 2, dtype: bfloat16, stop: ["\\n"]}
reward: {num_workers: 2}
actor: {use_kl_loss: true}
trainer: {total_training_steps: 4, save_freq: 2, test_freq: 3, val_before_train: true}
"""


def config(**simulate: Any) -> Config:
    values = yaml.safe_load(TRAINING)
    return from_mapping(values | {"simulate": simulate})
