"""From the configuration to a scorer: a small picklable object that imports what it needs where it runs.

The training process builds the scorer, and refuses what it can see without running the user's code. Worker processes
get it as a few strings, and import what it needs (`load`). Nothing here imports jax.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, Protocol

from jaxrl.rewards.request import ScoreRequest, as_reward
from jaxrl.rewards.tracebacks import error_location
from jaxrl.scheduling.rounds.events import VerdictStatus

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.config.domains import Domain
    from jaxrl.rewards.answers import Extract

Scored = tuple[VerdictStatus, float, dict[str, Any], float]
"""The result of scoring one request: status, reward, info, duration_s."""

_MAX_DEPTH = 64  # of nested values: a reader of JSON takes some hundreds


class Scorer(Protocol):
    """Maps a request to (reward, values to record with it). Must survive pickling; may raise."""

    @property
    def loads(self) -> str:
        """Describes `load` at the beginning of an error: `reward.path: importing /home/me/reward.py`."""
        ...

    def load(self) -> None:
        """Imports everything that scoring needs, so that the first score is not charged for imports. A ValueError's
        sentence is shown to the user unchanged."""
        ...

    def __call__(self, request: ScoreRequest) -> tuple[Any, dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class MathScorer:
    extract: Extract = "auto"
    loads: str = "reward.kind: importing math_verify"

    def load(self) -> None:
        from jaxrl.rewards import math

        math.load()

    def __call__(self, request: ScoreRequest) -> tuple[float, dict[str, Any]]:
        if request.answer is None:
            raise ValueError(f"{request.source}: the prompt has no reference answer to compare with (data.answer_key)")
        from jaxrl.rewards import math

        return math.score(request.response, request.answer, self.extract)


@dataclass(frozen=True, slots=True)
class EnvironmentScorer:
    """The rewards of a trajectory's turns as one: their sum, or the last (`environment.reward`)."""

    how: Literal["sum", "last"]
    loads: str = "reward.kind: nothing"

    def load(self) -> None: ...

    def __call__(self, request: ScoreRequest) -> tuple[float, dict[str, Any]]:
        rewards = request.turn_rewards
        if rewards is None:
            raise ValueError(f"{request.source}: the response has no turns, which reward.kind=environment needs")
        total = rewards[-1] if self.how == "last" else sum(rewards)
        return total, {"stop": request.stop, "num_turns": len(rewards)}


def has_conversations(config: Config) -> bool:
    """Whether a prompt is a list of messages."""
    return bool(config.data.messages_key) or config.environment.is_on


def scorer_of(config: Config, domain: Domain, columns: frozenset[str] | None = None) -> Scorer:
    """The scorer of a domain that worker processes score. `columns`: the names of the data's columns, or
    None if they are not known. Raises ValueError for settings that would make every sample fail."""
    data, option = config.data, f"{domain.option}.kind"
    if domain.kind == "custom":
        from jaxrl.rewards.custom import CustomScorer

        return CustomScorer.of(domain.option, domain, columns, has_conversations(config))
    if domain.kind == "code":
        from jaxrl.rewards.code import CodeScorer

        return CodeScorer(config.reward.code)
    if domain.kind == "environment":
        return EnvironmentScorer(config.environment.reward)
    by_math = MathScorer(domain.extract)
    if domain.kind == "math" or not data.task:
        # where all sources have domains, none of the others' samples comes; `source_problem` looks at the data
        if not data.answer_key and not (config.reward.domains and not domain.source):
            raise ValueError(f"data.answer_key is empty: {option}=math compares with a reference answer")
        return by_math
    try:
        task_config = json.dumps({k: v for k, v in data.task_config.items() if k not in ("seed", "size")})
    except TypeError as error:
        raise ValueError(f"data.task_config must hold plain values (numbers, text, lists): {error}") from error
    if domain.kind == "task" and data.val_files:
        raise ValueError(f"data.val_files with {option}=task: those prompts have no task; use {option}=auto")
    from jaxrl.rewards.task import TaskScorer

    return TaskScorer(data.task, task_config, domain.extract, by_math if data.val_files else None)


def score_safely(scorer: Scorer, request: bytes) -> tuple[Scored, BaseException | None]:
    """Scores one pickled request; returns plain values only, which leave this process as JSON, and the error that the
    scorer has raised, unless it ends the process."""
    start = time.perf_counter()
    try:
        reward, info = scorer(pickle.loads(request))
        return ("ok", as_reward(reward), _plain(info), time.perf_counter() - start), None
    except BaseException as error:  # sys.exit() and KeyboardInterrupt of a scorer's own making, too
        duration_s = time.perf_counter() - start
        if isinstance(error, MemoryError):  # without the frames, which may hold the memory
            return ("error", 0.0, {"error": describe(error)}, duration_s), error.with_traceback(None)
        return ("error", 0.0, {"error": _with_place(error)}, duration_s), error


def describe(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # the error's own class is the user's, too
        text = "(its text cannot be read)"
    name = "MemoryError" if isinstance(error, MemoryError) else type(error).__name__  # numpy's has another name
    return f"{name}: {text}"[:1000] if text else name


def _with_place(error: BaseException) -> str:
    try:
        place = error_location(error)
    except BaseException:  # the frames' names are the user's, too
        place = ""
    return f"{describe(error)} ({place})" if place else describe(error)


def _plain(value: Any, depth: int = 0) -> Any:
    """The value in types that JSON has; a value without such a form (NaN, too) becomes its text."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and isfinite(value):
        return value
    if depth > _MAX_DEPTH:
        raise ValueError(f"what a scorer returns must not be nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return repr(value)
