"""Samples to read on a run's page: a table of lines of `samples.jsonl` that a small script sorts and filters.

Not every sample has every field, so a cell reads them with `get`. Without the script the page has no controls. Of a
prompt in a chat template the last message of the user is shown, and the rest is folded below it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import groupby
from math import isfinite
from typing import Any

from jaxrl.record.metrics import number
from jaxrl.report.charts import breakable

EXTREMES = 8
"""The number of best and of worst samples."""
MOST = 200
"""Samples on the page; of more, those of some steps."""
_MAX_TEXT = 4000  # characters of a prompt or response that are shown
_USER = re.compile(
    r"(?:<\|im_start\|>user\n|<\|start_header_id\|>user<\|end_header_id\|>\n+|<start_of_turn>user\n|\[INST\])"
    r"(.*?)(?:<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|\[/INST\])",
    re.DOTALL,
)
_SHADES = "<p class=shades>A token's colour is the probability with which it was drawn: {}.</p>".format(
    " ".join(
        f"<span class=p{shade}>{text}</span>"
        for shade, text in enumerate(("above 37 %", "14 to 37 %", "5 to 14 %", "2 to 5 %", "below 2 %"))
    )
)
"""Powers of e, as `_coloured` cuts them."""
Shown = Mapping[str, Any]


def samples_section(samples: Sequence[Shown]) -> str:
    if not samples:
        return "<p class=note>No samples were recorded.</p>"
    chosen = _chosen(samples)
    rows = [_row(samples[i]) for i in chosen]
    heads = "".join(
        f"<th>{f'<button type=button data-by={by} disabled>{heading}</button>' if by else heading}</th>"
        for heading, by, _, _ in COLUMNS
    )
    table = f"<table class=samples><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    count = f"{len(chosen)} of {len(samples)} recorded samples are on this page."
    controls = _controls(samples) + (_SHADES if any("class=p0" in row for row in rows) else "")
    return f"<p class=sub>{count}</p>{controls}<div class=scroll>{table}</div><script>{SCRIPT}</script>"


def _controls(samples: Sequence[Shown]) -> str:
    sources = sorted({str(sample.get("source") or "") for sample in samples} - {""})
    named = "".join(f"<option>{escape(source)}</option>" for source in sources)
    of_source = f"<select data-source aria-label=source><option value=''>any source</option>{named}</select>"
    return (
        f"<form class=controls hidden>{of_source if len(sources) > 1 else ''}"
        "<input type=search data-text placeholder='words in them'><span class=sub data-count></span></form>"
    )


def _chosen(samples: Sequence[Shown]) -> list[int]:
    """The samples on the page, by step and then the best first: the best and the worst of the run, and of the others as
    many as there is room for, at equal distances."""
    ordered = sorted(range(len(samples)), key=lambda i: -value(samples[i]))
    extremes = {*ordered[:EXTREMES], *ordered[-EXTREMES:]}
    others = [i for i in range(len(samples)) if i not in extremes]
    room = min(MOST - len(extremes), len(others))
    spread = [others[i * len(others) // room] for i in range(room)]
    return sorted([*extremes, *spread], key=lambda i: (samples[i]["step"], -value(samples[i]), i))


def value(sample: Shown) -> float:
    """A sample without a reward is the lowest."""
    reward = sample.get("reward")
    return float(reward) if isinstance(reward, int | float) and isfinite(reward) else float("-inf")


def _row(sample: Shown) -> str:
    data = {"step": sample["step"], "reward": value(sample), "tokens": sample.get("length") or 0}
    numbers = " ".join(f"data-{name}={found if isfinite(found) else -1e308}" for name, found in data.items())
    source = escape(str(sample.get("source") or ""), quote=True)
    cells = "".join(
        f"<td data-label={heading}{' class=num' if is_number else ''}>{content(sample)}</td>"
        for heading, _, content, is_number in COLUMNS
    )
    return f'<tr {numbers} data-source="{source}">{cells}</tr>'


def _step(sample: Shown) -> str:
    key = sample.get("key")
    return f"{sample['step']:g}" + (f"<p class='sub key'>{escape(str(key))}</p>" if key else "")


def _prompt(sample: Shown) -> str:
    answer, text = sample.get("answer"), str(sample.get("prompt") or "")
    shown = "" if answer in (None, "") else f"<p class=sub>answer: {escape(str(answer)[:_MAX_TEXT])}</p>"
    messages = _USER.findall(text)
    if not messages:
        return _pre(text) + shown
    whole = f"<details><summary>with the chat template</summary>{_pre(text)}</details>"
    return _pre(messages[-1].strip()) + shown + whole


def _response(sample: Shown) -> str:
    """With several turns, less likely tokens are redder, and an environment's answer is grey."""
    turns: Sequence[Shown] = sample.get("turns") or ()
    if not turns:
        return _pre(str(sample.get("response") or ""))
    parts: list[str] = []
    for count, turn in enumerate(turns, 1):
        answer = turn.get("answer") or []
        seconds = f", answered in {number(turn['seconds'])} s" if answer else ""
        parts.append(f"<p class=sub>turn {count}: reward {_number(turn.get('reward'))}{seconds}</p>")
        tokens = turn.get("tokens")
        parts.append(_coloured(tokens) if tokens else _pre(str(turn.get("text") or "")))
        parts += [f"<pre class=answer>{escape(str(each['content'])[:_MAX_TEXT])}</pre>" for each in answer]
    return "".join(parts)


