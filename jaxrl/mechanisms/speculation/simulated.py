"""The history of a simulated run, and what its responses draft from.

A simulated run keeps, drops and counts responses as a real one, and asks the same rule whether a plan verifies drafts.
Its tokens are fillers, in which nothing could be found: its indexes
are blank, and `jaxrl.mechanisms.speculation.acceptance` says what drafts have right.

Departures: a prompt's index takes no time and no bytes, so the bound of `rollout.speculation.max_bytes` counts
responses alone. How much of a draft is right does not depend on how many rollouts are kept. Programs are
as wide as the plan has rows, where a real executor's have room for the next larger number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jaxrl.config import Config
from jaxrl.mechanisms.speculation import draft_config
from jaxrl.mechanisms.speculation.acceptance import AcceptanceModel
from jaxrl.mechanisms.speculation.index import DraftIndex
from jaxrl.mechanisms.speculation.index_builder import Building, IndexBuilder
from jaxrl.mechanisms.speculation.rule import DraftConfig, DraftRule, StepCosts
from jaxrl.scheduling.rounds.history import PromptHistory
from jaxrl.sim.configured import PLATFORM
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.verification import Acceptance
from jaxrl.sim.workload import Workload
from jaxrl.types import SampleKey

_BLANK = DraftIndex.build([], [])


class BlankIndexes(IndexBuilder):
    """Indexes in which nothing can be found, at once."""

    def begin(self, index: int, history: PromptHistory) -> Building:
        done: Future[DraftIndex] = Future()
        done.set_result(_BLANK)
        return Building(done, lambda: _BLANK)


@dataclass(frozen=True, slots=True)
class SimulatedDrafts:
    """How rows draft (`jaxrl.sim.verification.Proposals`).

    Attributes:
      model: of how much of a draft is right.
      config: of the windows, and of how many tokens a step verifies.
    """

    model: Callable[[SampleKey, int], Acceptance]
    config: DraftConfig

    @property
    def first_window(self) -> int:
        return self.config.window.least

    def acceptance(self, key: SampleKey, length: int) -> Acceptance:
        return self.model(key, length)

    def width(self, rows: int) -> int:
        return self.config.width(rows)

    def next_window(self, window: Any, proposed: Any, accepted: Any) -> Any:
        return self.config.window.after(window, proposed, accepted)


def proposals(config: Config, workload: Workload) -> SimulatedDrafts | None:
    """What simulated devices draft; None where `rollout.speculation` is off."""
    drafts, spec = draft_config(config, PLATFORM), config.rollout.speculation
    if drafts is None:
        return None
    model = AcceptanceModel(config.trainer.seed, workload.history, spec.min_prefix, spec.max_prefix)
    return SimulatedDrafts(model, drafts)


def verify_rule(config: Config, cost: CostModel) -> Callable[[], DraftRule] | None:
    """Makes what says which plans of a worker verify, by what the cost model says that its steps take; None where
    `rollout.speculation` is off."""
    drafts, tp = draft_config(config, PLATFORM), config.rollout.tp
    if drafts is None:
        return None

    def verify_s(rows: int, context: float) -> float:
        return float(cost.verify_steps_s(tp, np.array([rows]), drafts.width(rows), np.array([context]))[0])

    costs = StepCosts(lambda rows, context: cost.decode_step_s(tp, rows, context), verify_s)
    return partial(DraftRule, replace(drafts, costs=costs))
