"""The headline table: every row of the papers' tables and bars that has a number, beside ours, met or missed.

Purpose: `page` reads the newest result of each experiment. A row is met if its error is at most `BAR`: of
(speed-up - 1) where the number is a speed-up, else of the number itself. The column *over the best static setting* is
the control of a gain: the same step, over the fastest one that a baseline reaches at any static degree. A sum whose
published parts are off by more than `PART` is met by cancellation, and not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from jaxrl.models.shapes import named_shape
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.hardware import HARDWARE
from papers import slime
from papers.calibration import Calibration, efficiency_of
from papers.cases import EPOCH_STEPS
from papers.facts import FACTS
from papers.pages import BAR, REPORTED, Result, line, render, shown
from papers.rhymerl_closed import mean_step_s
from papers.runs import read
from papers.what_if import WARM_UP, Variant, april_rollouts

PART = 0.3
DEGREES = (1, 2, 4, 8)
MODELS = ("7B/8k", "14B/16k", "32B/32k")
PARTS = {"start_s": "weights, waking", "gen_s": "rollout", "reward_s": "reward", "train_s": "training"}


@dataclass(slots=True)
class Line:
    """A row: its name, the paper's number, ours by seed, whether it is a speed-up, the control by seed, and whether the
    constants were fitted to it."""

    name: str
    theirs: float
    ours: np.ndarray | None = None
    gain: bool = True
    control: np.ndarray | None = None
    cancels: bool = False
    fitted: bool = False

    @property
    def error(self) -> float:
        assert self.ours is not None
        ours = float(np.mean(self.ours))
        return (ours - 1) / (self.theirs - 1) - 1 if self.gain else ours / self.theirs - 1

    @property
    def met(self) -> bool:
        return self.ours is not None and abs(self.error) <= BAR and not (self.cancels or self.fitted)

    @property
    def cells(self) -> str:
        form = ".2f" if abs(self.theirs) < 10 else ".0f"
        if abs(self.theirs) < 0.1:
            form = ".3f"
        if self.ours is None:
            return line(self.name, f"{self.theirs:{form}}", "not run", "", "**missed**", "")
        verdict = "sum only" if self.cancels and abs(self.error) <= BAR else "met" if self.met else "**missed**"
        verdict = "fitted" if self.fitted else verdict
        control = "" if self.control is None else shown(self.control)
        return line(self.name, f"{self.theirs:{form}}", shown(self.ours, form), f"{self.error:+.0%}", verdict, control)


class Results(dict[str, Result]):
    """The newest results, by experiment."""

    def __init__(self, folder: Path) -> None:
        for file in sorted(folder.glob("*-20*.json")):
            result = Result(*read(file))
            self[file.stem[:-11]] = result

    def gain(
        self, name: str, column: str, before: str, after: str, value: str = "step_s", long: bool | None = None
    ) -> np.ndarray:
        """How many times as long a value is before as after; `long`: after, in one kind of rounds."""
        result = self[name]
        return result.found(before, column)(value) / result.found(after, column)(value, long)

    def fastest(self, name: str, column: str, rows: Sequence[str], value: str = "step_s") -> np.ndarray:
        """The least of a value over these rows, where a column has them."""
        result = self[name]
        found = [result.found(row, column)(value) for row in rows if column in result.experiment[row]]
        return min(found, key=np.mean)

    def degrees(self, name: str, column: str, row: str) -> np.ndarray:
        """The fastest step of a row of the experiment at any degree."""
        usual = "+ tail batching" if row == "tail" else row
        rows = [each for each in self[name].experiment if each.startswith(f"{row}, tp") or each == usual]
        return self.fastest(name, column, rows)


def off(ours: float, theirs: float) -> bool:
    return abs(ours / theirs - 1) > PART


def published_parts(results: Results, model: str) -> dict[str, dict[str, tuple[float, float]]]:
    """RollPacker Fig. 11c, by kind of round and part: our seconds and the paper's."""
    found, published = results["rollpacker"].found("+ stream trainer", model), {}
    for kind in ("short", "long"):
        names = {part: f"{found.case.setup}.{kind}_{part}" for part in PARTS}  # of those that are facts
        theirs = {part: FACTS[name].low for part, name in names.items() if name in FACTS}
        theirs |= REPORTED[f"RollPacker Fig. 11c, {model}, {kind}"]
        published[kind] = {part: (float(np.mean(found(part, kind == "long"))), theirs[part]) for part in PARTS}
    return published


