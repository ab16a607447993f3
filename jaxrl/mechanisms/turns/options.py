"""The options `environment.*`, and what must hold between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval

from jaxrl.schema.declared import Cap, Checked, Names
from jaxrl.schema.limits import MAX_GIB, MAX_LENGTH, MAX_WAIT

_MAX_WORKERS = Cap(1024, "each is a process")


@dataclass(frozen=True)
class EnvironmentSection(Checked):
    """Tools and games: what a model says is answered, and it goes on, over several turns."""

    kind: Annotated[
        Literal["none", "tools", "class", "native", "openai", "verifiers"],
        "What path holds; none: responses have one turn, tools: functions that the model may call, class: a class "
        "whose methods are tools, native: an `Env`, openai: a function that asks for turns itself, by OpenAI's API; "
        "verifiers: the environment of that library that id names, without a path.",
    ] = "none"
    path: Annotated[
        str,
        Names("file"),
        "A Python file, or one that comes with jaxrl: `calculator`, `python`, `search`, `number_guessing`, `wordle`, "
        "`frozen_lake`, `gymnasium` or `openenv`.",
    ] = ""
    id: Annotated[str, "With kind verifiers, the name of the taskset."] = ""
    python: Annotated[
        str,
        Names("file"),
        "With the kinds openai and verifiers, another Python that runs the program; empty: this one.",
    ] = ""
    name: Annotated[
        str,
        "The class in path, of the kinds class and native; a row's column `environment` names another. Of the kind "
        "openai the function; empty: run.",
    ] = ""
    args: Annotated[
        dict[str, Any], "Columns that every row has, such as a game's size; a row's own `env_args` go before them."
    ] = field(default_factory=dict)
    describe_tools: Annotated[
        bool, "Have the chat template describe the tools; false: data.system_prompt does, for a template that cannot."
    ] = True
    num_problems: Annotated[
        int, Ge(1), Cap(10_000_000, "they are kept"), "Training prompts, where the environment makes its own."
    ] = 1000
    max_turns: Annotated[int, Ge(0), "Turns of the model in a trajectory; 0: no limit."] = 0
    max_trajectory_tokens: Annotated[
        int,
        Ge(0),
        MAX_LENGTH,
        "Tokens of a trajectory behind its prompt, answers with them; 0: data.max_response_length.",
    ] = 0
    max_sampled_tokens: Annotated[
        int, Ge(0), MAX_LENGTH, "Tokens that the model draws in a trajectory; 0: no limit."
    ] = 0
    max_tool_calls: Annotated[int, Ge(0), "Calls in a trajectory, after which no turn follows; 0: no limit."] = 0
    rollout_timeout_s: Annotated[
        float, Ge(0), MAX_WAIT, "Seconds after which a trajectory ends where it is between two turns; 0: no limit."
    ] = 0.0
    timeout_s: Annotated[float, Gt(0), MAX_WAIT, "Seconds until the calls of a turn are given up, each for itself."] = (
        10.0
    )
    timeout: Annotated[
        Literal["fixed", "adaptive"],
        "The time limit of a tool; fixed: timeout_s, adaptive: 1.5 times its longest call that went well, 2 s at least "
        "and timeout_s at most.",
    ] = "fixed"
    num_workers: Annotated[int, Ge(1), _MAX_WORKERS, "Processes that answer turns, one at a time each."] = 8
    max_calls_per_worker: Annotated[int, Ge(0), "Turns, or programs, after which a process is replaced; 0: never."] = 0
    max_memory_gib: Annotated[float, Ge(0), MAX_GIB, "GiB that each of them may take; 0: no limit."] = 4.0
    env: Annotated[list[str], "Environment variables of the run that they get."] = field(default_factory=list)
    group: Annotated[
        str,
        "With the kinds tools, class and native, the class in path that compares the trajectories of a prompt, each of "
        "which is given more or less for it; empty: none does.",
    ] = ""
    reward: Annotated[
        Literal["sum", "last"],
        "What reward.kind=environment makes of the rewards of turns; last: that of the last turn alone.",
    ] = "sum"
    reward_discount: Annotated[
        float, Interval(ge=0, le=1), "What a turn's reward is multiplied by for each turn before it, in the sum."
    ] = 1.0

    @property
    def is_on(self) -> bool:
        return self.kind != "none"

    def problem(self, config: Any) -> str | None:
        if not self.is_on:
            if config.algorithm.adv_estimator == "grpo_turns":
                return "algorithm.adv_estimator=grpo_turns needs environment.kind, which is none: there are no turns"
            return None
        if self.kind == "verifiers":
            if not self.id or not self.python:
                return (
                    "environment.kind=verifiers needs environment.id, the environment's name, and environment.python, "
                    "the Python of an environment of its own with verifiers in it"
                )
            data = config.data
            if data.system_prompt or data.prompt_template != "{question}":
                return (
                    "data.system_prompt and data.prompt_template exclude environment.kind=verifiers: its environments "
                    "begin with prompts of their own"
                )
        elif self.python and self.kind != "openai":
            return f"environment.python ({self.python}) needs environment.kind openai or verifiers, found {self.kind}"
        elif not self.path:
            return f"environment.path is missing: environment.kind is {self.kind}, which needs a Python file"
        if self.group:
            if self.kind in ("openai", "verifiers"):
                return (
                    f"environment.group ({self.group}) needs environment.kind tools, class or native, found {self.kind}"
                )
            for option, is_on in (
                ("algorithm.filter_groups.enable", config.algorithm.filter_groups.enable),
                ("trainer.stream.enable", config.trainer.stream.enable),
            ):
                if is_on:
                    return (
                        f"environment.group excludes {option}, which needs a sample's whole reward before its round is "
                        "over: only then are trajectories compared"
                    )
        if not config.data.apply_chat_template:
            return "environment.kind needs data.apply_chat_template: turns are written in the model's chat template"
        if "tools" in config.data.apply_chat_template_kwargs:
            return "data.apply_chat_template_kwargs.tools excludes environment.kind, which gives the template its tools"
        longest = config.data.max_response_length
        for name in ("max_trajectory_tokens", "max_sampled_tokens"):
            if getattr(self, name) > longest:
                return (
                    f"environment.{name} ({getattr(self, name)} tokens) must be at most data.max_response_length "
                    f"({longest} tokens), for which rows and batches have room"
                )
        if config.algorithm.adv_estimator == "grpo_turns" and (self.reward == "last" or self.reward_discount < 1):
            return (
                "algorithm.adv_estimator=grpo_turns excludes environment.reward=last and environment.reward_discount "
                "below 1: it gives each turn its own reward"
            )
        if config.rollout.stop:
            return "rollout.stop excludes environment.kind: a turn ends where the chat template says so"
        return None

    def unread(self, config: Any) -> Iterator[tuple[frozenset[str], str]]:
        if not self.is_on:
            names = frozenset(self.__dataclass_fields__) - {"kind"}
            yield names, "environment.kind is none"
            return
        if self.kind == "tools":
            yield frozenset({"name"}), "environment.kind is tools"
        if self.kind != "tools":
            yield frozenset({"timeout"}), f"environment.kind is {self.kind}"
        if self.kind == "verifiers":
            yield frozenset({"path", "name"}), "environment.kind is verifiers"
        else:
            yield frozenset({"id"}), f"environment.kind is {self.kind}"
        if "environment" not in config.reward.kinds:
            yield frozenset({"reward", "reward_discount"}), "no reward's kind is environment"
        elif self.reward == "last":
            yield frozenset({"reward_discount"}), "environment.reward is last"
        if config.data.task or config.data.train_files:
            yield frozenset({"num_problems"}), "data.task or data.train_files has the problems"
