"""RollPacker's tables and figures, ours beside theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from papers import stream_page
from papers.cases import FACTORS, JOINT, ROLLPACKER_SETUPS
from papers.facts import FACTS
from papers.reported import REPORTED
from papers.runs import Steps
from papers.setups import TASKS
from papers.tables import OVER_SEEDS, Runs, by_seed, mean, over_seeds, ratios, seconds, share, shown, sums, table
from papers.what_if import AS_CALIBRATED, PERIODS

FIRST = 10  # steps that a table shows one by one

Readings = Mapping[str, Sequence[Sequence[float]]]


def sections(runs: Runs, readings: Readings) -> list[str]:
    return [
        _table2(runs, readings),
        stream_page.rows_of_table2(runs),
        stream_page.table3(runs),
        stream_page.table4(runs),
        _baselines(runs),
        _figure4(runs),
        _figure10(runs),
        _figure11(runs),
        _figure12(readings),
    ]


def _pair(runs: Runs, setup: str, tasks: Sequence[str] = TASKS) -> tuple[list[Steps], list[Steps]]:
    """Plain, and tail batching at the default factors."""
    return runs.of(setup, "plain", tasks=tasks), runs.of(setup, "tail", JOINT, tasks)


def _table2(runs: Runs, readings: Readings) -> str:
    reported = REPORTED["RollPacker Table 2, + tail batching"]
    rows, order = [], []
    for i, (name, setup) in enumerate(ROLLPACKER_SETUPS.items()):
        plain, tail = (by_seed(each, "step_s") for each in _pair(runs, setup))
        ours = ratios(plain, tail)
        order.append(sum(ours) / len(ours))
        published = f"{FACTS[f'{setup}.step_s'].low:.0f}"
        closed = readings[AS_CALIBRATED.name][i]
        rows.append([name, seconds(plain), published, seconds(tail), *over_seeds(ours, closed, reported[name])])
    same = "the same as" if order == sorted(order) else "**not** that of"
    head = ["model", "plain, s a step", "veRL's (fitted to)", "tail batching, s a step", *OVER_SEEDS]
    return f"""## RollPacker Table 2, the row of tail batching

{table(head, rows)}

The order over models is {same} the paper's. Rewards are scored after the rollout in both columns, task by task, as in
the paper's rows above *reward scheduler*."""


def _baselines(runs: Runs) -> str:
    rows = []
    for task in TASKS:
        found = runs.of("rollpacker.14b", "plain", tasks=(task,))
        step = by_seed(found, "step_s")
        row = [task, seconds(step)]
        rollout = sums(by_seed(found, "gen_s"), by_seed(found, "start_s"))
        stages = (("rollout", rollout), ("reward", by_seed(found, "reward_s")), ("train", by_seed(found, "train_s")))
        for stage, values in stages:
            theirs = FACTS[f"rollpacker.{task}.{stage}_share"].low
            row += [share(ratios(values, step)), f"{theirs:.0%}"]
        rows.append(row)
    head = ["task (14B/16k)", "s a step", "rollout", "Table 1", "reward", "Table 1", "training", "Table 1"]
    return f"""## The plain step against what it was fitted to

Not a result: how far the simulated step is from the closed form that the calibration uses. Waking the engines and
sending weights count as rollout.

{table(head, rows)}"""


def _per_step(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values[:FIRST])


def _figure4(runs: Runs) -> str:
    plain, tail = _pair(runs, "rollpacker.14b", ("code",))
    period = tail[0].case.period
    cut = ratios(by_seed(plain, "longest"), by_seed(tail, "longest", False))
    rows = []
    for name, found in (("plain", plain), ("tail batching", tail)):
        step = by_seed(found, "step_s")
        rollout = sums(by_seed(found, "gen_s"), by_seed(found, "start_s"))
        shares = [
            share(ratios(each, step)) for each in (rollout, by_seed(found, "reward_s"), by_seed(found, "train_s"))
        ]
        whole = [value * period for value in step]
        rows.append([name, _per_step(found[0].longest[:period]), seconds(whole), *shares])
    head = ["", "longest response of each step (first seed)", "seconds of a period", "rollout", "reward", "training"]
    speedup = ratios(by_seed(plain, "step_s"), by_seed(tail, "step_s"))
    return f"""## RollPacker Fig. 4: one period of the 14B model on code

{table(head, rows)}

Short rounds cut the longest response {shown(cut, "{:.1f}".format)} times (paper: up to 8.9). Speed-up {shown(speedup)}
(paper, §3: 1.48)."""