def _coloured(tokens: Sequence[tuple[str, float]]) -> str:
    """Neighbours of one shade are one element."""
    shades = [(min(int(-logprob), 4), piece) for piece, logprob in tokens]
    shaded = ((shade, "".join(piece for _, piece in some)) for shade, some in groupby(shades, key=lambda pair: pair[0]))
    title = "title='log-probability below "
    spans = [f"<span class=p{shade} {title}{-shade}'>{escape(text)}</span>" for shade, text in shaded]
    return f"<pre tabindex=0>{''.join(spans)}</pre>"


def _reward(sample: Shown) -> str:
    parts = sample.get("parts")
    made_of = {"scorer": sample.get("own_reward"), **(parts if isinstance(parts, Mapping) else {})}
    made_of |= {"wrong": sample.get("wrong_reward"), "overlong": sample.get("overlong_reward")}
    lines = [f"{name} {_number(value)}" for name, value in made_of.items() if value is not None]
    if sample.get("error"):
        lines.append(str(sample["error"])[:200])
    below = "".join(f"<p class=sub>{breakable(line)}</p>" for line in lines)
    shown = escape(_number(sample.get("reward"))) + below
    info = sample.get("info")
    if not isinstance(info, Mapping) or not info:
        return shown
    lines = [f"{name}: {said if isinstance(said, str) else json.dumps(said)}" for name, said in info.items()]
    return f"{shown}<details><summary>info</summary>{_pre(chr(10).join(lines))}</details>"


def _number(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else "–"


def _tokens(sample: Shown) -> str:
    length = sample.get("length")
    details = [str(sample[key]) for key in ("finish_reason", "source") if sample.get(key)]
    return f"{escape('–' if length is None else str(length))}<p class=sub>{breakable(', '.join(details))}</p>"


def _pre(text: str) -> str:
    more = len(text) - _MAX_TEXT
    rest = f"<i> … {more} more characters</i>" if more > 0 else ""
    return f"<pre tabindex=0>{escape(text[:_MAX_TEXT])}{rest}</pre>"


COLUMNS: tuple[tuple[str, str, Callable[[Shown], str], bool], ...] = (
    ("Step", "step", _step, True),
    ("Prompt", "", _prompt, False),
    ("Response", "", _response, False),
    ("Reward", "reward", _reward, True),
    ("Tokens", "tokens", _tokens, True),
)
"""The table of samples: heading, what it is sorted by, what the cell shows of a sample, and whether it is a number."""

SCRIPT = """
(() => {
  const form = document.querySelector('form.controls'), table = document.querySelector('table.samples');
  const body = table.tBodies[0], rows = [...body.rows], get = name => form.querySelector(`[data-${name}]`);
  const show = () => {
    const source = get('source') ? get('source').value : '', words = get('text').value.toLowerCase();
    let count = 0;
    for (const row of rows) {
      const fits = (!source || row.dataset.source === source)
        && (!words || row.textContent.toLowerCase().includes(words));
      row.hidden = !fits;
      count += fits;
    }
    get('count').textContent = count + (count === 1 ? ' sample' : ' samples');
  };
  let by = '', down = true;
  for (const button of table.tHead.querySelectorAll('button')) {
    button.disabled = false;
    button.onclick = () => {
      down = by === button.dataset.by ? !down : button.dataset.by !== 'step';
      by = button.dataset.by;
      for (const head of table.tHead.rows[0].cells) head.removeAttribute('aria-sort');
      button.parentNode.setAttribute('aria-sort', down ? 'descending' : 'ascending');
      body.append(...rows.sort((a, b) => (down ? -1 : 1) * (a.dataset[by] - b.dataset[by])));
    };
  }
  form.oninput = show;
  form.onsubmit = event => event.preventDefault();
  form.hidden = false;
  show();
})();
"""
"""Shows the controls; sorts by a click on a heading, and filters by what the controls hold."""
