"""`jaxrl port`: the options of a verl or TRL run as a configuration of jaxrl, with what each one was, what has no
counterpart and why, and what is left to decide.

Sources: verl's `ppo_trainer.yaml`, versions 0.4 to 0.7; TRL's `GRPOConfig`, `RLOOConfig`, `SFTConfig` and `DPOConfig`,
versions 0.15 to 1.9. A table has a row for each option; defaults of the library pass through the same rows.
"""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from jaxrl.config.files import put
from jaxrl.config.inputs import ConfigError, Options, reading
from jaxrl.config.mapping import by_path, from_mapping, is_section_path
from jaxrl.config.verl_options import ABSENT, PREFIX, RENAMED, advice

Library = Literal["verl", "trl"]
Given = dict[str, Any]
"""Options of the other library by name, sections with dots."""

_SMALL = (
    "trainer.run_dir=runs/small trainer.total_training_steps=2 data.train_batch_size=8 data.gen_batch_size=0 "
    "data.val_size=8 actor.ppo_mini_batch_size=0 critic.ppo_mini_batch_size=0 rollout.n=4 rollout.max_num_seqs=32 "
    "rollout.tensor_model_parallel_size=1 data.max_response_length=256 reward.overlong_buffer.enable=false hosts.num=1 "
    "trainer.num_devices=1"
)
"""Overrides with which a port is tried on one device, as far as it has these options."""


@dataclass(slots=True)
class Ported:
    """A ported run.

    Attributes:
      values: our options, each with a remark.
      absent: options without a counterpart, by the reason. ignored: those of them that change nothing here.
      devices: of the other run.
    """

    command: str = "train"
    devices: int = 8
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    absent: dict[str, list[str]] = field(default_factory=dict)
    ignored: dict[str, list[str]] = field(default_factory=dict)
    decide: list[str] = field(default_factory=list)

    def put(self, option: str, value: Any, remark: str) -> None:
        field = by_path().get(option)
        if field is not None and str(field.annotation).startswith("list") and not isinstance(value, list):
            value = [value]
        self.values[option] = value, remark

    def text(self) -> str:
        """The YAML file."""
        always = {"trainer.total_training_steps", "trainer.num_devices", *self.values}
        small = [each for each in _SMALL.split() if each.partition("=")[0] in always]
        plan = f"--devices {self.devices} --device-gib 60 --command {self.command}"
        lines = [
            f"# jaxrl {self.command} --config FILE",
            f"# Plan it on any machine: jaxrl explain-config --config FILE {plan}",
            f"# Try it on one device: jaxrl {self.command} --config FILE {' '.join(small)}",
            *self._sections(self.values, ()),
        ]
        for title, reasons in (("Ignored", self.ignored), ("No counterpart", self.absent), ("To decide", self._open())):
            if reasons:
                named = [f"{', '.join(names)}: {why}" if names else why for why, names in reasons.items()]
                lines += ["", f"# {title}:", *(f"# - {line}" for line in named)]
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

    def _open(self) -> dict[str, list[str]]:
        """The remaining decisions, with every problem of the configuration."""
        options = Options()
        for option, (value, _) in self.values.items():
            put(options, option, value, "port")
        try:
            from_mapping(options.values, self.command)
        except ConfigError as error:
            problems = error.problems
        else:
            problems = ()
        return {text: [] for text in (*self.decide, *problems)}


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


@dataclass(frozen=True, slots=True)
class Was:
    """An option of the other run, or its library's default. `given`: all that the run gives; `defaults`: the others."""

    name: str
    value: Any
    library: str
    given: Given
    defaults: Given

    @property
    def said(self) -> str:
        return f"{self.name}={str(self.value).lower() if isinstance(self.value, bool) else self.value}"

    @property
    def remark(self) -> str:
        return f"was {self.said}" if self.name in self.given else f"{self.library}'s default of {self.name}"

    def get(self, name: str) -> Any:
        return self.given.get(name, self.defaults.get(name))

    def numbers(self, *names: str) -> tuple[int, ...] | None:
        """The values of these options; None where the script computes one."""
        values = tuple(map(self.get, names))
        return values if all(isinstance(each, int) for each in values) else None


Rule = Callable[[Ported, Was], object]
Row = Rule | str
"""What becomes of an option: what a function does, or the same under another name."""


def port(library: Library, source: Sequence[str], devices: int = 1) -> str:
    """The configuration as YAML with comments. Raises ValueError where `source` has no options of the library.

    `source`: a file (a shell script or YAML of verl; Python, JSON, YAML or a script of TRL), or the words of a command
    line; `devices`: on which the TRL run trained, since it counts completions per device.
    """
    ported = Ported()
    if library == "verl":
        _port_verl(_verl_options(source), ported)
    else:
        _port_trl(*_trl_options(source), devices, ported)
    return ported.text()


