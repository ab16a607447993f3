"""The layout over time, for a run's page: live requests of a round with the tp degree under them, and its switches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from jaxrl.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, figure, frame

_LIVE_BOTTOM, _TP_TOP, _TP_BOTTOM = 120, 140, HEIGHT - BOTTOM
_UNIT = "live requests, and tp under them"

COLUMNS = (
    *("Step", "tp", "KV", "Live rows", "Tokens moved", "Cost, predicted", "Cost, real", "Next step, predicted"),
    "Steps after, real",
)


def layouts_section(rounds: Sequence[Mapping[str, Any]]) -> str:
    """HTML of a run's rounds (`jaxrl.record.layouts.read_layouts`): the first, the middle and the last of those that
    switched, and a table of their switches; empty if the run's layout does not adapt."""
    if not rounds:
        return ""
    switched = [each for each in rounds if each["switches"]]
    count = sum(len(each["switches"]) for each in switched)
    text = f"{count} switch{'es' if count != 1 else ''} in {len(switched)} of {len(rounds)} rounds."
    if any(each["source"] == "synthetic" for each in rounds):
        text += " The latency profile behind them is synthetic: it was made up to try switches out, not measured."
    among = switched or rounds[-1:]
    shown = [among[i] for i in sorted({0, (len(among) - 1) // 2, len(among) - 1})]
    figures = "".join(map(_figure, shown))
    return (
        f"<h2>Layout</h2><p class=sub>{escape(text)}</p><section class=charts>{figures}</section>"
        f"{_table(shown) if switched else ''}"
    )


def _figure(one: Mapping[str, Any]) -> str:
    kind = "" if one["kind"] in ("all", "plain") else f", {one['kind']}"
    title = f"Step {one['step']}{kind}" + (f", worker {one['worker']}" if "worker" in one else "")
    points = [(float(at), int(live), int(tp)) for at, live, tp in one["points"]]
    if not points:
        return figure(title, _UNIT, (), "", about="No plan was run.")
    end = max(points[-1][0], 1e-9)
    most = max(1, *(live for _, live, _ in points))
    degrees = sorted({tp for _, _, tp in points})

    def x(at: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * at / end, 1)

    def y_live(live: int) -> float:
        return round(_LIVE_BOTTOM - (_LIVE_BOTTOM - TOP) * live / most, 1)

    def y_tp(tp: int) -> float:
        return round(_TP_BOTTOM - (_TP_BOTTOM - _TP_TOP) * degrees.index(tp) / max(len(degrees) - 1, 1), 1)

    live = " ".join(f"{x(at)},{y_live(value)}" for at, value, _ in points)
    stairs = [f"{x(points[0][0])},{y_tp(points[0][2])}"]
    marks = ""
    for (_, _, was), (at, _, tp) in pairwise(points):
        stairs += [f"{x(at)},{y_tp(was)}", f"{x(at)},{y_tp(tp)}"]
        if tp != was:
            marks += f"<line class=grid x1={x(at)} x2={x(at)} y1={TOP} y2={_TP_BOTTOM} />"
    ticks = [("0", y_live(0)), (str(most), y_live(most)), *((f"tp {tp}", y_tp(tp)) for tp in degrees)]
    axes = frame(ticks, [("0", LEFT, "start"), (f"{end:.3g}", WIDTH - RIGHT, "end")], "s")
    lines = f"<polyline class='line c1' points='{live}' /><polyline class='line c2' points='{' '.join(stairs)}' />"
    return figure(title, _UNIT, (), axes + marks + lines)


def _table(rounds: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for one in rounds:
        for each in one["switches"]:
            cells = (
                str(one["step"]) + (f", worker {one['worker']}" if "worker" in one else ""),
                f"{each['from_tp']} to {each['to_tp']}",
                "failed, recomputed" if each["failed"] else f"{each['how']}d",
                str(each["num_live"]),
                f"{each['num_moved']:,}",
                _seconds(each["predicted_cost_s"]),
                _seconds(each["cost_s"]),
                _seconds(each["predicted_step_s"]),
                _seconds(each["step_s"]),
            )
            rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<div style='overflow-x:auto'>{table}</div>"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3g} s" if value >= 0.9995 else f"{value * 1e3:.3g} ms"
