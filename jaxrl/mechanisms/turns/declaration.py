"""What turns go with."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.config import Config
from jaxrl.mechanisms.room import WORKERS, Room


def _problem(config: Config, racing: Sequence[str]) -> str | None:
    if config.rollout.ranking_groups.enable:
        return (
            "rollout.ranking_groups.enable excludes environment.kind: workers are shared out by the tokens that "
            "prompts' responses had, and time that goes to tools is none of them"
        )
    return None


ROOM = Room(
    "turns",
    "environment.kind",
    lambda config: config.environment.is_on,
    changes=frozenset({WORKERS}),  # a turn goes to the worker that has the conversation's KV
    problem=_problem,
)
