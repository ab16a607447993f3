"""Rules between options of several sections; a section's own rules stand with it (`Section.problems`).

Each rule that is broken is a sentence: which options, what was found, what is allowed. `as_read` puts the options
that a command does not read back to their defaults, so that no rule refuses a run for an option without effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.config.domains import problems as reward_problems
from jaxrl.config.domains import unread as unread_rewards
from jaxrl.config.options import AdvantageEstimator, Config
from jaxrl.config.rewards import RewardSection
from jaxrl.config.updates import DpoSection, SftSection
from jaxrl.schema.declared import MAX_INT, shown
from jaxrl.schema.devices import devices_problem, possible_workers
from jaxrl.schema.limits import template_problem
from jaxrl.schema.section import Section, named_section

_MAX_STEP_SAMPLES = 1 << 20

GROUP_RELATIVE: frozenset[AdvantageEstimator] = frozenset({"grpo", "dr_grpo", "grpo_turns", "rloo", "gdpo"})
"""Estimators that compare the samples of a prompt with each other, and so need two of them."""

NEEDS_WHOLE_BATCH: frozenset[AdvantageEstimator] = frozenset({"reinforce_plus_plus", "gae", "gdpo"})
"""Estimators with statistics over the whole batch: the gradient of a group has to wait for the last sample's score."""

LEARNING = ("train", "sft", "dpo")
"""The commands that train."""

_READ: dict[str, str] = {  # "": all of a section; `serve`: what a run has learnt can be served with it
    "model": "",
    "hosts": "",
    "serve": "",
    "data": "train_files val_files val_size system_prompt prompt_template apply_chat_template "
    "apply_chat_template_kwargs special_tokens_in_content max_prompt_length max_response_length "
    "filter_overlong_prompts train_batch_size shuffle seed",
    "actor": "optim dtype param_dtype ppo_max_token_len_per_gpu context_parallel_size grad_clip remat "
    "logprob_chunk_tokens attention offload_optimizer router_aux_loss_coef reduce_dtype",
    "trainer": "run_dir total_training_steps total_epochs save_freq mtbf_s max_ckpt_to_keep test_freq val_before_train "
    "seed num_devices init_from logger project_name experiment_name compilation_cache_dir max_bad_steps hang_timeout_s",
}
_OF_COMMAND: Mapping[str, dict[str, str]] = {
    "sft": {"sft": "", "algorithm": "loss_agg_mode"},
    "dpo": {"dpo": "", "actor": f"{_READ['actor']} offload_reference"},
}


def broken_rules(c: Config) -> list[str]:
    found = [*_of_data(c), *_of_batch(c), *_of_sizes(c), *_of_update(c)]
    found += [problem for _, section in _sections(c) for problem in section.problems(c)]
    return found + (across_hosts(c, "hosts.num", "hosts.devices_per_host") or _of_devices(c))


def _of_devices(c: Config) -> list[str]:
    tp = 1 if c.is_tp_open else c.rollout.tp
    own, devices, per_group = c.rollout.num_devices, c.trainer.num_devices, c.workers_per_group
    problem = devices_problem(own, devices, tp, "trainer.num_devices", per_group)
    return [problem] if problem else []


