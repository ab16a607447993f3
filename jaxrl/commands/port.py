"""`jaxrl port`: the options of a verl or TRL run as a configuration of jaxrl, with what each one was, what has no
counterpart and why, and what is left to decide.

Sources: verl's `ppo_trainer.yaml`, versions 0.3 to 0.7; TRL's `GRPOConfig`, `SFTConfig` and `DPOConfig`, versions 0.15
to 1.0. An option that the run does not give has that library's default, not jaxrl's.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from jaxrl.config.inputs import ConfigError
from jaxrl.config.mapping import by_path, from_mapping, is_section_path
from jaxrl.config.verl_options import ABSENT, PREFIX, RENAMED, advice

Library = Literal["verl", "trl"]
Given = dict[str, Any]
"""Options of the other library by name, sections with dots."""


@dataclass(slots=True)
class Ported:
    """A ported run. `values`: our options, each with a remark. `absent`: options without a counterpart, and why."""

    command: str = "train"
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    decide: list[str] = field(default_factory=list)

    def put(self, option: str, value: Any, remark: str) -> None:
        field = by_path().get(option)
        if field is not None and str(field.annotation).startswith("list") and not isinstance(value, list):
            value = [value]
        self.values[option] = value, remark

    def text(self) -> str:
        """The YAML file."""
        lines = [f"# jaxrl {self.command} --config FILE", *self._sections(self.values, ())]
        for title, found in (("No counterpart:", self.absent), ("To decide:", self._open())):
            if found:
                lines += ["", f"# {title}", *(f"# - {line}" for line in found)]
        return "\n".join(lines) + "\n"

    def _sections(self, values: Mapping[str, tuple[Any, str]], above: tuple[str, ...]) -> Iterator[str]:
        margin, within = "  " * len(above), dict[str, dict[str, tuple[Any, str]]]()
        for name, (value, remark) in values.items():
            first, dot, rest = name.partition(".")
            if dot and is_section_path(".".join((*above, first))):
                within.setdefault(first, {})[rest] = value, remark
                continue
            yield f"{margin}{name}: {_yaml(value)}{f'  # {remark}' if remark else ''}"
        for name, inner in within.items():
            yield f"{margin}{name}:"
            yield from self._sections(inner, (*above, name))

    def _open(self) -> list[str]:
        """The remaining decisions, with every problem of the configuration."""
        nested: dict[str, Any] = {}
        for option, (value, _) in self.values.items():
            *sections, name = option.split(".")
            node = nested
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = value
        try:
            from_mapping(nested, self.command)
        except ConfigError as error:
            return [*self.decide, *error.problems]
        return self.decide


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _said(name: str, value: Any) -> str:
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def port(library: Library, source: Sequence[str], devices: int = 1) -> str:
    """The configuration as YAML with comments.

    Args:
      source: a file (a shell script or YAML of verl; Python, JSON or YAML of TRL), or the words of a command line.
      devices: on which the TRL run trained, since it counts completions per device.

    Raises ValueError where `source` has no options of the library.
    """
    ported = Ported()
    if library == "verl":
        _port_verl(_verl_options(source), ported)
    else:
        _port_trl(*_trl_options(source), devices, ported)
    return ported.text()


# -- reading -----------------------------------------------------------------------------------------------------------


def _text_of(source: Sequence[str]) -> tuple[str, str]:
    """(the text, the suffix of its file), of a file or of the words themselves."""
    path = Path(source[0]).expanduser() if len(source) == 1 else None
    if path is not None and path.is_file():
        return path.read_text(encoding="utf-8"), path.suffix
    if path is not None and "=" not in source[0] and not source[0].startswith("--"):
        raise ValueError(f"port: no such file: {path}")
    return " ".join(map(shlex.quote, source)), ".sh"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Given:
    found: Given = {}
    for name, value in values.items():
        found |= (
            _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {f"{prefix}{name}": value}
        )
    return found


def _verl_options(source: Sequence[str]) -> Given:
    text, suffix = _text_of(source)
    if suffix in (".yaml", ".yml"):
        return _flat(yaml.safe_load(text) or {})
    found: Given = {}
    for word in _words(text):
        if match := re.fullmatch(r"\+{0,2}([a-z_]\w*(?:\.[\w@]+)+)=(.*)", word, re.DOTALL):
            found[match[1]] = _value(match[2])
    if not found:
        raise ValueError(f"port: {' '.join(source):.100} has no option of verl, such as algorithm.adv_estimator=grpo")
    return found


def _value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):  # 1e-6 is text in YAML 1.1
        return float(value)
    return value


def _words(script: str) -> Iterator[str]:
    """The words of a shell script, with its own variables expanded."""
    variables = {"HOME": "~"}
    pending = ""
    for line in script.replace("\\\n", " ").splitlines():
        pending = f"{pending}\n{line}" if pending else line
        text = re.sub(r"\$\(\((.*?)\)\)(?!\))", lambda found: _sum(found[1], variables) or found[0], pending)
        text = re.sub(r"\$\([^()]*\)", lambda found: found[0].replace(" ", "_"), text)
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # a quotation mark that a later line closes
            continue
        pending = ""
        for word in words:
            word = _expanded(word, variables)
            if match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL):
                variables[match[1]] = match[2]
            yield word


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    word = re.sub(r"\$\{(\w+):?-([^{}]*)\}", lambda found: variables.get(found[1], found[2]), word)
    return re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], found[0]), word)


def _sum(text: str, variables: Mapping[str, str]) -> str:
    """A shell's integer arithmetic; empty for anything else."""
    of = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}

    def value(node: Any) -> int:
        match node:
            case ast.Expression():
                return value(node.body)
            case ast.Constant(value=int(number)):
                return number
            case ast.Name():
                return int(variables[node.id])  # with or without $ in front of it
            case ast.BinOp():
                return of[type(node.op)](value(node.left), value(node.right))
        raise ValueError(text)

    try:
        return str(value(ast.parse(re.sub(r"\$\{?(\w+)\}?", r"\1", text.strip()), mode="eval")))
    except (KeyError, ValueError, SyntaxError, ZeroDivisionError):
        return ""


