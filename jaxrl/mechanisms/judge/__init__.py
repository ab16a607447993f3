"""A judge: a language model, or a reward model, that scores beside the actor on the same devices, or at an endpoint.

On the devices it has an engine like the actor's and takes turns with it, a plan each. When it may take one follows from
counts and never from clocks (`reward.judge.busy_share`). Once only verdicts are awaited it has the devices to itself.

A template is text with `{name}` where the value of a field goes; `{{name}}` is `{name}` itself. All other braces stay.

Source: RollPacker §4.3, which runs judge and actor at once and lets the GPU share itself out (MPS).

Departures: judge and actor take turns. The paper does not say where its judge is while half of the devices compute
gradients (§4.4); here a turn takes those as well, after the microbatch that is running, so that a verdict has the same
layout, and the same bits, in every round.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Interval

from jaxrl.scheduling.mechanism import Mechanism, RolloutMemory, RoundState
from jaxrl.schema.declared import Cap, Names, shown
from jaxrl.schema.endpoint import PACE, EndpointOptions, endpoint_problem
from jaxrl.schema.limits import MAX_GIB, template_problem
from jaxrl.schema.section import JsonObject

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.config.rewards import RewardSection
    from jaxrl.mechanisms.judge.device import DeviceJudge
    from jaxrl.run.run import Run

_OF_DEVICES = frozenset(
    [
        *("max_prompt_tokens", "dtype", "max_num_seqs", "max_memory_gib", "resident_layers", "busy_share"),
    ]
)
_OF_WORDS = frozenset({"prompt", "score_pattern", "max_score", "num_samples", "temperature", "max_tokens"})
SCORE = (  # a tag, a heading or a label; marks around the number; what makes it no score: a percentage, a range
    r"(?i)(?<!max[ _])(?<!maximum[ _])(?<!possible[ _])(?<![a-z])score"
    r"(?:>|[*_ \t]*+\n|[\s*_`\"']*+(?:\([^()\n]{0,40}\)[\s*_]*+)?[:=：])"
    r"[\s*_`\"'“<(\[{$]*+(?:\\(?:(?:boxed|textbf)\{|[(\[])\s*+){0,2}((?>-?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?))"
    r"(?![a-z\d%]|,\d|\s*+(?:%|percent|(?:to|or|[-–—])\s*+\d))(?:[\s*_]*+(?:/|out of)[\s*_]*+(?P<of>\d+(?:\.\d+)?))?"
)
"""Reads a score where `score_pattern` is empty; `of`: the highest score, if the judge names it."""
_FIELD = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")


def judge_kind(reward: RewardSection) -> Literal["judge", "model"] | None:
    """The kind of reward that a model on the run's devices gives; None where there is no such model."""
    if "model" in reward.kinds:
        return "model"
    return "judge" if "judge" in reward.kinds and reward.judge.model else None