def _of_data(c: Config) -> Iterator[str]:
    data, trainer = c.data, c.trainer
    if not c.model.path:
        yield "model.path is missing: give a Hugging Face folder, a .gguf file or org/name of the Hugging Face Hub"
    if data.task and data.train_files:
        yield (
            "data.task and data.train_files exclude each other: problems come from a task or from files; add "
            "data.task= to use the files"
        )
    if "{question}" not in data.prompt_template:
        yield f"data.prompt_template must contain {{question}}, found {data.prompt_template!r}"
    if problem := template_problem(data.apply_chat_template_kwargs):
        yield f"data.apply_chat_template_kwargs.{problem}"
    # without any data a run is refused otherwise, and a simulation makes its own
    if not data.val_files and not (data.task and data.val_size) and (data.task or data.train_files):
        for option, wanted in (("test_freq", trainer.test_freq), ("val_before_train", trainer.val_before_train)):
            if wanted:
                more = ", or data.val_size above 0" if data.task else ""
                value = str(wanted).lower()
                yield f"trainer.{option} ({value}) needs held-out prompts: give data.val_files{more}"
    quotas, batch = data.source_quotas, data.train_batch_size
    for source, quota in quotas.items():
        if quota < 0:
            yield f"data.source_quotas.{source} must be at least 0, found {quota}"
    if quotas and sum(quotas.values()) != batch:
        yield f"data.source_quotas must add up to data.train_batch_size ({batch} prompts), found {sum(quotas.values())}"
    yield from reward_problems(c)
    overlong, longest = c.reward.overlong_buffer, data.max_response_length
    if overlong.enable and not 0 < overlong.len <= longest:
        yield (
            f"reward.overlong_buffer.len ({overlong.len} tokens) must be at least 1 and at most "
            f"data.max_response_length ({longest} tokens) where reward.overlong_buffer.enable is on"
        )


def _of_batch(c: Config) -> Iterator[str]:
    batch, estimator = c.data.train_batch_size, c.algorithm.adv_estimator
    for model, mini in (("actor", c.mini_batch_prompts), ("critic", c.critic.ppo_mini_batch_size)):
        if mini and batch % mini:
            yield f"{model}.ppo_mini_batch_size ({mini} prompts) must divide data.train_batch_size ({batch} prompts)"
    if estimator in GROUP_RELATIVE and c.rollout.n < 2:
        yield (
            f"rollout.n ({c.rollout.n}) must be at least 2 with algorithm.adv_estimator={estimator}: its advantage "
            "compares the samples of a prompt with each other"
        )
    if c.algorithm.use_kl_in_reward and c.actor.use_kl_loss:
        yield "algorithm.use_kl_in_reward and actor.use_kl_loss exclude each other: count KL once"
    if c.actor.param_dtype == "float64" and c.actor.dtype != "float64":
        yield f"actor.dtype must be float64 where actor.param_dtype is, found {c.actor.dtype}"
    if c.greedy_option and estimator in GROUP_RELATIVE:
        yield (
            f"{c.greedy_option} makes all samples of a prompt equal, and algorithm.adv_estimator={estimator} compares "
            "them with each other: every advantage would be 0"
        )


def _of_sizes(c: Config) -> Iterator[str]:
    data, rollout, actor = c.data, c.rollout, c.actor
    for first, second, count in (
        ("data.train_batch_size", "rollout.n", data.train_batch_size * rollout.n),
        ("data.val_size", "rollout.val_kwargs.n", data.val_size * rollout.val_kwargs.n),
    ):
        if count > _MAX_STEP_SAMPLES:
            yield (
                f"{first} × {second} must be at most {_MAX_STEP_SAMPLES} samples, which are in memory at once, found "
                f"{count}"
            )
    if rollout.num_blocks * rollout.block_size > MAX_INT:
        yield (
            f"rollout.num_blocks ({rollout.num_blocks}) × rollout.block_size ({rollout.block_size} tokens) must be at "
            f"most {MAX_INT}: a token's place in the pool has 32 bits"
        )
    steps, per_step = c.trainer.total_training_steps, max(c.updates_per_step, c.critic_updates_per_step)
    if steps * per_step > MAX_INT:
        yield (
            f"trainer.total_training_steps ({steps}) with {per_step} updates each makes {steps * per_step} updates, of "
            f"which at most {MAX_INT} can be counted: lower it, or actor.ppo_epochs"
        )
    for model, optim in (("actor", actor.optim), ("critic", c.critic_optim)):
        if optim.lr * optim.weight_decay > 1:
            yield (
                f"{model}.optim.lr ({optim.lr:g}) × {model}.optim.weight_decay ({optim.weight_decay:g}) must be at "
                "most 1: it is the share that every update takes off each weight"
            )


