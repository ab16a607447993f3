"""Drawings that are not curves over steps: lengths as a histogram, prompts' rewards as a heat map, rows over time. Each
is empty if its file was not written.

The rows come from the last round in the timeline; only the end of that file is read, because it may be large.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from jaxrl.record.metrics import number
from jaxrl.record.timeline import ROW
from jaxrl.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, figure, frame, ticks_of

_TAIL_BYTES = 8 << 20
_WANTED = (f'"cat":"{ROW}"'.encode(), b'"name":"step"')
_APART = 0.06  # between bars, in percent of the width
_COLUMNS, _LEVELS, _MOST_PROMPTS = 60, 8, 40
MOST_ROWS = 64
"""The most rows of a round that are drawn; of more, every second, third and so on."""
_ENDS = {  # of a request in a row: label and colour
    "stop": ("ended", "c1"),
    "length": ("cut at the limit", "c2"),
    "abort": ("aborted", "c6"),
    "preempted": ("preempted", "c5"),
    "moved": ("moved", "c4"),
}

Batches = Sequence[Mapping[str, Any]]
Event = Mapping[str, Any]
"""An event of the timeline."""


def histogram_card(batches: Batches) -> str:
    """How long responses were, in the first tenth of the steps and in the last."""
    batches = [each for each in batches if sum(each["lengths"])]
    if not batches:
        return ""
    tenth = max(len(batches) // 10, 1)
    parts = [("last steps", _shares(batches[-tenth:]), "c1")]
    if len(batches) > 1:
        parts.append(("first steps", _shares(batches[:tenth]), "c2"))
    limit, bins = batches[-1]["limit"], len(batches[-1]["lengths"])
    ticks = ticks_of(0.0, max(max(shares) for _, shares, _ in parts if shares))
    labels = [(t, t / limit) for t in ticks_of(0, limit) if 0 < t <= limit]
    grid = [(number(tick), round(HEIGHT - BOTTOM - tick / ticks[-1] * (HEIGHT - TOP - BOTTOM), 1)) for tick in ticks]
    body = [frame(grid, [_label(value, share) for value, share in labels], "tokens")]
    wide = (WIDTH - LEFT - RIGHT) / bins
    low, high = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP
    for label, shares, colour in parts:
        heights = [round(high * share / ticks[-1], 1) for share in shares]
        if colour == "c1":
            for i, (share, height) in enumerate(zip(shares, heights, strict=True)):
                if share:
                    span = f"{limit * i // bins} to {limit * (i + 1) // bins} tokens"
                    box = f"x={LEFT + wide * i:.1f} y={low - height:.1f} width={wide * 0.88:.1f} height={height}"
                    body.append(f"<rect class=c1 {box}><title>{label}, {span}: {share:.1%}</title></rect>")
            continue
        edge = [f"{LEFT},{low}"]
        for i, height in enumerate(heights):
            edge += [f"{LEFT + wide * (i + x):.1f},{low - height:.1f}" for x in (0, 1)]
        body.append(f"<polyline class='{colour} line' points='{' '.join(edge)}'/>")
    legend = [(label, colour) for label, _, colour in parts]
    about = "Whether responses grow, and whether they gather at the limit."
    return figure("Histogram of lengths", "share of responses", legend, "".join(body), about=about)


def _shares(batches: Batches) -> list[float]:
    """The share of responses in each bin, of batches with the limit of the last of them."""
    limit = batches[-1]["limit"]
    counts = [each["lengths"] for each in batches if each["limit"] == limit]
    sums = [sum(column) for column in zip(*counts, strict=True)]
    return [value / sum(sums) for value in sums]


def prompts_card(batches: Batches) -> str:
    """The mean reward of each prompt in each pass over the data, the stronger the higher; empty where no prompt came
    twice."""
    seen: dict[int, dict[int, float]] = {}
    for each in batches:
        for (epoch, index), reward in zip(each.get("prompts", ()), each["groups"], strict=False):
            seen.setdefault(index, {})[epoch] = reward
    epochs = sorted({epoch for rewards in seen.values() for epoch in rewards})
    values = [reward for rewards in seen.values() for reward in rewards.values()]
    if len(epochs) < 2 or (low := min(values)) == (high := max(values)):
        return ""
    shown = _some(sorted(seen, key=lambda index: -fmean(seen[index].values())), _MOST_PROMPTS)
    epochs = _some(epochs, _COLUMNS)
    tall, wide = max((HEIGHT - TOP - BOTTOM) / len(shown), 6), (WIDTH - LEFT - RIGHT) / len(epochs)
    base, body = TOP + tall * len(shown), list[str]()
    for rank, index in enumerate(shown):
        y, rewards = TOP + tall * rank, seen[index]
        if not rank % round(12 / tall + 0.5):
            body.append(f"<text x={LEFT - 6} y={y + tall / 2 + 4:.1f} text-anchor=end>{index}</text>")
        body.append(f"<g><title>prompt {index}: {', '.join(number(rewards[at]) for at in sorted(rewards))}</title>")
        for i, epoch in enumerate(epochs):
            if epoch in rewards:
                level = min(int((rewards[epoch] - low) / (high - low) * _LEVELS), _LEVELS - 1)
                box = f"x={LEFT + wide * i:.1f} y={y:.1f} width={wide:.1f} height={tall:.1f}"
                body.append(f"<rect class='c3 heat{level}' {box} />")
        body.append("</g>")
    labels = [(f"{epoch + 1}", round(LEFT + wide * (i + 0.5), 1), "middle") for i, epoch in enumerate(epochs)]
    body.append(frame([], _some(labels, 8), "pass", base + BOTTOM))
    legend = [(number(low + (high - low) * level / (_LEVELS - 1)), f"c3 heat{level}") for level in (0, 2, 5, 7)]
    some = f", {len(shown)} of {len(seen)}" if len(shown) < len(seen) else ""
    view = f"viewBox='0 0 {WIDTH} {base + BOTTOM:.4g}'"
    about = "A line is a prompt, by its number in the data. Faint ones are too hard, strong ones too easy."
    return figure("Prompts", f"mean reward in each pass{some}", legend, "".join(body), view, about)


def _some(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most` values, evenly spaced, the first and the last among them."""
    if len(values) <= most:
        return [*values]
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _label(value: float, share: float) -> tuple[str, float, str]:
    return number(value), round(LEFT + share * (WIDTH - LEFT - RIGHT), 1), "end" if share > 0.97 else "middle"