def _trl_options(source: Sequence[str]) -> tuple[str, Given, Given]:
    """(train, sft or dpo; the options; arguments of the trainer)."""
    text, suffix = _text_of(source)
    of_trainer: Given = {}
    if suffix in (".json", ".yaml", ".yml"):
        options = json.loads(text) if suffix == ".json" else yaml.safe_load(text)
        if not isinstance(options, dict):
            raise ValueError(f"port: {source[0]} must hold options by name")
    elif suffix == ".py":
        options, of_trainer = _of_python(text)
        text = text + " ".join(options)
    else:
        options = _flags(shlex.split(text))
    if not options and not of_trainer:
        raise ValueError(f"port: {' '.join(source):.100} has no options of TRL: no GRPOConfig, SFTConfig or DPOConfig")
    names = set(options)
    of_kind = {"train": r"GRPO|grpo|RLOO|rloo", "dpo": r"DPOConfig|\bdpo\b", "sft": r"SFTConfig|\bsft\b"}
    kind = next((kind for kind, mark in of_kind.items() if re.search(mark, text)), None)
    if kind is None:
        is_rl = names & {"num_generations", "max_completion_length", "epsilon", "num_iterations"}
        kind = "train" if is_rl else "dpo" if "beta" in names else "sft"
    return kind, options, of_trainer


def _of_python(text: str) -> tuple[Given, Given]:
    """The arguments of configurations, and of trainers. A module's docstring may have a command line."""
    tree = ast.parse(text)
    words = (ast.get_docstring(tree) or "").replace("\\\n", " ").replace("`", " ").split()
    options, of_trainer = _flags(words), Given()
    if re.search(r"\bRLOOConfig\b", text):
        options["rloo"] = True
    for call in ast.walk(tree):
        name = getattr(call.func, "id", getattr(call.func, "attr", "")) if isinstance(call, ast.Call) else ""
        if not isinstance(call, ast.Call) or not re.fullmatch(r"(GRPO|RLOO|SFT|DPO)(Config|Trainer)|LoraConfig", name):
            continue
        prefix = "lora." if name == "LoraConfig" else ""
        if prefix:
            options["lora."] = None
        into = of_trainer if name.endswith("Trainer") else options
        into |= {f"{prefix}{each.arg}": _literal(each.value) for each in call.keywords if each.arg}
    return options, of_trainer


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _Source(ast.unparse(node))