def deciding(results: Results, model: str, kinds: Sequence[str] = ("short", "long")) -> list[tuple[float, float]]:
    """The published parts that are more than a twentieth of their step and no facts of the calibration."""
    published, found = published_parts(results, model), []
    for kind in kinds:
        least = 0.05 * sum(theirs for _, theirs in published[kind].values())
        fitted = ("start_s", "gen_s", "train_s") if kind == "short" else ("start_s",)
        found += [each for part, each in published[kind].items() if part not in fitted and each[1] > least]
    return found


def parts_are_off(results: Results, model: str, kinds: Sequence[str] = ("short", "long")) -> bool:
    return any(off(*each) for each in deciding(results, model, kinds))


# ---------------------------------------------------------------- the rows


def rollpacker(results: Results) -> Iterator[Line]:
    main = results["rollpacker"]
    for model in MODELS:
        best = results.degrees("rollpacker", model, "plain")
        cancels = parts_are_off(results, model)
        for row in ("+ tail batching", "+ reward scheduler", "+ parallelism planner", "+ stream trainer"):
            theirs = REPORTED[f"RollPacker Table 2, {row}"][model]
            own = results.degrees("rollpacker", model, "tail") if row == "+ tail batching" else None
            control = best / (main.found(row, model)("step_s") if own is None else own)
            name = f"RollPacker Table 2, {row}, {model}"
            ours = results.gain("rollpacker", model, "plain", row)
            yield Line(name, theirs, ours, control=control, cancels=cancels)
    for model in MODELS:
        theirs = REPORTED["RollPacker Fig. 10, RollPacker over RLHFuse"][model]
        ours = results.gain("rollpacker", model, "RLHFuse", "+ stream trainer")
        name = f"RollPacker Fig. 10, over RLHFuse, {model}"
        yield Line(name, theirs, ours, cancels=parts_are_off(results, model))
    for kind, long in (("short", False), ("long", True)):
        for model in MODELS:
            step = FACTS[f"{main.found('plain', model).case.setup}.step_s"].low
            theirs = step / REPORTED[f"RollPacker Fig. 10, s of a {kind} round"][model]
            ours = results.gain("rollpacker", model, "plain", "+ stream trainer", long=long)
            cancels = parts_are_off(results, model, [kind])
            name = f"RollPacker Fig. 10, {kind} rounds over veRL, {model}"
            yield Line(name, theirs, ours, cancels=cancels, fitted=not long)
    rollout, found = FACTS["rollpacker.32b.rollout_s"].low, main.found("+ stream trainer", "32B/32k")
    for kind, theirs in REPORTED["RollPacker Fig. 11b, s of a rollout"].items():
        ours = found.rollout_of(kind == "long") / main.found("plain", "32B/32k").rollout_s
        share = theirs / rollout, ours
        yield Line(f"RollPacker Fig. 11b, {kind} rollouts, share of veRL's", *share, False, fitted=kind == "short")
    for model in MODELS:
        theirs = REPORTED["RollPacker §6.5, asynchronous reward computation"][model]
        ours = results.gain("rollpacker", model, "+ tail batching", "+ rewards beside the rollout")
        yield Line(f"RollPacker §6.5, asynchronous rewards, {model}", theirs, ours)
    code, tail = (main.found(row, "14B/16k")("longest", False) for row in ("code", "code, + tail batching"))
    yield Line("RollPacker Fig. 4a, longest response cut in short rounds, 14B", 8.9, code / tail, False)
    bars = results["rollpacker-rollouts"]
    for model in MODELS:
        plain = bars.found("plain", model).longest_s
        for bar in ("P 1.25", "P 1.5", "R 1.25", "R 1.5", "P and R 1.25"):
            source = REPORTED[f"RollPacker Fig. 12, s of a rollout, {bar}"]
            theirs = source[model] / REPORTED["RollPacker Fig. 12, s of a rollout, plain"][model]
            ours = bars.found(bar, model).longest_s / plain
            yield Line(f"RollPacker Fig. 12, {bar}, {model}, share of the plain bar", theirs, ours, False)
    yield from under_pressure(results)
    yield from planner(results)
    yield from streamed(results)
    rewards = results["rollpacker-rewards"]
    fixed, own = (rewards.found(row, "authors' configuration").scored_s for row in ("fixed", "a column, for every row"))
    ratios = [fixed(long) / own(long) for long in (False, True)]
    paper = [REPORTED[f"RollPacker Fig. 14c, s of a round, {row}"] for row in ("fixed", "adaptive")]
    theirs = [paper[0][kind] / paper[1][kind] for kind in ("short", "long")]
    mixed = (4 * ratios[0] + ratios[1]) / 5  # the mean of the ratios of the steps, as theirs comes to 1.6
    yield Line("RollPacker Fig. 14c, adaptive over fixed time-outs, 7B/8k", 1.6, mixed)
    yield Line("the same, short rounds", theirs[0], ratios[0])
    yield Line("the same, long rounds", theirs[1], ratios[1], False)
    scale = results["rollpacker-scale"]
    ours = results.gain("rollpacker-scale", "Fig. 15, 7B/8k", "plain", "+ reward scheduler")
    yield Line("RollPacker Fig. 15, one-off pipeline, 7B/8k", 1.71, ours)
    for size in ("32", "128"):
        ours = results.gain("rollpacker-scale", f"Fig. 16, {size}", "plain", "whole")
        cancels = parts_are_off(results, "14B/16k")
        yield Line(f"RollPacker Fig. 16, over veRL on {size} devices, 14B/16k", 2.2, ours, cancels=cancels)
    small, large = (scale.found("whole", f"Fig. 16, {size}")("step_s") for size in ("32", "128"))
    yield Line("RollPacker Fig. 16, throughput for twice the devices", 1.5, np.sqrt(4 * small / large))


