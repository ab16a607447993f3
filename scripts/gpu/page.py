"""Text about the battery's figures: the page of results, and the page of what is expected of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpu.cards import CARDS, Card, card_of
from gpu.figures import Bar, Figure, figures
from gpu.parts import parts

Record = Mapping[str, Any]
TRIAL = "sizes     tiny, whatever is said below: a trial of the battery, and no measurement"
NOT_MEASURED, MET, MISSED = "not measured", "met", "MISSED"


def verdict(figure: Figure, value: float | None, is_gpu: bool) -> str:
    """Of a figure's bar; empty where it has none, or none on this device."""
    if figure.bar is None or not (is_gpu or figure.everywhere):
        return ""
    if value is None:
        return NOT_MEASURED
    return MET if figure.bar.is_met(value) else MISSED


def results(found: Sequence[Figure], records: Sequence[Record], *, trial: bool = False) -> str:
    """The page of results, of the newest records: bars first, then every figure by part, then kernels by group.

    Args:
      trial: the sizes were tiny, and not those that the figures' names have.
    """
    measured = [record for record in records if record["bench"] != "part"]
    newest = measured[-1] if measured else {}
    device = newest.get("device", {})
    card = card_of(device.get("kind", ""))
    is_gpu = device.get("platform") == "gpu"
    values = {id(figure): figure.value(records) for figure in found}
    verdicts = {id(figure): verdict(figure, values[id(figure)], is_gpu) for figure in found}
    lines = [*_head(newest, device, card), *([TRIAL] if trial else []), ""]
    judged = [figure for figure in found if verdicts[id(figure)]]
    for wanted in (MET, MISSED, NOT_MEASURED):
        of_kind = [figure for figure in judged if verdicts[id(figure)] == wanted]
        lines.append(f"bars {wanted}: {len(of_kind)}")
        if wanted != MET:
            lines += [f"    {figure.part}: {figure.text}" for figure in of_kind]
    ended = {record["part"]: record for record in records if record["bench"] == "part"}
    for part in dict.fromkeys(figure.part for figure in found):
        lines += ["", _part_line(part, ended.get(part))]
        for figure in found:
            if figure.part == part:
                lines.append(_figure_line(figure, values[id(figure)], card, verdicts[id(figure)]))
    return "\n".join([*lines, *_kernels(records), ""])


def _head(newest: Record, device: Record, card: Card | None) -> Iterator[str]:
    if not newest:
        yield "nothing has been measured yet"
        return
    used = ", ".join(f"{name} {version}" for name, version in newest["versions"].items())
    changes = " with uncommitted changes" if newest["dirty"] else ""
    yield f"device    {device['count']} x {device['kind']} ({device['platform']})"
    yield f"date      {newest['date']}"
    yield f"commit    {newest['commit'] or 'unknown'}{changes}"
    yield f"versions  {used}"
    if card is None:
        yield f"expected  nothing: expectations are for {' and '.join(CARDS)}, and bars on speed for GPUs"


def _part_line(part: str, ended: Record | None) -> str:
    how = "not run" if ended is None else f"{ended['status']}, {ended['seconds']:.0f} s, {ended['date']}"
    return f"{part} ({how})"


def _figure_line(figure: Figure, value: float | None, card: Card | None, judged: str) -> str:
    expected = expectation(figure, card) if card else ""
    line = f"    {figure.text:<66} {figure.shown(value):>12}"
    line += f"   expected {expected:>12}" if expected else " " * 24
    return (line + (f"   bar {bar_text(figure):<13} {judged}" if judged else "")).rstrip()


def expectation(figure: Figure, card: Card) -> str:
    """In print; empty where nothing is expected, and in words where it does not fit."""
    if figure.expected is None:
        return ""
    value = figure.expected(card)
    return "does not fit" if math.isnan(value) else figure.shown(value)


def bar_text(figure: Figure) -> str:
    bar: Bar | None = figure.bar
    if bar is None:
        return ""
    words = {">=": "at least", "<=": "at most", "+-": "within"}[bar.sense]
    return f"{words} {figure.shown(bar.limit)}"


