"""What history speculation goes with: everything (RhymeRL §5)."""

from jaxrl.config import Config
from jaxrl.mechanisms.room import Room


def asks_profile(config: Config) -> bool:
    """Whether plans verify by what `rollout.layout.profile` says."""
    spec = config.rollout.speculation
    return spec.enable and not spec.max_batch and bool(config.rollout.layout.profile)


def unmeasured_note(config: Config) -> str | None:
    """What a start says where plans verify without knowing whether that pays; None where something tells."""
    spec = config.rollout.speculation
    if not spec.enable or spec.max_batch or config.rollout.layout.profile:
        return None
    return (
        "rollout.speculation: plans verify drafts wherever a step has room for them, whether or not that is faster; "
        "give rollout.layout.profile a file of `jaxrl profile`, or set rollout.speculation.max_batch"
    )


ROOM = Room(
    "history speculation",
    "rollout.speculation.enable",
    lambda config: config.rollout.speculation.enable,
    reads_profile=asks_profile,
    note=unmeasured_note,
)
