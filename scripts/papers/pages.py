"""A result as a markdown page: ours beside theirs, with the ratio.

Purpose: `page`. The only place that reads what the papers' own methods reached (`published.REPORTED`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.sim.published import FACTS, REPORTED
from papers.cases import APRIL_SETUPS, APRIL_WARM_UP, FACTORS, ROLLPACKER_SETUPS
from papers.runs import Steps
from papers.setups import TASKS

BAR = 0.25  # of (speed-up - 1)


class Runs:
    """Runs by what they are."""

    def __init__(self, runs: Iterable[Steps]) -> None:
        self._runs = list(runs)

    def of(
        self, setup: str, rule: str, factors: tuple[float, float] = (1.0, 1.0), tasks: Sequence[str] = TASKS
    ) -> list[Steps]:
        """Every seed of a case; none where it was not run."""
        wanted = (setup, rule, *factors, tuple(tasks))
        return [r for r in self._runs if _identity(r) == wanted]

    def __bool__(self) -> bool:
        return bool(self._runs)


def _identity(steps: Steps) -> tuple[Any, ...]:
    case = steps.case
    return (case.setup, case.rule, case.prompt_factor, case.response_factor, case.tasks)


def mean(runs: Sequence[Steps], name: str, long: bool | None = None, skip: int = 0) -> float:
    """Over the steps of all seeds; of one kind of rounds where `long` is given."""
    values = [
        value
        for r in runs
        for value, is_long in list(zip(getattr(r, name), r.long, strict=True))[skip:]
        if long is None or is_long == long
    ]
    return float(np.mean(values)) if values else math.nan


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def page(header: Mapping[str, Any], runs: Sequence[Steps]) -> str:
    """The whole page."""
    parts = [_top(header, runs)]
    rollpacker = Runs(r for r in runs if r.case.problem == "rollpacker")
    april = Runs(r for r in runs if r.case.problem == "april")
    if rollpacker:
        parts += [section(rollpacker) for section in (_table2, _baselines, _figure4, _figure10, _figure11, _figure12)]
    if april:
        parts.append(_april(april))
    parts.append(
        "## PAT, Fig. 10 and 11: not here yet\n\nThe simulated devices keep one layout for a whole run, so PAT's adaptive "
        "tensor parallelism cannot be run on them yet. Its baselines are calibrated (`pat_h100`, `pat_a40`)."
    )
    return "\n\n".join(parts) + "\n"


def _top(header: Mapping[str, Any], runs: Sequence[Steps]) -> str:
    committed = header["calibration"]["committed"] or "not committed as it stands: these figures do not count"
    first = runs[0].case
    note = "\n\n**Tried out at a tiny size: no figure below means anything.**" if header["tiny"] else ""
    return (
        f"# The papers' experiments on modelled devices, {header['date'][:10]}\n\n"
        "All seconds are simulated ones. What they rest on, and what to make of them: [README.md](README.md).\n\n"
        f"- Command: `{header['command']}`\n- Date: {header['date']}\n- Commit: {header['commit']}\n"
        f"- Calibration: [{header['calibration']['file']}]({header['calibration']['file']}), last changed in commit "
        f"{committed}\n- Plans of at most {first.decode_steps} decode steps; seeds: "
        f"{', '.join(map(str, sorted({r.case.seed for r in runs})))}{note}"
    )


def beside(ours: float, theirs: float) -> list[str]:
    """Speed-ups: ours, theirs, ours / theirs, the error of (speed-up - 1), and whether it is within the bar."""
    error = (ours - 1) / (theirs - 1) - 1
    verdict = "yes" if abs(error) <= BAR else "**no**"
    return [f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}", f"{error:+.0%}", verdict]


def _table2(runs: Runs) -> str:
    reported = REPORTED["RollPacker Table 2, + tail batching"]
    rows, ours = [], []
    for name, setup in ROLLPACKER_SETUPS.items():
        plain, tail = runs.of(setup, "plain"), runs.of(setup, "tail", (1.25, 1.25))
        speedup = mean(plain, "step_s") / mean(tail, "step_s")
        ours.append(speedup)
        rows.append(
            [name, f"{mean(plain, 'step_s'):.0f}", f"{mean(tail, 'step_s'):.0f}", *beside(speedup, reported[name])]
        )
    order = "the same as" if ours == sorted(ours) else "**not** that of"
    later = [name for name in REPORTED if name.startswith("RollPacker Table 2") and "tail batching" not in name]
    head = [
        "model",
        "plain, s a step",
        "tail batching",
        "speed-up",
        "paper",
        "ours / paper",
        "error of (speed-up − 1)",
        "within 25 %",
    ]
    return (
        f"## RollPacker Table 2, the row of tail batching\n\n{table(head, rows)}\n\n"
        f"The order over models is {order} the paper's. Rewards are scored after the rollout in both columns, as in the "
        f"paper's rows above *reward scheduler*. The rows {', '.join(name.split('+ ')[1] for name in later)}: not here yet."
    )


def _baselines(runs: Runs) -> str:
    rows = []
    for task in TASKS:
        found = runs.of("rollpacker.14b", "plain", tasks=(task,))
        step = mean(found, "step_s")
        row = [task, f"{step:.0f}"]
        for stage, name in (("rollout", "gen_s"), ("reward", "reward_s"), ("train", "train_s")):
            theirs = FACTS[f"rollpacker.{task}.{stage}_share"].low
            row += [f"{mean(found, name) / step:.0%}", f"{theirs:.0%}"]
        rows.append(row)
    head = ["task (14B/16k)", "s a step", "rollout", "Table 1", "reward", "Table 1", "training", "Table 1"]
    return (
        "## The plain step against what it was fitted to\n\nNot a result: how far the simulated step is from the "
        f"closed form that the calibration uses.\n\n{table(head, rows)}"
    )


def _per_step(values: Sequence[float], digits: int = 0) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def _figure4(runs: Runs) -> str:
    plain, tail = (
        runs.of("rollpacker.14b", rule, f, ("code",)) for rule, f in (("plain", (1.0, 1.0)), ("tail", (1.25, 1.25)))
    )
    period = tail[0].case.period
    longest = [r[0].longest[:period] for r in (plain, tail)]
    shorter = max(a / b for a, b, long in zip(*longest, tail[0].long, strict=False) if not long)
    rows = []
    for name, found in (("plain", plain), ("tail batching", tail)):
        step = mean(found, "step_s")
        shares = [f"{mean(found, each) / step:.0%}" for each in ("gen_s", "reward_s", "train_s")]
        rows.append([name, _per_step(longest[name != "plain"]), f"{step * period:.0f}", *shares])
    return (
        f"## RollPacker Fig. 4: one period of the 14B model on code\n\n"
        f"{table(['', 'longest response of each step', 'seconds of a period', 'rollout', 'reward', 'training'], rows)}\n\n"
        f"Short rounds cut the longest response by up to {shorter:.1f} times (paper: up to 8.9), and the last round of the "
        f"period, the long one, is capped as in the plain run. Speed-up {mean(plain, 'step_s') / mean(tail, 'step_s'):.2f} "
        "(paper, §3: 1.48)."
    )


def _figure10(runs: Runs) -> str:
    rows = []
    for name, setup in ROLLPACKER_SETUPS.items():
        plain, tail = runs.of(setup, "plain"), runs.of(setup, "tail", (1.25, 1.25))
        kinds = [f"{mean(tail, 'step_s', long):.0f}" for long in (False, True)]
        gain = mean(plain, "step_s") / mean(tail, "step_s", False)
        rows.append([name, _per_step(plain[0].step_s[:10]), _per_step(tail[0].step_s[:10]), *kinds, f"{gain:.2f}"])
    head = ["model", "plain: s of steps 1 to 10", "tail batching: s of steps 1 to 10", "short", "long", "plain / short"]
    return (
        f"## RollPacker Fig. 10: step times\n\n{table(head, rows)}\n\nThe shape: four low steps and a high one, over and "
        "over. The paper's 2.1 to 3.6 for short rounds is of the whole system, this is tail batching alone."
    )


def _figure11(runs: Runs) -> str:
    setup = ROLLPACKER_SETUPS["32B/32k"]
    plain, tail = runs.of(setup, "plain"), runs.of(setup, "tail", (1.25, 1.25))
    rows = [
        [name, _per_step(found[0].longest[:10]), _per_step(found[0].gen_s[:10])]
        for name, found in (("plain", plain), ("tail batching", tail))
    ]
    gain = mean(plain, "gen_s") / mean(tail, "gen_s", False)
    breakdown = []
    for name, each in ROLLPACKER_SETUPS.items():
        found = runs.of(each, "tail", (1.25, 1.25))
        whole = mean(found, "step_s", True)
        for kind, long in (("short", False), ("long", True)):
            parts = [f"{mean(found, part, long) / whole:.2f}" for part in ("gen_s", "reward_s", "train_s")]
            breakdown.append([name, kind, *parts, f"{mean(found, 'step_s', long):.0f}"])
    return (
        "## RollPacker Fig. 11: where a step's time goes\n\nOf 32B/32k, steps 1 to 10:\n\n"
        f"{table(['', 'longest response', 'rollout, s'], rows)}\n\nA short round's rollout is {gain:.1f} times as fast as a "
        "plain one's on average (paper: up to 7.8, of the whole system). Long rounds' are "
        f"{mean(tail, 'gen_s', True) / mean(plain, 'gen_s'):.2f} times as long (paper: comparable). All models, of a long "
        f"round's step time:\n\n{table(['model', 'round', 'rollout', 'reward', 'training', 's a step'], breakdown)}"
    )


def _figure12(runs: Runs) -> str:
    rows = []
    for name, setup in ROLLPACKER_SETUPS.items():
        plain = mean(runs.of(setup, "plain"), "gen_s")
        shares = [mean(runs.of(setup, "tail", factors), "gen_s") / plain for factors in FACTORS.values()]
        rows.append([name, f"{plain:.0f}", *(f"{share:.2f}" for share in shares), f"{1 / shares[0]:.1f}"])
    head = ["model", "plain, s", *FACTORS, "joint: times as fast"]
    return (
        f"## RollPacker Fig. 12: rollout time over a period, of the plain one's\n\n{table(head, rows)}\n\nThe paper: joint "
        "speculation up to 3.9 times as fast, and up to 1.5 and 1.6 times as fast as speculation over responses or prompts "
        "alone; responses alone gain much at 1.5 only; at 32k, P 1.5 is slower than P 1.25."
    )


def _april(runs: Runs) -> str:
    rows = []
    for name, setup in APRIL_SETUPS.items():
        plain = runs.of(setup, "plain", tasks=("math",))
        partial = runs.of(setup, "partial", (2.0, 1.0), ("math",))
        ours = []
        for found in (plain, partial):
            tokens, seconds = (mean(found, each, skip=APRIL_WARM_UP) for each in ("drawn_tokens", "gen_s"))
            ours.append(tokens / seconds)
        facts = FACTS[f"april.{setup.split('.')[1]}.throughput"]
        reported = REPORTED[f"APRIL Table 1, GRPO, tokens/s with APRIL, {name}"]
        gain = REPORTED["APRIL Table 1, GRPO, mean improvement"][name]
        rows.append(
            [
                name,
                f"{ours[0]:,.0f}",
                f"{facts.low:,.0f} to {facts.high:,.0f}",
                f"{ours[1]:,.0f}",
                f"{min(reported.values()):,.0f} to {max(reported.values()):,.0f}",
                *beside(ours[1] / ours[0], 1 + gain),
                f"{mean(partial, 'stale_share', skip=APRIL_WARM_UP):.0%}",
            ]
        )
    head = [
        "model",
        "plain, tokens/s",
        "paper",
        "APRIL, tokens/s",
        "paper",
        "speed-up",
        "paper (mean)",
        "ours / paper",
        "error of (speed-up − 1)",
        "within 25 %",
        "stale tokens",
    ]
    return (
        f"## APRIL Table 1, GRPO\n\n{table(head, rows)}\n\nTokens that the engine generates over seconds of rollout, without "
        f"the first {APRIL_WARM_UP} steps, in which the buffer fills. The paper finds about 40 % of a step's tokens carried "
        "over (§3.2.3)."
    )