def _convert(ported: Ported, table: Mapping[str, Row], every: Sequence[Was]) -> None:
    """Of options that say the same the later wins: defaults go first, then general ones (`_GENERAL`)."""
    for was in sorted(every, key=lambda was: (was.name in was.given, was.name not in _GENERAL)):
        ignored = _why_ignored(was.name)
        same = RENAMED.get(was.name) or (was.name if was.library == "verl" and was.name in by_path() else "")
        row = table.get(was.name) or ("" if ignored or " and " in same else same)
        if row:
            (_to(row) if isinstance(row, str) else row)(ported, was)
        elif ignored:
            ported.ignored.setdefault(ignored, []).append(was.name)
        else:
            found = advice(was.name, was.value)
            ported.absent.setdefault(found[1] if found else "there is no such option here", []).append(was.said)


_MICRO = "actor.ppo_micro_batch_size"
_GENERAL = ("actor.clip_ratio", _MICRO, f"{_MICRO}_per_gpu", "rollout.multi_turn.max_user_turns", "epsilon")
_ENGINE_SHARE = "a GPU's share for the engine alone; rollout.memory_fraction is one of what JAX has, training included"
_IGNORED: Mapping[str, str] = {
    r"(rollout|ref)\.log_prob_": "actor.ppo_max_token_len_per_gpu holds for every pass",
    r"(critic|ref)\.(optim\.(betas|lr_warmup_steps_ratio)|model\.enable|ppo_m|ulysses)": "it is as the actor's",
    r"(actor|critic\.model)\.fsdp_config\.param_offload": "weights are always sharded over all devices",
    r"rollout\.gpu_memory_utilization|vllm_gpu_memory_utilization": _ENGINE_SHARE,
    r"rollout\.(do_sample|max_model_len)|reward_model\.reward_kwargs": "other options here say it",
    r"rollout\.multi_turn\.format": "the model's chat template says how a call looks",
    r"logging_|log_|num_completions|trackio": "every step is in metrics.jsonl, and every sample in samples.jsonl",
    r"vllm_importance_sampling": "algorithm.rollout_correction has its like",
    r"use_vllm|vllm_(?!tensor)": "jaxrl has its own engine",
    r"gradient_checkpointing": "actor.remat=auto decides by the device's memory",
    r"bf16|dtype|torch_dtype": "actor.dtype and rollout.dtype are bfloat16 on GPUs",
    r"attn_impl": "jaxrl has kernels of its own (actor.attention)",
    r"push_to_hub|hub_": "jaxrl export writes a folder for the Hub",
    r"do_eval|per_device_eval": "trainer.test_freq says when held-out prompts are drawn",
    r"disable_dropout": "there is no dropout but model.lora_dropout",
}
"""Options that change nothing here, by how they begin."""


def _why_ignored(name: str) -> str:
    return next((why for names, why in _IGNORED.items() if re.match(names, name)), "")


def _is_open(value: Any) -> bool:
    """Whether a variable of the script is left in it."""
    return re.search(r"\$[\w({]", str(value)) is not None


def _to(option: str = "", value: Callable[[Was], Any] = lambda was: was.value, note: str = "") -> Rule:
    """Another option, or the same, which stays as it is where `value` is None. `note`: why it has another value."""

    def convert(ported: Ported, was: Was) -> None:
        name = option or was.name
        if _is_open(was.value):
            ported.decide.append(f"{name}: only the script knows {was.said}")
        elif (found := value(was)) is not None:
            is_same = (name, found) == (was.name, was.value) and was.name in was.given
            ported.put(name, found, "" if is_same else was.remark + (note if found != was.value else ""))

    return convert


def _all(*rows: Rule) -> Rule:
    return lambda ported, was: [row(ported, was) for row in rows]


def _ask(text: str, when: Callable[[Any], object] = lambda value: True) -> Rule:
    """A decision, for some values."""
    return lambda ported, was: ported.decide.extend([text.format(was.said)] if when(was.value) else [])


def _one_of(option: str, names: Mapping[Any, Any]) -> Rule:
    """A value by its name in the other library."""

    def convert(ported: Ported, was: Was) -> None:
        if known := [ours for theirs, ours in names.items() if was.value in (theirs, [theirs])]:
            _to(option, lambda was: known[0])(ported, was)
        else:
            why = f"{option} is {' or '.join(dict.fromkeys(map(_yaml, names.values())))}"
            ported.absent.setdefault(why, []).append(was.said)

    return convert


