"""The complete configuration, typed. Every option is declared once: here, in `algorithm`, `updates`, `rollouts`,
`rewards` or `simulation`, or as `Options` of a mechanism.

A declaration is `name: Annotated[type, bounds, "what it is, with its unit"] = default`. Constraints between options are
in `checks`, or with a section (`Section.problems`). Options follow verl's names where verl has one. An option that
counts says whether it counts prompts, samples or tokens.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, overload

from annotated_types import Ge, Gt, Interval
from pydantic import Field

from jaxrl.config.algorithm import AlgorithmSection
from jaxrl.config.rewards import RewardSection
from jaxrl.config.rollouts import RolloutSection
from jaxrl.config.simulation import SimulateSection
from jaxrl.config.updates import (
    ActorSection,
    CriticSection,
    DpoSection,
    OptimSection,
    SftSection,
)
from jaxrl.mechanisms.stream_trainer import StreamTrainer
from jaxrl.mechanisms.turns import Turns
from jaxrl.schema.declared import SEED, Cap, Names
from jaxrl.schema.devices import MAX_DEVICES
from jaxrl.schema.limits import MAX_HOSTS, MAX_LENGTH, MAX_PROMPTS, MAX_RANK, MAX_WAIT, Quantization
from jaxrl.schema.section import JsonObject, Section
from jaxrl.types import SamplingParams

MAX_STEPS = Cap(1_000_000_000, "updates are counted in 32 bits")
MAX_WAITING = Cap(1_000_000, "each of them is held in memory")


class ModelSection(Section):
    """The model to train."""

    path: Annotated[
        str,
        Names("folder"),
        "A folder in Hugging Face form, a .gguf file, `package:file.gguf` inside an installed package, or `org/name` "
        "of the Hugging Face Hub.",
    ] = ""
    random_init: Annotated[
        bool, "Start from random weights; model.path then needs only config.json and the tokenizer's files."
    ] = False
    lora_rank: Annotated[
        int,
        Ge(0),
        MAX_RANK,
        "Rank of the adapters that are trained in place of the weights (LoRA); 0: all weights are trained.",
    ] = 0
    lora_alpha: Annotated[
        float,
        Gt(0),
        "What an adapter's product is multiplied by, divided by the rank: a larger rank needs no other lr.",
    ] = 32.0
    lora_dropout: Annotated[
        float,
        Interval(ge=0, lt=1),
        "Share of an adapter's inputs that a pass with gradients leaves out, drawn anew in each; no other pass does.",
    ] = 0.0
    target_modules: Annotated[
        list[str],
        "The matrices with adapters, by their names in Hugging Face files (q_proj, down_proj); all-linear: all "
        "matrices of the layers.",
    ] = ["all-linear"]
    exclude_modules: Annotated[list[str], "Those of them that have none."] = []
    use_rslora: Annotated[bool, "Divide lora_alpha by the square root of the rank (rsLoRA)."] = False
    lora_adapter_path: Annotated[
        str,
        Names("folder"),
        "A folder of adapters as peft writes it, which training begins from; rank, factor and matrices are its own.",
    ] = ""
    base_quantization: Annotated[
        Quantization,
        "The frozen matrices of layers in few bits (QLoRA), as bitsandbytes has them; nf4: 4 bits, in blocks of 64, "
        "int8: 8 bits, with a factor for each output.",
    ] = "none"

    @property
    def has_adapters(self) -> bool:
        return bool(self.lora_rank or self.lora_adapter_path)

    def problems(self, config: Any) -> Iterator[str]:
        if self.lora_adapter_path and config.trainer.init_from:
            yield (
                f"model.lora_adapter_path ({self.lora_adapter_path}) and trainer.init_from "
                f"({config.trainer.init_from}) exclude each other: adapters begin from one of them"
            )
        if self.base_quantization == "none":
            return
        option = f"model.base_quantization={self.base_quantization}"
        if not self.has_adapters:
            yield f"{option} needs adapters (model.lora_rank): weights in so few bits are not trained"
        if config.actor.remat == "none":
            yield f"{option} excludes actor.remat=none, which would keep all layers' matrices whole: use dots or full"

    def unread(self, config: Any) -> Iterator[tuple[frozenset[str], str]]:
        names = frozenset({"lora_alpha", "target_modules", "exclude_modules", "use_rslora"})
        if not self.has_adapters:
            yield names | {"lora_dropout"}, "model.lora_rank is 0"
        elif self.lora_adapter_path:
            yield names | {"lora_rank"}, "the adapters of model.lora_adapter_path have their own"


class DataSection(Section):
    """The problems, and how each becomes a prompt."""

    train_files: Annotated[
        list[str],
        Names("file"),
        "Training problems: .jsonl, .jsonl.gz or .parquet, or `org/name:file` of the Hugging Face Hub.",
    ] = []
    val_files: Annotated[list[str], Names("file"), "Evaluation problems: as data.train_files."] = []
    task: Annotated[str, "A reasoning-gym task that makes the problems, instead of files."] = ""
    task_config: Annotated[JsonObject, "Options of the task that data.task names."] = {}
    task_size: Annotated[
        int,
        Ge(1),
        Cap(10_000_000, "they are made one by one at the start, and kept"),
        "Prompts in the training set of a procedural task.",
    ] = 10_000
    val_size: Annotated[
        int,
        Ge(0),
        MAX_PROMPTS,
        "Evaluation prompts: this many of a procedural task, or the first ones of data.val_files; 0: all of the files.",
    ] = 100
    prompt_key: Annotated[str, "Column of the problem's text."] = "question"
    messages_key: Annotated[
        str, "Column of chat messages (a list, or a JSON string), instead of data.prompt_key; empty: none."
    ] = ""
    answer_key: Annotated[str, "Column of the reference answer; GSM8K's text before `####` is dropped."] = "answer"
    source_key: Annotated[str, "Column that names the data source; empty: the file's name is the source."] = ""
    reference_time_key: Annotated[
        str,
        "Column of the seconds that a right program takes for a test case, the adaptive limits' first anchor for each "
        "of the row; a row without a number there, and with the option empty every row, has none.",
    ] = ""
    system_prompt: Annotated[str, "System message of the chat template; empty: none."] = ""
    prompt_template: Annotated[str, "What is asked, with `{question}` where the problem's text goes."] = "{question}"
    apply_chat_template: Annotated[bool, "Write the prompt in the tokenizer's chat template."] = True
    apply_chat_template_kwargs: Annotated[
        JsonObject,
        "Variables for the chat template, such as `{enable_thinking: false}`; `tools` is a list of JSON schemas.",
    ] = {}
    special_tokens_in_content: Annotated[
        Literal["text", "tokens"],
        "What special tokens become that messages of users, tools and the system spell; text: their letters, so that "
        "no text ends its own message or opens another one, tokens: themselves, as in transformers and vLLM.",
    ] = "text"
    max_prompt_length: Annotated[int, Ge(1), MAX_LENGTH, "The longest prompt, in tokens."] = 256
    max_response_length: Annotated[int, Ge(1), MAX_LENGTH, "The longest response, in tokens."] = 128
    filter_overlong_prompts: Annotated[
        bool, "Drop prompts above data.max_prompt_length at loading and count them; false: they are an error."
    ] = True
    train_batch_size: Annotated[int, Ge(1), MAX_PROMPTS, "Prompts per training step."] = 8
    gen_batch_size: Annotated[
        int,
        Ge(0),
        MAX_PROMPTS,
        "Prompts launched at a time with algorithm.filter_groups, in place of as many as are expected to be needed; 0: "
        "that many.",
    ] = 0
    source_quotas: Annotated[
        dict[str, int],
        "Prompts of each source in data.train_batch_size, by the source's name, 0 to leave one out; none: as the data "
        "has them.",
    ] = {}
    shuffle: Annotated[bool, "Give the prompts in a new random order in each epoch; false: in the files' order."] = True
    seed: Annotated[int, Ge(0), SEED, "Seed of the procedural problems and of the order of the prompts."] = 0


class TrainerSection(Section):
    """The run: how long it is, what it saves, and where."""

    run_dir: Annotated[
        str, Names("new folder"), "The folder of everything that the run writes; an existing one is resumed."
    ] = ""
    total_training_steps: Annotated[
        int, Ge(0), MAX_STEPS, "Training steps of the run; 0: trainer.total_epochs decides."
    ] = 0
    total_epochs: Annotated[int, Ge(1), MAX_STEPS, "Passes over the training prompts."] = 1
    critic_warmup: Annotated[
        int, Ge(0), MAX_STEPS, "Steps at the beginning of a run that train the critic alone, with adv_estimator gae."
    ] = 0
    save_freq: Annotated[
        Annotated[int, Ge(0)] | Literal["auto"],
        "Steps between checkpoints; 0: only at the end; auto: as costs least with a failure every trainer.mtbf_s.",
    ] = 10
    mtbf_s: Annotated[float, Gt(0), MAX_WAIT, "Mean seconds between failures, for trainer.save_freq=auto."] = 21600.0
    max_ckpt_to_keep: Annotated[int, Ge(1), "Checkpoints that are kept, the newest ones."] = 2
    test_freq: Annotated[int, Ge(0), "Steps between evaluations; another follows the last step; 0: none."] = 0
    val_before_train: Annotated[bool, "Evaluate before the first step."] = False
    seed: Annotated[int, Ge(0), SEED, "Seed of random weights and of sampling."] = 0
    num_devices: Annotated[int, Ge(0), MAX_DEVICES, "Devices of the run; 0: all that there are."] = 0
    one_step_off: Annotated[bool, "Roll out for step t + 1 with the weights before update t."] = False
    stream: StreamTrainer.Options = Field(default_factory=StreamTrainer.Options)
    init_from: Annotated[
        str, Names("folder"), "A run directory or checkpoint folder to take only the parameters from."
    ] = ""
    logger: Annotated[
        list[Literal["console", "wandb", "tensorboard", "mlflow", "trackio"]],
        "Where metrics and samples go besides the run's files.",
    ] = ["console"]
    project_name: Annotated[str, "The project under which loggers file the run."] = "jaxrl"
    experiment_name: Annotated[str, "The run's name in loggers and on its page."] = ""
    compilation_cache_dir: Annotated[str, Names("new folder"), "The persistent compilation cache; empty: none."] = (
        "~/.cache/jaxrl/xla"
    )
    max_bad_steps: Annotated[
        int,
        Ge(0),
        "Steps in a row without any finite gradient, or batches' worth of failed rewards in a row, that end the run; "
        "0: it only warns.",
    ] = 3
    hang_timeout_s: Annotated[
        float,
        Ge(0),
        MAX_WAIT,
        "Seconds without progress (a phase, a decode call or a compiled program has ended) after which the run is "
        "ended, with every thread's stack; after half of them it is only reported. 0: off.",
    ] = 3600.0

    def unread(self, config: Any) -> Iterator[tuple[frozenset[str], str]]:
        if self.save_freq != "auto":
            yield frozenset({"mtbf_s"}), "trainer.save_freq is not auto"

    def problems(self, config: Any) -> Iterator[str]:
        if config.rollout.num_devices and not self.one_step_off:
            yield (
                f"rollout.num_devices ({config.rollout.num_devices}) needs trainer.one_step_off: without it rollout "
                "and update wait for each other, and devices of their own would stand idle in turns"
            )


class HostsSection(Section):
    """Several hosts: a Ray actor on each, a mesh over all of them for training, and rollout workers on each."""

    num: Annotated[
        int,
        Ge(1),
        MAX_HOSTS,
        "Hosts of the run, each with as many devices; 1: this machine alone, without Ray; more: a Ray actor on each "
        "host.",
    ] = 1
    address: Annotated[
        str,
        "The address of the Ray cluster; auto: one that `ray start` has started on this machine; empty: the one that "
        "the environment variable RAY_ADDRESS names, or else a cluster of the run's own on this machine.",
    ] = ""
    devices_per_host: Annotated[
        int, Ge(0), MAX_DEVICES, "Devices that the run uses on each host; 0: all, and on CPUs one."
    ] = 0
    stall_timeout_s: Annotated[
        float,
        Gt(0),
        MAX_WAIT,
        "Seconds without progress on any host after which the run ends, names the silent ones, and starts again.",
    ] = 900.0
    max_restarts: Annotated[
        int,
        Ge(0),
        "How often all hosts are started again after one was lost, without a checkpoint in between, before it ends.",
    ] = 3


class ServeSection(Section):
    """A model behind OpenAI's routes; what it draws with are options of `rollout`."""

    max_model_len: Annotated[
        int, Ge(0), MAX_LENGTH, "The longest prompt and response together, in tokens; 0: 4096, or what the model takes."
    ] = 0
    max_waiting: Annotated[
        int, Ge(0), MAX_WAITING, "Requests that wait for a row; beyond them a client gets status 503, try again later."
    ] = 256
    grace_s: Annotated[
        float, Ge(0), MAX_WAIT, "Seconds that responses under way have to end once the server is asked to stop."
    ] = 30.0


