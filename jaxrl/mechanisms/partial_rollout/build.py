"""Partial rollout from its options, with the buffer's filter of the user's."""

from jaxrl.config import Config
from jaxrl.config.functions import read_user_file, user_function
from jaxrl.mechanisms.partial_rollout.buffer_filter import BufferFilter
from jaxrl.mechanisms.partial_rollout.options import PartialRolloutSection
from jaxrl.mechanisms.partial_rollout.rule import PartialRollout
from jaxrl.scheduling.rounds.race import BatchSettings


def rule(config: Config, batch: BatchSettings) -> PartialRollout:
    """A new rule, with an empty buffer. Raises ValueError for impossible limits, and for a file that cannot be used."""
    options = config.rollout.partial_rollout
    return PartialRollout(batch, options, _buffer_filter(options))


def _buffer_filter(options: PartialRolloutSection) -> BufferFilter | None:
    if not options.buffer_filter_path:
        return None
    names = "rollout.partial_rollout.buffer_filter_path", "rollout.partial_rollout.buffer_filter_name"
    file = read_user_file(names[0], options.buffer_filter_path)
    return user_function(names, file, options.buffer_filter_name, ("groups", "policy_version"))
