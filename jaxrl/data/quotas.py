"""Prompts of each source in a fixed number per batch (`data.source_quotas`), in an order that one integer resumes.

Each source is walked in epochs of its own: its k-th prompt, counted over the run, belongs to its epoch k // n, n being
its number of prompts. So a small source with a large quota is in a later epoch than the others, no prompt is left out,
and the key (epoch, index) of a prompt stays unique, since an index belongs to one source.

The p-th prompt of the run stands at place p mod P0 of batch p // P0. The places of a batch are dealt to the sources so
that each has its share of every beginning, nearly: a rule that launches more or fewer than P0 gets the same mix.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence


class SourceQuotas:
    """Where each position of a run comes from.

    Args:
      quotas: prompts per batch by source; 0 leaves a source out. They add up to a batch.
      sources: of every prompt of the data set, in its order.

    Raises ValueError for a quota of a source that the data does not hold, and for a source without a quota.

    Attributes:
      members: places in `sources` by source, of those with a quota above 0.
    """

    def __init__(self, quotas: Mapping[str, int], sources: Iterable[str]) -> None:
        found: dict[str, list[int]] = {}
        for place, source in enumerate(sources):
            found.setdefault(source, []).append(place)
        for name in quotas:
            if name not in found:
                near = difflib.get_close_matches(name, list(found), n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it holds {', '.join(map(repr, found))}"
                raise ValueError(f"data.source_quotas: the training data has no source {name!r}: {hint}")
        for source, places in found.items():
            if source not in quotas:
                raise ValueError(
                    f"data.source_quotas: the training data holds {len(places)} prompts of {source!r}, which has no "
                    "quota: give it one, or 0 to leave it out"
                )
        self.members = {name: found[name] for name, quota in quotas.items() if quota}
        self._pattern = dealt({name: quota for name, quota in quotas.items() if quota})
        self._quotas = dict(quotas)
        before = [self._pattern[:place].count(name) for place, name in enumerate(self._pattern)]
        self._before = before  # places of the same source earlier in a batch

    def at(self, position: int) -> tuple[str, int]:
        """The source of a position, and how many prompts of that source come before it."""
        batch, place = divmod(position, len(self._pattern))
        source = self._pattern[place]
        return source, batch * self._quotas[source] + self._before[place]

    @property
    def num_prompts(self) -> int:
        """Prompts of all sources with a quota."""
        return sum(map(len, self.members.values()))


def dealt(quotas: Mapping[str, int]) -> Sequence[str]:
    """The source of each place of a batch, so that every beginning of it has of each source its share, rounded. The
    order of `quotas` does not matter."""
    total = sum(quotas.values())
    given = dict.fromkeys(quotas, 0)
    order: list[str] = []
    for place in range(1, total + 1):
        # the one that is furthest behind its share; of equals the first by name
        behind = {n: place * quota - total * given[n] for n, quota in sorted(quotas.items()) if given[n] < quota}
        order.append(max(behind, key=behind.__getitem__))
        given[order[-1]] += 1
    return order
