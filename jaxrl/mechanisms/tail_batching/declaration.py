"""What tail batching goes with (RollPacker §3, §7), and what can be searched of it (§6.3)."""

import math

from jaxrl.mechanisms.room import PROMPTS_OF_ROUNDS, UNFINISHED, Room, Searched
from jaxrl.scheduling.rounds.batches import provisioned


def _period(prompt_factor: float, num_prompts: int) -> int:
    """Steps until a long round has come."""
    spare = provisioned("rollout.tail_batching.prompt_factor", prompt_factor, num_prompts) - num_prompts
    return math.ceil(num_prompts / spare) + 1 if spare else 1


ROOM = Room(
    "tail batching",
    "rollout.tail_batching",
    lambda config: config.rollout.tail_batching.enable,
    decides=frozenset({UNFINISHED}),
    changes=frozenset({PROMPTS_OF_ROUNDS}),
    races=True,
    drops_slowest=lambda config: config.rollout.tail_batching.response_factor > 1,
    searched=Searched(("prompt_factor", "response_factor"), (1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4), period=_period),
)
