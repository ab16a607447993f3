"""The whole configuration, typed. Every option is declared once, here, with its unit in its comment.

Options follow verl's names where verl has one. A YAML file, command-line overrides (`a.b=c`) and a gin file all
arrive here as one nested mapping, so that they give the identical resolved `Config`. An unknown key, a wrong type, or
sizes that do not fit together raise `ConfigError` with one sentence: which option, what was found, what is allowed.

Counts: an option that counts *prompts*, *samples* or *tokens* says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrl.config.layout import LayoutSection, devices_problem


class ConfigError(ValueError):
    """A configuration that cannot run. The message is one sentence for the user."""


@dataclass(frozen=True)
class ModelSection:
    path: str = ""  # folder in Hugging Face form, a .gguf file, or `package:file.gguf` inside an installed package
    random_init: bool = False  # start from random weights; `path` then needs only config.json (and a tokenizer)


@dataclass(frozen=True)
class DataSection:
    train_files: list[str] = field(default_factory=list)  # .jsonl, .jsonl.gz or .parquet
    val_files: list[str] = field(default_factory=list)
    task: str = ""  # a reasoning-gym task instead of files
    task_config: dict[str, Any] = field(default_factory=dict)  # that task's own options
    task_size: int = 10_000  # problems in the procedural training set (prompts)
    val_size: int = 100  # evaluation prompts of a procedural task, or the first ones of val_files; 0 = all of val_files
    prompt_key: str = "question"  # column of the problem's text ...
    messages_key: str = ""  # ... or of chat messages (a list, or a JSON string)
    answer_key: str = "answer"  # column of the reference answer; GSM8K's text before `####` is dropped
    source_key: str = ""  # column that names the data source; default: the file's name
    system_prompt: str = ""
    prompt_template: str = "{question}"  # what is asked, around the problem's text
    apply_chat_template: bool = True
    max_prompt_length: int = 256  # tokens
    max_response_length: int = 128  # tokens
    filter_overlong_prompts: bool = True  # drop longer prompts at loading (counted); false: they are an error
    train_batch_size: int = 8  # prompts per step
    shuffle: bool = True
    seed: int = 0


@dataclass(frozen=True)
class ValSampling:
    n: int = 1  # samples per evaluation prompt
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class TailBatching:
    enable: bool = False  # short rounds with speculation, long rounds of the prompts that came last in them
    prompt_factor: float = 1.25  # a short round launches ceil(this × data.train_batch_size) prompts ...
    response_factor: float = 1.25  # ... and ceil(this × rollout.n) samples of each; both >= 1
    max_age_steps: int = 0  # the most steps from a prompt's first launch to its batch; 0: no bound
    at_end: Literal["flush", "leave"] = "flush"  # flush: the last rounds empty the queue; leave: it is what it is
    keep_finished: bool = False  # a deferred prompt's finished samples count later, while no update lies between


@dataclass(frozen=True)
class PartialRollout:
    enable: bool = False  # stop at enough complete prompts, go on with the others in the next step
    over_provision: float = 2.0  # ceil(this × data.train_batch_size) prompts are under way; >= 1
    max_staleness: int = -1  # versions that a trained token may lag behind the policy; -1: no cap
    max_restarts: int = 1  # how often a sample may lose its tokens to the cap before a round waits for it
    at_end: Literal["flush", "leave"] = "flush"  # flush: the last rounds empty the buffer; leave: it is what it is


@dataclass(frozen=True)
class OverProvisioning:
    enable: bool = False  # a baseline: launch more, keep what ends first, discard the rest for good
    prompt_factor: float = 1.25  # as in tail_batching
    response_factor: float = 1.25


@dataclass(frozen=True)
class FilterGroups:
    enable: bool = False  # DAPO's dynamic sampling: prompts whose rewards are all equal are replaced by others
    max_num_gen_batches: int = 10  # a round that has launched this many batches of prompts gives up
    max_unscored_groups: int = 8  # complete prompts whose rewards may be due before generation waits for them


@dataclass(frozen=True)
class RolloutSection:
    n: int = 8  # samples per prompt (the group size)
    num_devices: int = 0  # of the rollout's own, the last ones (needs trainer.one_step_off); 0: training's, in turns
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: all
    top_p: float = 1.0
    min_p: float = 0.0
    stop: list[str] = field(default_factory=list)  # stop strings
    tensor_model_parallel_size: int = 1  # tp; dp is devices of the rollout / tp
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    block_size: int = 16  # tokens per KV block
    max_num_seqs: int = 32  # rows that decode at once, per dp group (samples)
    max_num_batched_tokens: int = 512  # prefill tokens per plan, per dp group
    decode_steps: int = 16  # decode steps per plan
    attention: Literal["auto", "reference", "pallas"] = "auto"  # what reads the KV cache; auto: kernels on GPU
    num_blocks: int = 0  # KV blocks per dp group; 0: what the memory leaves, at most what max_num_seqs can use
    memory_fraction: float = 0.85  # of a device's memory, for weights and KV pool together
    warmup: bool = True  # compile every shape before the first step
    max_active_requests: int = 0  # samples under way at once, in the rounds of all rules; 0: no limit
    stale_tokens: Literal["recorded", "mask"] = "recorded"  # of earlier versions; mask: not learnt from
    tail_batching: TailBatching = field(default_factory=TailBatching)
    partial_rollout: PartialRollout = field(default_factory=PartialRollout)
    over_provisioning: OverProvisioning = field(default_factory=OverProvisioning)
    layout: LayoutSection = field(default_factory=LayoutSection)
    val_kwargs: ValSampling = field(default_factory=ValSampling)


@dataclass(frozen=True)
class OptimSection:
    lr: float = 1e-6
    lr_warmup_steps: int = 0  # optimizer updates
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    min_lr_ratio: float = 0.0  # where cosine and linear end, as a share of lr
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass(frozen=True)
class ActorSection:
    optim: OptimSection = field(default_factory=OptimSection)
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of the forward and backward pass
    param_dtype: Literal["float32", "float64"] = "float32"  # of master weights, optimizer state and gradients
    ppo_mini_batch_size: int = 0  # prompts per optimizer update; 0: the whole batch
    ppo_epochs: int = 1
    ppo_max_token_len_per_gpu: int = 2048  # tokens per microbatch and device, padding included
    share_prompts: bool = True  # a prompt is computed once per row for all of its samples there; false: per sample
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 0.0  # dual clip; 0: off
    grad_clip: float = 1.0  # global norm; 0: off
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: Literal["kl", "abs", "mse", "low_var_kl"] = "low_var_kl"
    entropy_coeff: float = 0.0
    ratio_level: Literal["token", "sequence"] = "token"  # sequence: GSPO
    old_logprobs: Literal["rollout", "recompute"] = "recompute"  # the denominator of the ratio
    # what the backward pass recomputes: nothing, all but products with weights and attention (dots), or whole layers;
    # auto: dots where the device's memory allows it, else full
    remat: Literal["auto", "none", "dots", "full"] = "auto"
    logprob_chunk_tokens: int = 1024  # tokens whose logits exist at once, per device
    attention: Literal["auto", "reference", "pallas"] = "auto"  # of training; auto: jnp in tiles, on GPUs too
    offload_optimizer: bool = False  # keep the optimizer state in host memory outside the update


@dataclass(frozen=True)
class AlgorithmSection:
    adv_estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"] = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    use_kl_in_reward: bool = False
    kl_penalty: Literal["kl", "abs", "mse", "low_var_kl"] = "kl"
    kl_coef: float = 0.001
    filter_groups: FilterGroups = field(default_factory=FilterGroups)


@dataclass(frozen=True)
class RewardSection:
    kind: Literal["auto", "math", "task", "custom"] = "auto"  # auto: the task's own scorer, or math for files
    path: str = ""  # custom: a Python file ...
    name: str = "compute_score"  # ... and a function in it: (data_source, solution_str, ground_truth, extra_info)
    extract: Literal["auto", "none", "last_number", "boxed", "answer_tag"] = "auto"
    timeout_s: float = 10.0  # per sample, of scoring alone; 0: none
    num_workers: int = 1  # processes
    pool: Literal["process", "ray"] = "process"
    score_when: Literal["sample", "group", "rollout"] = "sample"  # ended; or its prompt's samples; or all


@dataclass(frozen=True)
class TrainerSection:
    run_dir: str = ""  # everything the run writes; an existing one is resumed
    total_training_steps: int = 0  # steps; 0: total_epochs decides
    total_epochs: int = 1
    save_freq: int = 10  # steps between checkpoints; 0: only at the end
    max_ckpt_to_keep: int = 2
    test_freq: int = 0  # steps between evaluations; 0: none
    val_before_train: bool = False
    seed: int = 0
    num_devices: int = 0  # 0: all
    one_step_off: bool = False  # roll out for step t + 1 with the weights before update t
    init_from: str = ""  # a run directory or checkpoint folder whose parameters (only) to start from
    logger: list[Literal["console", "wandb", "tensorboard"]] = field(default_factory=lambda: ["console"])
    project_name: str = "jaxrl"
    experiment_name: str = ""
    compilation_cache_dir: str = "~/.cache/jaxrl/xla"  # empty: no persistent compilation cache
    hang_timeout_s: float = 1800.0  # the watchdog reports a phase that takes longer; 0: off


@dataclass(frozen=True)
class SimulatedLengths:
    median: float = 500.0  # response tokens, of the lognormal body, at the first step
    sigma: float = 1.0  # standard deviation of its logarithm
    tail_from: float = 1.0  # quantile from which a power law takes over; 1: none
    tail_index: float = 2.0  # above it the share of longer responses falls as length ** -tail_index
    shortest: int = 1  # tokens; the longest is data.max_response_length
    growth: float = 0.0  # share by which all lengths grow per step ...
    growth_limit: float = 10.0  # ... until they are this many times as long


@dataclass(frozen=True)
class SimulatedScoring:
    median_s: float = 0.0  # seconds of scoring a response, of the lognormal part
    sigma: float = 0.0  # standard deviation of its logarithm
    per_token_s: float = 0.0  # seconds per response token besides
    hang_share: float = 0.0  # responses whose scoring ends at reward.timeout_s only


@dataclass(frozen=True)
class SimulatedTask:
    name: str = "simulated"
    weight: float = 1.0  # share of the prompts, relative to the other tasks'
    response: SimulatedLengths = field(default_factory=SimulatedLengths)
    correlation: float = 0.5  # how much of a response's length its prompt decides: 0 nothing, 1 all
    prompt_median: float = 200.0  # prompt tokens; the longest is data.max_prompt_length
    prompt_sigma: float = 0.5
    scoring: SimulatedScoring = field(default_factory=SimulatedScoring)
    pass_rate: float = 0.5  # probability of reward 1 of the median prompt ...
    pass_spread: float = 2.0  # ... and the standard deviation of its logit over prompts


@dataclass(frozen=True)
class SimulateSection:
    run_dir: str = ""  # what `jaxrl simulate` writes; empty: trainer.run_dir with -simulated behind it
    hardware: str = "H100"  # A40, A100, H100, H800, H200 or MI300X
    num_devices: int = 0  # 0: trainer.num_devices, or 8 where that is 0 as well
    model: str = ""  # a named shape, or a folder with a config.json; empty: model.path
    num_prompts: int = 0  # prompts of an epoch; 0: data.task_size
    cost: Literal["roofline", "table"] = "roofline"  # what says how long things take
    profile: str = ""  # table: the file that `jaxrl profile` wrote; what it does not hold comes from the roofline
    calibration: str = ""  # a calibration file (jaxrl.sim.calibrate) ...
    calibration_of: str = ""  # ... and whose efficiency factors to take from it
    efficiency: dict[str, float] = field(default_factory=dict)  # of the roofline, by name (jaxrl.sim.cost_model)
    host_s: float = 0.0  # seconds of the host per plan, while the devices run the plan before
    workload: Literal["modelled", "recorded"] = "modelled"  # where lengths and rewards come from
    recorded_run: str = ""  # recorded: a run directory, whose samples.jsonl is drawn from ...
    recorded_rule: Literal["by_prompt", "pooled"] = "by_prompt"  # ... for each prompt alone, or for all together
    task: SimulatedTask = field(default_factory=SimulatedTask)  # modelled; a recorded run has its scoring time from it
    tasks: list[SimulatedTask] = field(default_factory=list)  # modelled: a mix in place of task


@dataclass(frozen=True)
class Config:
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    actor: ActorSection = field(default_factory=ActorSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    reward: RewardSection = field(default_factory=RewardSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    simulate: SimulateSection = field(default_factory=SimulateSection)  # read by `jaxrl simulate` alone

    @property
    def mini_batch_prompts(self) -> int:
        """Prompts per optimizer update."""
        return self.actor.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def needs_ref(self) -> bool:
        """Whether a frozen reference model is kept."""
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def max_model_length(self) -> int:
        """Tokens of the longest sequence: prompt and response."""
        return self.data.max_prompt_length + self.data.max_response_length


def from_mapping(values: Mapping[str, Any]) -> Config:
    """Builds and checks a `Config` from nested mappings (a parsed YAML file); raises `ConfigError`."""
    config = _build(Config, values, "")
    _check(config)
    return config


def total_steps(config: Config, num_prompts: int | None) -> int | None:
    """The run's last step: `trainer.total_training_steps`, or what `total_epochs` fill; None while that is unknown.

    Batches cross the ends of epochs; the last one that would need prompts of a further epoch is not run.
    """
    if config.trainer.total_training_steps:
        return config.trainer.total_training_steps
    if num_prompts is None:
        return None
    return max(config.trainer.total_epochs * num_prompts // config.data.train_batch_size, 1)


# ---------------------------------------------------------------- counts


def to_mapping(config: Config) -> dict[str, Any]:
    """The resolved config as nested plain values; `from_mapping` of it gives an equal config."""
    return dataclasses.asdict(config)


def differences(old: Config, new: Config) -> list[str]:
    """One line per option whose value differs: `a.b: old -> new`."""
    a, b = flatten(to_mapping(old)), flatten(to_mapping(new))
    return [f"{key}: {a[key]!r} -> {b[key]!r}" for key in a if a[key] != b.get(key)]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as `a.b` keys; options that are mappings themselves (`data.task_config`) stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = prefix + key
        if isinstance(value, Mapping) and path not in _MAPPINGS:
            flat |= flatten(value, path + ".")
        else:
            flat[path] = value
    return flat


def _build(cls: type, values: Any, path: str) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path or 'the config'} must be a section with options, found {values!r}")
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise ConfigError(_unknown(path, str(key), list(hints)))
    kwargs = {key: _convert(hints[key], value, f"{path}.{key}" if path else key) for key, value in values.items()}
    return cls(**kwargs)


def _unknown(path: str, key: str, known: list[str]) -> str:
    full = f"{path}.{key}" if path else key
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    everywhere = {option.rsplit(".", 1)[-1]: option for option in flatten(to_mapping(Config()))}
    if near:
        hint = f"did you mean {f'{path}.{near[0]}' if path else near[0]}?"
    elif key in everywhere:
        hint = f"did you mean {everywhere[key]}?"
    else:
        hint = f"known here: {', '.join(known)}"
    return f"unknown option {full}: {hint}"


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), {} if value is None else value, path)
    if origin is Literal:
        allowed = typing.get_args(hint)
        if value not in allowed:
            near = difflib.get_close_matches(str(value), allowed, n=1)
            hint_text = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{path} must be one of {', '.join(map(str, allowed))}, found {value!r}{hint_text}")
        return value
    if origin in (list, types.GenericAlias):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path} must be a list, found {value!r}")
        (item,) = typing.get_args(hint)
        return [_convert(item, element, f"{path}[{i}]") for i, element in enumerate(value)]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be a mapping, found {value!r}")
        return dict(value)
    if hint is str and value is None:
        value = ""  # `option=` on the command line, or `option:` in YAML
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads `1e-6` as text
        with contextlib.suppress(ValueError):
            value = float(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{path} must be {hint.__name__}, found {value!r} ({type(value).__name__})")
    return value


def _check(c: Config) -> None:
    values = flatten(to_mapping(c))
    for path, low in _AT_LEAST.items():
        if not values[path] >= low:
            raise ConfigError(f"{path} must be at least {low}, found {values[path]!r}")
    for path in _UNIT:
        if not 0 < values[path] <= 1:
            raise ConfigError(f"{path} must be in (0, 1], found {values[path]!r}")
    for path in _BELOW_ONE:
        if not 0 <= values[path] < 1:
            raise ConfigError(f"{path} must be in [0, 1), found {values[path]!r}")
    if not c.model.path:
        raise ConfigError("model.path is missing: give a Hugging Face folder or a .gguf file")
    _check_data(c)
    _check_batch(c)
    _check_tokens(c)
    used = c.rollout.num_devices or c.trainer.num_devices
    problem = c.rollout.layout.problem(c.rollout.tensor_model_parallel_size, used)
    if problem is not None:
        raise ConfigError(problem)


def _check_data(c: Config) -> None:
    if c.data.task and c.data.train_files:
        raise ConfigError("data.task and data.train_files exclude each other: problems come from a task or from files")
    if "{question}" not in c.data.prompt_template:
        raise ConfigError(f"data.prompt_template must contain {{question}}, found {c.data.prompt_template!r}")
    if c.reward.kind == "custom" and not c.reward.path:
        raise ConfigError("reward.path is missing: reward.kind is custom, which needs a Python file")
    if c.reward.kind == "task" and not c.data.task:
        raise ConfigError("reward.kind is task, which needs data.task: the scorer is the task's own")


def _check_batch(c: Config) -> None:
    batch, mini = c.data.train_batch_size, c.mini_batch_prompts
    if batch % mini:
        raise ConfigError(
            f"actor.ppo_mini_batch_size ({mini} prompts) must divide data.train_batch_size ({batch} prompts)"
        )
    if c.algorithm.adv_estimator in ("grpo", "dr_grpo", "rloo") and c.rollout.n < 2:
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
    _check_devices(c)


def _check_devices(c: Config) -> None:
    devices, own, tp = c.trainer.num_devices, c.rollout.num_devices, c.rollout.tensor_model_parallel_size
    if own and not c.trainer.one_step_off:
        raise ConfigError(
            f"rollout.num_devices ({own}) needs trainer.one_step_off: without it rollout and update wait for each "
            "other, and devices of their own would stand idle in turns"
        )
    problem = devices_problem(own, devices, tp, "trainer.num_devices")
    if problem is not None:
        raise ConfigError(problem)


_MAPPINGS = ("data.task_config", "simulate.efficiency")  # options that hold a mapping
_AT_LEAST: dict[str, float] = {
    "data.task_size": 1,
    "data.val_size": 0,
    "data.seed": 0,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    "data.train_batch_size": 1,
    "rollout.n": 1,
    "rollout.num_devices": 0,
    "rollout.temperature": 0,
    "rollout.top_k": -1,
    "rollout.tensor_model_parallel_size": 1,
    "rollout.block_size": 1,
    "rollout.max_num_seqs": 1,
    "rollout.max_num_batched_tokens": 1,
    "rollout.decode_steps": 1,
    "rollout.num_blocks": 0,
    "rollout.max_active_requests": 0,
    "rollout.tail_batching.prompt_factor": 1,
    "rollout.tail_batching.response_factor": 1,
    "rollout.tail_batching.max_age_steps": 0,
    "rollout.partial_rollout.over_provision": 1,
    "rollout.partial_rollout.max_staleness": -1,
    "rollout.partial_rollout.max_restarts": 0,
    "rollout.over_provisioning.prompt_factor": 1,
    "rollout.over_provisioning.response_factor": 1,
    "rollout.layout.devices_per_host": 0,
    "rollout.layout.cooldown": 1,
    "rollout.layout.headroom_tokens": 0,
    "rollout.layout.correction_weight": 0,
    "rollout.layout.correction_max_factor": 1,
    "rollout.layout.planner_rise": 1,
    "rollout.layout.planner_quiet_rounds": 1,
    "rollout.val_kwargs.n": 1,
    "rollout.val_kwargs.temperature": 0,
    "rollout.val_kwargs.top_k": -1,
    "actor.optim.lr": 0,
    "actor.optim.lr_warmup_steps": 0,
    "actor.optim.min_lr_ratio": 0,
    "actor.optim.weight_decay": 0,
    "actor.optim.eps": 0,
    "actor.kl_loss_coef": 0,
    "algorithm.kl_coef": 0,
    "algorithm.filter_groups.max_num_gen_batches": 1,
    "algorithm.filter_groups.max_unscored_groups": 0,
    "actor.ppo_mini_batch_size": 0,
    "actor.ppo_epochs": 1,
    "actor.ppo_max_token_len_per_gpu": 1,
    "actor.clip_ratio_low": 0,
    "actor.clip_ratio_high": 0,
    "actor.grad_clip": 0,
    "actor.logprob_chunk_tokens": 1,
    "reward.timeout_s": 0,
    "reward.num_workers": 1,
    "trainer.total_training_steps": 0,
    "trainer.total_epochs": 1,
    "trainer.save_freq": 0,
    "trainer.max_ckpt_to_keep": 1,
    "trainer.test_freq": 0,
    "trainer.seed": 0,
    "trainer.num_devices": 0,
    "trainer.hang_timeout_s": 0,
    "simulate.num_devices": 0,
    "simulate.num_prompts": 0,
    "simulate.host_s": 0,
}
_UNIT = ("rollout.top_p", "rollout.memory_fraction", "rollout.val_kwargs.top_p")  # in (0, 1]
_BELOW_ONE = ("rollout.min_p", "rollout.layout.min_gain", "actor.optim.beta1", "actor.optim.beta2")  # in [0, 1)
