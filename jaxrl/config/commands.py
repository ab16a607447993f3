"""Which options `jaxrl sft` and `jaxrl dpo` read. The others are put back to their defaults, so that no rule of
`jaxrl.config.checks` refuses a run for an option that has no effect on it."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrl.config.options import Config
from jaxrl.config.supervised import DpoSection, SftSection

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
