"""The charts of a run's page: which metrics are drawn, and how."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from jaxrl.record.metrics import ROUND_PHASES, hidden_shares, seconds_of, step_phases
from jaxrl.report.charts import Chart, Curve, Point, finite
from jaxrl.report.runs import Run

PHASES = {  # in a step: label and colour of each
    "gen": ("gen", "c1"),
    "reward": ("reward", "c2"),
    "ahead": ("next rollout", "c10"),
    "stream": ("stream", "c11"),
    "old_log_prob": ("old_log_prob", "c3"),
    "ref": ("ref", "c4"),
    "testing": ("testing", "c5"),
    "update_actor": ("update_actor", "c6"),
    "sync": ("sync", "c7"),
    "save": ("save", "c8"),
}


def validation_names(run: Run) -> list[str]:
    """The scores among the evaluation metrics, accuracy first."""
    names = {name for row in run.metrics for name in row if name.startswith("val")}
    scores = [name for name in names if not any(word in name for word in ("length", "timing", "num_"))]
    return sorted(scores, key=lambda name: ("acc" not in name, name))


def charts(run: Run) -> list[Chart]:
    def curve(label: str, name: str, colour: str = "c1") -> list[Curve]:
        return [Curve(label, points, colour)] if (points := run.series(name)) else []

    reward, idle = curve("mean", "critic/rewards/mean"), curve("idle", "rollout/bubble_ratio")
    band = (run.series("critic/rewards/min"), run.series("critic/rewards/max"))
    limit = run.option("data.max_response_length")
    lengths = [
        *curve("median", "response_length/p50"),
        *curve("mean", "response_length/mean", "c4"),
        *curve("95 %", "response_length/p95", "c2"),
        *curve("longest", "response_length/max", "c3"),
    ]
    if lengths and isinstance(limit, int | float):
        lengths.append(Curve("limit", [(step, limit) for step, _ in lengths[0].points], "c9", limit=True))
    names = validation_names(run)[:4]
    held_out = [Curve(short(name), run.series(name), f"c{i + 1}", dots=True) for i, name in enumerate(names)]
    kl = curve("ppo_kl", "actor/ppo_kl") + curve("kl_loss", "actor/kl_loss", "c2")
    return [
        Chart("Reward", "per step", reward, "critic/rewards/mean", band=band),
        Chart("Held-out", "at evaluations", held_out, "val/* (trainer.test_freq is 0, or none was due yet)"),
        Chart("Response length", "tokens", lengths, "response_length/*"),
        Chart("Step time by phase", "seconds", _one_by_one(run), "timing_s/*", stack=_phases(run)),
        *_by_round(run),
        *_hidden(run),
        *_drafts(run),
        *_ranked(run),
        Chart("Idle row-slots in rollout", "share", idle, "rollout/bubble_ratio", top=1),
        Chart("Throughput", "tokens/s/device", curve("throughput", "perf/throughput"), "perf/throughput"),
        Chart("Entropy", "nats per token", curve("entropy", "actor/entropy"), "actor/entropy"),
        Chart("KL", "nats per token", kl, "actor/ppo_kl, actor/kl_loss", from_zero=False),
        Chart("Gradient norm", "before clipping", curve("grad norm", "actor/grad_norm"), "actor/grad_norm"),
    ]


def _by_round(run: Run) -> list[Chart]:
    """Charts of rollout time and longest response by kind of round, and of the queue; none without long rounds."""
    is_long = dict(run.series("rollout/long_round"))
    if not any(is_long.values()):
        return []

    def dots(series: list[Point]) -> list[Curve]:
        kinds = ((0.0, "short", "c1"), (1.0, "long", "c2"))
        points = {kind: [(step, y) for step, y in series if is_long.get(step) == kind] for kind, *_ in kinds}
        return [Curve(label, points[kind], colour, dots=True, line=False) for kind, label, colour in kinds]

    rollout_s = [(row["step"], seconds_of(ROUND_PHASES, row)) for row in run.metrics if "timing_s/gen" in row]
    queue = [
        Curve("prompts that wait", run.series("rollout/queue_length")),
        Curve("longest wait, steps", run.series("rollout/queue_age_steps/max"), "c2"),
    ]
    return [
        Chart("Rollout time by round", "seconds", dots(rollout_s), "timing_s/gen"),
        Chart("Longest response by round", "tokens", dots(run.series("response_length/max")), "response_length/max"),
        Chart("Long-prompt queue", "prompts, steps", queue, "rollout/queue_length"),
    ]


def _hidden(run: Run) -> list[Chart]:
    """How much of the update ran beside a rollout; none where nothing could."""
    if not (seconds := hidden_shares(run.metrics)):
        return []
    curves = [Curve("of its seconds", seconds)]
    if prompts := run.series("actor/streamed_share"):
        curves.append(Curve("of its prompts", prompts, "c2"))
    return [Chart("Update hidden under the rollout", "share", curves, "rollout/scale_down/hidden_s", top=1)]


def _drafts(run: Run) -> list[Chart]:
    """What speculation brought, with the steps at which an epoch begins; none where it is off."""
    if not run.series("rollout/spec/accept_rate"):
        return []
    shares = [
        Curve("accepted, of those drafted", run.series("rollout/spec/accept_rate")),
        Curve("of decoded tokens from drafts", run.series("rollout/spec/drafted_share"), "c2"),
        Curve("of plans that verify", run.series("rollout/spec/plans_share"), "c4"),
    ]
    tokens = [Curve("tokens", run.series("rollout/spec/tokens_per_step"))]
    charts = [
        Chart("Drafts from history", "share", shares, "rollout/spec/accept_rate", top=1),
        Chart("Tokens of a step that verifies", "per row", tokens, "rollout/spec/tokens_per_step"),
    ]
    return [_with_epochs(run, chart) for chart in charts]


def _ranked(run: Run) -> list[Chart]:
    """How busy ranking groups have kept the workers; none where they are off."""
    if not run.series("rollout/ranking/idle_share"):
        return []
    shares = [
        Curve("of workers' time idle", run.series("rollout/ranking/idle_share")),
        Curve("of responses moved", run.series("rollout/ranking/moved_share"), "c2"),
        Curve("begun in an earlier round", run.series("rollout/ranking/carried_share"), "c4"),
    ]
    return [_with_epochs(run, Chart("Workers of ranking groups", "share", shares, "rollout/ranking/*", top=1))]


def _with_epochs(run: Run, chart: Chart) -> Chart:
    """The chart, with the steps at which an epoch begins."""
    newest = run.series("training/epoch")
    begun = [step for (_, before), (step, epoch) in pairwise(newest) if epoch > before]
    return replace(chart, marks=begun, mark="an epoch begins")


def _phases(run: Run) -> list[Curve]:
    """Phases as layers, those that ran in the step and each moment once; the rest of the step's time is "other"."""
    whole = dict(finite(run.series("timing_s/step")))
    parts = {row["step"]: step_phases(row) for row in run.metrics}
    found = [(name, dict(finite([(s, of[name]) for s, of in parts.items() if name in of]))) for name in PHASES]
    found = [(name, seconds) for name, seconds in found if seconds]
    if not found:
        return [Curve("step", list(whole.items()))] if whole else []
    steps = sorted(whole.keys() | set().union(*(seconds.keys() for _, seconds in found)))
    layers = [
        Curve(PHASES[name][0], [(step, seconds.get(step, 0.0)) for step in steps], PHASES[name][1])
        for name, seconds in found
    ]
    other = [(s, max(whole.get(s, 0.0) - sum(seconds.get(s, 0.0) for _, seconds in found), 0.0)) for s in steps]
    return [*layers, Curve("other", other, "c9")] if any(value > 0 for _, value in other) else layers


def _one_by_one(run: Run) -> list[Curve]:
    """Where rollout and update ran at the same time: what the steps would have taken in turns."""
    both = [(row["step"], seconds_of(("step", "overlap"), row)) for row in run.metrics if "timing_s/overlap" in row]
    return [Curve("in turns", both, "c10", limit=True)] if both else []


def short(name: str) -> str:
    """`val-core/gsm8k/acc/mean@1` as `gsm8k/acc/mean@1`."""
    return name.partition("/")[2] or name
