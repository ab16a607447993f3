"""The options `simulate.*`, which `jaxrl simulate` alone reads: the machine, the cost model and the workload."""

from typing import Annotated

from annotated_types import Ge, Gt, Interval
from pydantic import Field

from jaxrl.schema.declared import Cap, Names
from jaxrl.schema.devices import MAX_DEVICES
from jaxrl.schema.limits import MAX_HOSTS
from jaxrl.schema.section import Section

_MAX_TOKENS = Cap(1_000_000_000, "beyond, every response has the longest length")
_MAX_SIGMA = Cap(10, "one in six lengths or times would be above 22,000 times the median")
_MAX_SECONDS = Cap(1_000_000_000, "that is longer than thirty years")


class SimulatedLengths(Section):
    """How long responses are: a lognormal body, and a power law above one of its quantiles."""

    median: Annotated[
        float,
        Gt(0),
        _MAX_TOKENS,
        "Response tokens at the median of the lognormal body, at the first step; data.max_response_length caps the "
        "longest.",
    ] = 500.0
    sigma: Annotated[float, Ge(0), _MAX_SIGMA, "Standard deviation of the logarithm of the body's lengths."] = 1.0
    tail_from: Annotated[
        float, Interval(gt=0, le=1), "Quantile of the body from which a power law takes over; 1: none does."
    ] = 1.0
    tail_index: Annotated[
        float, Gt(0), "In the tail, the share of longer responses falls as length ** -tail_index."
    ] = 2.0
    growth: Annotated[
        float, Gt(-1), "Share by which all lengths grow per training step, up to ten times the first step's lengths."
    ] = 0.0


class SimulatedScoring(Section):
    """How long scoring takes."""

    median_s: Annotated[
        float, Ge(0), _MAX_SECONDS, "Seconds of scoring a response, at the median of a lognormal distribution."
    ] = 0.0
    sigma: Annotated[float, Ge(0), _MAX_SIGMA, "Standard deviation of the logarithm of those seconds."] = 0.0
    per_token_s: Annotated[
        float, Ge(0), _MAX_SECONDS, "Seconds of scoring per response token, besides the drawn ones."
    ] = 0.0
    hang_share: Annotated[
        float,
        Interval(ge=0, le=1),
        "Share of the responses with scoring that only reward.timeout_s ends, or the time limit of a test case.",
    ] = 0.0
    workers: Annotated[
        int,
        Ge(0),
        Cap(65536, "each is followed one by one"),
        "Processes that score this task alone; 0: it shares the reward.num_workers of all others.",
    ] = 0
    device_s: Annotated[
        float,
        Ge(0),
        _MAX_SECONDS,
        "Seconds that scoring a response takes from the rollout's devices, as a model on them does; 0: it takes none, "
        "but workers.",
    ] = 0.0


class SimulatedHistory(Section):
    """How much of a response its prompt's responses of the epoch before foretell."""

    stretch_median: Annotated[
        float,
        Gt(0),
        _MAX_TOKENS,
        "Tokens that history foretells in a row, at the median of a lognormal distribution, in the second epoch.",
    ] = 2.0
    stretch_sigma: Annotated[
        float, Ge(0), _MAX_SIGMA, "Standard deviation of the logarithm of the tokens foretold in a row."
    ] = 2.0
    gap_mean: Annotated[
        float, Ge(0), _MAX_TOKENS, "Mean tokens that history does not foretell, before each foretold stretch."
    ] = 1.0
    growth: Annotated[float, Gt(-1), "Share by which foretold stretches grow per epoch."] = 0.0


