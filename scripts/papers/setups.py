"""Published set-ups as configurations of `jaxrl simulate`, with constants of a calibration file.

Purpose: `Case` is one run: a set-up of `papers.facts.SETUPS`, a rule with its factors, a seed. `configuration`
and `models` turn it into what `jaxrl.commands.simulate.build` takes. Nothing in here reads the results of the papers'
own methods.

Source: RollPacker §2.2, §6 (set-ups, uniform mix of three tasks), §6.3 (factors); APRIL §3.1 and A.2; PAT §5.1;
RhymeRL §7.

Departures, where the papers are silent: the calibration file's assumptions; prompts of `PROMPT_TOKENS` tokens; vLLM's
and SGLang's limits on rows are not reached by any case and stand at `ROWS`; the optimizer's state lies in host memory
during a rollout, as in veRL and slime.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxrl.config import Config, SimulatedLengths, SimulatedScoring, SimulatedTask, from_mapping
from jaxrl.mechanisms.speculation import MIN_WINDOW, WINDOW_STEP, Speculation
from jaxrl.mechanisms.speculation.rule import DraftConfig, DraftWindow
from jaxrl.mechanisms.speculation.simulated import SimulatedDrafts, acceptance_model
from jaxrl.models.shapes import named_shape
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.hardware import HARDWARE
from jaxrl.sim.workload import ModelledWorkload
from papers.calibrate import constant
from papers.calibration import Calibration
from papers.closed_form import PROMPT_TOKENS
from papers.facts import SETUPS, Setup
from papers.lengths import lengths_of
from papers.pat import GROUP, OneOutlier
from papers.rhymerl import history_of, lengths_at
from papers.rollpacker import OWN_TRAINER, TASKS, task_lengths

ROWS = 512  # per dp group
RESERVED_SHARE = 0.25  # of the devices, that a judge has for itself elsewhere (RollPacker §4.3)
OWN_FACTOR = 2.0  # of a row's anchor, in RollPacker's code (code_sandbox_reward_worker.py); the paper has 1.5
NODE = 8  # devices, which TP does not leave
DATASET_PROMPTS = 100_000  # no prompt comes twice in any case but RhymeRL's
EPOCH_STEPS = 4  # of RhymeRL's runs here
PAPER_EPOCH_STEPS = 8192 // SETUPS["rhymerl.math"].num_prompts  # in which its lengths grow as much; 8K prompts: §7

RANKING_GROUPS = {"math": 16, "code": 8}  # RhymeRL §7.2.3
VERIFY_TOKENS = 256  # of a step of a dp group: what jaxrl takes on GPUs

_OWN_PROBLEM = ("rollpacker.7b", "rollpacker.32b")  # set-ups with machines of their own; the others share their paper's

Rule = Literal["plain", "tail", "partial", "adaptive"]
Stream = Literal["off", "adaptive", "fixed"]
Pipeline = Literal["off", "naive", "two_tier"]


@dataclass(frozen=True, slots=True)
class Case:
    """One simulated run.

    Attributes:
      setup: a name in `facts.SETUPS`.
      rule: batches as the baseline makes them, tail batching, partial rollout, or the baseline in an adaptive layout.
      prompt_factor, response_factor: of tail batching; the former is partial rollout's over-provisioning.
      tasks: in equal shares.
      score_when: rewards wait for the rollout's end, or begin as each response ends.
      tp, tokens, devices, prompts: in place of the set-up's TP degree, longest response and number of devices and of
        prompts; 0: the set-up's.
      degrees: that an adaptive layout may use; empty: all of a host.
      workers: that roll out.
      planner: whether the degree follows preemptions.
      own_trainer: training costs what RollPacker's own trainer does, not its baseline's.
      stream: the stream trainer in long rounds, and what frees devices.
      freed_at: with `fixed`, the share of a round's samples after which they are freed.
      fetch: the stream gets groups once, those that are there, and no more than this share of the batch; 0: as they
        end.
      pipeline: ranking groups, with equal shares of workers or with two tiers.
      speculation: drafts from the epoch before.
      timeout: of the code task; whole: of all of a sample's scoring, as the baseline has it; else of its test case.
      anchors: of adaptive time-outs; rows: a column of the data has one for every prompt, and limits are twice those,
        as in the authors' code; else what right responses have taken.
      epoch_steps: batches after which prompts come again; 0: no prompt does.
      pass_spread: how much prompts differ in how often they are solved (`simulate.tasks.NAME.pass_spread`).
      judge: has workers of its own, beside all devices; or takes its time from the rollout's devices.
      steps, seed: of the run.
      decode_steps: the most steps of a plan; how late the end of a round may be seen.
      scale: divides prompts, devices and the longest response, to try the script out.
    """

    setup: str
    rule: Rule
    prompt_factor: float = 1.0
    response_factor: float = 1.0
    tasks: tuple[str, ...] = TASKS
    steps: int = 40
    seed: int = 0
    decode_steps: int = 16
    scale: int = 1
    tp: int = 0
    tokens: int = 0
    devices: int = 0
    prompts: int = 0
    score_when: Literal["rollout", "sample"] = "rollout"
    degrees: tuple[int, ...] = ()
    workers: int = 1
    planner: bool = False
    own_trainer: bool = False
    stream: Stream = "off"
    freed_at: float = 0.0
    fetch: float = 0.0
    pipeline: Pipeline = "off"
    speculation: bool = False
    timeout: Literal["whole", "fixed", "adaptive"] = "whole"
    anchors: Literal["learnt", "rows"] = "learnt"
    epoch_steps: int = 0
    pass_spread: float = 2.0
    judge: Literal["workers", "devices"] = "workers"

    @property
    def base(self) -> Case:
        """The same without a stream trainer, with the same rounds."""
        return replace(self, stream="off", freed_at=0.0, fetch=0.0)

    @property
    def of(self) -> Setup:
        """The published set-up."""
        return SETUPS[self.setup]

    @property
    def problem(self) -> str:
        """The calibration problem that its constants are from."""
        paper, name = self.setup.split(".")[:2]
        if self.own_trainer:
            return OWN_TRAINER
        if paper == "rhymerl":
            return "rhymerl_machine"
        return f"{paper}_{name}" if paper == "pat" or self.setup in _OWN_PROBLEM else paper

    @property
    def paper(self) -> str:
        return self.setup.split(".", maxsplit=1)[0]

    @property
    def title(self) -> str:
        """For people."""
        factors = f" P {self.prompt_factor:g} R {self.response_factor:g}" if self.rule in ("tail", "partial") else ""
        layout = f", tp {self.degree}, {self.num_devices} devices" if self.tp or self.devices else ""
        layout += f", of tp {', '.join(map(str, self.degrees))}" if self.degrees else ""
        longest = f", {self.max_tokens} tokens" if self.tokens else ""
        longest += ", scored beside the rollout" if self.score_when == "sample" else ""
        longest += f", {self.workers} workers" if self.workers > 1 else ""
        longest += ", planner" if self.planner else ""
        if self.stream != "off":
            longest += f", stream {self.stream}" + (f" {self.freed_at:.0%}" if self.freed_at else "")
        longest += f", ranking groups {self.pipeline}" if self.pipeline != "off" else ""
        longest += ", speculation" if self.speculation else ""
        longest += f", {self.prompts} prompts" if self.prompts else ""
        longest += f", time-outs {self.timeout}" if self.timeout != "whole" else ""
        longest += ", an anchor for every row" if self.anchors == "rows" else ""
        longest += f", epochs of {self.epoch_steps} steps" if self.epoch_steps else ""
        longest += f", spread of pass rates {self.pass_spread:g}" if self.pass_spread != 2.0 else ""
        longest += ", judge on the devices" if self.judge == "devices" else ""
        if self.fetch:
            longest += f", one fetch of {self.fetch:.0%}"
        return f"{self.setup} {self.rule}{factors}, {'+'.join(self.tasks)}{layout}{longest}, seed {self.seed}"

    @property
    def period(self) -> int:
        """Steps from one empty long-prompt queue to the next: short rounds until it holds a batch, and a long one."""
        spare = math.ceil(round((self.prompt_factor - 1) * self.num_prompts, 6))
        if self.rule != "tail" or not spare:
            return 1
        return math.lcm(spare, self.num_prompts) // spare + math.lcm(spare, self.num_prompts) // self.num_prompts

    @property
    def num_prompts(self) -> int:
        count = self.prompts or self.of.num_prompts
        return max((count if self.of.group_size > 1 else count // GROUP) // self.scale, 2)

    @property
    def degree(self) -> int:
        """The TP degree that rounds start in."""
        return self.tp or self.of.tp

    @property
    def num_devices(self) -> int:
        least = self.degree * self.workers * (2 if self.paper == "rhymerl" else 1)  # half of them rolls out
        return max((self.devices or self.of.num_devices) // self.scale, least)

    @property
    def rollout_devices(self) -> int:
        """Devices of the rollout's own; 0: training has them as well, in turns."""
        return self.num_devices // 2 if self.paper == "rhymerl" else 0

    @property
    def max_tokens(self) -> int:
        return max((self.tokens or self.of.max_tokens) // self.scale, 64)


def configuration(case: Case, calibration: Calibration) -> Config:
    """What `jaxrl simulate` would be given."""
    setup, rollpacker = case.of, case.paper == "rollpacker"
    return from_mapping(
        {
            "model": {"path": setup.model},
            "data": {
                "task": "none",
                "max_prompt_length": PROMPT_TOKENS,
                "max_response_length": case.max_tokens,
                "train_batch_size": case.num_prompts,
                "reference_time_key": "reference_time" if case.anchors == "rows" else "",
                "shuffle": case.paper != "pat",  # an outlier for each batch goes by the order of the prompts
                "val_size": 0,
            },
            "rollout": _rollout(case),
            # APRIL trains without KL (A.2); RollPacker's table counts a reference model; PAT does not say
            "actor": {
                "dtype": "bfloat16",
                "offload_optimizer": True,
                "use_kl_loss": case.paper in ("rollpacker", "rhymerl"),
                "old_logprobs": "rollout" if case.own_trainer or case.paper == "rhymerl" else "recompute",
                "ppo_max_token_len_per_gpu": 1 << 16,
            },
            # in RollPacker's baseline and its row of tail batching, rewards wait for the rollout's end, and the tasks
            # for one another; scored beside the rollout, each task has its own workers
            "reward": {
                "timeout_s": _timeout_s(case, calibration) if rollpacker else 0.0,
                "score_when": case.score_when if rollpacker else "sample",
                "domains": {} if case.timeout == "whole" else {"code": {"kind": "code"}},
                "code": {} if case.timeout == "whole" else _limits(case),
            },
            "trainer": {
                "total_training_steps": case.steps,
                "save_freq": 0,
                "seed": case.seed,
                "stream": _stream(case),
                "one_step_off": case.paper == "rhymerl",
            },
            "simulate": {
                "hardware": setup.hardware,
                "num_devices": case.num_devices,
                "num_prompts": _epoch_steps(case) * case.num_prompts or DATASET_PROMPTS,
                "tasks": _own_workers(case, calibration) if rollpacker else {},
                "score_in_turn": rollpacker and case.score_when == "rollout",
            },
        }
    )


def _limits(case: Case) -> dict[str, Any]:
    """`reward.code`."""
    return {"timeout": case.timeout, "timeout_factor": OWN_FACTOR if case.anchors == "rows" else 1.5}


def _rollout(case: Case) -> dict[str, Any]:
    """`rollout`."""
    setup, april = case.of, case.paper == "april"
    rollout: dict[str, Any] = {
        "n": setup.group_size if setup.group_size > 1 else GROUP,
        "tensor_model_parallel_size": case.degree,
        "dtype": "bfloat16",
        "max_num_seqs": ROWS,
        # SGLang prefills all that waits before it decodes on, and a resumed response has thousands of tokens
        "max_num_batched_tokens": 1 << 20 if april else 8192,
        "decode_steps": case.decode_steps,
        "sample_placement": "spread" if april else "together",
        "num_workers": case.workers,
    }
    if case.rule == "tail":
        rollout["tail_batching"] = {
            "enable": True,
            "prompt_factor": case.prompt_factor,
            "response_factor": case.response_factor,
            "at_end": "leave",
        }
    if case.rule == "partial":
        rollout["partial_rollout"] = {"enable": True, "over_provision": case.prompt_factor, "at_end": "leave"}
    if case.rule == "adaptive":
        rollout["layout"] = {
            "switch": True,
            "profile": "of the modelled devices",
            "devices_per_host": NODE,
            "degrees": [degree for degree in case.degrees if degree <= case.num_devices],
        }
    if case.own_trainer:
        rollout["memory_fraction"] = 0.8
    if case.paper == "rhymerl":
        rollout |= {
            "num_devices": case.rollout_devices,
            "deal": "prompts",
            "speculation": {"enable": case.speculation, "verify_tokens": VERIFY_TOKENS},
            "ranking_groups": {
                "enable": case.pipeline != "off",
                "num_groups": RANKING_GROUPS[case.tasks[0]] if case.scale == 1 else 2,
                "two_tier": case.pipeline == "two_tier",
                "move": "recompute",
            },
        }
    if case.planner:
        rollout["layout"] = {"planner": True, "devices_per_host": NODE, "degrees": _planned_degrees(case)}
    return rollout


def _epoch_steps(case: Case) -> int:
    """Batches of an epoch; 0: no prompt comes twice."""
    return EPOCH_STEPS if case.paper == "rhymerl" else case.epoch_steps


def _stream(case: Case) -> dict[str, Any]:
    """`trainer.stream`."""
    if case.stream == "off":
        return {}
    found: dict[str, Any] = {"enable": True, "counts": "prompts"}
    if case.stream == "fixed":
        found |= {"trigger": "fixed", "min_done": case.freed_at, "max_done": 1.0}
    return found | ({"max_prompts": 0} if case.fetch else {})


def _planned_degrees(case: Case) -> list[int]:
    """All of a host, where a worker's devices allow it; of the 32B model from 2 on, since its weights alone take three
    quarters of a device."""
    smallest = 2 if case.setup == "rollpacker.32b" else 1
    return [tp for tp in (1, 2, 4, 8) if smallest <= tp <= case.num_devices // case.workers]


def models(case: Case, calibration: Calibration) -> tuple[CostModel, ModelledWorkload]:
    """Costs and lengths."""
    cost = CostModel(named_shape(case.of.model), HARDWARE[case.of.hardware], calibration.efficiency(case.problem))
    values = calibration.of(case.problem)

    def task(name: str, lengths: SimulatedLengths, correlation: float, scoring: SimulatedScoring) -> SimulatedTask:
        return SimulatedTask(
            name=name,
            response=lengths,
            correlation=correlation,
            prompt_median=PROMPT_TOKENS,
            prompt_sigma=0.0,
            scoring=scoring,
            pass_spread=case.pass_spread,
        )

    if case.paper == "rhymerl":
        return cost, _rhymerl_workload(case, calibration)
    if case.paper != "rollpacker":
        plain = (task("math", lengths_of(values), values.get("correlation", 0.0), SimulatedScoring()),)
        limits = (case.seed, plain, case.max_tokens, PROMPT_TOKENS)
        if case.paper == "pat":
            return cost, OneOutlier(*limits, num_prompts=case.num_prompts, group_size=GROUP)
        return cost, ModelledWorkload(*limits)
    tasks = [
        task(name, task_lengths(values, name), values["correlation"], _scoring(values, name)) for name in case.tasks
    ]
    limit_s = _timeout_s(case, calibration)
    return cost, ModelledWorkload(case.seed, tuple(tasks), case.max_tokens, PROMPT_TOKENS, limit_s)


def _rhymerl_workload(case: Case, calibration: Calibration) -> ModelledWorkload:
    """Lengths as of the middle of the paper's runs, growing in an epoch here as much as in one of the paper's."""
    (task,) = case.tasks
    values, drafts = calibration.of("rhymerl_machine"), calibration.of("rhymerl_drafts")
    growth = (1 + values["lengths.growth"]) ** (PAPER_EPOCH_STEPS / EPOCH_STEPS) - 1
    lengths = lengths_at(values, task).replace(growth=growth)
    begun = (1 + growth) ** -(2 * EPOCH_STEPS)  # between the second and the third epoch is the middle of the paper's
    only = SimulatedTask(
        name=task,
        response=lengths.replace(median=lengths.median * begun),
        correlation=values[f"{task}.correlation"],
        outlier_share=values["outlier_share"],
        prompt_median=PROMPT_TOKENS,
        prompt_sigma=0.0,
        history=history_of(drafts, task),
    )
    return ModelledWorkload(case.seed, (only,), case.max_tokens, PROMPT_TOKENS)


def drafting_of(case: Case, workload: ModelledWorkload) -> SimulatedDrafts:
    """How the rows of a case draft."""
    options = Speculation.Options()
    window = DraftWindow(MIN_WINDOW, WINDOW_STEP, options.max_window)
    tell = acceptance_model(case.seed, workload, options)
    return SimulatedDrafts(tell, DraftConfig(window, VERIFY_TOKENS))


def _timeout_s(case: Case, calibration: Calibration) -> float:
    """When scoring is cut off: a run has one limit, and only responses of the code task reach theirs."""
    return constant(calibration, case.problem, "reward.code.timeout_s")


def _scoring(values: Mapping[str, float], task: str) -> SimulatedScoring:
    return SimulatedScoring(median_s=values[f"reward.{task}.median_s"], hang_share=values[f"reward.{task}.hang_share"])


def _own_workers(case: Case, calibration: Calibration) -> dict[str, Any]:
    """The tasks' reward workers, in the order in which they score."""
    values = calibration.of(case.problem)
    found: dict[str, dict[str, float]] = {
        name: {"workers": int(values[f"reward.{name}.workers"])} for name in case.tasks
    }
    if case.judge == "devices":
        # as many device-seconds as the baseline's workers need on the devices that they have for themselves
        seconds = values["reward.judge.median_s"] / values["reward.judge.workers"]
        found["judge"] = {"device_s": seconds * RESERVED_SHARE}
    return {name: {"scoring": scoring} for name, scoring in found.items()}
