"""Which dp group each live row goes to when the layout changes: balanced, with as little KV as possible taken far.

Source: PAT §4.2, Algorithm 1, lines 7 (compute_merged_bs) and 23 (merge_and_redistribute).

On the factored mesh (docs/architecture.md) neighbouring groups merge, and a group splits into neighbours. The groups
that merge into one, or the one that splits, are a *home*: there, only the way changes in which the heads of a row's KV
are split. A row that goes elsewhere takes all of its KV over the links.

Rows are balanced first: after a change no new group has two rows more than another (as far as rows that are there
already allow it). Of all such outcomes, the one that moves the fewest tokens away from home is taken: where a home has
too many rows, its shortest leave. Sharing is ignored. Tokens come second. Within a home, and then among the rows that
leave, rows are dealt longest first. Each goes to the group with the fewest rows, and among equals to the one with the
fewest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.scheduling.layouts.batch_state import LiveRow, Rows, num_tokens


def regroup(groups: Sequence[Rows], dp: int, held: Sequence[Rows] = ()) -> tuple[Rows, ...]:
    """The rows of each of `dp` new groups, given those of each group before. `held`: rows that the new groups have
    already (another worker's own). The switch rule's predictions and the engine's moves both come from here."""
    assert dp % len(groups) == 0 or len(groups) % dp == 0, f"{len(groups)} dp groups cannot become {dp}"
    num_homes = min(len(groups), dp)
    merged, split = len(groups) // num_homes, dp // num_homes
    homes = [
        sorted((row for rows in groups[i * merged : (i + 1) * merged] for row in rows), key=_longest_first)
        for i in range(num_homes)
    ]
    counts = [len(rows) for rows in held] or [0] * dp
    tokens = [num_tokens(rows) for rows in held] or [0] * dp
    dealt: list[list[LiveRow]] = [[] for _ in range(dp)]

    def deal(row: LiveRow, among: range) -> None:
        group = min(among, key=lambda g: (counts[g], tokens[g], g))
        dealt[group].append(row)
        counts[group] += 1
        tokens[group] += row.length

    leaving: list[LiveRow] = []
    for home, (rows, kept) in enumerate(zip(homes, _num_kept(homes, counts), strict=True)):
        leaving += rows[kept:]
        for row in rows[:kept]:
            deal(row, range(home * split, (home + 1) * split))
    for row in sorted(leaving, key=_longest_first):
        deal(row, range(dp))
    return tuple(map(tuple, dealt))


def _num_kept(homes: Sequence[Sequence[LiveRow]], counts: Sequence[int]) -> list[int]:
    """How many rows of each home, the longest first, stay there.

    Balanced groups have `level` rows, or one more in `extra` of them. A home keeps what brings its groups to the level;
    the places above it go to the rows, of all homes, that would cost most to move.
    """
    split = len(counts) // len(homes)
    level, extra = _level(counts, sum(map(len, homes)))
    kept: list[int] = []
    above: list[tuple[int, int]] = []  # (-length, home) of the rows that a place above the level would keep
    for home, rows in enumerate(homes):
        own = counts[home * split : (home + 1) * split]
        room = sum(max(level - count, 0) for count in own)
        kept.append(min(room, len(rows)))
        more = sum(count <= level for count in own)
        above += [(-row.length, home) for row in rows[room : room + more]]
    for _, home in sorted(above)[:extra]:
        kept[home] += 1
    return kept


def _level(counts: Sequence[int], num_rows: int) -> tuple[int, int]:
    """(the level up to which `num_rows` more rows fill all groups, how many rows are left above it)."""
    level, ascending = 0, sorted(counts)
    for filled in range(1, len(ascending) + 1):  # as many groups as lie below the level
        level = (sum(ascending[:filled]) + num_rows) // filled
        if filled == len(ascending) or level <= ascending[filled]:
            break
    return level, num_rows - sum(max(level - count, 0) for count in counts)


def _longest_first(row: LiveRow) -> tuple[int, int]:
    return -row.length, row.request_id
