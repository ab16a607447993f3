"""The batcher that a configuration asks for, of real and simulated runs alike."""

from __future__ import annotations

from collections.abc import Callable

from jaxrl.config import Config
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.plan import VerifyRule


def batcher_config(config: Config, verify_rule: Callable[[], VerifyRule] | None = None) -> BatcherConfig:
    """The options of continuous batching from section `rollout`; `verify_rule`: as in `BatcherConfig`."""
    return BatcherConfig(
        decode_steps=config.rollout.decode_steps,
        max_model_len=config.max_model_length,
        spread_samples=config.rollout.sample_placement == "spread",
        verify_rule=verify_rule,
    )


def carried(name: str, num_prompts: int) -> dict[str, str]:
    """The summary's entry about prompts that were begun and not trained on; empty without any."""
    return {"prompts begun and not trained on": f"{num_prompts} ({name})"} if num_prompts else {}
