"""What the devices of a rollout need to draft and verify, from a configuration.

Purpose: `drafting_of` is the one place that says for how many responses and tokens an index has room on the devices;
the executor is built with it, and memory planning counts it.
"""

from __future__ import annotations

from jaxrl.config import Config
from jaxrl.rollout.draft_books import Drafting, book_bytes
from jaxrl.runtime.history import draft_lengths
from jaxrl.runtime.rules import draft_config


def drafting_of(config: Config, platform: str) -> Drafting | None:
    """What an executor that verifies drafts is built for; None where `rollout.speculation` is off.

    Args:
      platform: of the rollout's devices.
    """
    drafts, spec = draft_config(config, platform), config.rollout.speculation
    if drafts is None:
        return None
    num_responses = config.rollout.n * spec.epochs
    return Drafting(
        num_responses,
        num_responses * config.data.max_response_length,
        drafts.verify_tokens,
        draft_lengths(spec),
        drafts.window,
        spec.num_indexes,
    )


def draft_book_bytes(config: Config) -> int:
    """Bytes on each device of the indexes that a dp group of `rollout.max_num_seqs` rows has room for; 0 where
    `rollout.speculation` is off."""
    drafting = drafting_of(config, "cpu")  # sizes are the same on every platform
    return 0 if drafting is None else book_bytes(drafting, config.rollout.max_num_seqs)


def verified_positions(config: Config, platform: str) -> int:
    """Positions that a step computes beside one for each row of a dp group, at most; 0 where nothing is verified."""
    drafts = draft_config(config, platform)
    return 0 if drafts is None else drafts.verify_tokens