class Judge(Mechanism):
    """Gives a judge on the rollout's devices its turns. `device` scores what the run's scoring gives it."""

    class Options(EndpointOptions):
        """A language model that scores (reward.kind=judge), or a reward model with a scalar head (kind model)."""

        model: Annotated[
            str, Names("folder"), "The judge's model on the run's devices, as model.path; empty: the endpoint is asked."
        ] = ""
        system_prompt: Annotated[str, "System message for the judge; empty: none."] = ""
        apply_chat_template_kwargs: Annotated[
            JsonObject,
            "Variables for the judge's chat template, such as `{enable_thinking: false}`; an endpoint is sent them as "
            "`chat_template_kwargs`.",
        ] = {}
        prompt: Annotated[
            str,
            "What the judge is asked, with `{question}`, `{response}`, `{answer}` and any column of the data "
            "in braces; `{{answer}}` is text.",
        ] = (
            "Judge the response to the question.\n\nQuestion:\n{question}\n\nReference answer:\n{answer}\n\nResponse:\n"
            "{response}\n\nIs the response correct? Give your verdict on a last line of this form: Score: <0 to 10>"
        )
        score_pattern: Annotated[
            str,
            "A regular expression whose last match in a verdict holds the score in its first group; empty: it reads "
            "`Score: 7`, as models write that.",
        ] = ""
        max_score: Annotated[
            float, Gt(0), "The score that becomes reward 1, as 0 becomes 0; scores beyond are not verdicts."
        ] = 10.0
        num_samples: Annotated[
            int, Ge(1), Cap(64, "each is a response of the judge"), "Verdicts per sample; their mean."
        ] = 1
        temperature: Annotated[float, Ge(0), "Of the judge's sampling; 0: greedy."] = 0.0
        max_tokens: Annotated[int, Ge(1), "Tokens of a verdict at most."] = 256
        max_prompt_tokens: Annotated[
            int,
            Ge(1),
            "Tokens that a model on the devices reads; of longer ones the response is cut. An endpoint has its own "
            "limit.",
        ] = 4096
        dtype: Annotated[Literal["bfloat16", "float32", "float64"], "Type of the judge's weights on the devices."] = (
            "bfloat16"
        )
        max_num_seqs: Annotated[int, Ge(1), "Verdicts that the judge writes at once."] = 8
        max_memory_gib: Annotated[
            float,
            Ge(0),
            MAX_GIB,
            "GiB per device for the judge: resident layers, buffers and KV; 0: half of its weights.",
        ] = 0.0
        resident_layers: Annotated[
            int,
            Ge(-1),
            "Layers that stay on the devices, while the others are streamed; -1: as many as max_memory_gib takes.",
        ] = -1
        busy_share: Annotated[
            float,
            Interval(ge=0, le=1),
            "The share of the rows that may be busy when the judge takes a turn between plans; 0: none, so it runs "
            "after the rollout.",
        ] = 0.5

        kinds: ClassVar = frozenset({"judge", "model"})  # of rewards, that are scored so

        def place(self, kind: str) -> Literal["endpoint", "devices"]:
            """Where samples of one of its kinds are scored."""
            return "endpoint" if kind == "judge" and self.endpoint else "devices"

        def explained(self, kind: str) -> tuple[str, str, str]:
            """The scorer of one of its kinds, its time limit, and how many samples it scores at once."""
            if self.place(kind) == "devices":
                return f"{kind}: {self.model}", "none", f"{self.max_num_seqs} verdicts"
            rate = f", {self.requests_per_minute:g} a minute" if self.requests_per_minute else ""
            return (
                f"judge: {self.endpoint_model or 'a model'} at {self.endpoint}",
                f"{self.request_timeout_s:g} s a request",
                f"{self.max_requests} requests{rate}",
            )

        def unread_with(self, kinds: frozenset[str]) -> Iterator[tuple[str, frozenset[str] | None, str]]:
            """Options that rewards of these kinds do not read: the section, their names (None: all of it), and why."""
            if not self.kinds & kinds:
                yield "reward.judge", None, "no reward's kind is judge or model"
            elif self.endpoint:
                yield "reward.judge", _OF_DEVICES, "an endpoint is the judge, and no model on the devices"
            else:
                yield "reward.judge", PACE | {"endpoint_model", "api_key_env"}, "reward.judge.endpoint is empty"
            if "model" in kinds:
                yield "reward.judge", _OF_WORDS, "a reward model gives a number, and no text"

        def problem(self, option_of: Mapping[str, str], *, has_answers: bool) -> str | None:
            """Why it cannot score, as a sentence. `option_of`: the kinds of rewards that are asked for, each with the
            section that asks for it; `has_answers`: whether prompts have reference answers."""
            if "@" in self.endpoint:  # for any scorer: config.yaml would keep it
                return endpoint_problem("reward.judge", self)
            if self.kinds <= option_of.keys():
                return (
                    f"{option_of['model']}.kind is model, and another kind is judge: reward.judge names one model, "
                    "which is a reward model or a judge"
                )
            if self.kinds & option_of.keys() and (problem := template_problem(self.apply_chat_template_kwargs)):
                return f"reward.judge.apply_chat_template_kwargs.{problem}"
            if "judge" in option_of:
                return _source_problem(self) or _text_problem(self, has_answers)
            if "model" in option_of:
                if not self.model:
                    return "reward.judge.model is missing: reward.kind=model needs a reward model's folder"
                if self.endpoint:
                    return (
                        f"reward.judge.endpoint ({self.endpoint}) needs reward.kind=judge: a reward model is a folder"
                    )
            return None

    title = "a judge on the devices"
    option = "reward.judge.model"
    evaluates = True

    def __init__(self, device: DeviceJudge) -> None:
        self.device = device
        self.device_user = lambda busy_rows: device.turn(busy_rows, self._workers.num_rows)

    @classmethod
    def is_on(cls, config: Config) -> bool:
        return judge_kind(config.reward) is not None

    @classmethod
    def rollout_memory(
        cls, config: Config, num_devices: int, platform: str, weight_bytes: int, is_timeless: bool
    ) -> RolloutMemory:
        from jaxrl.mechanisms.judge.device import rollout_memory

        return rollout_memory(config, num_devices)

    @classmethod
    def build(cls, run: Run) -> Self | None:
        """Loads the judge. A simulated run models it in its scoring."""
        if run.machine.mesh is None or not cls.is_on(run.config):
            return None
        from jaxrl.mechanisms.judge.device import build_judge

        return cls(build_judge(run, run.machine.mesh))

    def attach(self, state: RoundState) -> None:
        self._workers = state.workers

    def leave_rollout(self) -> bool:
        self.device.release()
        return False


def template_fields(template: str) -> list[str]:
    """The names of a template's fields, each once, in their order."""
    return list(dict.fromkeys(match[2] for match in _FIELD.finditer(template) if match[2]))


def fill_template(template: str, value_of: Callable[[str], str]) -> str:
    """The template with its fields' values in one pass: braces in a value are text."""
    return _FIELD.sub(lambda match: value_of(match[2]) if match[2] else "{" + match[1] + "}", template)


def _source_problem(judge: Judge.Options) -> str | None:
    if bool(judge.model) == bool(judge.endpoint):
        found = "both" if judge.model else "neither"
        return f"reward.kind=judge needs one of reward.judge.model and reward.judge.endpoint, found {found}"
    return endpoint_problem("reward.judge", judge) if judge.endpoint else None


def _text_problem(judge: Judge.Options, has_answers: bool) -> str | None:
    fields = template_fields(judge.prompt)
    if "response" not in fields:
        return f"reward.judge.prompt must have the field {{response}}, found {shown(judge.prompt)}"
    if "answer" in fields and not has_answers:
        return "reward.judge.prompt has the field {answer}, but data.answer_key is empty: write a prompt without it"
    try:
        groups = re.compile(judge.score_pattern or SCORE).groups
    except (re.error, OverflowError, RecursionError) as error:
        return f"reward.judge.score_pattern ({shown(judge.score_pattern)}) is no regular expression: {error}"
    if not groups:
        return (
            f"reward.judge.score_pattern ({shown(judge.score_pattern)}) must have a group: the parentheses that hold "
            "the score"
        )
    if judge.num_samples > 1 and judge.temperature == 0:
        return (
            f"reward.judge.num_samples ({judge.num_samples}) needs reward.judge.temperature above 0: greedy verdicts "
            "on a sample are all the same"
        )
    return None
