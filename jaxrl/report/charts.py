"""Charts as inline SVG, for a page that needs no network and no script. Colours are classes of the page's style sheet.

Lines are drawn from at most `_POINTS` points and bars from `_BARS`: longer series are averaged over equal stretches,
while bands keep the extremes. Of more than `_MARKS` marks, every second, third and so on is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from statistics import fmean

from jaxrl.record.metrics import number

_POINTS = 160
_BARS = 60
_MARKS = 40
# size of the drawing in units of its viewBox: about one CSS pixel each on a phone, and in a column of the wide page
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 210, 46, 12, 10, 26
VIEW = f"viewBox='0 0 {WIDTH} {HEIGHT}'"

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart. `colour` is a class of the style sheet, c1 to c13; `limit` is drawn dashed; `dots` marks each
    point."""

    label: str
    points: Sequence[Point]
    colour: str = "c1"
    limit: bool = False
    dots: bool = False
    line: bool = True


@dataclass(frozen=True, slots=True)
class Chart:
    """A titled drawing, with a line that explains it."""

    title: str
    unit: str
    curves: Sequence[Curve]
    about: str = ""
    band: tuple[Sequence[Point], Sequence[Point]] = ((), ())  # lower and upper edge
    stack: Sequence[Curve] = ()
    from_zero: bool = True
    top: float | None = None
    least: float = 0.0  # how far from 0 the axis reaches at least: what is smaller is noise
    span: tuple[float, float] | None = None  # steps that the axis covers; default: the points' steps
    marks: Sequence[float] = ()  # steps with an upright line
    mark: str = ""  # what happens there
    legend: bool = False  # also of a single curve


def card(chart: Chart) -> str:
    drawn = [*chart.curves, *chart.stack]
    if not any(finite(curve.points) for curve in drawn):
        return ""
    labels = [(curve.label, curve.colour + " dash" * curve.limit) for curve in drawn]
    if all(chart.band):
        labels.append(("middle half of the prompts", "c1 faint"))
    if chart.marks:
        labels.append((chart.mark, "mark"))
    body, (first, last) = _drawing(chart)
    legend = labels if len(labels) > 1 or chart.legend else ()
    return figure(chart.title, chart.unit, legend, body, about=chart.about, steps=f", steps {first:g} to {last:g}")


def figure(
    title: str,
    unit: str,
    legend: Sequence[tuple[str, str]],
    body: str,
    view: str = VIEW,
    about: str = "",
    steps: str = "",
) -> str:
    """A figure with a legend of (label, colour), and an SVG with this body. `about` explains it."""
    items = "".join(f"<li class='{colour}'>{escape(label)}</li>" for label, colour in legend)
    head = f"<h3>{escape(title)} <small>{escape(unit)}</small></h3><p>{escape(about)}</p><ul>{items}</ul>"
    label = escape(f"{title}, {unit}{steps}", quote=True)
    return f'<figure>{head}<svg {view} role=img aria-label="{label}">{body}</svg></figure>'


def _drawing(chart: Chart) -> tuple[str, tuple[float, float]]:
    """The body of a chart's SVG, and the steps that its axis covers."""
    curves = [replace(curve, points=thin(curve.points, _POINTS)) for curve in chart.curves]
    stack = [replace(curve, points=thin(curve.points, _BARS)) for curve in chart.stack]
    low, high = (thin(points, _POINTS, how) for points, how in zip(chart.band, (min, max), strict=True))
    xs = [x for curve in (*curves, *stack) for x, _ in curve.points]
    tops = [sum(values) for values in zip(*([y for _, y in c.points] for c in stack), strict=True)] if stack else []
    ys = [y for c in curves for _, y in finite(c.points)] + [y for _, y in finite((*low, *high))] + tops
    if chart.least:
        ys += [chart.least, -chart.least] if min(ys) < 0 else [chart.least]
    ys += [] if chart.top is None else [chart.top]
    ticks = ticks_of(min([*ys, 0.0] if chart.from_zero else ys), max(ys))
    first, last = chart.span or (min(xs), max(xs))
    x0, x1 = first, last
    if stack:  # bars need room to their sides
        half = (x1 - x0) / max(len(stack[0].points) - 1, 1) / 2 or 0.5
        x0, x1 = x0 - half, x1 + half

    def px(x: float) -> float:
        share = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def py(y: float) -> float:
        return round(HEIGHT - BOTTOM - (y - ticks[0]) / (ticks[-1] - ticks[0]) * (HEIGHT - TOP - BOTTOM), 1)

    # beside the axis' name, a label begins at its step
    labels = [(f"{x:g}", px(x), "start" if px(x) < LEFT + 8 else "middle") for x in step_labels(first, last)]
    parts = [frame([(number(tick), py(tick)) for tick in ticks], labels, "step")]
    parts += [_marks(chart, px), _bars(stack, px, py) if stack else ""]
    low, high = finite(low), finite(high)
    if low and high:
        edge = [(px(x), py(y)) for x, y in (*high, *reversed(low))]
        parts.append(f"<polygon class='c1 band' points='{' '.join(f'{x},{y}' for x, y in edge)}'/>")
    parts += [_line(curve, px, py) for curve in curves]
    return "".join(parts), (first, last)


