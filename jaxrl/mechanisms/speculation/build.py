"""History speculation of a real run, and what the devices of its rollout need to draft and verify.

Purpose: `build` makes the mechanism. `drafting_of` is the one place that says for how many responses and tokens an
index has room on the devices; the executor is built with it, and memory planning counts it. `step_costs` says what its
steps take, by the latency profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing

from jaxrl.config import Config, ConfigError
from jaxrl.mechanisms.parts import RunParts
from jaxrl.mechanisms.speculation.drafts import draft_config
from jaxrl.mechanisms.speculation.session import HistorySession, IndexBuilder, draft_lengths, history_store
from jaxrl.rollout.draft_books import Drafting, book_bytes
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import Profile
from jaxrl.scheduling.tokens.draft_rule import StepCosts


def build(parts: RunParts) -> HistorySession | None:
    """What a run keeps of its responses, empty, and what it drafts from them; None where nothing has any use for it."""
    config, options = parts.config, parts.config.rollout.speculation
    if not options.enable and not config.rollout.ranking_groups.enable:
        return None
    builder = None
    if options.enable:
        builder = IndexBuilder(options, parts.timeline)
    session = HistorySession(history_store(options), builder)
    parts.stack.enter_context(closing(session))
    parts.history = session.store
    return session


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


def step_costs(
    config: Config, profile: Profile, executor: MeshExecutor, row_sizes: Mapping[int, Sequence[int]]
) -> StepCosts:
    """What the steps of an executor take, in the layout that it has when it is asked.

    Args:
      profile: checked; nothing that is measured in the run changes what it says, so plans do not depend on a clock.
      row_sizes: row counts of its programs, by degree.

    Raises:
      ConfigError: the profile has no steps that verify drafts, or of other widths.
    """
    for tp in row_sizes:
        widths, measured = executor.draft_widths(tp), profile.draft_widths(tp)
        if widths != measured:
            raise ConfigError(
                f"rollout.layout.profile: {config.rollout.layout.profile} has steps at tp {tp} that verify "
                f"{measured or 'nothing'}, and rollout.speculation needs {widths} (drafted tokens of a row, by the "
                "number of rows): run `jaxrl profile` with the same rollout.speculation options, or set "
                "rollout.speculation.max_batch, which asks no profile"
            )
    predictor = LatencyPredictor(profile, config.rollout.layout, row_sizes)
    return StepCosts(
        lambda rows, context: predictor.decode_step_s(executor.tp, rows, context),
        lambda rows, context: predictor.verify_step_s(executor.tp, rows, context),
    )