def _kernels(records: Sequence[Record]) -> Iterator[str]:
    """Of every newest profile: groups of kernels, and the five kernels that take longest."""
    newest: dict[tuple[str, str], Mapping[str, Any]] = {}
    for record in records:
        for case in record.get("results", {}).get("cases", ()):
            if case.get("profile"):
                sizes = " x ".join(str(case[name]) for name in ("rows", "context", "tokens") if name in case)
                newest[record["part"], f"{case.get('case', '')} {sizes}".strip()] = case["profile"]
    for (part, what), profile in newest.items():
        yield ""
        yield f"kernels of {part}, {what}: {profile['kernels_s'] * 1e3:.3f} ms in {profile['launches']} launches"
        for name, group in sorted(profile["groups"].items(), key=lambda item: -item[1]["seconds"]):
            share = group["seconds"] / profile["kernels_s"] if profile["kernels_s"] else 0.0
            yield f"    {name:<40} {group['seconds'] * 1e3:10.3f} ms {share:6.1%} {group['launches']:>7} launches"
        for kernel in profile["top"][:5]:
            yield f"        {kernel['name'][:60]:<60} {kernel['seconds'] * 1e3:10.3f} ms {kernel['launches']:>7}"


EXPECTED = """# What the GPU battery should find

**Nothing on this page was measured.** It was written down before jaxrl ran on a GPU: for each number that
`scripts/gpu_battery.py` prints, the value that arithmetic gives, so that a number that is far off shows that something
is not understood. The page is made from the code that the battery compares with (`scripts/gpu/figures.py` and
`cards.py`; `python scripts/gpu_battery.py --expected` prints it, and a test holds it against this file).

- Rates of the datasheets: {cards}.
- Assumed: a copy reaches 90 % of the bandwidth, a large bfloat16 product 80 % of the rate.
- Assumed of decoding: weights are read at {weights:.0f} % of the copy bandwidth, the cache at {cache:.0f} %. A layer of
  a step has {kernels} kernels and {outside} are outside of the layers, as compiled for an H100; {merge} and {list} more
  where a context is longer than 1,024; {gap:.1f} µs lie between two. (Until 28 November the page assumed 9 and 12: of
  the 1.5B 0.02 ms more at 1k, 0.01 ms less at 8k.)
- Assumed of training: products run at {products:.0f} % of the large product's rate, packed attention at
  {attention:.0f} % (cuDNN's at {cudnn:.0f} %). Beside that move {outer} bytes per token, layer and entry between
  products; the float32 logits, {logits} times; {accumulate} bytes per weight and microbatch; {adamw} per weight and
  update.
- Figures with `actor.numerics: invariant`, and of a long row among short ones, came later (28 November 2026), when an
  H200 had run the others; what is assumed of them is in kernels.md: [invariant](../kernels.md#invariant-numbers),
  [a long row](../kernels.md#a-long-row-among-short-ones).
- [kernels.md](../kernels.md) has the roofline of a decode step without any of these assumptions.

The small model is Qwen2.5-1.5B (`decode-1.5b`, training, the step, the rules), the large one Qwen2.5-7B, both in
bfloat16 with random weights. A bar is what the figure must reach on a GPU; those of `check`, of recompiles and of
failed tests hold everywhere. Where the expectation itself misses its bar, the bar is expected to be missed.
"""


def expected_page() -> str:
    """docs/benchmarks/expected-gpu.md."""
    from gpu import cards

    sheets = "; ".join(
        f"{sheet.name} {sheet.memory_bytes_per_s / 1e12:.2f} TB/s, {sheet.flops_per_s / 1e12:.0f} TFLOP/s"
        for sheet in (card.sheet for card in CARDS.values())
    )
    head = EXPECTED.format(
        cards=sheets,
        weights=100 * cards.WEIGHTS_OF_COPY,
        cache=100 * cards.CACHE_OF_COPY,
        products=100 * cards.LARGE_OF_PRODUCT,
        attention=100 * cards.ATTENTION_OF_PRODUCT,
        cudnn=100 * cards.CUDNN_OF_PRODUCT,
        kernels=cards.KERNELS_A_LAYER,
        outside=cards.KERNELS_OUTSIDE,
        merge=cards.KERNELS_OF_PIECES[0],
        list=cards.KERNELS_OF_PIECES[1],
        gap=cards.GAP_S * 1e6,
        outer=cards.OUTER_BYTES,
        logits=cards.LOGIT_PASSES,
        accumulate=cards.ACCUMULATE_BYTES,
        adamw=cards.ADAMW_BYTES,
    )
    lines = [head]
    all_figures = figures()
    for part in parts():
        lines += [f"## {part.name}", "", f"About {part.seconds} s.", ""]
        lines += [f"| figure | {' | '.join(CARDS)} | bar | how |", "| --- | " + "--: | " * len(CARDS) + "--: | --- |"]
        for figure in all_figures:
            if figure.part == part.name:
                values = [expectation(figure, card) or "-" for card in CARDS.values()]
                lines.append(" | ".join([f"| {figure.text}", *values, bar_text(figure), f"{figure.how} |"]))
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
