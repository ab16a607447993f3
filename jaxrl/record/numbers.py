"""Numbers and times as people read them, on a terminal and on a page."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """At most three significant digits: `12.3k`, `0.0123`, `1.2e-5`."""
    size = abs(value)
    if not math.isfinite(value) or size == 0:
        return f"{value:g}"
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= scale:
            return f"{value / (scale if unit != 'k' else 1e3):.3g}{unit}"
    if size < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.0f}" if size >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """`7s`, `3m05s`, `2h10m`, `3d04h`: two units at most."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    for size, name, part, part_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{name}{whole % size // part:02d}{part_name}"
    return f"{whole}s"
