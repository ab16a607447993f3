"""What over-provisioning goes with."""

from jaxrl.mechanisms.room import UNFINISHED, Room

ROOM = Room(
    "over-provisioning",
    "rollout.over_provisioning",
    lambda config: config.rollout.over_provisioning.enable,
    decides=frozenset({UNFINISHED}),
    races=True,
    drops_slowest=lambda config: True,
)
