"""The charts of a run's page: which metrics are drawn, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from jaxrl.record.metrics import hidden_shares, seconds_of, step_phases
from jaxrl.report.charts import Chart, Curve, finite
from jaxrl.report.runs import Run

_SHOWN = 1e-3
"""The share of a run's seconds below which a phase is part of "other"."""
PHASES = {  # in a step: label and colour of each
    "gen": ("gen", "c1"),
    "reward": ("reward", "c2"),
    "ahead": ("next rollout", "c10"),
    "stream": ("stream", "c11"),
    "old_log_prob": ("old_log_prob", "c3"),
    "ref": ("ref", "c4"),
    "teacher": ("teacher", "c13"),
    "values": ("values", "c12"),
    "update_critic": ("update_critic", "c13"),
    "testing": ("testing", "c5"),
    "update_actor": ("update_actor", "c6"),
    "sync": ("sync", "c7"),
    "save": ("save", "c8"),
}


def validation_names(run: Run) -> list[str]:
    """The scores among the evaluation metrics, the mean reward and the accuracy first."""
    names = {name for row in run.metrics for name in row if name.startswith("val")}
    scores = [name for name in names if not any(word in name for word in ("length", "timing", "num_"))]
    return sorted(scores, key=lambda name: (not name.endswith(("/reward", "/loss")), "acc" not in name, name))


@dataclass(frozen=True, slots=True)
class PagePart:
    """What a mechanism adds to a run's page; nothing where the run has nothing of it.

    Attributes:
      charts: among the others. section: of its own, as HTML.
    """

    charts: Callable[[Run], list[Chart]] = lambda run: []
    section: Callable[[Run], str] = lambda run: ""


def charts(run: Run, parts: Sequence[PagePart] = ()) -> list[Chart]:
    def curve(label: str, name: str, colour: str = "c1") -> list[Curve]:
        return [Curve(label, points, colour)] if (points := run.series(name)) else []

    if run.learns_from_files:
        return _supervised(run)
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
    mixed = curve("of groups", "critic/mixed_reward_groups")
    cut = curve("of responses", "response_length/clip_ratio")
    names = validation_names(run)[:4]
    held_out = [Curve(short(name), run.series(name), f"c{i + 1}", dots=True) for i, name in enumerate(names)]
    drawn = [
        Chart("Reward", "per step", reward, "critic/rewards/mean", band=band),
        Chart("Held-out", "at evaluations", held_out, "val/* (trainer.test_freq is 0, or none was due yet)"),
        Chart("Response length", "tokens", lengths, "response_length/*"),
        Chart("Step time by phase", "seconds", _one_by_one(run), "timing_s/*", stack=_phases(run)),
        Chart("Groups with mixed rewards", "share", mixed, "critic/mixed_reward_groups", top=1),
        Chart("Responses cut at the limit", "share", cut, "response_length/clip_ratio", top=1),
        *_hidden(run),
        *(chart for part in parts for chart in part.charts(run)),
        Chart("Idle row-slots in rollout", "share", idle, "rollout/bubble_ratio", top=1),
        Chart("Throughput", "tokens/s/device", curve("throughput", "perf/throughput"), "perf/throughput"),
        Chart("Entropy", "nats per token", curve("entropy", "actor/entropy"), "actor/entropy"),
        *_update(run),
        *_of_critic(run),
        *_off_policy(run),
    ]
    if run.is_simulated:  # it has no weights: nothing is missing
        return [chart for chart in drawn if chart.stack or any(finite(each.points) for each in chart.curves)]
    return drawn


def _supervised(run: Run) -> list[Chart]:
    """Of a run that learns from files."""
    held_out = [Curve("held-out", points, "c2", dots=True)] if (points := run.series("val/loss")) else []
    means = (
        ("preferred", "rewards/chosen", "c1"),
        ("other", "rewards/rejected", "c3"),
        ("margin", "rewards/margins", "c2"),
    )
    rewards = [Curve(label, run.series(name), colour) for label, name, colour in means]
    accuracy = [
        Curve("training", run.series("rewards/accuracies")),
        Curve("held-out", run.series("val/rewards/accuracies"), "c2", dots=True),
    ]
    charts = [
        Chart("Loss", "per step", [Curve("training", run.series("train/loss")), *held_out], "train/loss"),
        Chart("Implicit rewards", "beta times the log-ratio, means", _ever(rewards), "", from_zero=False),
        Chart("Preferred by the policy", "share of pairs", _ever(accuracy), "", top=1),
        Chart("Step time by phase", "seconds", [], "timing_s/*", stack=_phases(run)),
        Chart("Throughput", "tokens/s/device", [Curve("throughput", run.series("perf/throughput"))], "perf/throughput"),
        *_update(run),
    ]
    return [chart for chart in charts if chart.stack or any(finite(each.points) for each in chart.curves)]