class _Source(str):
    """An expression, whose value only the script knows."""


def _flags(words: Sequence[str]) -> Given:
    """`--name value`, `--name=value`, `--name a, b` and `--name` alone, which is true."""
    found: Given = {}
    for place, word in enumerate(words):
        if match := re.fullmatch(r"--(\w+)(?:=(.*))?", word):
            values = [match[2]] if match[2] is not None else []
            for following in words[place + 1 :] if not values else ():
                if following.startswith("--"):
                    break
                values.append(following)
            given = [_value(value.strip("\"',")) for value in values]
            found[match[1]] = given[0] if len(given) == 1 else given or True
    return found


# -- verl --------------------------------------------------------------------------------------------------------------

_VERL_DEFAULTS: Given = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "actor.ppo_mini_batch_size": 256,
    "actor.optim.lr": 1e-6,
    "actor.optim.weight_decay": 0.01,
    "actor.grad_clip": 1.0,
    "rollout.n": 1,
    "rollout.temperature": 1.0,
    "trainer.total_epochs": 30,
}
_KL = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
_OF_PARQUET = {
    "data.messages_key": "prompt",
    "data.answer_key": "reward_model.ground_truth",
    "data.source_key": "data_source",
}
_MERGED = ("log_prob_micro_batch_size", "log_prob_max_token_len_per_gpu", "log_prob_use_dynamic_bsz")
"""Options of the reference and of log-probabilities, which one option here covers."""


def _port_verl(given: Given, ported: Ported) -> None:
    options = {name.removeprefix(f"{PREFIX}."): (name, value) for name, value in given.items()}
    for name, value in _VERL_DEFAULTS.items():
        if name not in options:
            ported.put(name, value, "verl's default")
    for name, (full, value) in options.items():
        if value is None or value == "":
            continue
        said = _said(full, value)
        if (convert := _OF_VERL.get(name)) is not None:
            convert(ported, value, said, {key: each for key, (_, each) in options.items()})
        elif any(part in name for part in _MERGED):
            continue
        elif name in by_path():
            ported.put(name, value, "")
        elif name in RENAMED and " and " not in RENAMED[name]:
            ported.put(RENAMED[name], value, f"was {full}")
        else:
            found = advice(full, value)
            why = found[1] if found and found[1] != ABSENT[PREFIX] else "there is no such option here"
            ported.absent.append(f"{said}: {why}")
    files = ported.values.get("data.train_files", ([], ""))[0]
    if any(str(file).endswith(".parquet") for file in files):
        for option, value in _OF_PARQUET.items():
            if option not in options:
                ported.put(option, value, "as verl writes its Parquet files")
    ported.values.pop("data.prompt_key", None)
    if "trainer.run_dir" not in ported.values:
        ported.put("trainer.run_dir", "runs/ported", "choose a folder")
    if "reward.kind" not in ported.values and "reward.path" not in ported.values:
        ported.put("reward.kind", "math", "verl chooses by data_source: docs/rewards.md has the scorers")
    for option, (value, _) in ported.values.items():
        if "$" in str(value):
            ported.decide.append(f"{option}: the script computes {value!r}")


def _same(option: str, change: Callable[[Any], Any] = lambda value: value) -> Callable[..., None]:
    def convert(ported: Ported, value: Any, said: str, given: Given) -> None:
        ported.put(option, change(value), f"was {said}")

    return convert


def _clip(ported: Ported, value: Any, said: str, given: Given) -> None:
    for side in ("low", "high"):
        if f"actor.clip_ratio_{side}" not in given:
            ported.put(f"actor.clip_ratio_{side}", value, f"was {said}")


def _loss_mode(ported: Ported, value: Any, said: str, given: Given) -> None:
    if value == "gspo":
        ported.put("actor.ratio_level", "sequence", f"was {said}")
    elif value in ("vanilla", "cispo"):
        ported.put("actor.loss_mode", value, f"was {said}")
    else:
        ported.absent.append(f"{said}: actor.loss_mode is vanilla, cispo or reinforce")


