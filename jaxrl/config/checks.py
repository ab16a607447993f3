"""Rules between several options. The bounds of a single option stand on its field.

Each check raises `ConfigError` with one sentence: which options, what was found, what is allowed.
"""

from __future__ import annotations

import math

from jaxrl.config.devices import devices_problem
from jaxrl.config.options import AdvantageEstimator, Config

GROUP_RELATIVE: frozenset[AdvantageEstimator] = frozenset({"grpo", "dr_grpo", "rloo"})
"""Estimators that compare the samples of a prompt with each other, and so need two of them."""


class ConfigError(ValueError):
    """A configuration that cannot run. The message is one sentence for the user."""


def check(c: Config) -> None:
    """Raises ConfigError for options that do not go together."""
    if not c.model.path:
        raise ConfigError("model.path is missing: give a Hugging Face folder or a .gguf file")
    _check_data(c)
    _check_quotas(c)
    _check_filtering(c)
    _check_overlong(c)
    _check_batch(c)
    _check_old_logprobs(c)
    _check_tokens(c)
    _check_devices(c)


def _check_data(c: Config) -> None:
    if c.data.task and c.data.train_files:
        raise ConfigError("data.task and data.train_files exclude each other: problems come from a task or from files")
    if "{question}" not in c.data.prompt_template:
        raise ConfigError(f"data.prompt_template must contain {{question}}, found {c.data.prompt_template!r}")
    if c.reward.kind == "custom" and not c.reward.path:
        raise ConfigError("reward.path is missing: reward.kind is custom, which needs a Python file")
    if c.reward.kind == "task" and not c.data.task:
        raise ConfigError("reward.kind is task, which needs data.task: the scorer is the task's own")


def _check_quotas(c: Config) -> None:
    quotas, batch = c.data.source_quotas, c.data.train_batch_size
    for source, quota in quotas.items():
        if not isinstance(source, str):
            raise ConfigError(
                f"data.source_quotas: a source's name must be text, found {source!r} ({type(source).__name__}): put it "
                "in quotation marks"
            )
        if isinstance(quota, bool) or not isinstance(quota, int) or quota < 0:
            raise ConfigError(f"data.source_quotas.{source} must be a whole number of prompts >= 0, found {quota!r}")
    if quotas and sum(quotas.values()) != batch:
        raise ConfigError(
            f"data.source_quotas must add up to data.train_batch_size ({batch} prompts), found {sum(quotas.values())}"
        )


def _check_filtering(c: Config) -> None:
    filtering = c.algorithm.filter_groups
    if c.data.gen_batch_size and not filtering.enable:
        raise ConfigError(
            f"data.gen_batch_size ({c.data.gen_batch_size} prompts) needs algorithm.filter_groups.enable: without "
            "dynamic sampling a step launches what its rollout rule says"
        )
    most = c.data.gen_batch_size * filtering.max_num_gen_batches
    if 0 < most < c.data.train_batch_size:
        raise ConfigError(
            f"data.gen_batch_size ({c.data.gen_batch_size} prompts) × algorithm.filter_groups.max_num_gen_batches "
            f"({filtering.max_num_gen_batches}) must be >= data.train_batch_size ({c.data.train_batch_size} prompts): "
            "else a round gives up before it has launched a batch"
        )
    if filtering.path and filtering.metric != "reward":
        raise ConfigError(
            f"algorithm.filter_groups.path and algorithm.filter_groups.metric ({filtering.metric}) exclude each other: "
            "the function decides alone which prompts are kept"
        )
    if filtering.enable and not filtering.metric:
        raise ConfigError("algorithm.filter_groups.metric is empty: name reward, or a value that the scorer returns")


def _check_overlong(c: Config) -> None:
    overlong, longest = c.reward.overlong_buffer, c.data.max_response_length
    if overlong.enable and not 0 < overlong.len <= longest:
        raise ConfigError(
            f"reward.overlong_buffer.len ({overlong.len} tokens) must be at least 1 and at most "
            f"data.max_response_length ({longest} tokens) where reward.overlong_buffer.enable is on"
        )
    if overlong.enable and not math.isfinite(overlong.penalty_factor):
        raise ConfigError(
            f"reward.overlong_buffer.penalty_factor ({overlong.penalty_factor}) must be a finite number: rewards and "
            "advantages would not be"
        )


def _check_batch(c: Config) -> None:
    batch, mini = c.data.train_batch_size, c.mini_batch_prompts
    if batch % mini:
        raise ConfigError(
            f"actor.ppo_mini_batch_size ({mini} prompts) must divide data.train_batch_size ({batch} prompts)"
        )
    if c.algorithm.adv_estimator in GROUP_RELATIVE and c.rollout.n < 2:
        raise ConfigError(
            f"rollout.n ({c.rollout.n}) must be at least 2 with algorithm.adv_estimator={c.algorithm.adv_estimator}: "
            "its advantage compares the samples of a prompt with each other"
        )
    if c.algorithm.use_kl_in_reward and c.actor.use_kl_loss:
        raise ConfigError("algorithm.use_kl_in_reward and actor.use_kl_loss exclude each other: count KL once")
    if c.actor.clip_ratio_c and c.actor.clip_ratio_c <= 1:
        raise ConfigError(f"actor.clip_ratio_c must be above 1, or 0 for off, found {c.actor.clip_ratio_c!r}")
    if c.actor.param_dtype == "float64" and c.actor.dtype != "float64":
        raise ConfigError(f"actor.dtype must be float64 where actor.param_dtype is, found {c.actor.dtype}")


def _check_old_logprobs(c: Config) -> None:
    if c.actor.old_logprobs == "recompute":
        return
    if c.rollout.stale_tokens == "recompute":
        raise ConfigError(
            "rollout.stale_tokens=recompute needs actor.old_logprobs=recompute, found rollout, with which no "
            "log-probability is computed anew"
        )
    level = c.algorithm.rollout_correction.rollout_is
    if level != "none":
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is={level} needs actor.old_logprobs=recompute, found rollout: the "
            "ratio's denominator is then what was recorded at sampling, and every weight would be 1"
        )


def _check_tokens(c: Config) -> None:
    longest, budget = c.max_model_length, c.actor.ppo_max_token_len_per_gpu
    if budget < longest:
        raise ConfigError(
            f"actor.ppo_max_token_len_per_gpu ({budget} tokens) must hold the longest sequence: "
            f"data.max_prompt_length ({c.data.max_prompt_length}) + data.max_response_length "
            f"({c.data.max_response_length}) = {longest} tokens"
        )
    if c.rollout.num_blocks:
        need = -(-longest // c.rollout.block_size)
        if c.rollout.num_blocks - 1 < need:
            raise ConfigError(
                f"rollout.num_blocks ({c.rollout.num_blocks}, one of them reserved) must hold one request of "
                f"{longest} tokens: at least {need + 1} blocks of {c.rollout.block_size} tokens"
            )


def _check_devices(c: Config) -> None:
    devices, own = c.trainer.num_devices, c.rollout.num_devices
    tp = None if c.is_tp_open else c.rollout.tp
    if own and not c.trainer.one_step_off:
        raise ConfigError(
            f"rollout.num_devices ({own}) needs trainer.one_step_off: without it rollout and update wait for each "
            "other, and devices of their own would stand idle in turns"
        )
    problem = devices_problem(own, devices, tp or 1, "trainer.num_devices")
    if problem is not None:
        raise ConfigError(problem)
    problem = c.rollout.layout.problem(tp, own or devices)
    if problem is not None:
        raise ConfigError(problem)