def under_pressure(results: Results) -> Iterator[Line]:
    """Fig. 7."""
    paper = REPORTED["RollPacker Fig. 7, short and long rounds"]
    for figure, place, name, shown_as in (("7a", 0, "preempted", "preemptions"), ("7b", 1, "gen_s", "rollout")):
        found, theirs = {}, {}
        for tp, kind in (("tp 1", "short"), ("tp 1", "long"), ("tp 2", "short"), ("tp 2", "long")):
            runs = results["rollpacker-memory"].found("+ tail batching", f"Fig. 7, {tp}")
            found[tp, kind], theirs[tp, kind] = runs(name, kind == "long"), paper[f"{tp}, {kind}"][place]
        for before, after, said in (
            (("tp 1", "long"), ("tp 1", "short"), "short rounds over long ones"),
            (("tp 1", "short"), ("tp 2", "short"), "short rounds at tp 2 over tp 1"),
            (("tp 1", "long"), ("tp 2", "long"), "long rounds at tp 2 over tp 1"),
        ):
            row = f"RollPacker Fig. {figure}, {shown_as} of {said}, Qwen3-8B"
            yield Line(row, theirs[after] / theirs[before], found[after] / found[before], False)


def planner(results: Results) -> Iterator[Line]:
    """Fig. 13: at the degrees that the paper's planner had, the best static degree as the control."""
    lengths = ("8k", "12k", "16k", "20k", "24k", "28k", "32k")
    chosen = (1, 1, 2, 2, 4, 4, 4)
    runs = results["rollpacker-rollouts"]
    at = {tp: [runs.found(f"tp {tp}", length).rollout_s for length in lengths] for tp in (1, 2, 4, 8)}
    own = np.sum([at[tp][i] for i, tp in enumerate(chosen)], 0)
    control = min((np.sum(seconds, 0) for seconds in at.values()), key=np.mean) / own
    name = "RollPacker Fig. 13a, the paper's degrees over tp 1, 14B, 8k to 32k"
    yield Line(name, 1.9, sum(at[1]) / own, control=control)


def streamed(results: Results) -> Iterator[Line]:
    column, name = "7B/8k", "rollpacker-stream"
    table3, table4 = REPORTED["RollPacker Table 3, s a step"], REPORTED["RollPacker Table 4, s a step"]
    best = results.degrees(name, column, "w/o")
    for row in ("20%", "30%", "40%", "Adpt."):
        ours, step = results.gain(name, column, "w/o", row), results.degrees(name, column, row)
        yield Line(f"RollPacker Table 3, {row}, over no scaling", table3["w/o"] / table3[row], ours, True, best / step)
    for row, theirs in table4.items():
        ours = results.gain(name, column, "Adpt.", f"at that share, {row}")
        yield Line(f"RollPacker Table 4, one fetch of {row}, over the stream", table3["Adpt."] / theirs, ours)


def not_run(paper: str) -> Iterator[Line]:
    for name, theirs in REPORTED.get(f"{paper}, not run", {}).items():
        yield Line(f"{paper} {name}", theirs)


def april(results: Results, known: Calibration) -> Iterator[Line]:
    """The control in closed form: the best degree of either."""
    result = results["april"]
    for model, theirs in REPORTED["APRIL Table 1, GRPO, mean improvement"].items():
        rates, best = [], []
        for row in ("plain", "APRIL"):
            found = result.found(row, model)
            rates.append(found("drawn_tokens") / found("gen_s"))
            at = [april_rollouts(found.case, known, Variant(tp=tp))[WARM_UP:] for tp in DEGREES]
            best.append(max(map(slime.throughput, at)))
        control = np.array([best[1] / best[0]])
        yield Line(f"APRIL Table 1, GRPO, {model}", 1 + theirs, rates[1] / rates[0], True, control)
    for i, (model, theirs) in enumerate(REPORTED["APRIL Table 1, DAPO, mean improvement"].items()):
        ours = np.array(result.readings["DAPO's row of Table 1"][i])
        yield Line(f"APRIL Table 1, DAPO, {model} (closed form)", 1 + theirs, ours)
    stale = np.array(result.readings["stale, as the authors count"][0])
    paper = REPORTED["APRIL §3.2.3, stale share"]["Qwen3-4B"]
    yield Line("APRIL §3.2.3, stale share (closed form)", paper, stale, False)


