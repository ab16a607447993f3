"""A layout as a picture: a box per device, which shows the heads, MLP columns and vocabulary rows that it holds.

Purpose: `jaxrl explain-layout --svg FILE` and `--png FILE`. Boxes of a dp group stand in one row and have one colour; a
strip stands for a whole dim, and its filled part is on the device; padding is pale. A picture is first a list of
shapes, which is then written as text (SVG) or pixels (PNG, with the package pillow).
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from jaxrl.sharding.explain import DevicePart, LayoutExplanation, Range

INK, SOFT, PAPER, EMPTY = "#1d1f23", "#62666e", "#ffffff", "#eceae6"
# strong and pale; dp groups take them in turns
COLOURS = (
    ("#2563a8", "#b9cfe6"),
    ("#c2571a", "#efcdb9"),
    ("#2f855a", "#bfdccc"),
    ("#8554b0", "#dac8e8"),
    ("#b8871b", "#ead9b4"),
    ("#c23b5a", "#efc2cc"),
    ("#16899c", "#b8dce1"),
    ("#5b4bb5", "#cbc6e8"),
)
_BOX, _GAP, _LEFT, _TOP, _STRIP, _MAX_CELLS = 196, 14, 96, 74, 12, 64
_BOX_HEIGHT = 142


@dataclass(frozen=True, slots=True)
class Rectangle:
    """In pixels, from the top left corner."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    line: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """Text with its baseline beginning at (x, y)."""

    x: float
    y: float
    text: str
    size: int = 11
    colour: str = INK


@dataclass(frozen=True, slots=True)
class Picture:
    """Shapes, drawn in order, on a sheet of that many pixels."""

    title: str
    width: int
    height: int
    shapes: tuple[Rectangle | Label, ...]


def draw(e: LayoutExplanation) -> Picture:
    """The picture of a layout: a row per dp group, a column per tp rank."""
    shapes: list[Rectangle | Label] = []
    title = f"{e.name}: dp {e.dp} x tp {e.tp} on {len(e.devices)} device" + "s" * (len(e.devices) > 1)
    padding = ", ".join(f"{what} {before} to {after}" for what, before, after in e.sizes if before != after)
    shapes += [
        Label(_GAP, 28, title, 17),
        Label(_GAP, 48, f"padded for tp {e.max_tp}: {padding or 'nothing'}; padding is pale", 11, SOFT),
    ]
    shapes += [Label(_LEFT + rank * (_BOX + _GAP), _TOP - 6, f"tp rank {rank}", 11, SOFT) for rank in range(e.tp)]
    for group in range(e.dp):
        shapes.append(Label(_GAP, _TOP + group * (_BOX_HEIGHT + _GAP) + 20, f"dp group {group}", 12))
    for part in e.devices:
        shapes += _device(e, part)
    width = max(_LEFT + e.tp * (_BOX + _GAP), _GAP * 2 + 9 * len(title), _GAP * 2 + 6 * len(padding) + 220)
    return Picture(title, width, _TOP + e.dp * (_BOX_HEIGHT + _GAP), tuple(shapes))


def _device(e: LayoutExplanation, part: DevicePart) -> Iterator[Rectangle | Label]:
    x, y = _LEFT + part.tp_rank * (_BOX + _GAP), _TOP + part.dp_group * (_BOX_HEIGHT + _GAP)
    yield Rectangle(x, y, _BOX, _BOX_HEIGHT, PAPER, SOFT)
    yield Label(x + 8, y + 17, f"device {part.device}", 12)
    rows = ((part.heads, e.sizes[0]), (part.kv_heads, e.sizes[1]), (part.mlp, e.sizes[2]), (part.vocab, e.sizes[3]))
    for i, (held, (what, _, total)) in enumerate(rows):
        top = y + 26 + i * 29
        yield Label(x + 8, top + 9, f"{what} {held}", 10, SOFT)
        yield from _strip(x + 8, top + 13, held, total, COLOURS[part.dp_group % len(COLOURS)])


def _strip(x: float, y: float, held: Range, total: int, colours: tuple[str, str]) -> Iterator[Rectangle]:
    """A dim: one cell per entry where these are few, and otherwise a bar."""
    width = (_BOX - 16) / total
    strong, pale = colours
    yield Rectangle(x, y, _BOX - 16, _STRIP, EMPTY)
    yield Rectangle(x + held.start * width, y, (held.stop - held.start) * width, _STRIP, strong)
    for start, stop in held.padding:
        yield Rectangle(x + start * width, y, (stop - start) * width, _STRIP, pale)
    if total <= _MAX_CELLS:
        for cell in range(1, total):
            yield Rectangle(x + cell * width - 0.5, y, 1, _STRIP, PAPER)


def svg(picture: Picture) -> str:
    """The picture as an SVG document."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {picture.width} {picture.height}" '
        f'width="{picture.width}" height="{picture.height}" font-family="system-ui, sans-serif" role="img">',
        f"<title>{escape(picture.title)}</title>",
        f'<rect width="{picture.width}" height="{picture.height}" fill="{PAPER}"/>',
    ]
    for shape in picture.shapes:
        if isinstance(shape, Label):
            place = f'x="{shape.x:g}" y="{shape.y:g}" font-size="{shape.size}" fill="{shape.colour}"'
            parts.append(f"<text {place}>{escape(shape.text)}</text>")
        else:
            line = f' stroke="{shape.line}"' if shape.line else ""
            box = f'x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}"'
            parts.append(f'<rect {box} fill="{shape.fill}"{line}/>')
    return "\n".join([*parts, "</svg>", ""])


def png(picture: Picture, scale: int = 2) -> bytes:
    """The picture as PNG, `scale` pixels for one; ValueError where the package pillow is not installed."""
    try:
        image_module, draw_module, font_module = (
            importlib.import_module(f"PIL.{name}") for name in ("Image", "ImageDraw", "ImageFont")
        )
    except ImportError:
        raise ValueError("--png needs the package pillow, which is not installed: install it, or use --svg") from None
    image = image_module.new("RGB", (picture.width * scale, picture.height * scale), PAPER)
    canvas = draw_module.Draw(image)
    for shape in picture.shapes:
        if isinstance(shape, Label):
            font = font_module.load_default(size=shape.size * scale)
            canvas.text((shape.x * scale, shape.y * scale), shape.text, fill=shape.colour, font=font, anchor="ls")
        else:
            ends = (shape.x, shape.y, shape.x + shape.width, shape.y + shape.height)
            left, top, right, bottom = (round(value * scale) for value in ends)
            if right > left:  # a part narrower than a pixel leaves no trace
                canvas.rectangle((left, top, right - 1, bottom - 1), fill=shape.fill, outline=shape.line or None)
    out = io.BytesIO()
    image.save(out, format="PNG")
    return out.getvalue()