def _estimator(ported: Ported, value: Any, said: str, given: Given) -> None:
    near = {"reinforce_plus_plus_baseline": "grpo", "grpo_passk": "grpo", "remax": "rloo", "opo": "rloo"}
    if value in near:
        ported.decide.append(f"{said}: there is none here; {near[value]} is the nearest (docs/your-algorithm.md)")
    ported.put("algorithm.adv_estimator", near.get(value, value), f"was {said}" if value in near else "")


def _betas(ported: Ported, value: Any, said: str, given: Given) -> None:
    for number, beta in enumerate(value, 1):
        ported.put(f"actor.optim.beta{number}", beta, f"was {said}")


def _warmup(ported: Ported, value: Any, said: str, given: Given) -> None:
    steps = given.get("trainer.total_training_steps")
    if value and isinstance(steps, int):
        ported.put("actor.optim.lr_warmup_steps", round(value * steps), f"was {said}, of {steps} steps")
    elif value:
        ported.decide.append(f"{said}: set actor.optim.lr_warmup_steps, once the number of updates is known")


def _micro_batch(ported: Ported, value: Any, said: str, given: Given) -> None:
    if "actor.ppo_max_token_len_per_gpu" in given:
        return
    lengths = [given.get(f"data.max_{part}_length", 512) for part in ("prompt", "response")]
    if all(isinstance(each, int) for each in (value, *lengths)):
        ported.put("actor.ppo_max_token_len_per_gpu", value * sum(lengths), f"was {said}: tokens, no samples")


def _nodes(ported: Ported, value: Any, said: str, given: Given) -> None:
    if isinstance(value, int) and value > 1:
        ported.put("hosts.num", value, f"was {said}")
        ported.values.pop("trainer.num_devices", None)
        if isinstance(per_node := given.get("trainer.n_gpus_per_node"), int):
            ported.put("hosts.devices_per_host", per_node, "was trainer.n_gpus_per_node")
    elif not isinstance(value, int):
        ported.decide.append(f"{said}: set hosts.num and hosts.devices_per_host for more than one host")


def _devices(ported: Ported, value: Any, said: str, given: Given) -> None:
    if isinstance(value, int) and given.get("trainer.nnodes", 1) == 1:
        ported.put("trainer.num_devices", value, f"was {said}")


def _manager(ported: Ported, value: Any, said: str, given: Given) -> None:
    ported.put("reward.kind", "math", f"was {said}; other scorers: docs/rewards.md")
    if value == "dapo":
        ported.put("reward.wrong_reward", -1.0, "DAPO's rewards are 1 and -1")


def _loggers(ported: Ported, value: Any, said: str, given: Given) -> None:
    asked = value if isinstance(value, list) else [value]
    known = [each for each in asked if each in ("console", "wandb", "tensorboard", "mlflow", "trackio")]
    ported.put("trainer.logger", known or ["console"], "" if known == asked else f"was {said}")


def _modules(ported: Ported, value: Any, said: str, given: Given) -> None:
    if value != "all-linear":  # which is what adapters have here
        ported.put("model.target_modules", value if isinstance(value, list) else [value], "")


def _nothing(ported: Ported, value: Any, said: str, given: Given) -> None:
    """Options whose effect is always there, or that say what jaxrl decides itself."""


def _not_below_zero(option: str) -> Callable[..., None]:
    return _same(option, lambda value: max(value, 0) if isinstance(value, int) else value)