def _of_update(c: Config) -> Iterator[str]:
    actor, rollout, algorithm = c.actor, c.rollout, c.algorithm
    if rollout.stale_tokens == "recompute" and actor.old_logprobs != "recompute":
        yield (
            "rollout.stale_tokens=recompute needs actor.old_logprobs=recompute, found rollout, with which no "
            "log-probability is computed anew"
        )
    is_invariant = actor.numerics == "invariant"
    if is_invariant and actor.dtype != rollout.dtype:
        yield (
            f"actor.dtype ({actor.dtype}) must be rollout.dtype ({rollout.dtype}) where actor.numerics is invariant: "
            "numbers of two types are not the same bits"
        )
    if is_invariant and actor.context_parallel_size > 1:
        yield (
            f"actor.context_parallel_size ({actor.context_parallel_size}) must be 1 where actor.numerics is "
            "invariant: a token's attention is computed in the rollout's order, in which its whole sequence lies on "
            "one device"
        )
    if is_invariant and rollout.quantized:
        yield (
            f"{rollout.quantized} and actor.numerics=invariant exclude each other: the trainer, which quantises "
            "nothing, would not find the rollout's bits"
        )
    keys, weights, is_gdpo = (
        algorithm.gdpo_reward_keys,
        algorithm.gdpo_reward_weights,
        algorithm.adv_estimator == "gdpo",
    )
    if is_gdpo and (len(keys) < 2 or len(set(keys)) < len(keys)):
        yield (
            "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys with at least two different names, found "
            f"{', '.join(keys) or 'none'}: of a single reward its advantages are those of grpo, whitened"
        )
    if is_gdpo and weights and len(weights) != len(keys):
        yield (
            f"algorithm.gdpo_reward_weights must have one number for each of gdpo_reward_keys ({len(keys)}), found "
            f"{len(weights)}"
        )
    if is_gdpo and algorithm.use_kl_in_reward:
        yield (
            "algorithm.use_kl_in_reward and algorithm.adv_estimator=gdpo exclude each other: there is no one reward to "
            "take the KL off; use actor.use_kl_loss"
        )
    if c.max_row_length < c.max_model_length:
        yield (
            f"{c.row_budget} must hold the longest sequence: data.max_prompt_length ({c.data.max_prompt_length}) + "
            f"data.max_response_length ({c.data.max_response_length}) = {c.max_model_length} tokens; "
            "actor.context_parallel_size parts it among devices"
        )


def across_hosts(c: Config, option: str, devices_option: str) -> list[str]:
    """Why options exclude several hosts, a sentence each.

    Args:
      option: that says how many there are (`c.hosts.num`). devices_option: that says how many devices they have.
    """
    several = f"{option} ({c.hosts.num})"
    found = list(_of_spanning(c, several)) if c.rollout.hosts_per_worker > 1 else []
    return found if found or c.hosts.num == 1 else list(_of_hosts(c, several, devices_option))


def _of_hosts(c: Config, several: str, devices_option: str) -> Iterator[str]:
    workers = c.rollout.num_workers
    if workers > 1 and workers % c.num_host_groups:
        yield (
            f"rollout.num_workers ({workers}) counts the workers of all hosts, and must be a multiple of {several}, or "
            "1 for one per host"
        )
    if c.trainer.num_devices:
        yield (
            f"trainer.num_devices ({c.trainer.num_devices}) and {several} exclude each other: all hosts have as many "
            f"devices; set {devices_option}"
        )
    if c.reward.judge.model and {"judge", "model"} & set(c.reward.kinds):
        yield (
            f"reward.judge.model ({c.reward.judge.model}) and {several} exclude each other: rewards are the "
            "controller's, which has no devices; set reward.judge.endpoint"
        )
    for _, section in _sections(c):
        if (found := section.excludes_hosts(c)) is not None:
            yield (f"{found[0]} and {several} exclude each other: {found[1]}")