class Config(Section):
    """All sections."""

    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    actor: ActorSection = Field(default_factory=ActorSection)
    critic: CriticSection = Field(default_factory=CriticSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    environment: Turns.Options = Field(default_factory=Turns.Options)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    hosts: HostsSection = Field(default_factory=HostsSection)
    simulate: SimulateSection = Field(default_factory=SimulateSection)
    serve: ServeSection = Field(default_factory=ServeSection)
    sft: SftSection = Field(default_factory=SftSection)
    dpo: DpoSection = Field(default_factory=DpoSection)

    @property
    def mini_batch_prompts(self) -> int:
        return self.actor.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def updates_per_step(self) -> int:
        return self.actor.ppo_epochs * (self.data.train_batch_size // self.mini_batch_prompts)

    @property
    def has_critic(self) -> bool:
        """Whether a second model learns what a token's return will be."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def critic_optim(self) -> OptimSection:
        return self.actor.optim.replace(**dict(self.critic.optim))

    @property
    def critic_mini_batch_prompts(self) -> int:
        return self.critic.ppo_mini_batch_size or self.mini_batch_prompts

    @property
    def critic_epochs(self) -> int:
        return self.critic.ppo_epochs or self.actor.ppo_epochs

    @property
    def critic_updates_per_step(self) -> int:
        """Optimizer updates of the critic in a training step; 0 where there is none."""
        if not self.has_critic:
            return 0
        return self.critic_epochs * (self.data.train_batch_size // self.critic_mini_batch_prompts)

    @property
    def critic_warmup(self) -> int:
        """Steps at the beginning of the run that train the critic alone."""
        return self.trainer.critic_warmup if self.has_critic else 0

    @property
    def has_teacher(self) -> bool:
        return bool(self.algorithm.teacher.path or self.algorithm.teacher.endpoint)

    @property
    def needs_ref(self) -> bool:
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def greedy_option(self) -> str:
        """The option, with its value, that makes all samples of a prompt equal; empty: they are drawn."""
        rollout = self.rollout
        if rollout.temperature == 0:
            return "rollout.temperature (0)"
        return "rollout.top_k (1)" if rollout.top_k == 1 else ""

    def sampling(self, stop_token_ids: tuple[int, ...], *, evaluates: bool = False) -> SamplingParams:
        """How the responses of a round are drawn, or those of an evaluation."""
        rollout, data = self.rollout, self.data
        drawn = rollout.val_kwargs if evaluates else rollout
        return SamplingParams(
            temperature=drawn.temperature,
            top_k=max(drawn.top_k, 0),
            top_p=drawn.top_p,
            min_p=0.0 if evaluates else rollout.min_p,
            max_tokens=data.max_response_length,
            stop_token_ids=stop_token_ids,
            stop_strings=tuple(rollout.stop),
        )

    @property
    def batching(self) -> dict[str, Any]:
        """The fields of `BatcherConfig` that options set."""
        rollout, length = self.rollout, self.max_model_length
        spreads = rollout.sample_placement == "spread"
        return {"decode_steps": rollout.decode_steps, "max_model_len": length, "spread_samples": spreads}

    @property
    def max_model_length(self) -> int:
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def max_row_length(self) -> int:
        return self.actor.ppo_max_token_len_per_gpu * self.actor.context_parallel_size

    @property
    def row_budget(self) -> str:
        """The options that say so."""
        budget, sharing = self.actor.ppo_max_token_len_per_gpu, self.actor.context_parallel_size
        several = f" × actor.context_parallel_size ({sharing})" if sharing > 1 else ""
        return f"actor.ppo_max_token_len_per_gpu ({budget} tokens){several}"

    @property
    def num_workers(self) -> int:
        """The rollout's workers, of all hosts: at least one per host, or group of hosts that a worker spans."""
        asked = self.rollout.num_workers
        return self.num_host_groups if asked == 1 else asked

    @property
    def num_own_devices(self) -> int:
        """The rollout's own devices, of all hosts; 0: it has none."""
        return self.rollout.num_devices * self.hosts.num

    @property
    def num_host_groups(self) -> int:
        """Groups of hosts that have workers of their own: every host, or as many together as a worker spans."""
        return self.hosts.num // self.rollout.hosts_per_worker

    @property
    def workers_per_group(self) -> int:
        """The rollout's workers on each group of hosts (`num_host_groups`), which share its devices."""
        return self.num_workers // self.num_host_groups

    @property
    def is_tp_open(self) -> bool:
        """Whether `rollout.tensor_model_parallel_size` is auto, so that its number is still to be chosen."""
        return self.rollout.tensor_model_parallel_size == "auto"

    def with_tp(self, degree: int) -> Self:
        return self.replace(rollout=self.rollout.replace(tensor_model_parallel_size=degree))

    def with_types(self, platform: str, earlier: Self | None = None) -> Self:
        """A copy without dtypes that are auto: they become those of an `earlier` start of the run, or what is usual on
        devices of `platform`, as JAX calls it."""
        if "auto" not in (self.actor.dtype, self.rollout.dtype, self.algorithm.teacher.dtype):
            return self
        usual = "float32" if platform == "cpu" else "bfloat16"

        def typed(section: Any, before: Any) -> Any:
            dtype = usual if before.dtype == "auto" else before.dtype
            return section.replace(dtype=dtype) if section.dtype == "auto" else section

        known = earlier or self
        teacher = typed(self.algorithm.teacher, known.algorithm.teacher)
        return self.replace(
            actor=typed(self.actor, known.actor),
            rollout=typed(self.rollout, known.rollout),
            algorithm=self.algorithm.replace(teacher=teacher),
        )

    def with_tp_of(self, earlier: Self | None, num_devices: int) -> Self:
        """A copy with the degree of an `earlier` start of the run, where it is auto and that one divides the rollout's
        devices."""
        if not self.is_tp_open or earlier is None or earlier.is_tp_open or num_devices % earlier.rollout.tp:
            return self
        return self.with_tp(earlier.rollout.tp)


@overload
def total_steps(config: Config, num_prompts: int) -> int: ...
@overload
def total_steps(config: Config, num_prompts: None) -> int | None: ...
def total_steps(config: Config, num_prompts: int | None) -> int | None:
    """The run's last step: `trainer.total_training_steps`, or what `total_epochs` fill; None while that is unknown.

    Batches cross the ends of epochs; the last one that would need prompts of a further epoch is not run.
    """
    steps = config.trainer.total_training_steps
    if not steps:
        if num_prompts is None:
            return None
        steps = max(config.trainer.total_epochs * num_prompts // config.data.train_batch_size, 1)
    if steps <= config.critic_warmup:
        raise ValueError(
            f"trainer.critic_warmup ({config.critic_warmup} steps) must be less than the run's {steps} steps: the "
            "policy would never be trained"
        )
    return steps