_OF_VERL: Mapping[str, Callable[..., None]] = {
    "actor.clip_ratio": _clip,
    "actor.policy_loss.loss_mode": _loss_mode,
    "algorithm.adv_estimator": _estimator,
    "actor.optim.betas": _betas,
    "critic.optim.betas": _nothing,
    "actor.optim.lr_warmup_steps_ratio": _warmup,
    "critic.optim.lr_warmup_steps_ratio": _nothing,
    "actor.optim.lr_warmup_steps": _not_below_zero("actor.optim.lr_warmup_steps"),
    "model.enable_gradient_checkpointing": _same("actor.remat", lambda on: "auto" if on else "none"),
    "critic.model.enable_gradient_checkpointing": _nothing,
    "actor.ppo_micro_batch_size": _micro_batch,
    "actor.ppo_micro_batch_size_per_gpu": _micro_batch,
    "critic.ppo_micro_batch_size": _nothing,
    "critic.ppo_micro_batch_size_per_gpu": _nothing,
    "critic.ppo_max_token_len_per_gpu": _nothing,
    "actor.fsdp_config.param_offload": _nothing,
    "actor.kl_loss_type": _same("actor.kl_loss_type", lambda kind: _KL.get(kind, kind)),
    "rollout.do_sample": _nothing,
    "rollout.val_kwargs.do_sample": lambda ported, value, said, given: (
        None if value else ported.put("rollout.val_kwargs.temperature", 0.0, f"was {said}")
    ),
    "rollout.max_model_len": _nothing,
    "trainer.n_gpus_per_node": _devices,
    "trainer.nnodes": _nodes,
    "trainer.logger": _loggers,
    "trainer.save_freq": _not_below_zero("trainer.save_freq"),
    "trainer.test_freq": _not_below_zero("trainer.test_freq"),
    "trainer.resume_mode": _nothing,
    "model.target_modules": _modules,
    "reward_model.reward_manager": _manager,
    "reward_manager.name": _manager,
    "reward_model.reward_kwargs.max_resp_len": _nothing,
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": _nothing,
    **{
        f"reward_model.reward_kwargs.overlong_buffer_cfg.{name}": _same(f"reward.overlong_buffer.{name}")
        for name in ("enable", "len", "penalty_factor")
    },
}
assert not set(_OF_VERL) & set(ABSENT) - {"trainer.resume_mode"}, "an option is converted, or absent"

# -- TRL ---------------------------------------------------------------------------------------------------------------

