"""The names here of verl's options and of TRL's best known ones, or one sentence why there is no such option.

`advice(path)` completes the refusal of an unknown option. Most names of verl are the same and stand in no table.

Sources: verl's `ppo_trainer.yaml`, versions 0.3 to 0.7; TRL's `GRPOConfig`, versions 0.15 to 1.9.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.config.options import Config
from jaxrl.schema.section import walk

PREFIX = "actor_rollout_ref"
"""verl's section around model, actor, rollout and reference."""

RENAMED: Mapping[str, str] = {
    "data.reward_fn_key": "data.source_key",
    "data.val_max_samples": "data.val_size",
    "model.enable_gradient_checkpointing": "actor.remat",
    "actor.ppo_micro_batch_size": "actor.ppo_max_token_len_per_gpu",
    "actor.ppo_micro_batch_size_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "actor.ulysses_sequence_parallel_size": "actor.context_parallel_size",
    "actor.clip_ratio": "actor.clip_ratio_low and actor.clip_ratio_high",
    "actor.loss_agg_mode": "algorithm.loss_agg_mode",
    "actor.policy_loss.loss_mode": "actor.loss_mode and actor.ratio_level",
    "actor.optim.betas": "actor.optim.beta1 and actor.optim.beta2",
    "actor.optim.lr_warmup_steps_ratio": "actor.optim.lr_warmup_steps",
    "actor.optim.warmup_style": "actor.optim.lr_scheduler_type",
    "actor.fsdp_config.optimizer_offload": "actor.offload_optimizer",
    "ref.fsdp_config.param_offload": "actor.offload_reference",
    "actor.tis_imp_ratio_cap": "algorithm.rollout_correction.rollout_is_threshold",
    "rollout.prompt_length": "data.max_prompt_length",
    "rollout.response_length": "data.max_response_length",
    "rollout.gpu_memory_utilization": "rollout.memory_fraction",
    "rollout.log_prob_micro_batch_size": "actor.ppo_max_token_len_per_gpu",
    "rollout.log_prob_micro_batch_size_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "rollout.log_prob_max_token_len_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "rollout.max_model_len": "data.max_prompt_length and data.max_response_length",
    "rollout.engine_kwargs.vllm.kv_cache_dtype": "rollout.kv_cache_dtype",
    "rollout.engine_kwargs.sglang.kv_cache_dtype": "rollout.kv_cache_dtype",
    "rollout.do_sample": "rollout.temperature",
    "rollout.val_kwargs.do_sample": "rollout.val_kwargs.temperature",
    "critic.enable": "algorithm.adv_estimator",
    "critic.optim.betas": "actor.optim.beta1 and actor.optim.beta2",
    "critic.optim.lr_warmup_steps_ratio": "critic.optim.lr_warmup_steps",
    "critic.optim.warmup_style": "actor.optim.lr_scheduler_type",
    "critic.ppo_micro_batch_size": "actor.ppo_max_token_len_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "critic.ulysses_sequence_parallel_size": "actor.context_parallel_size",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
    "algorithm.rollout_correction.bypass_mode": "actor.old_logprobs",
    "algorithm.rollout_correction.loss_type": "actor.loss_mode",
    "algorithm.rollout_is": "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_is_threshold": "algorithm.rollout_correction.rollout_is_threshold",
    "custom_reward_function.path": "reward.path",
    "custom_reward_function.name": "reward.name",
    "reward_model.model.path": "reward.judge.model",
    "reward_model.reward_manager": "reward.kind",
    "reward_manager.name": "reward.kind",
    "reward_model.overlong_buffer.enable": "reward.overlong_buffer.enable",
    "reward_model.overlong_buffer.len": "reward.overlong_buffer.len",
    "reward_model.overlong_buffer.penalty_factor": "reward.overlong_buffer.penalty_factor",
    "reward_model.sandbox_fusion": "reward.code.sandbox",
    "trainer.n_gpus_per_node": "trainer.num_devices",
    "trainer.nnodes": "hosts.num",
    "trainer.default_local_dir": "trainer.run_dir",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.n",
    "max_completion_length": "data.max_response_length",
    "max_new_tokens": "data.max_response_length",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "vllm_tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "vllm_gpu_memory_utilization": "rollout.memory_fraction",
    "max_tool_calling_iterations": "environment.max_turns",
    "max_prompt_length": "data.max_prompt_length",
    "shuffle_dataset": "data.shuffle",
    "chat_template_kwargs": "data.apply_chat_template_kwargs",
    "per_device_train_batch_size": "data.train_batch_size",
    "gradient_accumulation_steps": "actor.ppo_mini_batch_size",
    "learning_rate": "actor.optim.lr",
    "weight_decay": "actor.optim.weight_decay",
    "adam_beta1": "actor.optim.beta1",
    "adam_beta2": "actor.optim.beta2",
    "warmup_steps": "actor.optim.lr_warmup_steps",
    "warmup_ratio": "actor.optim.lr_warmup_steps",
    "lr_scheduler_type": "actor.optim.lr_scheduler_type",
    "max_grad_norm": "actor.grad_clip",
    "router_aux_loss_coef": "actor.router_aux_loss_coef",
    "entropy_coef": "actor.entropy_coeff",
    "num_iterations": "actor.ppo_epochs",
    "importance_sampling_level": "actor.ratio_level",
    "beta": "actor.use_kl_loss and actor.kl_loss_coef",
    "epsilon": "actor.clip_ratio_low and actor.clip_ratio_high",
    "epsilon_high": "actor.clip_ratio_high",
    "delta": "actor.clip_ratio_c",
    "loss_type": "algorithm.loss_agg_mode and actor.loss_mode",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "teacher_model_name_or_path": "algorithm.teacher.path",
    "reward_funcs": "reward.path and reward.parts",
    "reward_weights": "reward.parts",
    "label_smoothing": "dpo.label_smoothing",
    "precompute_ref_log_probs": "dpo.precompute_ref_log_probs",
    "lora_r": "model.lora_rank",
    "lora_alpha": "model.lora_alpha",
    "lora_dropout": "model.lora_dropout",
    "lora_target_modules": "model.target_modules",
    "use_rslora": "model.use_rslora",
    "load_in_4bit": "model.base_quantization",
    "num_train_epochs": "trainer.total_epochs",
    "max_steps": "trainer.total_training_steps",
    "save_steps": "trainer.save_freq",
    "save_total_limit": "trainer.max_ckpt_to_keep",
    "eval_steps": "trainer.test_freq",
    "output_dir": "trainer.run_dir",
    "run_name": "trainer.experiment_name",
    "seed": "trainer.seed",
    "report_to": "trainer.logger",
}
"""Options of verl, without `PREFIX`, and of TRL, and what is nearest to them here: an option, or two."""

