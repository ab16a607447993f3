"""What tail batching goes with (RollPacker §3, §7)."""

from jaxrl.mechanisms.room import PROMPTS_OF_ROUNDS, UNFINISHED, Room

ROOM = Room(
    "tail batching",
    "rollout.tail_batching",
    lambda config: config.rollout.tail_batching.enable,
    decides=frozenset({UNFINISHED}),
    changes=frozenset({PROMPTS_OF_ROUNDS}),
    races=True,
)
