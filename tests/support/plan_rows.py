"""A plan's rows one by one, and a result made of what each gained: for tests, which look at a few."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.scheduling.tokens.plan import Plan, PlanResult, ScheduledRows, VerifyCounts


@dataclass(frozen=True)
class DecodeRow:
    """A row that decodes in a plan; fields as in `ScheduledRows`."""

    request_id: int
    dp_group: int
    slot: int
    block_table: tuple[int, ...]
    max_new: int
    history: Any = None


def decode_rows(plan: Plan) -> list[DecodeRow]:
    rows = plan.rows
    tables = [tuple(table[:width].tolist()) for table, width in zip(*rows.tables, strict=True)]
    columns = rows.request_ids, rows.dp_groups, rows.slots, tables, rows.max_new, rows.histories or [None] * len(rows)
    values = (column.tolist() if isinstance(column, np.ndarray) else column for column in columns)
    return [DecodeRow(*row) for row in zip(*values, strict=True)] if plan.num_steps else []


def contents(plan: Plan) -> tuple[Any, ...]:
    """All of a plan, to compare."""
    options = plan.num_steps, plan.leave_after, plan.verifies, plan.tells_top
    return plan.index, plan.prefill, plan.rows.request_ids.tolist(), decode_rows(plan), options


def scheduled(rows: Sequence[DecodeRow], num_slots: int, new: Collection[int] = ()) -> ScheduledRows:
    """Rows as a plan has them; `new`: the requests whose prefill ends in it."""
    rows = sorted(rows, key=lambda row: (row.dp_group, row.slot))
    widths = np.array([len(row.block_table) for row in rows], np.int64)
    tables = np.zeros((len(rows), widths.max(initial=0)), np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row.block_table)] = row.block_table
    return ScheduledRows(
        np.array([row.request_id for row in rows], np.int64),
        np.array([row.dp_group * num_slots + row.slot for row in rows], np.int64),
        num_slots,
        np.array([row.request_id in new for row in rows], bool),
        np.array([row.max_new for row in rows], np.int64),
        (tables, widths),
        [row.history for row in rows],
    )


def result_of(
    rows: ScheduledRows,
    index: int,
    tokens: Mapping[int, Sequence[int]],
    stopped: Collection[int] = (),
    verified: Mapping[int, VerifyCounts] | None = None,
    logprobs: tuple[float, float] = (0.0, 0.0),
    **more: Any,
) -> PlanResult:
    """The result of a plan in which these requests gained these tokens; `logprobs`: sampled, and rollout."""
    ids = rows.request_ids.tolist()
    assert not tokens.keys() - set(ids)
    gained = [list(tokens.get(request_id, ())) for request_id in ids]
    token_ids = np.array([token for each in gained for token in each], np.int32)
    counts = None
    if verified is not None:
        fields = [[getattr(verified.get(i, VerifyCounts()), name) for name in VerifyCounts.__slots__] for i in ids]
        counts = np.array(fields, np.int64).reshape(len(ids), -1).T
    return PlanResult(
        index,
        rows.request_ids,
        np.array(list(map(len, gained)), np.int64),
        np.array([request_id in stopped for request_id in ids], bool),
        token_ids,
        np.full(len(token_ids), logprobs[0], np.float32),
        np.full(len(token_ids), logprobs[1], np.float32),
        verified=counts,
        **more,
    )
