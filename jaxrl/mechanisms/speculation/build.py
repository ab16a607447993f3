"""History speculation of a real run, and what the devices of its rollout need to draft and verify.

Purpose: `build` makes the mechanism. `proposer` is the one place that says for how many responses and tokens an index
has room on the devices; the executor is built with it, and memory planning counts it. `verify_rule` decides which plans
verify, by what the latency profile says that steps take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from jaxrl.config import Config, ConfigError
from jaxrl.mechanisms.parts import RunParts
from jaxrl.mechanisms.speculation.declaration import asks_profile
from jaxrl.mechanisms.speculation.drafts import draft_config
from jaxrl.mechanisms.speculation.index import DraftIndex
from jaxrl.mechanisms.speculation.proposer import Drafting
from jaxrl.mechanisms.speculation.rule import DraftRule, StepCosts
from jaxrl.mechanisms.speculation.session import HistorySession, IndexBuilder, draft_lengths, history_store
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import Profile

if TYPE_CHECKING:
    from jaxrl.rollout.remote import RemoteExecutor


def build(parts: RunParts) -> HistorySession | None:
    """What a run keeps of its responses, empty, and what it drafts from them; None where nothing has any use for it."""
    config, options = parts.config, parts.config.rollout.speculation
    if not options.enable and not config.rollout.ranking_groups.enable:
        return None
    builder = None
    if options.enable:
        parts.workers.share(DraftIndex)
        builder = IndexBuilder(options, parts.timeline)
    session = HistorySession(history_store(options), builder)
    parts.stack.enter_context(closing(session))
    parts.history = session.store
    return session


def proposer(config: Config, platform: str) -> Drafting | None:
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


def verify_rule(
    config: Config,
    executor: MeshExecutor | RemoteExecutor,
    profile: Profile | None = None,
    row_sizes: Mapping[int, Sequence[int]] | None = None,
) -> Callable[[], DraftRule] | None:
    """Makes what says which plans of an executor verify; None where `rollout.speculation` is off.

    Args:
      profile: checked; None: nothing reads it. row_sizes: as in `step_costs`, where there is a profile.

    Raises ConfigError as `step_costs` does.
    """
    costs = None
    if profile is not None and row_sizes is not None and asks_profile(config):
        costs = step_costs(config, profile, executor, row_sizes)
    drafts = draft_config(config, executor.platform, costs)
    return None if drafts is None else partial(DraftRule, drafts)


def step_costs(
    config: Config, profile: Profile, executor: MeshExecutor | RemoteExecutor, row_sizes: Mapping[int, Sequence[int]]
) -> StepCosts:
    """What the steps of an executor take, in the layout that it has when it is asked.

    Args:
      profile: checked; nothing that is measured in the run changes what it says, so plans do not depend on a clock.
      row_sizes: row counts of its programs, by degree.

    Raises:
      ConfigError: the profile has no steps that verify drafts, or of other widths.
    """
    for tp in row_sizes:
        widths, measured = executor.verify_widths(tp), profile.verify_widths(tp)
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
