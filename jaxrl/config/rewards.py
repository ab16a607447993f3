"""Options of the reward stage (`reward.*`): scorers, domains and parts, the sandbox for code, and models that score.

Source: RollPacker §4.3 for adaptive timeouts and the model that scores beside the actor.
"""

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import Field

from jaxrl.mechanisms.judge import Judge
from jaxrl.schema.declared import Cap, Names, Or
from jaxrl.schema.limits import MAX_WAIT, ScoreWhen
from jaxrl.schema.section import Section

RewardKind = Literal["auto", "math", "task", "code", "judge", "model", "custom", "environment"]
Extract = Literal["auto", "none", "last_number", "boxed", "answer_tag"]
Place = Literal["workers", "endpoint", "devices"]
"""Where samples are scored: worker processes, an endpoint that a thread asks, or the run's devices."""


class DomainSection(Section):
    """How samples of one source are scored; what is left at its default is that of `reward`."""

    kind: Annotated[RewardKind, "The scorer, as in reward.kind."] = "auto"
    weight: Annotated[float, "What the scorer's reward is multiplied by before parts are added."] = 1.0
    path: Annotated[str, Names("file"), "The Python file of a custom scorer."] = ""
    name: Annotated[str, "The function in the file, as reward.name."] = "compute_score"
    extract: Annotated[
        Literal["inherit", "auto", "none", "last_number", "boxed", "answer_tag"],
        "Which part of a response is the answer; inherit: as reward.extract.",
    ] = "inherit"
    timeout_s: Annotated[
        float, Ge(0), Or(-1, "reward.timeout_s"), MAX_WAIT, "Seconds that scoring one sample may take; 0: no limit."
    ] = -1.0


class PartSection(Section):
    """One part of a reward beside the scorer's."""

    kind: Annotated[
        Literal["format", "length", "custom"],
        "What it is; format: 1 if the response matches pattern, length: 0 up to free_tokens, falling to -1 at "
        "data.max_response_length, custom: the function at path.",
    ] = "format"
    weight: Annotated[float, "What the part is multiplied by."] = 1.0
    pattern: Annotated[str, "A regular expression that the whole response must match, `.` matching line ends."] = ""
    free_tokens: Annotated[int, Ge(0), "Tokens of a response that cost nothing."] = 0
    path: Annotated[str, Names("file"), "The Python file of a part of your own."] = ""
    name: Annotated[str, "The function in the file, as reward.name."] = "compute_score"


class CodeSection(Section):
    """Model-written programs, run against tests in a sandbox (reward.kind=code)."""

    tests_key: Annotated[
        str,
        "Column with the tests (with dots: what is nested in one): assertions or a test program as text, a list of "
        "them, or a mapping with `inputs`, `outputs` and perhaps `fn_name`; empty: as the columns of HumanEval, MBPP, "
        "LiveCodeBench or KodCode say.",
    ] = ""
    command: Annotated[
        list[str],
        "The command line that runs a program, with `{file}` where its file's name goes; none: Python, in a fork of a "
        "warm interpreter.",
    ] = []
    score: Annotated[
        Literal["all", "share"], "The reward; all: 1 if every test passes, else 0; share: the share that passes."
    ] = "all"
    sandbox: Annotated[
        Literal["auto", "fork", "bubblewrap", "none"],
        "What locks a program in; auto: fork; fork: a fork server with seccomp, Landlock and resource limits; "
        "bubblewrap: namespaces; none: nothing, for trusted programs alone.",
    ] = "auto"
    timeout: Annotated[
        Literal["adaptive", "fixed"],
        "The time limit of a test case; adaptive: timeout_factor times the longest time of a correct response so far, "
        "between min_timeout_s and max_timeout_s; fixed: max_timeout_s.",
    ] = "adaptive"
    min_timeout_s: Annotated[float, Gt(0), MAX_WAIT, "Seconds: the least time limit of a test case."] = 2.0
    max_timeout_s: Annotated[float, Gt(0), MAX_WAIT, "Seconds: the largest limit, and that before any is right."] = 30.0
    max_failing_s: Annotated[
        float,
        Ge(0),
        MAX_WAIT,
        "Seconds that a program may take with test cases which it does not pass, beyond which the cases left count as "
        "wrong; 0: no limit. It matters with score=share: with all the first wrong case ends the verdict.",
    ] = 60.0
    timeout_factor: Annotated[float, Ge(1), "What the longest time of a correct response is multiplied by."] = 1.5
    max_memory_mib: Annotated[int, Ge(16), Cap(2**30, "no machine has more"), "MiB that a program may take."] = 512


