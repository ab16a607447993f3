"""The interface of environments: one reads what a model has said, and answers until the episode ends.

An environment's state is a value: between two turns it is pickled, and any worker continues with it. What cannot be
pickled (a connection, a browser) belongs to a program that drives the policy through the endpoint instead.

Source: names and shapes of tinker-cookbook's `Env` and `StepResult`. Departure: what is said and answered are messages
and not tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from jaxrl.data.tool_calls import ToolCall, calls_in, seems_to_call
from jaxrl.rewards.request import as_reward

Message = Mapping[str, Any]
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """A turn of the model."""

    text: str  # without special tokens and without the calls that were read
    calls: tuple[ToolCall, ...] = ()
    is_unread: bool = False  # it tries to call something that cannot be read

    @classmethod
    def of(cls, text: str, schemas: Sequence[Schema]) -> Action:
        names = [schema["function"]["name"] for schema in schemas]
        said, calls = calls_in(text, names)
        return cls(said, tuple(calls), is_unread=bool(names) and seems_to_call(text) and not calls)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to a turn.

    `next_observation`: messages of a user or of tools, at least one unless the episode is done; a text is a user's.
    `metrics`: numbers to be averaged over trajectories, each the sum over its turns.
    """

    reward: float = 0.0
    episode_done: bool = False
    next_observation: str | Sequence[Message] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def messages(self) -> tuple[Message, ...]:
        return as_messages(self.next_observation)


class Env(Protocol):
    """One episode, made for a row of the data and pickled between its turns. Users write classes of this form, perhaps
    with an attribute `schemas`: what the model may call (`jaxrl.environments.schemas.tool_schema`)."""

    def initial_observation(self) -> str | Sequence[Message]:
        """The first message; called only where the rows are the environment's own, and no file has a question."""
        ...

    def step(self, action: Action) -> StepResult | Awaitable[StepResult]: ...


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished trajectory."""

    messages: tuple[Message, ...]  # the whole conversation, each with `role` and `content`
    turn_rewards: tuple[float, ...]
    reward: float  # the score so far
    stop: str  # why it ended (`jaxrl.mechanisms.turns.rule.STOPS`)


def as_messages(observation: str | Sequence[Message]) -> tuple[Message, ...]:
    if isinstance(observation, str):
        return ({"role": "user", "content": observation},) if observation else ()
    return tuple(observation)


def checked(result: Any, name: str) -> StepResult:
    """The result of an environment's `step`. Raises ValueError where it breaks a rule."""
    if not isinstance(result, StepResult):
        raise ValueError(f"{name}.step must return a StepResult, found {type(result).__name__}")
    result = replace(result, reward=as_reward(result.reward, f"{name}.step: reward must be"))
    for message in result.messages:
        if not is_answer(message):
            raise ValueError(
                f"{name}.step: next_observation must be a text, or messages with the role user or tool and a content "
                f"that is text, found {message!r:.80}"
            )
    if not result.episode_done and not result.messages:
        raise ValueError(f"{name}.step: an episode that is not over needs a next_observation")
    return result


def is_answer(message: Any) -> bool:
    return (
        isinstance(message, Mapping)
        and message.get("role") in ("user", "tool")
        and isinstance(message.get("content"), str)
    )