_TRL_DEFAULTS: Mapping[str, Given] = {
    "train": {
        "learning_rate": 1e-6,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 8,
        "max_completion_length": 512,
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "num_train_epochs": 3,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
    },
    "sft": {
        "learning_rate": 2e-5,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_length": 1024,
        "num_train_epochs": 3,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
    },
    "dpo": {
        "learning_rate": 1e-6,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_length": 1024,
        "num_train_epochs": 3,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
        "beta": 0.1,
        "loss_type": "sigmoid",
    },
}
_SAME: Mapping[str, str] = {
    "model_name_or_path": "model.path",
    "learning_rate": "actor.optim.lr",
    "weight_decay": "actor.optim.weight_decay",
    "adam_beta1": "actor.optim.beta1",
    "adam_beta2": "actor.optim.beta2",
    "warmup_steps": "actor.optim.lr_warmup_steps",
    "lr_scheduler_type": "actor.optim.lr_scheduler_type",
    "max_grad_norm": "actor.grad_clip",
    "router_aux_loss_coef": "actor.router_aux_loss_coef",
    "num_train_epochs": "trainer.total_epochs",
    "max_steps": "trainer.total_training_steps",
    "save_steps": "trainer.save_freq",
    "save_total_limit": "trainer.max_ckpt_to_keep",
    "eval_steps": "trainer.test_freq",
    "output_dir": "trainer.run_dir",
    "run_name": "trainer.experiment_name",
    "seed": "trainer.seed",
    "chat_template_kwargs": "data.apply_chat_template_kwargs",
    "lora.r": "model.lora_rank",
    "lora_r": "model.lora_rank",
    "lora.lora_alpha": "model.lora_alpha",
    "lora_alpha": "model.lora_alpha",
    "lora.lora_dropout": "model.lora_dropout",
    "lora_dropout": "model.lora_dropout",
    "lora.target_modules": "model.target_modules",
    "lora_target_modules": "model.target_modules",
    "lora.use_rslora": "model.use_rslora",
}
_SAME_OF: Mapping[str, Mapping[str, str]] = {
    "train": {
        "num_generations": "rollout.n",
        "max_completion_length": "data.max_response_length",
        "max_prompt_length": "data.max_prompt_length",
        "temperature": "rollout.temperature",
        "top_p": "rollout.top_p",
        "top_k": "rollout.top_k",
        "min_p": "rollout.min_p",
        "num_iterations": "actor.ppo_epochs",
        "importance_sampling_level": "actor.ratio_level",
        "entropy_coef": "actor.entropy_coeff",
        "vllm_gpu_memory_utilization": "rollout.memory_fraction",
        "vllm_tensor_parallel_size": "rollout.tensor_model_parallel_size",
        "shuffle_dataset": "data.shuffle",
        "max_tool_calling_iterations": "environment.max_turns",
    },
    "sft": {},
    "dpo": {
        "beta": "dpo.beta",
        "label_smoothing": "dpo.label_smoothing",
        "precompute_ref_log_probs": "dpo.precompute_ref_log_probs",
    },
}
_WHY: Mapping[str, str] = {
    "mask_truncated_completions": "cut responses are learnt from; reward.overlong_buffer makes them cost something",
    "sync_ref_model": "the reference is the policy as the run began",
    "repetition_penalty": "tokens are drawn from the policy itself",
    "use_vllm": "jaxrl has its own engine",
    "gradient_checkpointing": "actor.remat=auto decides by the device's memory",
    "bf16": "actor.dtype and rollout.dtype are bfloat16 on GPUs",
    "fp16": "actor.dtype is bfloat16 or float32",
    "packing": "sequences are always packed, without attention between them",
    "padding_free": "sequences are always packed, without padding",
    "dataset_name": "data.train_files takes JSONL or Parquet files, also of the Hub (docs/your-data.md)",
    "reward_weights": "weights stand in reward.parts",
    "environment_factory": "environment.kind=class takes such a class (docs/environments.md)",
    "load_in_4bit": "model.base_quantization=nf4",
}
_SILENT = re.compile(
    r"logging_|log_|vllm_|push_to_hub|hub_|dataset_num_proc|dataset_config|config_file|dtype|torch_dtype|attn_impl|use_peft|"
    r"peft_config|lora\.($|task_type|bias)|lora_task|eval_strategy|save_strategy|do_eval|per_device_eval|"
    r"remove_unused|disable_dropout|trackio|report_to|num_compl|trust_remote|processing_class|args|train_dataset|"
    r"eval_dataset|model_init|steps_per_gen|quantization_c|epsilon_high|callbacks"
)
"""Options that do not affect training, or that another option's conversion reads."""


def _port_trl(kind: str, options: Given, of_trainer: Given, devices: int, ported: Ported) -> None:
    ported.command, defaults = kind, _TRL_DEFAULTS[kind]
    model = of_trainer.pop("model", None)
    if isinstance(model, str) and not isinstance(model, _Source):
        options.setdefault("model_name_or_path", model)
    given, same = {**defaults, **options, **of_trainer}, {**_SAME, **_SAME_OF[kind]}
    rewards = given.pop("reward_funcs", None)

    def said(name: str) -> str:
        return f"was {_said(name, given[name])}" if name in options else f"TRL's default of {name}"

    for name, value in given.items():
        if isinstance(value, _Source):
            ported.decide.append(f"{name}: the script computes {value!s:.100}") if not _SILENT.match(name) else None
        elif value is None or name in ("per_device_train_batch_size", "gradient_accumulation_steps", "max_length"):
            continue
        elif name in same:
            ported.put(same[name], value, said(name))
        elif (convert := _OF_TRL.get((kind, name))) is not None:
            convert(ported, value, said(name), given)
        elif not _SILENT.match(name):
            ported.absent.append(f"{name}={value}: {_WHY.get(name, 'there is no such option here')}")
    _batch(kind, given, devices, ported)
    if "max_length" in given:
        half = given["max_length"] // 2
        for part in ("prompt", "response"):
            ported.put(
                f"data.max_{part}_length", half, f"half of max_length={given['max_length']}: only the sum counts"
            )
    if "model.path" not in ported.values:
        ported.decide.append("model.path: the script computes the model's name")
    ported.values.setdefault("trainer.run_dir", ("runs/ported", "choose a folder"))
    ported.values.setdefault("data.train_files", ([], "JSONL or Parquet: docs/your-data.md"))
    ported.decide.append("data.train_files: name the files with the rows of train_dataset")
    if kind == "train":
        ported.put("data.prompt_key", "prompt", "TRL's column; where it holds messages: data.messages_key")
        if rewards is not None:
            ported.put("reward.kind", "custom", f"was reward_funcs={rewards!s:.60}")
            ported.put(
                "reward.path", "reward.py", "a file with the function; TRL's run as they are (docs/your-reward.md)"
            )
    if any(name.startswith("lora.") for name in options) and "model.lora_rank" not in ported.values:
        ported.put("model.lora_rank", 8, "peft's default")