class TaskSection(Section):
    """One kind of prompts."""

    weight: Annotated[float, Gt(0), "Share of the prompts, relative to the weights of the other tasks."] = 1.0
    response: SimulatedLengths = Field(default_factory=SimulatedLengths)
    correlation: Annotated[
        float, Interval(ge=0, le=1), "How much of a response's length its prompt decides: 0 nothing, 1 all."
    ] = 0.5
    outlier_share: Annotated[
        float, Interval(ge=0, le=1), "Share of the responses with lengths that have nothing to do with their prompts'."
    ] = 0.0
    prompt_median: Annotated[
        float, Gt(0), _MAX_TOKENS, "Prompt tokens at the median; data.max_prompt_length caps the longest."
    ] = 200.0
    prompt_sigma: Annotated[
        float, Ge(0), _MAX_SIGMA, "Standard deviation of the logarithm of the prompts' lengths."
    ] = 0.5
    scoring: SimulatedScoring = Field(default_factory=SimulatedScoring)
    pass_rate: Annotated[
        float, Interval(gt=0, lt=1), "Probability that a response to the median prompt has reward 1."
    ] = 0.5
    pass_spread: Annotated[float, Ge(0), "Standard deviation over prompts of the logit of their pass rates."] = 2.0
    history: SimulatedHistory = Field(default_factory=SimulatedHistory)


class SimulatedTask(TaskSection):
    """A task with its name, which is the data source of its prompts."""

    name: str = "simulated"


class SimulatedTool(Section):
    """How responses over several turns are answered, with environment.kind."""

    turns: Annotated[
        float, Interval(ge=1, le=500), "Turns of a response, in the mean; all but the first are drawn (Poisson)."
    ] = 3.0
    answer_tokens: Annotated[int, Ge(0), _MAX_TOKENS, "Tokens of an answer."] = 50
    median_s: Annotated[
        float, Ge(0), _MAX_SECONDS, "Seconds of an answer, at the median of a lognormal distribution."
    ] = 0.2
    sigma: Annotated[float, Ge(0), _MAX_SIGMA, "Standard deviation of the logarithm of those seconds."] = 0.0


class SimulateSection(Section):
    """A simulated run: the machine, the cost model, and where lengths and rewards come from."""

    run_dir: Annotated[
        str, Names("new folder"), "The folder to write; empty: trainer.run_dir with -simulated behind it."
    ] = ""
    hardware: Annotated[str, "Accelerator: A40, A100, H100, H800, H200 or MI300X."] = "H100"
    num_devices: Annotated[
        int,
        Ge(0),
        MAX_DEVICES,
        "Simulated devices, of all hosts; 0: trainer.num_devices, or 8 where that is 0 as well, or of several hosts "
        "hosts.devices_per_host of each, or 8.",
    ] = 0
    num_hosts: Annotated[
        int,
        Ge(0),
        MAX_HOSTS,
        "Simulated hosts, each with an equal part of the devices; 0: hosts.num. The other options of hosts have no "
        "effect in a simulation.",
    ] = 0
    host_spread: Annotated[
        float,
        Ge(0),
        Cap(100, "such a host would be down"),
        "By what share plans take longer on the slowest host than on the fastest; the others lie evenly "
        "between them, and trainer.seed draws which is which.",
    ] = 0.0
    model: Annotated[str, Names("folder"), "A named shape, or a folder with a config.json; empty: model.path."] = ""
    num_prompts: Annotated[
        int, Ge(0), Cap(10_000_000, "their order is drawn at once"), "Prompts of an epoch; 0: data.task_size."
    ] = 0
    profile: Annotated[
        str,
        Names("file"),
        "The file that `jaxrl profile` wrote, which says how long things take; what it does not hold, and everything "
        "where it is empty, comes from the roofline of simulate.hardware.",
    ] = ""
    recorded_run: Annotated[
        str, Names("folder"), "The run whose samples.jsonl has lengths and rewards to draw from; empty: simulate.tasks."
    ] = ""
    tool: SimulatedTool = Field(default_factory=SimulatedTool)
    tasks: Annotated[
        dict[str, TaskSection],
        "Kinds of prompts by their names, which are their data sources; none: one task with the defaults.",
    ] = {}
    score_in_turn: Annotated[
        bool, "Score one task after another, in the order of simulate.tasks; off: all tasks beside one another."
    ] = False
