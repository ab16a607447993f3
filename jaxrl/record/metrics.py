"""Numbers of a run: one JSON line per step in `metrics.jsonl`, and optional sinks.

`PHASES` and `SHOWN` are the one list of what people see: the live view, the report and the comparison of runs read it.

Source: metric names follow verl. Departures: `response_length/{p50,p95}` are added, because a mean hides
the long tail.

Non-finite numbers are written as the strings "nan", "inf" and "-inf" (JSON has no others) and read back as floats.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsFloat

import numpy as np

from jaxrl.record import samples
from jaxrl.record.files import JsonLines, read_lines
from jaxrl.types import Group, TrainBatch

if TYPE_CHECKING:
    from jaxrl.record.sinks import RetryingSink

FILE_NAME = "metrics.jsonl"


class Phase(NamedTuple):
    """A part of a step, whose seconds are `timing_s/<name>`. `part`: the "round" that made the batch, the "update", or
    neither; `colour`: on a page, where a phase without one is drawn as a part of "other"."""

    name: str
    part: str
    label: str
    colour: str = ""


PHASES = (
    Phase("data", "round", "data"),
    Phase("gen", "round", "gen", "c1"),
    Phase("reward", "round", "scoring", "c2"),
    Phase("ahead", "", "next rollout", "c10"),
    Phase("stream", "update", "stream", "c11"),  # the end of gradients that began beside the rollout
    Phase("old_log_prob", "update", "old_log_prob", "c3"),
    Phase("ref", "update", "ref", "c4"),
    Phase("teacher", "update", "teacher", "c13"),
    Phase("values", "update", "values", "c12"),
    Phase("adv", "update", "adv"),
    Phase("update_critic", "update", "update_critic", "c13"),
    Phase("update_actor", "update", "update_actor", "c6"),
    Phase("sync", "", "sync", "c7"),
    Phase("testing", "", "testing", "c5"),
    Phase("save", "", "save", "c8"),
)
ROUND_PHASES = tuple(phase.name for phase in PHASES if phase.part == "round")
UPDATE_PHASES = tuple(phase.name for phase in PHASES if phase.part == "update")


class Shown(NamedTuple):
    """The title, the unit and the explanation of a metric's chart, and its text in a step's line on a terminal."""

    title: str
    unit: str
    about: str = ""
    text: str = ""


SHOWN = {
    "critic/rewards/mean": Shown("Reward", "per step", "What the scorers gave. It should rise.", "reward {}"),
    "train/loss": Shown("Loss", "per step", "What training minimizes. Held-out rows should follow.", "loss {}"),
    "response_length/mean": Shown("Response length", "tokens", "Those at the limit are cut.", "length {}"),
    "response_length/max": Shown("Longest response", "tokens", "A step waits for its longest one.", "longest {}"),
    "response_length/clip_ratio": Shown("Responses cut at the limit", "share", "They had not ended."),
    "critic/mixed_reward_groups": Shown("Groups with mixed rewards", "share", "Only these prompts teach."),
    "rollout/bubble_ratio": Shown("Idle row-slots in rollout", "share", "Rows without a response in a decode step."),
    "perf/throughput": Shown("Throughput", "tokens/s/device", "Over a step with all its phases.", "{} tokens/s/device"),
    "actor/entropy": Shown("Entropy", "nats per token", "Uncertainty of the next token. Near 0, samples are alike."),
    "actor/grad_norm": Shown("Gradient norm", "before clipping", "At 0 a step changes nothing.", "grad norm {}"),
    "actor/pg_clipfrac": Shown("Clipped tokens", "share", "Their probability has moved too far for this step."),
    "actor/skipped_updates": Shown("Skipped updates", "per step", "Their gradient was not finite."),
    "actor/lr": Shown("Learning rate", "at the step's last update", "The size of an update."),
    "actor/ppo_kl": Shown("KL of the update", "nats per token, mean log-ratio", "How far a step moved the policy."),
    "actor/kl_loss": Shown("KL to the reference", "nats per token", "How far the policy is from its first weights."),
    "actor/teacher_kl": Shown("KL to the teacher", "nats per token, mean log-ratio", "It should fall."),
    "critic/values/mean": Shown("Values and returns", "mean over tokens", "What the critic expects, and what it got."),
    "critic/vf_explained_var": Shown("Explained variance of the critic", "share", "At 1 it predicts every return."),
    "rewards/chosen": Shown("Implicit rewards", "beta times the log-ratio, means", "The margin should rise."),
    "rollout_corr/k3_kl": Shown("Rollout against trainer", "nats per token", "Both compute the same: it should be 0."),
    "rollout_corr/logprob_abs_diff_max": Shown("Largest gap of a log-probability", "nats", "Rollout against trainer."),
    "rollout_corr/rollout_is_mean": Shown("Importance weights of the rollout", "ratio", "The mean should be near 1."),
    "training/off_policy/mean_staleness": Shown("Staleness of trained tokens", "updates", "Since they were drawn."),
    "training/off_policy/share": Shown("Tokens of earlier weights", "share", "Trained tokens that older weights drew."),
}
FAILURES = {"timeouts": ("time-out", "time-outs"), "crashes": ("crash", "crashes"), "errors": ("error", "errors")}
"""The kinds of failed rewards, which `reward/<kind>` counts: the words for one and for several."""
RIGHT = 1.0
"""The reward from which on a sample counts as right."""
_RESERVED = ("step", "time")
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends one line per step to `run_dir/metrics.jsonl`, and sends the same numbers to the sinks. Nothing is written
    or sent before `open_sinks` and `begin`, which a `with` calls.

    `sinks`: names from `trainer.logger`, which are sent the steps of the file that they lack when the writer begins;
    `resume_step`: the last step that counts (the checkpoint's), after which lines are removed; -1 removes all, None
    keeps all; `project`, `experiment`, `config`: what sinks show.
    """

    def __init__(
        self,
        run_dir: str | Path,
        sinks: Sequence[str] = (),
        *,
        resume_step: int | None = None,
        project: str = "jaxrl",
        experiment: str = "",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder, self._resume_step = Path(run_dir), resume_step
        self._shown = (project, experiment or self._folder.name, config or {})
        self._sinks: list[RetryingSink] = []
        self._names = [name for name in sinks if name != "console"]
        self._lines = JsonLines(self._folder / FILE_NAME, resume_step, sync=True)
        steps = (int(row["step"]) for row in read_metrics(self._folder))
        self.last_step = max((step for step in steps if resume_step is None or step <= resume_step), default=-1)

    def open_sinks(self) -> None:
        """To be called before `begin`: a sink that cannot be opened (RunFailed) changes nothing in the file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._names:
            return
        from jaxrl.record.sinks import RetryingSink, open_sink

        last_step = self.last_step if self._resume_step is None else self._resume_step
        for name in self._names[len(self._sinks) :]:  # one by one: those that are open are closed if the next fails
            self._sinks.append(RetryingSink(name, open_sink(name, self._folder, last_step, *self._shown)))

    def begin(self) -> None:
        """Removes the lines of later steps, and sends the sinks the steps of the file that they lack."""
        self.open_sinks()
        self._lines.open()
        if not self._sinks:
            return

        def with_step(line: bytes) -> tuple[int, Mapping[str, Any]]:
            row = json.loads(line)
            return int(row["step"]), row

        tables: dict[int, list[Mapping[str, Any]]] = {}
        for step, row in read_lines(self._folder / samples.FILE_NAME, with_step):
            tables.setdefault(step, []).append(row)
        for line in read_metrics(self._folder):
            step = int(line["step"])
            numbers = {name: value for name, value in line.items() if name not in _RESERVED}
            for sink in self._sinks:
                sink.send(step, numbers, tables.get(step, []))

    def write(self, step: int, metrics: Mapping[str, SupportsFloat], rows: Sequence[Mapping[str, Any]] = ()) -> None:
        """Writes a step's numbers; steps must rise (step 0 is the evaluation before training). `rows`: its samples, for
        the sinks."""
        assert step > self.last_step, f"step {step} after step {self.last_step} in {self._folder / FILE_NAME}"
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        line = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
        self._lines.append({"step": step, "time": round(time.time(), 3)} | line)
        self.last_step = step
        for sink in self._sinks:
            sink.send(step, numbers, rows)

    def close(self) -> None:
        self._lines.close()
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def __enter__(self) -> MetricsWriter:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(run_dir: str | Path, note: Callable[[str], None] = _log.warning) -> list[dict[str, float]]:
    """The steps of a run in order, each with "step", "time" and its metrics. `note` is called for damaged lines."""
    return read_lines(Path(run_dir) / FILE_NAME, _parse, note)


def _parse(line: bytes) -> dict[str, float]:
    values = json.loads(line)
    numbers = {name: _NON_FINITE[value] if isinstance(value, str) else value for name, value in values.items()}
    if not all(isinstance(value, int | float) for value in numbers.values()):
        raise ValueError("a value is not a number")
    return numbers | {"step": int(values["step"])}


def _number(name: str, value: SupportsFloat) -> float:
    assert name not in _RESERVED, f"metric {name!r}: that name belongs to the line itself"
    return value if isinstance(value, int) and not isinstance(value, bool) else float(value)


def spread(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    array = np.asarray(values, np.float64)
    if not array.size:
        return {}
    return {f"{name}/mean": float(array.mean()), f"{name}/max": float(array.max()), f"{name}/min": float(array.min())}


def length_metrics(lengths: Sequence[int] | np.ndarray, limit: int, name: str = "response_length") -> dict[str, float]:
    """In tokens; `clip_ratio` is the share that reached the limit, and percentiles are lengths that occur."""
    array = np.asarray(lengths, np.int64)
    if not array.size:
        return {}
    percentiles = {f"{name}/p{q}": float(np.percentile(array, q, method="inverted_cdf")) for q in (50, 95)}
    return spread(name, array) | {f"{name}/clip_ratio": float((array >= limit).mean())} | percentiles


def batch_metrics(groups: Sequence[Group], limit: int) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    measured = spread("critic/rewards", [sample.reward or 0.0 for sample in samples])
    measured |= length_metrics([sample.num_drawn for sample in samples], limit)
    measured |= spread("prompt_length", [len(group.prompt.token_ids) for group in groups])
    mixed = [len({sample.reward for sample in group.samples}) > 1 for group in groups]
    measured["training/epoch"] = max(group.prompt.epoch for group in groups)
    return measured | {"critic/mixed_reward_groups": float(np.mean(mixed))}


def evaluation_metrics(groups: Sequence[Group], limit: int) -> dict[str, float]:
    """`val/reward` is the mean over prompts and samples, `val/best@n` that of each prompt's best one, `val/accuracy`
    the share of samples that are right (`RIGHT`), as avg@n and pass@1 of `jaxrl eval`."""
    rewards = np.array([[sample.reward or 0.0 for sample in group.samples] for group in groups])
    measured = {
        "val/reward": float(rewards.mean()),
        "val/accuracy": float((rewards >= RIGHT).mean()),
        f"val/best@{rewards.shape[1]}": float(rewards.max(axis=1).mean()),
    }
    lengths = [sample.num_drawn for group in groups for sample in group.samples]
    return measured | length_metrics(lengths, limit, "val/response_length")


def off_policy_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """By how many versions the model's tokens are older than the policy that trains on them (version `step` - 1)."""
    versions = [sample.versions[sample.drawn] for group in groups for sample in group.samples]
    staleness = step - 1 - np.concatenate(versions)
    return {
        "training/off_policy/share": float(np.mean(staleness > 0)),
        "training/off_policy/mean_staleness": float(np.mean(staleness)),
        "training/off_policy/max_staleness": float(np.max(staleness)),
    }


def seconds_of(phases: Sequence[str], line: Mapping[str, float]) -> float:
    return sum(line.get(f"timing_s/{name}", 0.0) for name in phases)


def hidden_scoring(measured: dict[str, float], round_s: Mapping[str, float]) -> dict[str, float]:
    """`reward/hidden_s`: the seconds in which samples were being scored while the rollout went on: `reward/busy_s`,
    which is taken out of `measured`, less what was waited for."""
    busy_s = measured.pop("reward/busy_s", None)
    return {} if busy_s is None else {"reward/hidden_s": max(busy_s - round_s["timing_s/reward"], 0.0)}


def hidden_scoring_shares(lines: Sequence[Mapping[str, float]]) -> list[tuple[float, float]]:
    """(step, share of the scoring's time that the rollout hid)."""
    found: list[tuple[float, float]] = []
    for line in lines:
        if "reward/hidden_s" in line:
            hidden_s = line["reward/hidden_s"]
            whole_s = hidden_s + seconds_of(["reward"], line)
            found += [(line["step"], hidden_s / whole_s)] if whole_s > 0 else []
    return found


def seconds_of_other_steps(line: dict[str, float], earlier_s: float | None, ahead_s: float | None) -> dict[str, float]:
    """Connects a step's phases with its time (`jaxrl.loop`): `earlier_s` of this batch's round, where it ran before
    this step, and `ahead_s` of the next one's, where it ran in it. Takes `timing_s/together` out of `line`."""
    together_s = line.pop("timing_s/together", None)
    found = {} if earlier_s is None else {"timing_s/earlier": earlier_s}
    if ahead_s is not None:
        found["timing_s/ahead"] = ahead_s
        if together_s is not None:
            found["timing_s/overlap"] = max(ahead_s + seconds_of(UPDATE_PHASES, line) - together_s, 0.0)
    return found


def step_phases(line: Mapping[str, float]) -> dict[str, float]:
    """The phases of a step's time, each moment once. The round's phases are left out where it ran before the step;
    `ahead` is the next step's round, without what ran at the same time as the update."""
    elsewhere = {"step", "earlier", "ahead", "overlap", *(ROUND_PHASES if "timing_s/earlier" in line else ())}
    names = [name.removeprefix("timing_s/") for name in line if name.startswith("timing_s/")]
    found = {name: line[f"timing_s/{name}"] for name in names if name not in elsewhere}
    if "timing_s/ahead" in line:
        found["ahead"] = seconds_of(["ahead"], line) - seconds_of(["overlap"], line)
    return found


def hidden_shares(lines: Sequence[Mapping[str, float]]) -> list[tuple[float, float]]:
    """(step, share of the update's seconds that ran beside a rollout), for steps of which something could.

    With devices of the rollout's own that is what ran at once. With gradients beside the rollout (`trainer.stream`) it
    is the seconds of those on the freed devices, over the same and the phases that came after. Their round made the
    batch; with one-step-off it is the next step's, and so are its metrics.
    """
    found: list[tuple[float, float]] = []
    for line, following in zip_longest(lines, lines[1:], fillvalue={}):
        update_s = seconds_of(UPDATE_PHASES, line)
        if "actor/streamed_share" in line:
            beside = following if "timing_s/ahead" in line else line
            hidden_s = beside.get("rollout/scale_down/hidden_s", 0.0)
            update_s += hidden_s
        elif "timing_s/overlap" in line:
            hidden_s = line["timing_s/overlap"]
        else:
            continue
        if update_s > 0:
            found.append((line["step"], hidden_s / update_s))
    return found


def throughput(batch: TrainBatch, line: Mapping[str, float], num_devices: int) -> dict[str, float]:
    """Tokens of a batch, prompts once per sample, and per second and device."""
    total = sum(len(p.token_ids) + len(s) for p, s in zip(batch.prompts, batch.samples, strict=True))
    drawn = sum(sample.num_drawn for sample in batch.samples)
    training_s = line["timing_s/step"] - line.get("timing_s/testing", 0.0)
    gen_s = line.get("timing_s/gen", 0.0)
    return {
        "perf/total_num_tokens": total,
        "perf/throughput": total / training_s / num_devices,
        **({"perf/gen_throughput": drawn / gen_s / num_devices} if gen_s > 0 else {}),
    }


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