def _count(was: Was) -> Any:
    """A number that below zero is none."""
    return max(was.value, 0) if isinstance(was.value, int) else was.value


def _warmup(updates: Callable[[Was], Any]) -> Rule:
    """A number of updates, or a share of the run's updates."""

    def convert(ported: Ported, was: Was) -> None:
        number, option = updates(was), "actor.optim.lr_warmup_steps"
        if was.value and isinstance(was.value, int):
            ported.put(option, was.value, was.remark)
        elif was.value and isinstance(was.value, float) and number:
            ported.put(option, math.ceil(was.value * number), f"{was.remark}, of {number} updates")
        elif was.value:
            ported.decide.append(f"{was.said}: set {option}, once the number of updates is known")

    return convert


def _modules(was: Was) -> Any:
    return None if was.value == "all-linear" else was.value  # which is what adapters have here


def _loggers(was: Was) -> list[str]:
    asked = was.value if isinstance(was.value, list) else [was.value]
    known = [each for each in asked if each in ("console", "wandb", "tensorboard", "mlflow", "trackio")]
    return known or ["console"]


# -- reading -----------------------------------------------------------------------------------------------------------


def _text_of(source: Sequence[str]) -> tuple[str, str]:
    """(the text, the suffix of its file), of a file or of the words themselves."""
    path = Path(source[0]).expanduser() if len(source) == 1 else None
    if path is not None and path.is_file():
        with reading(path):
            return path.read_text(encoding="utf-8"), path.suffix
    if path is not None and "=" not in source[0] and not source[0].startswith("--"):
        raise ValueError(f"port: no such file: {path}")
    return " ".join(map(shlex.quote, source)), ".sh"


def _by_name(file: str, text: str, suffix: str) -> Given:
    """The options of a JSON or YAML file."""
    with reading(file):
        found = json.loads(text) if suffix == ".json" else yaml.safe_load(text)
    if not isinstance(found, dict):
        raise ValueError(f"port: {file} must hold options by name")
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> Given:
    found: Given = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = _number(value)
    return found


def _verl_options(source: Sequence[str]) -> Given:
    text, suffix = _text_of(source)
    if suffix in (".yaml", ".yml"):
        return _flat(_by_name(source[0], text, suffix))
    found: Given = {}
    for word in _words(re.sub(r"(--config-\w+)\s+", r"\1=", text)):
        if match := re.fullmatch(r"\+{0,2}([a-z_]\w*(?:\.[\w@]+)+|--config-\w+)=(.*)", word, re.DOTALL):
            found[match[1]] = _value(match[2])
    if not found:
        raise ValueError(f"port: {' '.join(source):.100} has no option of verl, such as algorithm.adv_estimator=grpo")
    folder = found.pop("--config-path", "")
    for at in (Path(str(folder)), Path(source[0]).parent / "config"):
        if (file := at / f"{found.get('--config-name')}.yaml").is_file():
            del found["--config-name"]
            found = _flat(_by_name(str(file), file.read_text(encoding="utf-8"), ".yaml")) | found
    return found


def _value(text: str) -> Any:
    try:
        return _number(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def _number(value: Any) -> Any:
    """1e-6 is text in YAML 1.1."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if is_number else value


def _words(script: str) -> Iterator[str]:
    """The words of a shell script, with its own variables expanded."""
    variables = {"HOME": "~", "PWD": "."}
    pending = ""
    for line in script.replace("\\\n", " ").splitlines():
        pending = f"{pending}\n{line}" if pending else line
        text = re.sub(r"\$\(\((.*?)\)\)(?!\))", lambda found: _sum(found[1], variables) or found[0], pending)
        text = re.sub(r"\$\([^()]*\)", lambda found: found[0].replace(" ", "_"), text.replace("$(pwd)", "."))
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # a quotation mark that a later line closes
            continue
        pending = ""
        for word in (each for given in words for each in _expanded(given, variables)):
            if match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL):
                variables[match[1]] = match[2]
            yield word


def _expanded(word: str, variables: Mapping[str, str]) -> list[str]:
    """The words that a word becomes; a variable alone may hold several."""

    def value(found: re.Match[str]) -> str:
        return variables.get(found[1], f"${found[1]}" if found[2] is None else found[2])

    text = word
    while (inner := re.sub(r"\$\{(\w+)(?::?-([^{}]*))?\}", value, text)) != text:  # defaults have defaults
        text = inner
    text = re.sub(r"\$(\w+)", lambda found: variables.get(found[1], found[0]), text)
    return text.split() if re.fullmatch(r"\$\{?\w+\}?", word) else [text]


def _sum(text: str, variables: Mapping[str, str]) -> str:
    """A shell's integer arithmetic; empty for anything else."""
    numbers = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda found: variables.get(found[1], "?"), text)
    if not re.fullmatch(r"[\d\s+*/()-]+", numbers) or "**" in numbers:
        return ""
    try:
        return str(eval(numbers.replace("/", "//")))  # digits, brackets and four signs
    except (SyntaxError, TypeError, ZeroDivisionError):
        return ""


