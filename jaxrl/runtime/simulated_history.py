"""The history of a simulated run, and what its responses draft from.

Purpose: a simulated run keeps, drops and counts responses as a real one (`jaxrl.runtime.history`), and asks the same
rule whether a plan verifies drafts. Its tokens are fillers, in which nothing could be found: its indexes are blank, and
`jaxrl.sim.foretold` says what drafts have right.

Departures: a prompt's index takes no time and no bytes, so the bound of `rollout.speculation.max_bytes` counts
responses alone. What is foretold does not depend on how many rollouts are kept. Programs are as wide as the plan has
rows, where a real executor's have room for the next larger number of rows.
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from jaxrl.config import Config
from jaxrl.runtime.history import Building, HistorySession, IndexBuilder, history_store
from jaxrl.scheduling.rounds.history import HistoryStore, PromptHistory
from jaxrl.scheduling.tokens.draft_index import DraftIndex
from jaxrl.scheduling.tokens.draft_rule import DraftConfig, StepCosts, default_verify_tokens, draft_width
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.foretold import Foreteller
from jaxrl.sim.verification import Drafting
from jaxrl.sim.workload import Workload

PLATFORM = "gpu"
"""Of simulated devices, where an option's default goes by the platform."""

_BLANK = DraftIndex.build([], [])


class BlankIndexes(IndexBuilder):
    """Indexes in which nothing can be found, at once."""

    def begin(self, index: int, history: PromptHistory) -> Building:
        done: Future[DraftIndex] = Future()
        done.set_result(_BLANK)
        return Building(done, lambda: _BLANK)


def history_session(config: Config, clock: SimulatedClock) -> HistorySession | None:
    """What a simulated run keeps of its responses, empty; None where nothing has any use for it."""
    options = config.rollout.speculation
    if options.enable:
        return HistorySession(history_store(options), BlankIndexes(options, clock=lambda: clock.now_s))
    return HistorySession(HistoryStore(0)) if config.rollout.ranking_groups.enable else None


def step_costs(config: Config, cost: CostModel) -> StepCosts | None:
    """What the steps of a worker's dp group take, for the rule that decides whether drafts pay; None where nothing is
    drafted."""
    spec = config.rollout.speculation
    if not spec.enable:
        return None
    tp, verify_tokens = config.rollout.tp, spec.verify_tokens or default_verify_tokens(PLATFORM)

    def verify_s(rows: int, context: float) -> float:
        width = draft_width(rows, verify_tokens, spec.max_window)
        return float(cost.verify_steps_s(tp, np.array([rows]), width, np.array([context]))[0])

    return StepCosts(lambda rows, context: cost.decode_step_s(tp, rows, context), verify_s)


def drafting_of(config: Config, workload: Workload, drafts: DraftConfig) -> Drafting:
    """How rows draft."""
    spec = config.rollout.speculation
    tell = Foreteller(config.trainer.seed, workload.history, spec.min_prefix, spec.max_prefix)
    return Drafting(tell, drafts.window, lambda rows: draft_width(rows, drafts.verify_tokens, drafts.window.most))
