"""Stands in for `verifiers.v1` of 0.4: as much of it as is driven."""

import contextlib
import dataclasses
import itertools
import os
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Generic, TypeVar

from openai.resources.chat.completions import AsyncCompletions

ConfigT = TypeVar("ConfigT")
REPLIES = []  # of the episode
_create = AsyncCompletions.create


async def _noted(self, **asked):
    answer = await _create(self, **asked)
    REPLIES.append(answer.choices[0].message.content)
    return answer


AsyncCompletions.create = _noted  # what the library's own server between an agent and its model sees


@dataclass
class TaskData:
    idx: int
    prompt: object
    system_prompt: str | None = None
    answer: str = ""

    def model_dump(self, mode):
        return dataclasses.asdict(self)

    @classmethod
    def model_validate(cls, data):
        return cls(**data)


@dataclass
class Task:
    data: TaskData
    config: object = None


@dataclass
class PrimeConfig:
    pass


@dataclass
class SubprocessConfig:
    pass


@dataclass
class HarnessConfig:
    id: str = "bash"
    tool_timeout: float = 9.0


class Copied:
    def model_copy(self, update):
        return dataclasses.replace(self, **update)


@dataclass
class AgentConfig(Copied):
    client: object = None
    harness: object = None
    runtime: object = field(default_factory=PrimeConfig)


@dataclass
class TasksetConfig:
    id: str
    count: int = 25
    task: object = None


@dataclass
class EnvConfig(Copied):
    taskset: TasksetConfig
    agent: AgentConfig = field(default_factory=AgentConfig)

    def __iter__(self):
        return iter(vars(self).items())


@dataclass
class EvalClientConfig:
    base_url: str
    api_key_var: str


@dataclass
class ModelContext:
    model: str
    client: EvalClientConfig


@dataclass
class ProgramResult:
    exit_code: int
    stdout: str
    stderr: str


class Harness(Generic[ConfigT]):
    def __init__(self, config):
        self.config = config

    def resolve_prompt(self, data):
        return data.system_prompt, data.prompt


class Taskset:
    def __init__(self, config):
        self.config, self.bounded = config, config.id != "endless"

    def task_type(self):
        return Task

    def __iter__(self):
        for i in itertools.count() if not self.bounded else range(self.config.count):
            prompt = None if self.config.id == "opened" else f"What is {i} + {i}?"
            yield Task(TaskData(i, prompt, "Be short.", str(2 * i)))


class Env:
    def __init__(self, config):
        self.config, self.taskset, self.has_started = config, Taskset(config.taskset), False
        assert isinstance(config.agent.runtime, SubprocessConfig)

    async def start(self):
        self.has_started = True

    def shared_tools(self):
        return contextlib.nullcontext({"calc": "http://tools"})

    async def run_episode(self, task, context):
        assert self.has_started
        episode = SimpleNamespace(ok=True, errors=[], traces=[])
        if self.config.taskset.id == "boxed":
            episode.ok = False
            episode.errors.append(SimpleNamespace(type="ValueError", message="it needs a container"))
            return episode
        data = task.data
        if data.prompt is None:
            data = dataclasses.replace(data, prompt=[SimpleNamespace(role="user", content="I open.")])
        module = sys.modules[self.config.agent.harness.id]
        harness = getattr(module, *module.__all__)(self.config.agent.harness)
        key = os.environ[context.client.api_key_var]
        result = await harness.launch(context, None, None, context.client.base_url, key, self._shared_tools, data)
        trace = SimpleNamespace(agent=SimpleNamespace(name="agent"), errors=[], metrics={"none": None, "replies": 0.0})
        if result.exit_code:
            episode.ok = False
            trace.errors.append(SimpleNamespace(type="HarnessError", message=result.stderr))
        trace.reward = float(REPLIES[-1:] == [data.answer])
        trace.rewards = {"right": SimpleNamespace(score=trace.reward), "unscored": None}
        trace.metrics["replies"] = float(len(REPLIES))
        REPLIES.clear()
        episode.traces.append(trace)
        return episode


def resolve_env_config(given):
    if given["taskset"]["id"] not in ("sums", "opened", "endless", "boxed"):
        raise ModuleNotFoundError("taskset not found") from ModuleNotFoundError("No module named 'nothing'")
    seats = {name: AgentConfig(**value) for name, value in given.items() if name == "agent"}
    return EnvConfig(TasksetConfig(**given["taskset"]), **seats)


def default_harness_id(id):
    return "bash"


def load_environment(config):
    return Env(config)