def _trl_options(source: Sequence[str]) -> tuple[str, Given, Given]:
    """(train, sft or dpo; the options; arguments of the trainer)."""
    text, suffix = _text_of(source)
    of_trainer: Given = {}
    if suffix in (".json", ".yaml", ".yml"):
        options = {name: _number(value) for name, value in _by_name(source[0], text, suffix).items()}
    elif suffix == ".py":
        options, of_trainer = _of_python(source[0], text)
        text = text + " ".join(options)
    else:
        options = _flags([*_words(text)])
    if not options and not of_trainer:
        raise ValueError(f"port: {' '.join(source):.100} has no options of TRL: no GRPOConfig, SFTConfig or DPOConfig")
    names = set(options)
    of_kind = {"train": r"GRPO|grpo|RLOO|rloo", "dpo": r"DPOConfig|\bdpo\b", "sft": r"SFTConfig|\bsft\b"}
    kind = next((kind for kind, mark in of_kind.items() if re.search(mark, text)), None)
    if kind is None:
        is_rl = names & {"num_generations", "max_completion_length", "epsilon", "num_iterations"}
        kind = "train" if is_rl else "dpo" if "beta" in names else "sft"
    return kind, options, of_trainer


def _of_python(file: str, text: str) -> tuple[Given, Given]:
    """The arguments of configurations, and of trainers. A module's docstring may have a command line."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{file}, line {error.lineno}: not valid Python ({error.msg})") from None
    words = (ast.get_docstring(tree) or "").replace("\\\n", " ").replace("`", " ").split()
    options, of_trainer = _flags(words), Given()
    if re.search(r"\bRLOOConfig\b", text):
        options["RLOOConfig"] = True
    if re.search(r"""["']role["']:""", text):
        options["conversations"] = True
    for call in ast.walk(tree):
        name = getattr(call.func, "id", getattr(call.func, "attr", "")) if isinstance(call, ast.Call) else ""
        if not isinstance(call, ast.Call) or not re.fullmatch(r"(GRPO|RLOO|SFT|DPO)(Config|Trainer)|LoraConfig", name):
            continue
        found = {each.arg: _literal(each.value) for each in call.keywords if each.arg}
        if name == "LoraConfig":
            found["LoraConfig"] = True
        into = of_trainer if name.endswith("Trainer") else options
        into |= found
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
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.prompt_key": "prompt",
    "data.reward_fn_key": "data_source",
    "data.val_max_samples": -1,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "algorithm.adv_estimator": "gae",
    "actor.ppo_mini_batch_size": 256,
    "actor.ppo_max_token_len_per_gpu": 16384,
    "actor.optim.lr": 1e-6,
    "actor.optim.weight_decay": 0.01,
    "actor.clip_ratio_c": 3.0,
    "actor.grad_clip": 1.0,
    "rollout.n": 1,
    "rollout.temperature": 1.0,
    "rollout.max_num_seqs": 1024,
    "rollout.max_num_batched_tokens": 8192,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.val_before_train": True,
}
_BESIDE: Mapping[str, Given] = {
    "model.lora_rank": {"model.lora_alpha": 16},
    "critic.optim.lr": {"critic.optim.weight_decay": 0.01},
    "RLOOConfig": {"beta": 0.05, "num_generations": 2, "loss_type": None, "scale_rewards": None},
    "use_peft": {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05},
    "LoraConfig": {"r": 8, "lora_alpha": 8},
}
"""Defaults that hold where the run gives another option."""


def _with_beside(defaults: Given, given: Given) -> Given:
    every = defaults | {name: each for key, found in _BESIDE.items() if given.get(key) for name, each in found.items()}
    return {name: value for name, value in every.items() if name not in given}


