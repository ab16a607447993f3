"""What ranking groups go with (RhymeRL §6)."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.config import Config
from jaxrl.mechanisms.room import LAYOUTS, PROMPTS_OF_ROUNDS, WORKERS, Room


def _problem(config: Config, racing: Sequence[str]) -> str | None:
    """Why prompts cannot be ranked."""
    option, rollout = "rollout.ranking_groups.enable", config.rollout
    needs = []
    if not config.trainer.one_step_off:
        needs.append(
            "trainer.one_step_off: workers that are done with a step's rollout go on with the next one's, while the "
            "update runs"
        )
    if not rollout.num_devices:
        needs.append(
            "rollout.num_devices: workers take the next step's weights while others still draw the present one's, so "
            "the rollout needs devices of its own"
        )
    if config.num_workers < 2:
        needs.append(f"rollout.num_workers to be at least 2, found {config.num_workers}: they share the groups")
    if needs:
        return f"{option} needs {'; and '.join(needs)}"
    if rollout.max_active_requests:
        return (
            f"{option} excludes rollout.max_active_requests ({rollout.max_active_requests} samples): prompts are "
            "ranked when all of a round start together"
        )
    return None


ROOM = Room(
    "ranking groups",
    "rollout.ranking_groups.enable",
    lambda config: config.rollout.ranking_groups.enable,
    changes=frozenset({WORKERS}),
    relies_on={
        PROMPTS_OF_ROUNDS: "both decide which prompts share a round's workers, the one by the last rollout's lengths "
        "and the other by those of this one",
        LAYOUTS: "groups are shared out by what workers of one layout take for them",
    },
    reads_profile=lambda config: config.rollout.ranking_groups.enable and bool(config.rollout.layout.profile),
    problem=_problem,
)
