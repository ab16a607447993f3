"""Warnings for a reader: sentences about a run that learns little, or of which too little is known."""

from __future__ import annotations

from html import escape
from statistics import fmean, stdev

from jaxrl.record.metrics import number
from jaxrl.report.charts import finite
from jaxrl.report.curves import validation_names
from jaxrl.report.runs import RecordedRun

_RECENT = 10
"""Steps that count as the end of a run, and as its beginning."""
_MANY_CUT, _FEW_MIXED = 0.2, 0.2


def verdicts(run: RecordedRun) -> list[str]:
    """The most important first; none of a run without steps."""
    if not run.metrics:
        return []
    found = [_cut, _no_gradient, _few_mixed, _unchanged, _skipped, _no_held_out]
    return [text for each in found if (text := each(run))]


def verdicts_box(run: RecordedRun) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in verdicts(run))
    return f"<ul class=verdicts>{items}</ul>" if items else ""


def _last(run: RecordedRun, name: str) -> float | None:
    """The mean over the last steps."""
    values = [value for _, value in finite(run.series(name))][-_RECENT:]
    return fmean(values) if values else None


def _cut(run: RecordedRun) -> str:
    share, limit = _last(run, "response_length/clip_ratio"), run.option("data.max_response_length")
    if share is None or share < _MANY_CUT:
        return ""
    return f"{share:.0%} of the responses are cut at {limit} tokens: raise data.max_response_length."


def _no_gradient(run: RecordedRun) -> str:
    norms = [value for _, value in finite(run.series("actor/grad_norm"))]
    zeros = sum(value == 0 for value in norms)
    if not zeros:
        return ""
    of = f"{zeros} of {len(norms)} steps" if zeros < len(norms) else f"all {len(norms)} steps"
    return f"The gradient was 0 in {of}: no prompt had responses with different rewards."


def _few_mixed(run: RecordedRun) -> str:
    share = _last(run, "critic/mixed_reward_groups")
    if not share or share >= _FEW_MIXED:  # where there is none, the gradient says so
        return ""
    return (
        f"Only {share:.0%} of the prompts have responses with different rewards, and the others teach nothing: take "
        "easier or harder prompts, raise rollout.n, or switch algorithm.filter_groups on."
    )


def _unchanged(run: RecordedRun) -> str:
    values = [value for _, value in finite(run.series("critic/rewards/mean"))]
    if len(values) < 2 * _RECENT:
        return ""
    first, last = values[:_RECENT], values[-_RECENT:]
    noise = max(stdev(first), stdev(last)) / _RECENT**0.5
    if abs(fmean(last) - fmean(first)) > 2 * noise:
        return ""
    return (
        f"The reward has not changed: {number(fmean(first))} in the first {_RECENT} steps and {number(fmean(last))} in "
        f"the last {_RECENT}, which is chance alone."
    )


def _skipped(run: RecordedRun) -> str:
    count = sum(value for _, value in finite(run.series("actor/skipped_updates")))
    return f"{count:g} updates were skipped, because their gradient was not finite." if count else ""


def _no_held_out(run: RecordedRun) -> str:
    if validation_names(run) or run.is_simulated:
        return ""
    if run.learns_from_files:
        return "There is no held-out set: data.val_files or data.val_size, with trainer.test_freq, measures on one."
    return (
        "There is no held-out set, so nothing says what holds beyond the training prompts: data.val_files or "
        "data.val_size, with trainer.test_freq."
    )
