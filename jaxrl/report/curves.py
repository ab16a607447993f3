"""The charts of a run's page: which metrics are drawn, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import quantiles
from typing import Any

from jaxrl.record.metrics import PHASES, SHOWN, hidden_shares, seconds_of, step_phases
from jaxrl.report.charts import Chart, Curve, Point, finite
from jaxrl.report.runs import RecordedRun

_SHOWN_SHARE = 1e-3
"""The share of a run's seconds below which a phase is part of "other"."""
_OF_TIME = "What a step's seconds went to. The first step also compiles programs."
Line = tuple[str, str, str]
"""A curve's label, metric and colour."""


@dataclass(frozen=True, slots=True)
class PagePart:
    """What a mechanism adds to a run's page: charts among the others, and a section as HTML."""

    charts: Callable[[RecordedRun], list[Chart]] = lambda run: []
    section: Callable[[RecordedRun], str] = lambda run: ""


def validation_names(run: RecordedRun) -> list[str]:
    names = {name for row in run.metrics for name in row if name.startswith("val")}
    scores = [name for name in names if not any(word in name for word in ("length", "timing", "num_"))]
    return sorted(scores, key=lambda name: (not name.endswith(("/reward", "/loss")), "acc" not in name, name))


def charts(run: RecordedRun, parts: Sequence[PagePart] = ()) -> list[Chart]:
    if run.learns_from_files:
        return _supervised(run)
    lengths = curves_of(
        run,
        ("median", "response_length/p50", "c1"),
        ("mean", "response_length/mean", "c4"),
        ("95 %", "response_length/p95", "c2"),
        ("longest", "response_length/max", "c3"),
    )
    limit = run.option("data.max_response_length")
    if lengths and isinstance(limit, int | float):
        lengths.append(Curve("limit", [(step, limit) for step, _ in lengths[0].points], "c9", limit=True))
    scores = [(short(name), name, f"c{i + 1}") for i, name in enumerate(validation_names(run)[:4])]
    held_out = curves_of(run, *scores, dots=True)
    band = quartiles(run)
    return [
        _chart(run, "critic/rewards/mean", "mean", band=band),
        Chart("Held-out", "at evaluations", held_out, "Prompts that the run never trains on."),
        Chart("Response length", "tokens", lengths, SHOWN["response_length/mean"].about),
        Chart("Step time by phase", "seconds", _one_by_one(run), _OF_TIME, stack=_phases(run)),
        _chart(run, "critic/mixed_reward_groups", "of groups", top=1),
        _chart(run, "response_length/clip_ratio", "of responses", top=1),
        *_hidden(run),
        *(chart for part in parts for chart in part.charts(run)),
        _chart(run, "rollout/bubble_ratio", "idle", top=1),
        _chart(run, "perf/throughput", "throughput"),
        _chart(run, "actor/entropy", "entropy"),
        *_update(run),
        *ever(_chart(run, "critic/values/mean", "values", ("returns", "critic/returns/mean", "c2"), from_zero=False)),
        *ever(_chart(run, "critic/vf_explained_var", "of the returns' variance", from_zero=False)),
        *_off_policy(run),
    ]


def quartiles(run: RecordedRun) -> tuple[list[Point], list[Point]]:
    """By step, between which mean rewards the middle half of the prompts lies."""
    cuts = [(line["step"], quantiles(line["groups"], n=4)) for line in run.batches if len(line["groups"]) > 1]
    return [(step, low) for step, (low, _, _) in cuts], [(step, high) for step, (_, _, high) in cuts]


def curves_of(run: RecordedRun, *lines: Line, dots: bool = False) -> list[Curve]:
    found = [Curve(label, run.series(name), colour, dots=dots) for label, name, colour in lines]
    return [curve for curve in found if curve.points]


def _chart(
    run: RecordedRun, name: str, label: str, *more: Line, colour: str = "c1", unit: str = "", **options: Any
) -> Chart:
    """The chart of a metric in `SHOWN`, and of more curves beside it."""
    curves = curves_of(run, (label, name, colour), *more)
    return Chart(SHOWN[name].title, unit or SHOWN[name].unit, curves, SHOWN[name].about, **options)


def ever(chart: Chart) -> list[Chart]:
    """The chart with the curves that are anything but 0; nothing where all of them are."""
    curves = [curve for curve in chart.curves if any(y for _, y in finite(curve.points))]
    return [replace(chart, curves=curves)] if curves else []