def _port_verl(given: Given, ported: Ported) -> None:
    given = {name.removeprefix(f"{PREFIX}."): value for name, value in given.items() if value not in (None, "")}
    defaults = _with_beside(_VERL_DEFAULTS, given)
    every = [Was(name, value, "verl", given, defaults) for name, value in (defaults | given).items()]
    _convert(ported, _OF_VERL, every)
    ported.devices = _gpus(every[0])
    ported.put("data.answer_key", "reward_model.ground_truth", "as verl writes its files")
    if given.get("actor.policy_loss.loss_mode") == "gspo":
        for option, value in (("algorithm.loss_agg_mode", "seq-mean-token-mean"), ("actor.clip_ratio_c", 0.0)):
            ported.put(option, value, "verl's gspo, whatever the run says")
    if "reward.path" in ported.values:
        ported.put("reward.kind", "custom", "the function of reward.path")
    ported.values.setdefault("trainer.run_dir", ("runs/ported", "choose a folder"))
    ported.values.setdefault("reward.kind", ("math", "verl chooses by data_source: docs/your-reward.md has the kinds"))


def _gpus(was: Was) -> int:
    counts = was.given.get("trainer.n_gpus_per_node", 8), was.given.get("trainer.nnodes", 1)
    return counts[0] * counts[1] if all(isinstance(each, int) for each in counts) else 8


