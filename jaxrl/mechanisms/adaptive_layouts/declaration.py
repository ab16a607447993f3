"""What layouts that adapt go with (PAT §4; RollPacker §4.2)."""

from jaxrl.mechanisms.room import LAYOUTS, Room

ROOM = Room(
    "adaptive layouts",
    "rollout.layout.planner and rollout.layout.switch",
    lambda config: config.rollout.layout.adapts,
    changes=frozenset({LAYOUTS}),
    excludes_spanning="tp is all devices of such a worker",
    reads_profile=lambda config: config.rollout.layout.switch,
)
