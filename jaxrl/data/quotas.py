"""Prompts of each source in a fixed number per batch (`data.source_quotas`), in an order that one integer resumes.

Each source has its own epochs, so a small source with a large quota reaches later epochs sooner. The places of a batch
are dealt to the sources so that each has its share of every beginning, nearly: a rule that launches more or fewer than
a batch gets the same mix.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence


class SourceQuotas:
    """Where each position of a run comes from. `quotas`: prompts per batch by source; 0 leaves a source out. `sources`:
    of every prompt of the data set, in its order. `members`: places in it by source, of those with a quota above 0.
    Raises ValueError for a quota of a source that the data does not hold, and for a source without a quota."""

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
        # places of the same source earlier in a batch
        self._before = [self._pattern[:place].count(name) for place, name in enumerate(self._pattern)]

    def at(self, position: int) -> tuple[str, int]:
        """The source of a position, and how many prompts of that source come before it."""
        batch, place = divmod(position, len(self._pattern))
        source = self._pattern[place]
        return source, batch * self._quotas[source] + self._before[place]

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self.members.values()))


def dealt(quotas: Mapping[str, int]) -> Sequence[str]:
    """The source of each place of a batch; the order of `quotas` does not matter."""
    total = sum(quotas.values())
    given = dict.fromkeys(quotas, 0)
    order: list[str] = []
    for place in range(1, total + 1):
        # the one that is furthest behind its share; of equals the first by name
        behind = {n: place * quota - total * given[n] for n, quota in sorted(quotas.items()) if given[n] < quota}
        order.append(max(behind, key=behind.__getitem__))
        given[order[-1]] += 1
    return order