def _updates(was: Was) -> int:
    """Updates of a step."""
    sizes = was.numbers("data.train_batch_size", "actor.ppo_mini_batch_size")
    return was.given.get("actor.ppo_epochs", 1) * max(sizes[0] // sizes[1], 1) if sizes else 1


_NEAREST = {"reinforce_plus_plus_baseline": "grpo", "grpo_passk": "grpo", "remax": "rloo", "opo": "rloo"}


def _micro_batch(was: Was) -> int | None:
    """Its tokens; verl counts samples, of a GPU or of all."""
    sizes = was.numbers(was.name, "data.max_prompt_length", "data.max_response_length")
    devices = 1 if was.name.endswith("_per_gpu") else _gpus(was)
    return max(sizes[0] // devices, 1) * sum(sizes[1:]) if sizes else None


def _nodes(ported: Ported, was: Was) -> None:
    if not isinstance(was.value, int):
        ported.decide.append(f"{was.said}: set hosts.num and hosts.devices_per_host for more than one host")
    elif was.value > 1:
        ported.put("hosts.num", was.value, was.remark)
        ported.put("hosts.devices_per_host", was.given.get("trainer.n_gpus_per_node", 8), "was trainer.n_gpus_per_node")
        ported.decide.append("hosts.address: the Ray cluster's address, or auto (docs/several-hosts.md)")


def _turns(ported: Ported, was: Was) -> None:
    """Tools, or an interaction, which answers in place of a user."""
    tools, talk = (was.given.get(f"rollout.multi_turn.{what}_config_path") for what in ("tool", "interaction"))
    kind, file = ("native", "my_env.py") if talk and not tools else ("tools", "my_tools.py")
    if was.value is not False:
        ported.put("environment.kind", kind, f"was {was.name}")
        ported.put("environment.path", file, "a file to write")
        what = (
            f"what {talk} names as environment.name, an Env"
            if kind == "native"
            else f"each tool of {tools or 'the run'} as a function"
        )
        ask = f"environment.path: write {what} of this file (docs/environments.md)"
        ported.decide += [ask] if ask not in ported.decide else []


_OF_VERL: Mapping[str, Row] = {
    "--config-name": _ask(
        "{}: put this file, which has more options, into a folder config beside the script",
        lambda name: not name.startswith("ppo_"),  # verl's own, with its defaults
    ),
    "data.prompt_key": "data.messages_key",
    "data.gen_batch_size": _to("", lambda was: was.value if was.given.get("algorithm.filter_groups.enable") else None),
    "data.val_max_samples": _to("data.val_size", _count),
    "actor.clip_ratio": _all(_to("actor.clip_ratio_low"), _to("actor.clip_ratio_high")),
    "actor.clip_ratio_low": _to("", lambda was: min(was.value, 1)),
    "actor.loss_agg_mode": _all(
        _to("algorithm.loss_agg_mode", lambda was: str(was.value).removesuffix("-norm")),
        _ask("actor.grad_clip: {} divides what verl clips by the longest response", lambda mode: mode[-5:] == "-norm"),
    ),
    "actor.policy_loss.loss_mode": _all(
        _one_of("actor.loss_mode", {"vanilla": "vanilla", "gspo": "vanilla", "cispo": "cispo"}),
        _to("actor.ratio_level", lambda was: "sequence" if was.value == "gspo" else None),
    ),
    "algorithm.adv_estimator": _all(
        _to("", lambda was: _NEAREST.get(was.value, was.value.removesuffix("_vectorized"))),
        _ask("{} is not here: the nearest is taken (docs/your-algorithm.md)", lambda name: name in _NEAREST),
    ),
    "algorithm.rollout_correction.bypass_mode": _one_of("actor.old_logprobs", {True: "rollout", False: "recompute"}),
    "algorithm.rollout_correction.loss_type": _one_of(
        "actor.loss_mode", {"ppo_clip": "vanilla", "reinforce": "reinforce"}
    ),
    "algorithm.rollout_correction.rollout_rs": _to("", lambda was: was.value.split(",")),
    "actor.optim.betas": _all(
        _to("actor.optim.beta1", lambda was: was.value[0]), _to("actor.optim.beta2", lambda was: was.value[1])
    ),
    "actor.optim.lr_warmup_steps": _to(
        "",
        lambda was: was.value * _updates(was) if was.value > 0 else None,
        " steps, of several updates each",
    ),
    "actor.optim.lr_warmup_steps_ratio": _warmup(
        lambda was: (was.numbers("trainer.total_training_steps") or (0,))[0] * _updates(was)
    ),
    "model.enable_gradient_checkpointing": _to("actor.remat", lambda was: "auto" if was.value else "none"),
    "model.target_modules": _to("", _modules),
    **dict.fromkeys(
        (_MICRO, f"{_MICRO}_per_gpu"),
        _to("actor.ppo_max_token_len_per_gpu", _micro_batch, ": samples, and here tokens"),
    ),
    "actor.kl_loss_type": _to("", lambda was: {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}.get(was.value, was.value)),
    "rollout.val_kwargs.do_sample": _to("rollout.val_kwargs.temperature", lambda was: None if was.value else 0.0),
    "rollout.multi_turn.enable": _turns,
    "rollout.multi_turn.tool_config_path": _turns,
    "rollout.multi_turn.interaction_config_path": _turns,
    "rollout.multi_turn.max_assistant_turns": "environment.max_turns",
    "rollout.multi_turn.max_user_turns": _to("environment.max_turns", lambda was: was.value + 1),
    "trainer.n_gpus_per_node": _to(
        "trainer.num_devices", lambda was: was.value if was.given.get("trainer.nnodes", 1) == 1 else None
    ),
    "trainer.nnodes": _nodes,
    "trainer.logger": _to("", _loggers),
    "trainer.save_freq": _to("", _count),
    "trainer.test_freq": _to("", _count),
    "trainer.resume_mode": _ask(
        "trainer.run_dir: {}, and a run that is there is resumed", lambda mode: mode == "disable"
    ),
    **dict.fromkeys(
        ("reward_model.reward_manager", "reward_manager.name"),
        _all(
            _to("reward.kind", lambda was: "math", "; other kinds: docs/your-reward.md"),
            _to("reward.wrong_reward", lambda was: -1.0 if was.value == "dapo" else None, ": 1 and -1"),
        ),
    ),
    "reward_model.enable": _to("reward.kind", lambda was: "model" if was.value else None),
    "reward_model.model.path": _to(
        "reward.judge.model", lambda was: was.value if was.given.get("reward_model.enable") else None
    ),
    **{
        f"{section}.{name}": f"reward.overlong_buffer.{name}"
        for section in ("reward_model.reward_kwargs.overlong_buffer_cfg", "custom_reward_function.overlong_buffer")
        for name in ("enable", "len", "penalty_factor")
    },
}
assert not set(_OF_VERL) & set(ABSENT) - {"trainer.resume_mode"}, "an option is converted, or absent"

# -- TRL ---------------------------------------------------------------------------------------------------------------

_TRL_DEFAULTS: Given = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "save_steps": 500,
    "learning_rate": 1e-6,
}
_TRL_DEFAULTS_OF: Mapping[str, Given] = {
    "train": {
        "num_generations": 8,
        "max_prompt_length": 512,
        "max_completion_length": 256,
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "scale_rewards": "group",
    },
    "sft": {"learning_rate": 2e-5, "max_length": 1024},
    "dpo": {"max_length": 1024, "beta": 0.1, "loss_type": "sigmoid"},
}


def _port_trl(kind: str, options: Given, of_trainer: Given, devices: int, ported: Ported) -> None:
    ported.command, ported.devices = kind, devices
    model = of_trainer.pop("model", None)
    if isinstance(model, str) and not isinstance(model, _Source):
        options["model_name_or_path"] = model
    every = {name: _Source(value) if _is_open(value) else value for name, value in (options | of_trainer).items()}
    given = {name: value for name, value in every.items() if not isinstance(value, _Source)}
    defaults = _with_beside(_TRL_DEFAULTS | _TRL_DEFAULTS_OF[kind], given) | {"devices": devices}
    computed = (
        every.keys() - given.keys() - {"reward_funcs", "tools", "environment_factory", *filter(_why_ignored, every)}
    )
    asked = dict.fromkeys([name for name in every if name in computed], _ask("{:.100}: only the script knows"))
    special = _OF_DPO if kind == "dpo" else _OF_RLOO if "RLOOConfig" in given else {}
    table = {**_OF_TRL, **special, **asked}
    every = [Was(name, value, "TRL", given, defaults) for name, value in (defaults | every).items()]
    every = [was for was in every if was.value is not None and not _OF_THE_SCRIPT.fullmatch(was.name)]
    _convert(ported, table, every)
    _batch(kind, Was("", "", "TRL", given, defaults), ported)
    ported.values.setdefault("trainer.run_dir", ("runs/ported", "choose a folder"))
    ported.put("data.train_files", [], "JSONL or Parquet: docs/your-data.md")
    ported.decide.append("data.train_files: name the files with the rows of train_dataset")
    if ported.values.get("trainer.test_freq", (0, ""))[0] or "eval_dataset" in of_trainer:
        ported.decide.append("data.val_files: name the files with the rows of eval_dataset, for trainer.test_freq")
    if kind == "train":
        key = "messages_key" if given.get("conversations") else "prompt_key"
        ported.put(f"data.{key}", "prompt", "TRL's column: data.messages_key where it holds messages, else prompt_key")
        ported.put("data.answer_key", "", "TRL's functions take columns by their names")


def _together(was: Was) -> int:
    """Steps of accumulation whose completions are generated together."""
    rows = was.get("per_device_train_batch_size") * was.get("devices")
    of_batch = was.given.get("generation_batch_size", 0) // rows
    return was.given.get("steps_per_generation") or of_batch or was.get("gradient_accumulation_steps")


def _batch(kind: str, was: Was, ported: Ported) -> None:
    """TRL counts rows per device and step of accumulation, and in RL completions; here it is prompts of an update."""
    each, devices, steps = map(was.get, ("per_device_train_batch_size", "devices", "gradient_accumulation_steps"))
    rows, on = each * devices * steps, f"{each} per device × {devices} device{'s' * (devices > 1)}"
    lengths = [f"data.max_{part}_length" for part in ("prompt", "response")]
    if most := was.get("max_length"):
        for name in lengths:
            ported.put(name, most // 2, f"half of max_length={most}: only the sum counts")
    longest = sum(ported.values[name][0] for name in lengths if name in ported.values)
    ported.put("actor.ppo_max_token_len_per_gpu", each * longest, f"tokens of {each} rows per device")
    if kind != "train":
        ported.put("data.train_batch_size", rows, f"{on} × {steps} steps of accumulation")
        return
    group, together = was.get("num_generations"), max(_together(was), steps)
    prompts = max(each * devices * together // group, 1)
    ported.put("data.train_batch_size", prompts, f"prompts: {on} × {together} steps / num_generations={group}")
    ported.put("actor.ppo_mini_batch_size", max(rows // group, 1), "prompts of an update")
    ported.put("rollout.max_num_seqs", each * together, "all that a device generates")
    ported.put("rollout.max_num_batched_tokens", 4096, "TRL's setting of its engine")
    if rows % group:
        ported.decide.append(f"data.train_batch_size: {rows} completions of an update are no multiple of {group}")


def _rounds(was: Was) -> int | None:
    """Rounds of generation; TRL counts updates."""
    updates = was.given.get("num_iterations", 1) * max(_together(was) / was.get("gradient_accumulation_steps"), 1)
    return max(round(was.value / updates), 1) if was.value >= 1 else None


def _strategy(option: str) -> Rule:
    """How often something is done, where that is not a number of steps."""
    ask = _ask(f"{option}: {{}}, and here it is a number of steps", lambda value: value == "epoch")
    return _all(_to(option, lambda was: 0 if was.value == "no" else None), ask)


def _kl(switch: str, option: str) -> Rule:
    return _all(_to(switch, lambda was: was.value > 0 or None), _to(option, lambda was: was.value or None))


def _functions(was: Was) -> list[str]:
    """The names of functions in an expression, or in a list of names."""
    if not isinstance(was.value, _Source):
        return [str(each).rpartition(".")[2] for each in (was.value if isinstance(was.value, list) else [was.value])]
    node = ast.parse(was.value, mode="eval").body
    every = [getattr(each, "func", each) for each in getattr(node, "elts", [node])]
    return [name for each in every if (name := getattr(each, "id", getattr(each, "attr", ""))) not in ("", was.name)]


def _rewards(ported: Ported, was: Was) -> None:
    names = _functions(was)
    weights = dict.fromkeys(names, 1.0) | dict(zip(names, was.given.get("reward_weights") or (), strict=False))
    ported.put("reward.kind", "custom", f"was reward_funcs={was.value!s:.60}")
    ported.put("reward.path", "reward.py", "a file with the functions, which run as they are (docs/your-reward.md)")
    ported.decide.append(f"reward.path: write {' and '.join(names) or was.said} into this file")
    own = next((name for name in names if weights[name] == 1), names[0] if names else "compute_score")
    ported.put("reward.name", own, "")
    if weights.pop(own, 1) != 1:
        ported.decide.append(f"reward.name: {own} has weight 1 here: let it return its result times its weight")
    of_file = {"kind": "custom", "path": "reward.py"}
    if parts := {name: {**of_file, "name": name, "weight": weight} for name, weight in weights.items()}:
        ported.put("reward.parts", parts, "added, with the weights of reward_weights")


def _tools(ported: Ported, was: Was) -> None:
    ported.put("environment.kind", "tools" if was.name == "tools" else "class", f"was {was.name}")
    ported.put("environment.path", "my_tools.py", "a file to write")
    if was.name != "tools":
        ported.put("environment.name", "".join(_functions(was)[:1]), "")
    ported.decide.append(f"environment.path: write {was.value!s:.80} into it, as they are (docs/environments.md)")


_LOSSES = {"grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum"} | dict.fromkeys(
    ("dapo", "bnpo", "cispo"), "token-mean"
)
_READ = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
_READ += ("max_length", "reward_weights")
"""Options that other rows read."""
_OF_TRL: Mapping[str, Row] = {
    "warmup_ratio": _warmup(lambda was: max(was.given.get("max_steps", 0), 0)),
    "warmup_steps": _warmup(lambda was: max(was.given.get("max_steps", 0), 0)),
    "lr_scheduler_type": _to("actor.optim.lr_scheduler_type", lambda was: was.value.partition("_with_")[0]),
    "max_grad_norm": _to(
        "actor.grad_clip",
        lambda was: was.value * (was.get("max_completion_length") if was.get("loss_type") == "dr_grpo" else 1),
        ", of a loss that TRL divides by max_completion_length",
    ),
    "max_steps": _to("trainer.total_training_steps", _rounds, " updates"),
    "save_steps": _to("trainer.save_freq", _rounds, " updates"),
    "eval_steps": _to("trainer.test_freq", _rounds, " updates"),
    "save_strategy": _strategy("trainer.save_freq"),
    "eval_strategy": _strategy("trainer.test_freq"),
    "report_to": _to("trainer.logger", _loggers),
    "r": "model.lora_rank",
    "target_modules": _to("model.target_modules", _modules),
    "lora_target_modules": _to("model.target_modules", _modules),
    "load_in_4bit": _to("model.base_quantization", lambda was: "nf4" if was.value else None),
    "tools": _tools,
    "environment_factory": _tools,
    "reward_funcs": _rewards,
    "beta": _kl("actor.use_kl_loss", "actor.kl_loss_coef"),
    "epsilon_high": _to(
        "actor.clip_ratio_high",
        lambda was: was.value - (was.get("loss_type") == "cispo"),
        ", which in cispo bounds the ratio itself",
    ),
    "epsilon": _all(
        _to("actor.clip_ratio_low", lambda was: 1.0 if was.get("loss_type") == "cispo" else was.value),
        _to("actor.clip_ratio_high"),
    ),
    "loss_type": _all(
        _one_of("algorithm.loss_agg_mode", _LOSSES),
        _to("actor.loss_mode", lambda was: "cispo" if was.value == "cispo" else None),
    ),
    "scale_rewards": _one_of(
        "algorithm.norm_adv_by_std_in_grpo", {True: True, "group": True, False: False, "none": False}
    ),
    "RLOOConfig": _all(
        _to("algorithm.adv_estimator", lambda was: "rloo"),
        _to("algorithm.loss_agg_mode", lambda was: "seq-mean-token-sum"),
    ),
    **dict.fromkeys(_READ, _all()),
}
_OF_RLOO: Mapping[str, Row] = {"beta": _kl("algorithm.use_kl_in_reward", "algorithm.kl_coef")}
_OF_DPO: Mapping[str, Row] = {
    "beta": "dpo.beta",
    "loss_type": _one_of("dpo.loss_type", {"sigmoid": "sigmoid", "robust": "robust", "ipo": "ipo"}),
}
_OF_THE_SCRIPT = re.compile(
    r"devices|conversations|use_peft|LoraConfig|peft_config|(lora_)?task_type|bias|args|config_file|\w+_dataset|"
    r"processing_class|model_init_kwargs|quantization_config|callbacks|remove_unused_columns|dataset_num_proc|"
    r"dataset_config|dataset_\w+_split|completion_only_loss|assistant_only_loss"
)
"""What a script has for itself."""