def _of_spanning(c: Config, several: str) -> Iterator[str]:
    rollout, num = c.rollout, c.hosts.num
    option = f"rollout.hosts_per_worker ({rollout.hosts_per_worker})"
    possible = [num // groups for groups in reversed(possible_workers(num))]
    if rollout.hosts_per_worker not in possible:
        yield (
            f"{option} must cut {several} along the major axes of the mesh, into groups of one of "
            f"{', '.join(map(str, possible))} hosts"
        )
    if rollout.num_workers not in (1, c.num_host_groups):
        yield (
            f"rollout.num_workers ({rollout.num_workers}) must be {several} / {option}, or 1 for as many: a host has a "
            "part of one worker"
        )
    if rollout.num_devices:
        yield (f"rollout.num_devices ({rollout.num_devices}) and {option} exclude each other")
    if c.is_tp_open:
        yield (
            f"rollout.tensor_model_parallel_size is auto, and with {option} there is nothing to choose: set it to "
            "as many devices as its hosts have together"
        )
    if not rollout.warmup:
        yield (
            f"rollout.warmup=false and {option} exclude each other: one process would wait in a program for another "
            "that still compiles it, and collectives give up"
        )


def host_problem(c: Config, num_devices: int, option: str = "the number of devices") -> str | None:
    """Why the rollout is impossible on the devices of a host, as a sentence; None if it is possible. `option`: that
    counts the devices, where there is one host."""
    tp, own = 1 if c.is_tp_open else c.rollout.tp, c.rollout.num_devices
    if c.hosts.num == 1:
        return devices_problem(own, num_devices, tp, option, c.workers_per_group)
    if (spanned := c.rollout.hosts_per_worker) > 1:
        if not num_devices or tp == spanned * num_devices:
            return None
        return (
            f"rollout.tensor_model_parallel_size ({tp}) must be all devices of a worker where it spans hosts: "
            f"rollout.hosts_per_worker ({spanned}) × the devices of a host ({num_devices})"
        )
    problem = devices_problem(own, num_devices, tp, "the devices of a host", c.workers_per_group)
    return problem and (
        f"on each of {c.hosts.num} hosts {problem}; a worker stays inside its host, but with rollout.hosts_per_worker"
    )


def as_read(config: Config, command: str) -> Config:
    """The configuration with each option that a command does not read at its default. `command`: that trains. Of
    other ones nothing is known, and the configuration stays as it is."""
    if command == "train":
        return config.replace(sft=SftSection(), dpo=DpoSection())
    if command not in LEARNING:
        return config
    read, default = _READ | _OF_COMMAND[command], Config()
    own = {}
    for name, names in read.items():
        given = getattr(config, name)
        each = names.split() or type(given).model_fields
        own[name] = getattr(default, name).replace(**{option: getattr(given, option) for option in each})
    return default.replace(**own)


def is_read(path: str, command: str) -> bool:
    """Whether a command reads the option."""
    section, _, name = path.partition(".")
    if command not in _OF_COMMAND:
        return section not in ("sft", "dpo", "serve", *(["simulate"] if command == "train" else []))
    names = (_READ | _OF_COMMAND[command]).get(section)
    return section != "serve" and names is not None and (not names or name.partition(".")[0] in names.split())


def without_effect(c: Config, command: str = "") -> list[str]:
    """A sentence for each option that differs from its default and is not read, because another one is off, or the
    command (as in `as_read`) has no use for it."""
    read, defaults = as_read(c, command), Config(model=c.model)
    unread = [
        f"{path}={_short(value)} has no effect: `jaxrl {command}` does not read it"
        for prefix, section in _sections(c)
        for path, value in _changed(section, _section(read, prefix), prefix)
    ]
    return unread + [
        f"{path}={_short(value)} has no effect: {why}"
        for prefix, names, why in _unread(read, command)
        for path, value in _changed(_section(read, prefix), _section(defaults, prefix), prefix)
        if names is None or path.rpartition(".")[2] in names
    ]


def _unread(c: Config, command: str) -> Iterator[tuple[str, frozenset[str] | None, str]]:
    """Sections, the options in them that are not read (None for all), and why."""
    for path, section in _sections(c):
        if not getattr(section, "enable", True):
            yield path, None, f"{path}.enable is off"
        else:
            yield from ((path, names, why) for names, why in section.unread(c))
    if c.rollout.num_workers == 1:
        yield "rollout", frozenset({"deal"}), "rollout.num_workers is 1"
    if not c.actor.use_kl_loss:
        yield "actor", frozenset({"kl_loss_coef", "kl_loss_type"}), "actor.use_kl_loss is off"
    if not c.algorithm.use_kl_in_reward:
        yield "algorithm", frozenset({"kl_coef", "kl_penalty"}), "algorithm.use_kl_in_reward is off"
    if (why := _no_reference_copy(c, command)) is not None:
        yield "actor", frozenset({"offload_reference"}), why
    if c.actor.loss_mode != "vanilla":
        yield "actor", frozenset({"clip_ratio_c"}), f"actor.loss_mode is {c.actor.loss_mode}"
    if c.actor.loss_mode == "reinforce":
        yield "actor", frozenset({"clip_ratio_low", "clip_ratio_high", "ratio_level"}), "actor.loss_mode is reinforce"
    other = f"algorithm.adv_estimator is {c.algorithm.adv_estimator}"
    if not c.has_critic:
        yield "critic", None, other
        yield "critic.optim", None, other
        yield "algorithm", frozenset({"gamma", "lam"}), other
        yield "trainer", frozenset({"critic_warmup"}), other
    if c.actor.optim.name != "muon":
        yield "actor.optim", frozenset({"momentum"}), "actor.optim.name is adamw"
    if c.actor.optim.lr_scheduler_type == "constant":
        yield "actor.optim", frozenset({"min_lr_ratio"}), "actor.optim.lr_scheduler_type is constant"
    if c.algorithm.adv_estimator != "grpo":
        yield "algorithm", frozenset({"norm_adv_by_std_in_grpo"}), other
    if c.algorithm.adv_estimator != "gdpo":
        yield "algorithm", frozenset({"gdpo_reward_keys", "gdpo_reward_weights"}), other
    if not c.data.task:
        yield "data", frozenset({"task_config"}), "data.task is empty"
    if not c.data.apply_chat_template:
        unread = frozenset({"apply_chat_template_kwargs", "special_tokens_in_content"})
        yield "data", unread, "data.apply_chat_template is off"
    yield from unread_rewards(c)


def _no_reference_copy(c: Config, command: str) -> str | None:
    """Why a run keeps no copy of the weights for its reference; None if it keeps one."""
    if c.model.has_adapters:
        return "the reference is the base of the adapters, which is there"
    if command == "dpo":
        return "dpo.precompute_ref_log_probs keeps no copy of the reference" if c.dpo.precompute_ref_log_probs else None
    return None if c.needs_ref else "no option needs a reference (actor.use_kl_loss, algorithm.use_kl_in_reward)"


def _sections(within: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """The sections within one, each before those in it, with their paths."""
    for name, value in within:
        if isinstance(value, Section):
            yield prefix + name, value
            yield from _sections(value, f"{prefix}{name}.")


def _section(c: Config, path: str) -> Any:
    """The section at a path, which may end with a name of the user's (`reward.domains.train.jsonl`); of defaults, where
    there is none of that name, a section with its defaults."""
    found: Any = c
    names = path.split(".")
    for place, name in enumerate(names):
        if isinstance(found, dict):
            item = named_section(RewardSection.model_fields[names[place - 1]])
            assert item is not None, path
            return found.get(".".join(names[place:]), item())
        found = getattr(found, name)
    return found


def _changed(section: Any, default: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section:
        if not isinstance(value, Section) and value != getattr(default, name):
            yield f"{prefix}.{name}", value


def _short(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, str) else shown(value)
