"""The experiments' runs (cases.yaml), as configurations of `jaxrl simulate` with constants of a calibration.

Purpose: `Case` is one run: a set-up of facts.yaml, a rule with its factors, a seed. `cases_of` lists those of an
experiment; `configuration` and `models` turn one into what `jaxrl.run.simulation.build` takes.

Source: RollPacker §2.2, §6 (set-ups, uniform mix of three tasks), §6.3 (factors); APRIL §3.1 and A.2; PAT §5.1;
RhymeRL §7.

Departures, where the papers are silent: the calibration file's assumptions; prompts of `PROMPT_TOKENS` tokens; options
of cases.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import yaml

from jaxrl.config import Config, SimulatedLengths, SimulatedScoring, SimulatedTask, from_mapping
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.workload import ModelledWorkload, uniform
from jaxrl.types import SampleKey
from papers.calibration import Calibration, Values
from papers.closed_form import PROMPT_TOKENS, cost_of, lengths_of
from papers.facts import HERE, SETUPS, Setup
from papers.problems import GROUP, TASKS, history_of, lengths_at, task_lengths

RESERVED_SHARE = 0.25  # of the devices, that a judge has for itself elsewhere (RollPacker §4.3)
OWN_FACTOR = 2.0  # of a row's anchor, in RollPacker's code (code_sandbox_reward_worker.py); the paper has 1.5
DATASET_PROMPTS = 100_000  # where no prompt comes twice
EPOCH_STEPS = 4  # of RhymeRL's runs here
PAPER_EPOCH_STEPS = 8192 // SETUPS["rhymerl.math"].num_prompts  # in which its lengths grow as much; 8K prompts: §7
RANKING_GROUPS = {"math": 16, "code": 8}  # RhymeRL §7.2.3
VERIFY_TOKENS = 256  # of a step of a dp group: what jaxrl takes on GPUs

_PROBLEMS = {"rhymerl": "rhymerl_machine", "pat.a40": "pat_a40", "pat.h100": "pat_h100"}
_PROBLEMS |= {"rollpacker.7b": "rollpacker_7b", "rollpacker.8b": "rollpacker_7b", "rollpacker.32b": "rollpacker_32b"}


@dataclass(frozen=True, slots=True)
class Case:
    """One simulated run. 0 and an empty tuple leave what they name to the set-up."""

    setup: str
    rule: Literal["plain", "tail", "partial", "adaptive"]  # plain: as the baseline; adaptive: its layout alone
    prompt_factor: float = 1.0  # of tail batching, or partial rollout's over-provisioning
    response_factor: float = 1.0
    tasks: tuple[str, ...] = TASKS  # in equal shares
    steps: int = 40
    seed: int = 0
    decode_steps: int = 16  # the most of a plan; how late the end of a round may be seen
    scale: int = 1  # divides prompts, devices and the longest response, to try the script out
    tp: int = 0
    tokens: int = 0  # of the longest response
    devices: int = 0
    prompts: int = 0  # of a batch
    score_when: Literal["rollout", "sample"] = "rollout"  # when rewards begin: all have ended, or each response has
    degrees: tuple[int, ...] = ()  # that an adaptive layout may use
    workers: int = 1  # that roll out
    planner: bool = False  # the degree follows preemptions
    # what costs RollPacker's own and not its baseline's: nothing, its training, or its rollouts' start and end as well
    own: Literal["", "trainer", "system"] = ""
    stream: Literal["off", "adaptive", "fixed"] = "off"  # what frees devices for a stream trainer in long rounds
    freed_at: float = 0.0  # with `fixed`: the share of a round's samples after which they are freed
    fetch: float = 0.0  # the stream gets groups once, at most this share of the batch; 0: as they end
    pipeline: Literal["off", "naive", "two_tier"] = "off"  # ranking groups, with equal shares of workers or two tiers
    speculation: bool = False  # drafts from the epoch before
    # of the code task: the limit of all of a sample's scoring, as in the baseline, or of a test case
    timeout: Literal["whole", "fixed", "adaptive"] = "whole"
    # of adaptive time-outs: what right responses have taken, or a column of the data has one for every prompt, and
    # limits are twice those, as in the authors' code
    anchors: Literal["learnt", "rows"] = "learnt"
    epoch_steps: int = 0  # batches after which prompts come again; 0: no prompt does
    pass_spread: float = 2.0  # how much prompts differ in how often they are solved (`simulate.tasks.NAME.pass_spread`)
    judge: Literal["workers", "devices"] = "workers"  # beside all devices, or it takes its time from the rollout's
    one_off: bool = False  # half of the devices roll out for the next step (RollPacker §6.7)
    lengths: str = ""  # the problem that has them, where it is not the case's own
    longer: float = 1.0  # times the median length
    memory: float = 0.0  # the share of a device's memory for the rollout

    @classmethod
    def read(cls, entry: dict[str, Any]) -> Case:
        """From YAML or JSON, whose lists are tuples here."""
        read: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in entry.items()}
        return cls(**read)

    @property
    def base(self) -> Case:
        """The same without a stream trainer, with the same rounds."""
        return replace(self, stream="off", freed_at=0.0, fetch=0.0)

    @property
    def alike(self) -> Case:
        """The same for any seed, any number of steps, and at the size of a trial."""
        again = int(self.epoch_steps > 0)
        return replace(self, seed=0, steps=0, decode_steps=0, scale=1, workers=1, epoch_steps=again)

    @property
    def of(self) -> Setup:
        """The published set-up."""
        return SETUPS[self.setup]

    @property
    def paper(self) -> str:
        return self.setup.partition(".")[0]

    @property
    def problem(self) -> str:
        """The calibration problem that its constants are from: the set-up's, its machine's or its paper's."""
        names = (self.setup, self.setup.rpartition(".")[0], self.paper)
        found = next((_PROBLEMS[name] for name in names if name in _PROBLEMS), self.paper)
        return f"{found}_{self.own}" if self.own else found

    @property
    def title(self) -> str:
        """For people: what is not as usual."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return ", ".join(f"{name} {value}" for name, value in changed.items())

    @property
    def period(self) -> int:
        """Steps from one empty long-prompt queue to the next: short rounds until it holds a batch, and a long one. Of
        RhymeRL, an odd and an even step."""
        spare = math.ceil(round((self.prompt_factor - 1) * self.num_prompts, 6))
        if self.rule != "tail" or not spare:
            return 2 if self.paper == "rhymerl" else 1
        return math.lcm(spare, self.num_prompts) // spare + math.lcm(spare, self.num_prompts) // self.num_prompts

    @property
    def num_prompts(self) -> int:
        count = self.prompts or self.of.num_prompts
        return max((count if self.of.group_size > 1 else count // GROUP) // self.scale, 2)

    @property
    def group_size(self) -> int:
        return self.of.group_size if self.of.group_size > 1 else GROUP

    @property
    def degree(self) -> int:
        """The TP degree that rounds start in."""
        return self.tp or self.of.tp

    @property
    def num_devices(self) -> int:
        least = self.degree * self.workers * (2 if self.one_off or self.paper == "rhymerl" else 1)
        return max((self.devices or self.of.num_devices) // self.scale, least)

    @property
    def rollout_devices(self) -> int:
        """Devices of the rollout's own; 0: training has them as well, in turns."""
        return self.num_devices // 2 if self.one_off or self.paper == "rhymerl" else 0

    @property
    def max_tokens(self) -> int:
        return max((self.tokens or self.of.max_tokens) // self.scale, 64)

    @property
    def prompts_of_epoch(self) -> int:
        steps = EPOCH_STEPS if self.paper == "rhymerl" else self.epoch_steps
        return steps * self.num_prompts or DATASET_PROMPTS


# ---------------------------------------------------------------- the experiments


def _experiment(entry: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    columns, rows = entry["columns"], entry["rows"]
    return {row: {name: columns[name] | own for name in own.get("only", columns)} for row, own in rows.items()}


_WRITTEN = yaml.safe_load((HERE / "cases.yaml").read_text(encoding="utf-8"))
_OPTIONS = _WRITTEN.pop("options")
EXPERIMENTS = {name: _experiment(entry) for name, entry in _WRITTEN.items()}
"""By experiment, row and column: the fields of a case."""


def case_of(fields: dict[str, Any], steps: int = 40, scale: int = 1) -> Case:
    """A case over so many steps at most, in whole periods of short rounds and a long one where there are such."""
    own = dict(fields)
    own.pop("only", None)
    warm_up, again = own.pop("warm_up", 0), own.pop("again", False)
    case = replace(Case.read(own), scale=scale)
    if scale > 1:  # two workers are enough to try something out
        case = replace(case, workers=min(case.workers, 2))
    whole = -(-min(steps, case.steps) // case.period) * case.period
    if again:
        return replace(case, steps=2 * whole, epoch_steps=whole)
    return replace(case, steps=whole + warm_up)


def cases_of(experiment: str, steps: int, seeds: Iterable[int], decode_steps: int, scale: int) -> list[Case]:
    """Every run."""
    chosen = list(seeds)
    return [
        replace(case_of(entry, steps, scale), seed=seed, decode_steps=decode_steps)
        for row in EXPERIMENTS[experiment].values()
        for entry in row.values()
        for seed in chosen
    ]


def jobs_of(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases that are run together: one without a stream trainer, and those that differ from it in the stream alone."""
    jobs: dict[Case, list[Case]] = {}
    for case in cases:
        jobs.setdefault(case.base, []).append(case)
    return list(jobs.values())


# ---------------------------------------------------------------- as configurations


def configuration(case: Case, calibration: Calibration) -> Config:
    """What `jaxrl simulate` would be given."""
    values = calibration[case.problem]
    says = [name for name in ("planner", "freed_at", "fetch", "one_off") if getattr(case, name)]
    if case.stream != "off":
        says.append("stream")
    options: dict[str, Any] = {}
    for name in ("all", case.paper, case.rule, case.own, *says):
        options |= _OPTIONS.get(name, {})
    options |= {
        "model.path": case.of.model,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": case.max_tokens,
        "data.train_batch_size": case.num_prompts,
        "rollout.n": case.group_size,
        "rollout.tensor_model_parallel_size": case.degree,
        "rollout.decode_steps": case.decode_steps,
        "rollout.num_workers": case.workers,
        "trainer.total_training_steps": case.steps,
        "trainer.seed": case.seed,
        "simulate.hardware": case.of.hardware,
        "simulate.num_devices": case.num_devices,
        "rollout.num_devices": case.rollout_devices,
        "simulate.num_prompts": case.prompts_of_epoch,
        **_options_of_rule(case),
        **(_options_of_rewards(case, values) if case.paper == "rollpacker" else {}),
    }
    if case.paper == "rhymerl":
        options |= {
            "rollout.speculation": {"enable": case.speculation, "verify_tokens": VERIFY_TOKENS},
            "rollout.ranking_groups.enable": case.pipeline != "off",
            "rollout.ranking_groups.num_groups": RANKING_GROUPS[case.tasks[0]] if case.scale == 1 else 2,
            "rollout.ranking_groups.two_tier": case.pipeline == "two_tier",
        }
    nested: dict[str, Any] = {}
    for path, value in options.items():
        *sections, name = path.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return from_mapping(nested)


def _options_of_rule(case: Case) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if case.rule == "tail":
        options["rollout.tail_batching.relaunch"] = "new"  # the authors' engine has no bits of a sample's own
        options["rollout.tail_batching.prompt_factor"] = case.prompt_factor
        options["rollout.tail_batching.response_factor"] = case.response_factor
    if case.rule == "partial":
        options["rollout.partial_rollout.over_provision"] = case.prompt_factor
    if case.rule == "adaptive" or case.planner:
        # the planner's are all of a host, where a worker's devices allow it; of the 32B model from 2 on, since its
        # weights alone take three quarters of a device
        smallest, largest = 2 if case.setup == "rollpacker.32b" else 1, case.num_devices // case.workers
        degrees = [tp for tp in case.degrees or (1, 2, 4, 8) if smallest <= tp <= largest]
        options |= {"rollout.layout.degrees": degrees}
    if case.freed_at:
        options["trainer.stream.min_done"] = case.freed_at
    if case.memory:
        options["rollout.memory_fraction"] = case.memory
    return options


def _options_of_rewards(case: Case, values: Values) -> dict[str, Any]:
    """In RollPacker's baseline and its row of tail batching, rewards wait for the rollout's end, and the tasks for one
    another; scored beside the rollout, each task has its own workers."""
    by_row = case.anchors == "rows"
    options: dict[str, Any] = {
        "data.reference_time_key": "reference_time" if by_row else "",
        "reward.timeout_s": values["reward.code.timeout_s"],
        "reward.score_when": case.score_when,
        "simulate.tasks": _reward_workers(case, values),
        "simulate.score_in_turn": case.score_when == "rollout",
    }
    if case.timeout != "whole":
        options["reward.domains"] = {"code": {"kind": "code"}}
        options["reward.code"] = {"timeout": case.timeout, "timeout_factor": OWN_FACTOR if by_row else 1.5}
    return options


def _reward_workers(case: Case, values: Values) -> dict[str, Any]:
    """The tasks' reward workers, in the order in which they score."""
    more = max(case.devices / case.of.num_devices, 1)  # of the nodes' processors
    found: dict[str, dict[str, float]] = {
        name: {"workers": int(values[f"reward.{name}.workers"] * more)} for name in case.tasks
    }
    if case.judge == "devices":
        # as many device-seconds as the baseline's workers need on the devices that they have for themselves
        seconds = values["reward.judge.median_s"] / values["reward.judge.workers"]
        found["judge"] = {"device_s": seconds * RESERVED_SHARE}
    return {name: {"scoring": scoring} for name, scoring in found.items()}


# ---------------------------------------------------------------- costs and lengths


@dataclass(frozen=True)
class OneOutlier(ModelledWorkload):
    """Batches of consecutive prompts, in each of which one response reaches the limit (PAT §5.1).

    Attributes:
      num_prompts, group_size: of a batch.
    """

    num_prompts: int = 1
    group_size: int = 1

    def length(self, key: SampleKey, step: int = 0) -> int:
        batch, place = divmod(key.prompt_index, self.num_prompts)
        size = self.num_prompts * self.group_size
        first_word = 20_000_926  # of the outlier's identity, beside those of `jaxrl.sim.workload`
        if place * self.group_size + key.sample_index == int(uniform(first_word, self.seed, batch) * size):
            return self.max_response_length
        return super().length(key, step)


def models(case: Case, calibration: Calibration) -> tuple[CostModel, ModelledWorkload]:
    """Costs and lengths."""
    values = calibration[case.problem]
    limits = (case.max_tokens, PROMPT_TOKENS)
    if case.paper == "rollpacker":
        elsewhere = lengths_of(calibration[case.lengths]) if case.lengths else None
        tasks = tuple(_rollpacker_task(case, values, name, elsewhere) for name in case.tasks)
        workload = ModelledWorkload(case.seed, tasks, *limits, values["reward.code.timeout_s"])
    elif case.paper == "rhymerl":
        workload = ModelledWorkload(case.seed, (_rhymerl_task(case, calibration),), *limits)
    else:
        lengths = lengths_of(values)
        lengths = lengths.replace(median=lengths.median * case.longer)
        only = (_task("math", lengths, correlation=values.get("correlation", 0.0)),)
        batch = {"num_prompts": case.num_prompts, "group_size": GROUP}
        workload = ModelledWorkload(case.seed, only, *limits)
        if case.paper == "pat":
            workload = OneOutlier(case.seed, only, *limits, **batch)
    return cost_of(case.of, values), workload


def _task(name: str, lengths: SimulatedLengths, **more: Any) -> SimulatedTask:
    return SimulatedTask(name=name, response=lengths, prompt_median=PROMPT_TOKENS, prompt_sigma=0.0, **more)


def _rollpacker_task(case: Case, values: Values, name: str, lengths: SimulatedLengths | None) -> SimulatedTask:
    median_s, hang_share = values[f"reward.{name}.median_s"], values[f"reward.{name}.hang_share"]
    scoring = SimulatedScoring(median_s=median_s, hang_share=hang_share)
    more = {"correlation": values["correlation"], "scoring": scoring, "pass_spread": case.pass_spread}
    return _task(name, lengths or task_lengths(values, name), **more)


def _rhymerl_task(case: Case, calibration: Calibration) -> SimulatedTask:
    """Lengths as of the middle of the paper's runs, growing in an epoch here as much as in one of the paper's."""
    (task,), values = case.tasks, calibration["rhymerl_machine"]
    growth = (1 + values["lengths.growth"]) ** (PAPER_EPOCH_STEPS / EPOCH_STEPS) - 1
    begun = (1 + growth) ** -(2 * EPOCH_STEPS)  # between the second and the third epoch is the middle of the paper's
    lengths = lengths_at(values, task)
    return _task(
        task,
        lengths.replace(growth=growth, median=lengths.median * begun),
        correlation=values[f"{task}.correlation"],
        outlier_share=values["outlier_share"],
        history=history_of(calibration["rhymerl_drafts"], task),
    )