ABSENT: Mapping[str, str] = {
    PREFIX: "its sections model, actor and rollout stand by themselves here",
    "defaults": "there is no Hydra: one file has all options, and others stand behind it as section.option=value",
    "hydra": "there is no Hydra: one file has all options, and others stand behind it as section.option=value",
    "hybrid_engine": "rollout and update always share the weights, unless rollout.num_devices parts the devices",
    "ref": "the reference model is the policy as it began, and is computed with the actor's options",
    "ray_init": "hosts.num > 1 uses Ray, and hosts.address names its cluster; one host needs none",
    "ray_kwargs": "hosts.num > 1 uses Ray, and hosts.address names its cluster; one host needs none",
    "data.truncation": "no prompt is cut: longer ones are left out (data.filter_overlong_prompts)",
    "data.train_max_samples": "all problems of the files are used; trainer.total_training_steps ends a run earlier",
    "data.dataloader_num_workers": "the data is read once, before the first step",
    "data.validation_shuffle": "no result depends on the order of held-out prompts",
    "data.val_batch_size": "held-out prompts need no batches: the engine takes as many as fit",
    "data.return_raw_chat": "a reward function always gets the question and its columns",
    "data.return_raw_input_ids": "a reward function always gets the question and its columns",
    "data.image_key": "models are text-only",
    "data.video_key": "models are text-only",
    "data.tokenizer": "the tokenizer is the model's own",
    "data.trust_remote_code": "no code that comes with a model is run",
    "model.trust_remote_code": "no code that comes with a model is run",
    "model.external_lib": "no code that comes with a model is run",
    "model.use_remove_padding": "sequences are always packed, without padding between them",
    "model.use_liger": "jaxrl has kernels of its own (actor.attention)",
    "model.use_fused_kernels": "jaxrl has kernels of its own (actor.attention)",
    "actor.strategy": "there is no FSDP or Megatron: weights are sharded over the devices of trainer.num_devices",
    "actor.fsdp_config": "there is no FSDP: weights are sharded over the devices of trainer.num_devices",
    "actor.megatron": "there is no Megatron: weights are sharded over the devices of trainer.num_devices",
    "actor.use_dynamic_bsz": "batches are always packed by tokens (actor.ppo_max_token_len_per_gpu)",
    "actor.use_torch_compile": "everything is compiled, by XLA",
    "actor.optim.total_training_steps": "a schedule is as long as the run (trainer.total_training_steps)",
    "critic.grad_clip": "gradients of both models are clipped at actor.grad_clip",
    "critic.loss_agg_mode": "the losses of both models become one as algorithm.loss_agg_mode says",
    "critic.model": "the critic starts from the policy's weights, with its own head",
    "critic.strategy": "there is no FSDP or Megatron: weights are sharded over the devices of trainer.num_devices",
    "critic.use_dynamic_bsz": "batches are always packed by tokens (actor.ppo_max_token_len_per_gpu)",
    "rollout.name": "jaxrl has its own engine",
    "rollout.mode": "jaxrl has its own engine, which returns samples as they end",
    "rollout.engine_kwargs": "jaxrl has its own engine, whose options are those of rollout",
    "rollout.quantization_config_file": "rollout.quantization names one of two forms, which have nothing to set",
    "rollout.load_format": "the engine reads the trainer's weights where they are",
    "rollout.layered_summon_param": "the engine reads the trainer's weights where they are",
    "rollout.free_cache_engine": "the KV pool is planned with the rest of a device's memory (rollout.memory_fraction)",
    "rollout.enforce_eager": "everything is compiled, ahead of the first step (rollout.warmup)",
    "rollout.enable_chunked_prefill": "prompts are always read in chunks (rollout.max_num_batched_tokens)",
    "rollout.ignore_eos": "a response ends with the model's end token or at data.max_response_length",
    "rollout.log_prob_use_dynamic_bsz": "batches are always packed by tokens (actor.ppo_max_token_len_per_gpu)",
    "rollout.calculate_log_probs": "the engine's log-probabilities are always kept (actor.old_logprobs)",
    "rollout.over_sample_rate": "rollout.over_provisioning.enable starts more samples, and drops those that end last",
    "rollout.multi_turn": "environment.kind says what answers the model, and environment.max_turns how often",
    "rollout.agent": "environment.kind says what answers the model, and environment.max_turns how often",
    "algorithm.kl_ctrl": "the coefficient of KL stays as it is (algorithm.kl_coef)",
    "lmbda": "all responses are the policy's, as with a lmbda of 1 (algorithm.teacher.top_k)",
    "mask_truncated_completions": "cut responses are learnt from; reward.overlong_buffer.enable has them cost reward",
    "sync_ref_model": "the reference is the policy as the run began",
    "repetition_penalty": "tokens are drawn from the policy itself",
    "fp16": "actor.dtype is bfloat16 or float32",
    "packing": "sequences are always packed, without attention between them",
    "padding_free": "sequences are always packed, without padding",
    "dataset_name": "data.train_files takes JSONL or Parquet files, also of the Hub",
    "algorithm.rollout_correction.rollout_is_batch_normalize": "a weight needs its own sample alone, so that gradients "
    "can begin before the batch is there",
    "reward_model": "rewards have the section reward, and a reward model is reward.judge.model with reward.kind=model",
    "global_profiler": "a run's phases are in its timeline.json, and jaxrl profile measures latencies",
    "trainer.balance_batch": "batches are always packed by tokens (actor.ppo_max_token_len_per_gpu)",
    "trainer.log_val_generations": "samples are always written to samples.jsonl in trainer.run_dir",
    "trainer.rollout_data_dir": "samples are always written to samples.jsonl in trainer.run_dir",
    "trainer.validation_data_dir": "samples are always written to samples.jsonl in trainer.run_dir",
    "trainer.resume_mode": "a run in trainer.run_dir is resumed by itself",
    "trainer.resume_from_path": "trainer.run_dir names the run to resume (trainer.init_from gives its weights to a "
    "new one)",
    "trainer.default_hdfs_dir": "checkpoints are written to trainer.run_dir alone",
    "trainer.del_local_ckpt_after_load": "checkpoints are kept (trainer.max_ckpt_to_keep)",
    "trainer.device": "the installed JAX determines the devices (trainer.num_devices)",
    "trainer.val_only": "jaxrl eval scores a model without training",
}
"""Options and whole sections of verl, without `PREFIX`, that have no counterpart, each with a sentence."""