def _supervised(run: RecordedRun) -> list[Chart]:
    loss = curves_of(run, ("training", "train/loss", "c1")) + curves_of(run, ("held-out", "val/loss", "c2"), dots=True)
    margins = ("other", "rewards/rejected", "c3"), ("margin", "rewards/margins", "c2")
    accuracy = curves_of(run, ("training", "rewards/accuracies", "c1"))
    accuracy += curves_of(run, ("held-out", "val/rewards/accuracies", "c2"), dots=True)
    return [
        replace(_chart(run, "train/loss", ""), curves=loss),
        *ever(_chart(run, "rewards/chosen", "preferred", *margins, from_zero=False)),
        *ever(Chart("Preferred by the policy", "share of pairs", accuracy, "As the data has it.", top=1)),
        Chart("Step time by phase", "seconds", [], _OF_TIME, stack=_phases(run)),
        _chart(run, "perf/throughput", "throughput"),
        *_update(run),
    ]


def _update(run: RecordedRun) -> list[Chart]:
    skipped = [step for step, count in run.series("actor/skipped_updates") if count]
    by_dual_clip = ("by the dual clip", "actor/pg_clipfrac_lower", "c2")
    divergence = ("divergence in the loss", "actor/distillation_loss", "c4")
    estimate = f"nats per token, {run.option('actor.kl_loss_type') or 'estimate'}"
    optional = [
        _chart(run, "actor/pg_clipfrac", "by the ratio", by_dual_clip, least=1e-3),
        _chart(run, "actor/skipped_updates", "skipped"),
        _chart(run, "actor/lr", "lr"),
        _chart(run, "actor/ppo_kl", "old to new", least=1e-4),
        _chart(run, "actor/kl_loss", "policy to reference", colour="c2", unit=estimate, least=1e-4),
        _chart(run, "actor/teacher_kl", "policy to teacher", divergence, colour="c3", least=1e-4),
    ]
    norm = _chart(run, "actor/grad_norm", "grad norm", marks=skipped, mark="updates were skipped here")
    return [norm, *(each for chart in optional for each in ever(chart))]


def _off_policy(run: RecordedRun) -> list[Chart]:
    perplexity = ("difference of log-perplexities", "rollout_corr/log_ppl_abs_diff", "c2")
    oldest = ("oldest token", "training/off_policy/max_staleness", "c3")
    optional = [
        _chart(run, "rollout_corr/k3_kl", "KL (k3)", perplexity, least=1e-4),
        _chart(run, "rollout_corr/logprob_abs_diff_max", "largest", colour="c3", least=1e-4),
        _chart(run, "rollout_corr/rollout_is_mean", "mean", ("largest", "rollout_corr/rollout_is_max", "c3")),
        _chart(run, "training/off_policy/mean_staleness", "mean", oldest),
        _chart(run, "training/off_policy/share", "of tokens", top=1),
    ]
    return [each for chart in optional for each in ever(chart)]


def _hidden(run: RecordedRun) -> list[Chart]:
    if not (seconds := hidden_shares(run.metrics)):
        return []
    curves = [Curve("of its seconds", seconds), *curves_of(run, ("of its prompts", "actor/streamed_share", "c2"))]
    about = "How much of the update ran beside the rollout."
    return [Chart("Update hidden under the rollout", "share", curves, about, top=1)]


def with_epochs(run: RecordedRun, chart: Chart) -> Chart:
    newest = run.series("training/epoch")
    begun = [step for (_, before), (step, epoch) in pairwise(newest) if epoch > before]
    return replace(chart, marks=begun, mark="an epoch begins")


def _phases(run: RecordedRun) -> list[Curve]:
    """Phases as layers, each moment once; the rest of the step's time is "other"."""
    whole = dict(finite(run.series("timing_s/step")))
    parts = {row["step"]: step_phases(row) for row in run.metrics}
    found = [
        (phase, dict(finite([(step, of[phase.name]) for step, of in parts.items() if phase.name in of])))
        for phase in PHASES
        if phase.colour
    ]
    found = [(phase, seconds) for phase, seconds in found if seconds]
    if not found:
        return [Curve("step", list(whole.items()))] if whole else []
    steps = sorted(whole.keys() | set().union(*(seconds.keys() for _, seconds in found)))
    least_s = sum(whole.values()) * _SHOWN_SHARE  # of a phase, or no reader could find it
    found = [(phase, seconds) for phase, seconds in found if sum(seconds.values()) > least_s]
    layers = [
        Curve(phase.label, [(step, seconds.get(step, 0.0)) for step in steps], phase.colour) for phase, seconds in found
    ]
    other = [(s, max(whole.get(s, 0.0) - sum(seconds.get(s, 0.0) for _, seconds in found), 0.0)) for s in steps]
    return [*layers, Curve("other", other, "c9")] if sum(value for _, value in other) > least_s else layers


def _one_by_one(run: RecordedRun) -> list[Curve]:
    """Where rollout and update ran at the same time: what the steps would have taken one after the other."""
    both = [(row["step"], seconds_of(("step", "overlap"), row)) for row in run.metrics if "timing_s/overlap" in row]
    return [Curve("in turns", both, "c10", limit=True)] if both else []


def short(name: str) -> str:
    """`val-core/gsm8k/acc/mean@1` as `gsm8k/acc/mean@1`."""
    return name.partition("/")[2] or name