def frame(
    ticks: Sequence[tuple[str, float]], labels: Sequence[tuple[str, float, str]], unit: str, height: float = HEIGHT
) -> str:
    """Grid lines with their numbers at heights, and labels of the lower axis at (place, anchor)."""
    parts = []
    for text, y in ticks:
        parts.append(f"<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={y} y2={y} />")
        parts.append(f"<text x={LEFT - 6} y={y + 3.5} text-anchor=end>{text}</text>")
    parts.append(f"<text x={LEFT - 6} y={height - 8:g} text-anchor=end>{unit}</text>")
    parts += [f"<text x={x} y={height - 8:g} text-anchor={anchor}>{text}</text>" for text, x, anchor in labels]
    return "".join(parts)


def _marks(chart: Chart, px: Callable) -> str:
    """Upright lines, as many as a reader can tell apart."""
    shown = chart.marks[:: -(-len(chart.marks) // _MARKS)] if chart.marks else ()
    title = escape(chart.mark)
    return "".join(
        f"<line class=mark x1={px(x)} x2={px(x)} y1={TOP} y2={HEIGHT - BOTTOM}>"
        f"<title>step {x:g}: {title}</title></line>"
        for x in shown
    )


def _bars(stack: Sequence[Curve], px: Callable, py: Callable) -> str:
    count = len(stack[0].points)
    width = round(min((WIDTH - LEFT - RIGHT) / count * 0.82, 28), 2)
    base, parts = [0.0] * count, []
    for curve in stack:
        for i, (x, y) in enumerate(curve.points):
            if y > 0:
                top, bottom = py(base[i] + y), py(base[i])
                title = f"<title>step {x:g}: {curve.label} {number(y)}</title>"
                box = f"x={round(px(x) - width / 2, 2)} y={top} width={width} height={round(bottom - top, 2)}"
                parts.append(f"<rect class={curve.colour} {box}>{title}</rect>")
            base[i] += y
    return "".join(parts)


def _line(curve: Curve, px: Callable, py: Callable) -> str:
    pieces: list[list[Point]] = [[]]
    for x, y in curve.points:
        if math.isfinite(y):
            pieces[-1].append((px(x), py(y)))
        elif pieces[-1]:
            pieces.append([])  # a gap where a number was not finite
    kind = f"{curve.colour} line" + " dash" * curve.limit
    parts = [
        f"<polyline class='{kind}' points='{' '.join(f'{x},{y}' for x, y in p)}'/>"
        for p in pieces
        if curve.line and len(p) > 1
    ]
    shown = finite(curve.points)
    if curve.dots or len(shown) == 1:
        parts += [
            f"<circle class={curve.colour} cx={px(x)} cy={py(y)} r=3 ><title>step {x:g}: {number(y)}</title></circle>"
            for x, y in shown
        ]
    return "".join(parts)


def ticks_of(low: float, high: float) -> list[float]:
    """Three to six round values that enclose [low, high]."""
    if high <= low:
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    rough = (high - low) / 4
    scale = 10.0 ** math.floor(math.log10(rough))
    size = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= rough * 0.999)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [i * size for i in range(first, last + 1)]


def step_labels(first: float, last: float) -> list[float]:
    """Labels of the step axis: whole numbers, round ones inside."""
    if last - first < 1:
        return [first]
    inside = [t for t in ticks_of(first, last) if first <= t <= last and t == int(t)]
    return inside if len(inside) >= 2 else [first, last]


def thin(points: Sequence[Point], most: int, how: Callable[[list[float]], float] = fmean) -> list[Point]:
    """At most `most` points, each by `how` from an equal stretch of the series; one without a finite number is a
    gap."""
    count = min(most, len(points))
    pieces = [points[i * len(points) // count : (i + 1) * len(points) // count] for i in range(count)]
    values = [[y for _, y in finite(piece)] for piece in pieces]
    return [(piece[len(piece) // 2][0], how(ys) if ys else math.nan) for piece, ys in zip(pieces, values, strict=True)]


def finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(y)]


def breakable(text: str) -> str:
    return escape(text).replace("/", "/<wbr>").replace("_", "_<wbr>")