def last_round(file: Path) -> tuple[int, list[Event]]:
    """The last step with rows in a timeline, and the spans of requests in them, without evaluations; no spans where
    none were drawn. Damaged lines are left out."""
    steps: list[Event] = []
    spans: list[Event] = []
    for event in _events(file) if file.is_file() else ():
        if event.get("cat") != ROW:
            steps.append(event)
        elif not event["name"].startswith("val "):
            spans.append(event)
    for step in reversed(steps):
        if inside := [each for each in spans if _holds(step, each)]:
            return step["args"]["step"], sorted(inside, key=lambda event: event["ts"])
    return 0, []


def _events(file: Path) -> Iterator[Event]:
    with open(file, "rb") as opened:
        opened.seek(max(opened.seek(0, 2) - _TAIL_BYTES, 0))
        for line in opened:
            if any(wanted in line for wanted in _WANTED):
                with suppress(ValueError):  # what a crash has cut, or where the tail begins
                    yield json.loads(line.rstrip(b",\r\n"))


def _holds(outer: Event, inner: Event) -> bool:
    """Whether a span ends inside another one of the same start."""
    end = inner["ts"] + inner["dur"]
    return outer["pid"] == inner["pid"] and outer["ts"] <= end <= outer["ts"] + outer["dur"] + 1


def rows_card(step: int, spans: Sequence[Event]) -> str:
    if not spans:
        return ""
    rows: dict[str, list[Event]] = {}
    for span in spans:
        rows.setdefault(span["args"]["row"], []).append(span)
    began = spans[0]["ts"]
    end = max(max(span["ts"] + span["dur"] for span in spans) - began, 1e-3) / 1e6
    names = sorted(rows, key=lambda row: [int(part) for part in row.split(".")])
    shown = names[:: -(-len(names) // MOST_ROWS)]
    tall = max(min((HEIGHT * 1.4) / len(shown), 16), 4)
    base = TOP + tall * len(shown)
    bars = []
    for i, row in enumerate(shown):
        y = TOP + tall * i
        bars += [_bar(span, (span["ts"] - began) / 1e6, 100 / end, y, tall) for span in rows[row]]
        if i % max(1, round(14 / tall)) == 0:
            bars.append(f"<text x=-6 y={y + tall / 2 + 4:.1f} text-anchor=end>{escape(row)}</text>")
    for tick in ticks_of(0, end):
        if tick <= end:
            x = f"{100 / end * tick:.2f}%"
            bars.append(f"<line class=grid x1={x} x2={x} y1={TOP} y2={base:.1f} />")
            bars.append(f"<text x={x} y={base + 16:.1f} text-anchor=middle>{number(tick)}</text>")
    ends = {span["args"]["end"] for row in shown for span in rows[row]}
    legend = [label for end_, label in _ENDS.items() if end_ in ends]
    some = f", {len(shown)} of {len(names)} rows" if len(shown) < len(names) else ""
    about = "A bar is a response, until the end of the plan (rollout.decode_steps tokens) in which it ended."
    # without a viewBox: lengths are shares of the width, so that it fits a phone with text of the same size
    view = f"style='height:{base + BOTTOM:.4g}px'"
    drawn = figure(f"Rows in step {step:g}", f"seconds{some}", legend, "".join(bars), view, about)
    return f"<section class='charts rows'>{drawn}</section>"


def _bar(span: Event, start_s: float, share: float, y: float, tall: float) -> str:
    """`share`: of the width, in percent for each second."""
    args, seconds = span["args"], span["dur"] / 1e6
    label, colour = _ENDS.get(args["end"], _ENDS["abort"])
    tokens = f", {args['tokens']} tokens" if "tokens" in args else ""
    times = f"{number(start_s)} to {number(start_s + seconds)} s"
    title = f"row {args['row']}: {span['name']}, {times}, {label}{tokens}"
    x, width = share * start_s, max(share * seconds - _APART, _APART)
    box = f"x={x:.2f}% y={y + 0.5:.1f} width={width:.2f}% height={tall - 1:.1f}"
    return f"<rect class={colour} {box}><title>{escape(title)}</title></rect>"