def _batch(kind: str, given: Given, devices: int, ported: Ported) -> None:
    """TRL counts rows per device and step of accumulation, and in RL completions; here it is prompts of an update."""
    each, steps = given["per_device_train_batch_size"], given["gradient_accumulation_steps"]
    rows, on = each * devices * steps, f"{each} per device × {devices} device{'s' * (devices > 1)}"
    if kind != "train":
        ported.put("data.train_batch_size", rows, f"{on} × {steps} steps of accumulation")
        return
    group, together = given["num_generations"], given.get("steps_per_generation") or steps
    prompts = max(each * devices * together // group, 1)
    ported.put("data.train_batch_size", prompts, f"prompts: {on} × {together} steps / num_generations={group}")
    ported.put("actor.ppo_mini_batch_size", max(rows // group, 1), "prompts of an update")
    if rows % group:
        ported.decide.append(f"data.train_batch_size: {rows} completions of an update are no multiple of {group}")


def _beta(ported: Ported, value: Any, said: str, given: Given) -> None:
    if value:
        ported.put("actor.use_kl_loss", True, said)
        ported.put("actor.kl_loss_coef", value, said)


def _epsilon(ported: Ported, value: Any, said: str, given: Given) -> None:
    ported.put("actor.clip_ratio_low", value, said)
    high = given.get("epsilon_high")
    ported.put(
        "actor.clip_ratio_high", value if high is None else high, said if high is None else f"was epsilon_high={high}"
    )


def _rl_loss(ported: Ported, value: Any, said: str, given: Given) -> None:
    modes = {"grpo": "seq-mean-token-mean", "dapo": "token-mean", "bnpo": "token-mean", "dr_grpo": "seq-mean-token-sum"}
    if value == "cispo":
        ported.put("actor.loss_mode", value, said)
    elif value in modes:
        ported.put("algorithm.loss_agg_mode", modes[value], said)
        if value == "dr_grpo":
            ported.decide.append("actor.grad_clip: TRL's loss is smaller, by max_completion_length (dr_grpo.yaml)")
    else:
        ported.absent.append(f"loss_type={value}: algorithm.loss_agg_mode and actor.loss_mode have what there is")


def _scale(ported: Ported, value: Any, said: str, given: Given) -> None:
    ported.put("algorithm.norm_adv_by_std_in_grpo", value in (True, "group"), said)
    if value == "batch":
        ported.absent.append("scale_rewards=batch: advantages are divided by the group's deviation, or by nothing")


def _rloo(ported: Ported, value: Any, said: str, given: Given) -> None:
    ported.put("algorithm.adv_estimator", "rloo", "was RLOOConfig")


def _dpo_loss(ported: Ported, value: Any, said: str, given: Given) -> None:
    kinds = value if isinstance(value, list) else [value]
    if len(kinds) == 1 and kinds[0] in ("sigmoid", "robust", "ipo"):
        ported.put("dpo.loss_type", kinds[0], said)
    else:
        ported.absent.append(f"loss_type={value}: dpo.loss_type is sigmoid, robust or ipo")


_OF_TRL: Mapping[tuple[str, str], Callable[..., None]] = {
    ("train", "beta"): _beta,
    ("train", "epsilon"): _epsilon,
    ("train", "loss_type"): _rl_loss,
    ("train", "scale_rewards"): _scale,
    ("train", "rloo"): _rloo,
    ("dpo", "loss_type"): _dpo_loss,
    ("sft", "completion_only_loss"): _nothing,
    ("sft", "assistant_only_loss"): _nothing,
}