def pat(results: Results, known: Calibration) -> Iterator[Line]:
    own, base = "{1, 2, 4, 8} from 2", "static 2"
    static = ["static 1", base, "static 4", "static 8"]
    runs = results["pat"]
    for column, paper in REPORTED["PAT Fig. 10 and 11, largest speed-up of an iteration"].items():
        control = results.fastest("pat", column, static) / runs.found(own, column)("step_s")
        ours = results.gain("pat", column, base, own)
        yield Line(f"PAT {column} tokens, over static tp 2", paper, ours, control=control)
    for column, paper in REPORTED["PAT §5.3, H100, generation with PAT in s"].items():
        yield Line(f"PAT §5.3, s of generation, {column}", paper, runs.found(own, column)("gen_s"), False)
    # §5.4: 9 samples of 12k tokens, on two of the four dp groups at most three each
    cost = CostModel(named_shape("Llama-3.1-8B"), HARDWARE["A40"], efficiency_of(known["pat_a40"]))
    switch = cost.switch_cost(2, 8)
    seconds = switch.weights_s + switch.fixed_s + switch.kv_s_per_token * 3 * 12288
    paper = REPORTED["PAT §5.4, A40, switch TP 2 to 8 in s"]["all"]
    yield Line("PAT §5.4, s of a switch from tp 2 to 8 with 9 samples of 12k", paper, np.array([seconds]), False)


def rhymerl(results: Results, known: Calibration) -> Iterator[Line]:
    """The control: over the baseline, times what another degree would be worth to it in closed form."""
    rows = ["plain", "+ ranking groups", "+ two tiers", "+ speculation"]
    moved = REPORTED["RhymeRL Fig. 18, share of samples that move"]
    for column in ("Math-14B", "Code-14B"):
        theirs = REPORTED[f"RhymeRL Fig. 14, {column}"]
        case, roll_out = results["rhymerl"].found("plain", column).case, 64
        at = [mean_step_s(replace(case, tp=tp, workers=roll_out // tp), known) for tp in DEGREES]
        slower = min(at) / at[DEGREES.index(case.degree)]
        for before, row in pairwise(rows):
            control = results.gain("rhymerl", column, "plain", row) * slower
            ours = results.gain("rhymerl", column, before, row)
            yield Line(f"RhymeRL Fig. 14, {row} over the row before, {column}", theirs[row], ours, True, control)
        ours = results["rhymerl"].found("+ two tiers", column)("moved")
        yield Line(f"RhymeRL Fig. 18, share that moves, {column}", moved[case.tasks[0]], ours, False)
    columns = ("Math-14B", "Code-14B")
    for name, tokens in (("rhymerl-8k", "8k"), ("rhymerl", "16k")):
        ours = np.mean([results.gain(name, column, "plain", "+ speculation") for column in columns], 0)
        theirs = REPORTED["RhymeRL Fig. 13, over veRL, mean"][tokens]
        yield Line(f"RhymeRL Fig. 13, over veRL, mean at {tokens} (14B only)", theirs, ours)
    plain, alone = (results["rhymerl-8k"].found(row, "Math-14B") for row in ("plain", "speculation alone"))
    most = [
        np.max(np.divide(a.values["gen_s"], b.values["gen_s"])[EPOCH_STEPS:-1])
        for a, b in zip(plain.runs, alone.runs, strict=True)
    ]
    theirs = REPORTED["RhymeRL Fig. 16, rollout throughput with speculation, most"]["8k"]
    yield Line("RhymeRL Fig. 16, rollout throughput with speculation, most, 8k", theirs, np.array(most))


# ---------------------------------------------------------------- the page


def page(folder: Path, known: Calibration) -> str:
    results = Results(folder)
    papers = {
        "RollPacker": [*rollpacker(results), *not_run("RollPacker")],
        "APRIL": list(april(results, known)),
        "PAT": [*pat(results, known), *not_run("PAT")],
        "RhymeRL": [*rhymerl(results, known), *not_run("RhymeRL")],
    }
    parts_of = {model: published_parts(results, model) for model in MODELS}
    large = [not off(*each) for model in MODELS for each in deciding(results, model)]
    return render("headline.md", papers=papers, parts=parts_of, names=list(PARTS.values()), large=large, off=off)