def _update(run: Run) -> list[Chart]:
    """The gradient, and how far an update goes; what was always 0 is left out."""
    norm = [Curve("grad norm", points)] if (points := run.series("actor/grad_norm")) else []
    skipped = [step for step, count in run.series("actor/skipped_updates") if count]
    clipped = [
        Curve("by the ratio", run.series("actor/pg_clipfrac")),
        Curve("by the dual clip", run.series("actor/pg_clipfrac_lower"), "c2"),
    ]
    charts = [
        Chart(
            "Gradient norm", "before clipping", norm, "actor/grad_norm", marks=skipped, mark="updates were skipped here"
        ),
        Chart("Clipped tokens", "share", _ever(clipped), "", least=1e-3),
        Chart("Skipped updates", "per step", _ever([Curve("skipped", run.series("actor/skipped_updates"))]), ""),
        Chart("Learning rate", "at the step's last update", _ever([Curve("lr", run.series("actor/lr"))]), ""),
        Chart(
            "KL of the update, old to new policy",
            "nats per token, mean log-ratio",
            _ever([Curve("old to new", run.series("actor/ppo_kl"))]),
            "",
            least=1e-4,
        ),
        Chart(
            "KL to the reference",
            f"nats per token, {run.option('actor.kl_loss_type') or 'estimate'}",
            _ever([Curve("policy to reference", run.series("actor/kl_loss"), "c2")]),
            "",
            least=1e-4,
        ),
        Chart(
            "KL to the teacher",
            "nats per token, mean log-ratio",
            _ever(
                [
                    Curve("policy to teacher", run.series("actor/teacher_kl"), "c3"),
                    Curve("divergence in the loss", run.series("actor/distillation_loss"), "c4"),
                ]
            ),
            "",
            least=1e-4,
        ),
    ]
    return [charts[0], *(chart for chart in charts[1:] if chart.curves)]


def _of_critic(run: Run) -> list[Chart]:
    """How well the critic foretells returns; none without one."""
    explained = run.series("critic/vf_explained_var")
    if not explained:
        return []
    means = [
        Curve("values", run.series("critic/values/mean")),
        Curve("returns", run.series("critic/returns/mean"), "c2"),
    ]
    variance = [Curve("of the returns' variance", explained)]
    return [
        Chart("Values and returns", "mean over tokens", means, "critic/values/mean", from_zero=False),
        Chart("Explained by the critic", "share", variance, "critic/vf_explained_var", from_zero=False),
    ]


def _off_policy(run: Run) -> list[Chart]:
    """How far what was sampled is from what is trained; none where it is the same."""
    mismatch = [
        Curve("KL (k3)", run.series("rollout_corr/k3_kl")),
        Curve("difference of log-perplexities", run.series("rollout_corr/log_ppl_abs_diff"), "c2"),
    ]
    gap = [Curve("largest", run.series("rollout_corr/logprob_abs_diff_max"), "c3")]
    weights = [
        Curve("mean", run.series("rollout_corr/rollout_is_mean")),
        Curve("largest", run.series("rollout_corr/rollout_is_max"), "c3"),
    ]
    age = [
        Curve("mean", run.series("training/off_policy/mean_staleness")),
        Curve("oldest token", run.series("training/off_policy/max_staleness"), "c3"),
    ]
    share = [Curve("of tokens", run.series("training/off_policy/share"))]
    charts = [
        Chart("Rollout against trainer", "nats per token", _ever(mismatch), "", least=1e-4),
        Chart("Largest gap of a log-probability", "nats, rollout to trainer", _ever(gap), "", least=1e-4),
        Chart("Importance weights of the rollout", "ratio", _ever(weights), ""),
        Chart("Staleness of trained tokens", "policy versions", _ever(age), ""),
        Chart("Tokens of earlier weights", "share", _ever(share), "", top=1),
    ]
    return [chart for chart in charts if chart.curves]


def _ever(curves: list[Curve]) -> list[Curve]:
    """The curves that are anything but 0."""
    return [curve for curve in curves if any(y for _, y in finite(curve.points))]


def _hidden(run: Run) -> list[Chart]:
    """How much of the update ran beside a rollout; none where nothing could."""
    if not (seconds := hidden_shares(run.metrics)):
        return []
    curves = [Curve("of its seconds", seconds)]
    if prompts := run.series("actor/streamed_share"):
        curves.append(Curve("of its prompts", prompts, "c2"))
    return [Chart("Update hidden under the rollout", "share", curves, "rollout/scale_down/hidden_s", top=1)]


def with_epochs(run: Run, chart: Chart) -> Chart:
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
    least_s = sum(whole.values()) * _SHOWN  # of a phase, or no reader could find it
    found = [(name, seconds) for name, seconds in found if sum(seconds.values()) > least_s]
    layers = [
        Curve(PHASES[name][0], [(step, seconds.get(step, 0.0)) for step in steps], PHASES[name][1])
        for name, seconds in found
    ]
    other = [(s, max(whole.get(s, 0.0) - sum(seconds.get(s, 0.0) for _, seconds in found), 0.0)) for s in steps]
    return [*layers, Curve("other", other, "c9")] if sum(value for _, value in other) > least_s else layers


def _one_by_one(run: Run) -> list[Curve]:
    """Where rollout and update ran at the same time: what the steps would have taken in turns."""
    both = [(row["step"], seconds_of(("step", "overlap"), row)) for row in run.metrics if "timing_s/overlap" in row]
    return [Curve("in turns", both, "c10", limit=True)] if both else []


def short(name: str) -> str:
    """`val-core/gsm8k/acc/mean@1` as `gsm8k/acc/mean@1`."""
    return name.partition("/")[2] or name
