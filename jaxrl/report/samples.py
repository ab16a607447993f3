"""Samples to read on a run's page: of its first, middle and last step, and the best and the worst of the whole run,
each sorted by reward.

Purpose: `samples_section` shows lines of `samples.jsonl` (`jaxrl.record.samples` has their fields). Older runs lack
fields that were added later, so a cell reads them with `get`. Widths of columns stand in the page's style sheet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import isfinite
from typing import Any

from jaxrl.report.charts import breakable, number

PER_STEP = 4
EXTREMES = 3
"""Of the best and of the worst samples each, where the run has more samples than that."""
_MAX_TEXT = 4000  # characters of a prompt or response that are shown

Shown = Mapping[str, Any]


def samples_section(samples: Sequence[Shown]) -> str:
    """HTML of a run's recorded samples."""
    if not samples:
        return "<p class=note>No samples were recorded.</p>"
    steps = sorted({sample["step"] for sample in samples})
    rows = []
    for step in dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1])):
        of_step = [sample for sample in samples if sample["step"] == step]
        rows += [_head(f"Step {step:g}"), *map(_row, by_reward(of_step[:PER_STEP]))]
    if len(samples) > 2 * EXTREMES and len({_value(sample) for sample in samples}) > 1:
        ordered = by_reward(samples)
        rows += [_head("Highest rewards of the run"), *map(_row_with_step, ordered[:EXTREMES])]
        rows += [_head("Lowest rewards of the run"), *map(_row_with_step, ordered[-EXTREMES:])]
    heads = "".join(f"<th>{heading}</th>" for heading, _, _ in COLUMNS)
    return f"<table class=samples><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def by_reward(samples: Sequence[Shown]) -> list[Shown]:
    """From the highest reward to the lowest; samples without one at the end, equals in their order."""
    return sorted(samples, key=_value, reverse=True)


def _value(sample: Shown) -> float:
    reward = sample.get("reward")
    return float(reward) if isinstance(reward, int | float) and isfinite(reward) else float("-inf")


def _head(text: str) -> str:
    return f"<tr class=step><th colspan={len(COLUMNS)} scope=rowgroup>{escape(text)}</th></tr>"


def _row(sample: Shown) -> str:
    return f"<tr>{''.join(_cell(sample, *column) for column in COLUMNS)}</tr>"


def _row_with_step(sample: Shown) -> str:
    return _row({**sample, "of_step": sample["step"]})


def _cell(sample: Shown, heading: str, content: Callable[[Shown], str], is_number: bool) -> str:
    return f"<td data-label={heading}{' class=num' if is_number else ''}>{content(sample)}</td>"


def _prompt(sample: Shown) -> str:
    answer = sample.get("answer")
    shown = "" if answer in (None, "") else f"<p class=sub>answer: {escape(str(answer)[:_MAX_TEXT])}</p>"
    return _text(sample, "prompt") + shown


def _reward(sample: Shown) -> str:
    """The reward, and below it what it was made of and why scoring failed."""
    parts = sample.get("parts")
    made_of = {"scorer": sample.get("own_reward"), **(parts if isinstance(parts, Mapping) else {})}
    made_of["overlong"] = sample.get("overlong_reward")
    lines = [f"{name} {_number(value)}" for name, value in made_of.items() if value is not None]
    if sample.get("error"):
        lines.append(str(sample["error"])[:200])
    below = "".join(f"<p class=sub>{breakable(line)}</p>" for line in lines)
    return escape(_number(sample.get("reward"))) + below


def _number(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else "–"


def _tokens(sample: Shown) -> str:
    length = sample.get("length")
    details = [str(sample[key]) for key in ("finish_reason", "source") if sample.get(key)]
    details += [f"step {sample['of_step']:g}"] if "of_step" in sample else []
    return f"{escape('–' if length is None else str(length))}<p class=sub>{breakable(', '.join(details))}</p>"


def _text(sample: Shown, name: str) -> str:
    value = str(sample.get(name) or "")
    more = len(value) - _MAX_TEXT
    rest = f"<i> … {more} more characters</i>" if more > 0 else ""
    return f"<pre tabindex=0>{escape(value[:_MAX_TEXT])}{rest}</pre>"


COLUMNS: tuple[tuple[str, Callable[[Shown], str], bool], ...] = (
    ("Prompt", _prompt, False),
    ("Response", lambda sample: _text(sample, "response"), False),
    ("Reward", _reward, True),
    ("Tokens", _tokens, True),
)
"""The table of samples: heading, what the cell shows of a sample, and whether it is a number."""