def _figure10(runs: Runs) -> str:
    rows = []
    for name, setup in ROLLPACKER_SETUPS.items():
        plain, tail = _pair(runs, setup)
        short, long = (by_seed(tail, "step_s", kind) for kind in (False, True))
        gain = ratios(by_seed(plain, "step_s"), short)
        each = [_per_step(found[0].step_s) for found in (plain, tail)]
        rows.append([name, *each, seconds(short), seconds(long), shown(gain)])
    head = [
        "model",
        "plain: s of the first steps (first seed)",
        "tail batching: the same",
        "short",
        "long",
        "plain / short",
    ]
    return f"""## RollPacker Fig. 10: step times

{table(head, rows)}

The paper's 2.1 to 3.6 for short rounds is of the whole system; this is tail batching alone."""


def _figure11(runs: Runs) -> str:
    plain, tail = _pair(runs, ROLLPACKER_SETUPS["32B/32k"])
    rows = [
        [name, _per_step(found[0].longest), _per_step(found[0].gen_s)]
        for name, found in (("plain", plain), ("tail batching", tail))
    ]
    gain = ratios(by_seed(plain, "gen_s"), by_seed(tail, "gen_s", False))
    loss = ratios(by_seed(tail, "gen_s", True), by_seed(plain, "gen_s"))
    breakdown = []
    for name, each in ROLLPACKER_SETUPS.items():
        found = runs.of(each, "tail", JOINT)
        whole = mean(found, "step_s", True)
        for kind, long in (("short", False), ("long", True)):
            parts = [
                shown([value / whole for value in by_seed(found, part, long)])
                for part in ("start_s", "gen_s", "reward_s", "train_s")
            ]
            breakdown.append([name, kind, *parts, seconds(by_seed(found, "step_s", long))])
    head = ["model", "round", "weights, waking", "rollout", "reward", "training", "s a step"]
    return f"""## RollPacker Fig. 11: where a step's time goes

The first steps of 32B/32k, first seed:

{table(["", "longest response", "rollout, s"], rows)}

A short round's rollout is {shown(gain, "{:.1f}".format)} times as fast as a plain one's on average (paper: up to 7.8,
of the whole system). A long round's takes {shown(loss)} times as long (paper: comparable). As shares of a long round's
step time:

{table(head, breakdown)}"""


def _figure12(readings: Readings) -> str:
    rows, implied = [], []
    table2 = REPORTED["RollPacker Table 2, + tail batching"]
    for i, (name, setup) in enumerate(ROLLPACKER_SETUPS.items()):
        plain = readings[PERIODS["plain"]][i]
        theirs = {
            factors: REPORTED[f"RollPacker Fig. 12, s of a rollout, {factors}"][name] for factors in ("plain", *FACTORS)
        }
        cells = [
            f"{shown(ratios(readings[PERIODS[factors]][i], plain))} ({theirs[factors] / theirs['plain']:.2f})"
            for factors in FACTORS
        ]
        rollout, step = (FACTS[f"{setup}.{each}"].low for each in ("rollout_s", "step_s"))
        rows.append([name, f"{seconds(plain)} ({rollout:.0f})", *cells])
        saved = rollout * (1 - theirs["P and R 1.25"] / theirs["plain"])
        needed = step * (1 - 1 / table2[name])
        speedup, before = step / (step - saved), f"{step:.0f}, of it {rollout:.0f}"
        implied.append([name, before, f"{saved:.0f}", f"{speedup:.2f}", f"{table2[name]:.2f}", f"{needed:.0f}"])
    head = ["model", "plain step and rollout, s", "saved, s", "speed-up", "Table 2", "s to save for that"]
    return f"""## RollPacker Fig. 12: rollout time over whole periods, as a share of the plain one's

In closed form (`scripts/papers/what_if.py`), with weights and waking; in brackets the paper's bars:

{table(["model", "plain, s", *FACTORS], rows)}

What the paper's own figures say of Table 2: the plain step (Fig. 10), less what joint speculation takes off its rollout
in Fig. 12, if nothing else of the step changes:

{table(head, implied)}

For 14B/16k they ask for a larger gain than Table 2 has, for the other two for a smaller one: Fig. 12 and Table 2 are
not of the same runs. What would decide is the rollout's seconds in Table 2's runs."""
