"""Dynamic sampling: which groups count, and how many prompts to launch ahead of verdicts.

Source: DAPO (Yu et al. 2025, §3.2: prompts with all rewards equal are left out and replaced); RollPacker §7.

Departures: `filtered_share.py` says why a round launches ahead of verdicts. By default generation waits for verdicts
when half as many complete groups lack them as still decode: many verdicts may be late while a wait would idle a full
engine, and few when a late replacement would prolong the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jaxrl.mechanisms.dynamic_sampling.filtered_share import MOST_PER_MISSING, FilteredShare
from jaxrl.mechanisms.dynamic_sampling.group_filter import KeepsGroup, differs_in
from jaxrl.mechanisms.dynamic_sampling.options import FilterGroupsSection
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Group


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """The filter of groups (`jaxrl.scheduling.rounds.race.GroupFilter`).

    Attributes:
      options: `algorithm.filter_groups`.
      gen_batch_size: prompts launched at a time (`data.gen_batch_size`); 0: one by one.
      user_filter: which groups are kept; None: those in which `options.metric` differs.
    """

    options: FilterGroupsSection
    gen_batch_size: int = 0
    user_filter: KeepsGroup | None = None
    learnt: FilteredShare = field(default_factory=FilteredShare)

    def keeps(self, group: Group, verdicts: Sequence[Verdict]) -> bool:
        return (self.user_filter or differs_in(self.options.metric))(group, verdicts)

    def after(self, *, kept: bool, num_groups: int) -> DynamicSampling:
        return replace(self, learnt=self.learnt.after(not kept, num_groups))

    @property
    def share(self) -> float:
        return self.learnt.share

    def under_way(self, missing: int) -> int:
        return self.learnt.under_way(missing)

    @property
    def launched_at_once(self) -> int:
        return max(self.gen_batch_size, 1)

    def most_under_way(self, num_groups: int) -> int:
        return MOST_PER_MISSING * num_groups + self.launched_at_once - 1

    def most_launched(self, num_started: int) -> int:
        return self.options.max_num_gen_batches * (self.gen_batch_size or num_started)

    @property
    def advice(self) -> str:
        return (
            "the problems are too easy or too hard for the model; algorithm.filter_groups.max_num_gen_batches "
            f"({self.options.max_num_gen_batches}) is the limit"
        )

    def max_unscored(self, num_running: int, num_groups: int) -> int:
        allowed = self.options.max_unscored_groups
        return allowed if allowed >= 0 else min(num_groups, num_running // 2)

    def state(self) -> list[float]:
        return self.learnt.state()

    def of_state(self, state: Sequence[float]) -> DynamicSampling:
        return replace(self, learnt=FilteredShare.of_state(state))