class OverlongBufferSection(Section):
    """DAPO's overlong reward shaping: a response near data.max_response_length loses reward, in training only."""

    enable: Annotated[bool, "Switch overlong reward shaping on."] = False
    len: Annotated[
        int, Ge(0), "Tokens before data.max_response_length over which the penalty grows; above 0 where it is on."
    ] = 0
    penalty_factor: Annotated[float, Ge(0), "What a response of data.max_response_length tokens loses."] = 1.0


class RewardSection(Section):
    """How samples are scored."""

    kind: Annotated[
        RewardKind,
        "The scorer; auto: the task's own for data.task, math for files; code: runs the response against tests; "
        "judge: a language model's verdict; model: a reward model's scalar; custom: the function at reward.path; "
        "environment: what environment.path gives for turns.",
    ] = "auto"
    path: Annotated[str, Names("file"), "The Python file of a custom scorer."] = ""
    name: Annotated[
        str,
        "The function in reward.path, called with data_source, solution_str, ground_truth and extra_info.",
    ] = "compute_score"
    extract: Annotated[
        Extract,
        "Which part of a response is the answer; none: all of it, last_number: its last number, boxed: the content of "
        "`\\boxed{}`, answer_tag: that of `<answer>`, auto: the last marked answer, or else the last line or "
        "number.",
    ] = "auto"
    timeout_s: Annotated[float, Ge(0), MAX_WAIT, "Seconds that the scoring of one sample may take; 0: no limit."] = 10.0
    math_timeout_s: Annotated[
        float,
        Ge(0),
        MAX_WAIT,
        "Seconds that scoring one sample may take with the kinds math and auto, where timeout_s is longer; 0: "
        "timeout_s. A domain's own timeout_s replaces both.",
    ] = 2.0
    start_timeout_s: Annotated[
        float,
        Gt(0),
        MAX_WAIT,
        "Seconds that a scoring process may take to load the scorer: to import the file at reward.path.",
    ] = 120.0
    num_workers: Annotated[int, Ge(1), Cap(1024, "each is a process with its own Python"), "Processes that score."] = 1
    max_memory_gib: Annotated[
        float,
        Ge(0),
        Cap(2**20, "no machine has more"),
        "GiB that one scoring process may take, beyond which its sample has reward 0; 0: no limit.",
    ] = 8.0
    env: Annotated[
        list[str],
        "Environment variables that scorers see besides PATH, HOME, locale, Python's and thread counts; a key or token "
        "only if it is named here.",
    ] = []
    pool: Annotated[
        Literal["process", "ray"], "Where samples are scored; process: on this machine, ray: on a Ray cluster."
    ] = "process"
    score_when: Annotated[
        ScoreWhen,
        "When a sample is scored; sample: when it ends, group: when all of its prompt's have ended, rollout: when all "
        "of the round have.",
    ] = "sample"
    max_retries: Annotated[
        int,
        Ge(0),
        Cap(100, "a scorer that fails so often is broken"),
        "Retries of a sample after its scorer's process died or ran out of memory because of earlier samples, or its "
        "node was lost. A wrong answer, an error of the scorer's own and a time limit are never tried again.",
    ] = 1
    domains: Annotated[
        dict[str, DomainSection],
        "Scorers of prompts by their source (data.source_key), in place of reward.kind; sources without one have that.",
    ] = {}
    parts: Annotated[
        dict[str, PartSection],
        "What is added to every sample's reward, by a name that becomes a metric; each is weighted.",
    ] = {}
    wrong_reward: Annotated[
        float,
        Lt(1),
        "The reward of a wrong answer, in training only: what is scored s from 0 to 1 gets (1 - s) times this on top, "
        "and what could not be scored has it; -1.0: rewards from -1 to 1, as of verl's math_dapo.",
    ] = 0.0
    code: CodeSection = Field(default_factory=CodeSection)
    judge: Judge.Options = Field(default_factory=Judge.Options)
    overlong_buffer: OverlongBufferSection = Field(default_factory=OverlongBufferSection)

    @property
    def kinds(self) -> frozenset[RewardKind]:
        return frozenset({self.kind, *(domain.kind for domain in self.domains.values())})

    def model_of(self, kind: RewardKind) -> Judge.Options | None:
        """The model that scores a kind; None if worker processes do."""
        return self.judge if kind in self.judge.kinds else None