VALUES: Mapping[str, str] = {"gspo": "actor.ratio_level=sequence"}
"""Names of verl's that are no value of the same option here, and what they are."""

_OURS = frozenset(path for path, _ in walk(Config))
_VERLS_LAST_NAMES = frozenset(path.rpartition(".")[2] for path in (*RENAMED, *ABSENT))
_LAST_NAMES = frozenset(path.rpartition(".")[2] for path in _OURS)


def advice(path: str, value: Any = None) -> tuple[str, str] | None:
    """For an unknown option, or a section with options as its value: the option's path, and what to do about it. None
    if no option of verl with that name is known here."""
    for option in _leaves(path, value):
        if (found := _advice(option)) is not None:
            return option, found
    return None


def advice_by_word(word: str) -> str | None:
    """What to do about an option of verl of which only the last name is known, or a word in its name, as `lora`."""
    every = {**ABSENT, **{name: f"here it is {ours}" for name, ours in RENAMED.items()}}
    begins = re.compile(rf"(?:^|[._]){re.escape(word.lower())}")
    for fits in (lambda name: name.rpartition(".")[2] == word.lower(), begins.search):
        if (found := next((name for name in every if fits(name)), None)) is not None:
            return every[found]
    return None


def _advice(option: str) -> str | None:
    name = option.removeprefix(f"{PREFIX}.")
    note = f" (there is no {PREFIX} here)" if name != option else ""
    if name != option and name in _OURS:
        return f"it is {name}{note}"
    if name in RENAMED:
        return f"here it is {RENAMED[name]}"
    above = name
    while above:  # of sections the innermost
        if above in ABSENT:
            return ABSENT[above]
        above = above.rpartition(".")[0]
    last = name.rpartition(".")[2]
    # a single word, as `name`, may be meant otherwise
    if "_" in last and last not in _LAST_NAMES and last in _VERLS_LAST_NAMES:
        return advice_by_word(last)
    return ABSENT[PREFIX] if name != option else None


def _leaves(path: str, value: Any) -> Iterator[str]:
    """The paths of what a mapping holds, however deep; of anything else its own."""
    if not isinstance(value, Mapping) or not value:
        yield path
        return
    for key, inner in value.items():
        yield from _leaves(f"{path}.{key}", inner)
