"""RollPacker's ablation row by row, and its stream trainer's tables, ours beside theirs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from papers.cases import (
    JOINT,
    ROLLPACKER_SETUPS,
    STREAM_BASE,
    STREAM_FETCHES,
    STREAM_FREED,
    below_tail_batching,
    whole_rows,
)
from papers.reported import REPORTED
from papers.runs import Steps
from papers.setups import Case
from papers.tables import Runs, by_seed, ratios, seconds, share, shown, table

_TABLE3, _TABLE4 = REPORTED["RollPacker Table 3, s a step"], REPORTED["RollPacker Table 4, s a step"]


def rows_of_table2(runs: Runs) -> str:
    """Each mechanism on top of those before it."""
    return f"""## RollPacker Table 2, row by row

Each row has what the rows above it have; plain steps and tail batching as in the table before, the others over their
first ten steps, with two workers, each half of the devices.

{_rows(runs, below_tail_batching)}

Of the reward scheduler, rewards are scored while others decode, each task by workers of its own; the adaptive time-out
of the sandbox and the judge on the actor's devices are not in these runs. What the planner and the stream trainer did:

{_details(runs, below_tail_batching)}"""


def whole_table2(runs: Runs) -> str:
    """The same with all of the reward scheduler: the last row is the whole system."""
    return f"""## RollPacker Table 2, all four parts at once

Each row has what the rows above it have, and the last one is the whole system. Plain steps and tail batching score
after the rollout, task by task, with one worker; the rows below have two, each half of the devices. The reward
scheduler is whole here: rewards are scored while others decode, the sandbox's time-outs are adaptive (an anchor for
every row of the data, as in the authors' code), and the judge is on the actor's devices, where each verdict takes its
time from the rollout, and from the gradients on devices that are freed.

{_rows(runs, whole_rows)}

What the planner and the stream trainer did:

{_details(runs, whole_rows)}"""


Of = Callable[[str], dict[str, Case]]
"""A set-up's rows below tail batching."""


def _rows(runs: Runs, of: Of) -> str:
    rows = []
    for name, setup in ROLLPACKER_SETUPS.items():
        found = {
            "+ tail batching": runs.of(setup, "tail", JOINT),
            **{row: runs.like(case) for row, case in of(setup).items()},
        }
        plain = by_seed(runs.of(setup, "plain"), "step_s")
        before = 1.0
        for row, steps in found.items():
            own, theirs = by_seed(steps, "step_s"), REPORTED[f"RollPacker Table 2, {row}"][name]
            gain = ratios(plain, own)
            last = float(np.mean(gain)) / before
            before = float(np.mean(gain))
            rows.append(
                [name, row, str(len(steps[0].step_s)), seconds(own), shown(gain), f"{theirs:.2f}", f"{last:.2f}"]
            )
    return table(["model", "row", "steps", "s a step", "speed-up over plain", "paper", "over the row before"], rows)


def _details(runs: Runs, of: Of) -> str:
    detail = []
    for name, setup in ROLLPACKER_SETUPS.items():
        _, planned, streamed = (runs.like(case) for case in of(setup).values())
        detail.append(_where(name, planned, streamed))
    where = ["model", "tp, short and long rounds", "preempted", "freed at", "streamed", *_CHANGED]
    return f"""{table(where, detail)}

*tp*: the degrees that rounds ended in, the last one of each kind. *Freed at*: the share of a long round's prompts that
were complete when half of the devices were freed (0: in a round in which the projected KV did not fit). *Streamed*: the
share of its prompts whose gradients were computed beside the rollout. Then a long round's seconds with the stream
trainer, less those without it."""


_CHANGED = ("rollout", "training", "step")


def _where(name: str, without: list[Steps], streamed: list[Steps]) -> list[str]:
    degrees = ", ".join(f"{_last(without[0], long):g}" for long in (False, True))
    return [
        name,
        degrees,
        str(sum(each.preemptions for each in without)),
        share(by_seed(streamed, "freed_at", True)),
        share(by_seed(streamed, "streamed", True)),
        *_changed(without, streamed),
    ]


def _last(steps: Steps, long: bool) -> float:
    return [degree for degree, kind in zip(steps.degrees, steps.long, strict=True) if kind == long][-1]


def _changed(without: list[Steps], streamed: list[Steps], long: bool | None = True) -> list[str]:
    """Seconds of rollout, training and the step: what streaming adds, in long rounds or in all."""
    cells = []
    for stage in ("gen_s", "train_s", "step_s"):
        before, after = (by_seed(each, stage, long) for each in (without, streamed))
        cells.append(shown([a - b for a, b in zip(after, before, strict=True)], "{:+.1f}".format))
    return cells


def table3(runs: Runs) -> str:
    """When devices are freed."""
    base = runs.like(STREAM_BASE)
    plain = by_seed(base, "step_s")
    rows = []
    for name, case in STREAM_FREED.items():
        found = runs.like(case)
        step, theirs = by_seed(found, "step_s"), _TABLE3["w/o"] / _TABLE3[name]
        row = [name, shown(step, _TENTH), f"{_TABLE3[name]:.1f}", shown(ratios(plain, step)), f"{theirs:.2f}"]
        if case == STREAM_BASE:
            rows.append([*row, "", "", "", ""])
        else:
            freed, streamed = (by_seed(found, each) for each in ("freed_at", "streamed"))
            rows.append([*row, share(freed), share(streamed), *_changed(base, found, None)[:2]])
    head = ["freed", "s a step", "paper", "speed-up", "paper", "freed at", "streamed", "rollout, s", "training, s"]
    parts = [shown(by_seed(base, each), _TENTH) for each in ("gen_s", "reward_s", "train_s", "start_s")]
    return f"""## RollPacker Table 3: when devices are freed

Qwen2.5-7B/8k on math prompts, means over five rounds. Of the table only *w/o* was used before: the share of the peak
that RollPacker's own training reaches, and its fixed cost, come from it (problem `rollpacker_7b_trainer`). Without a
stream trainer a step is {parts[0]} s of rollout, {parts[1]} of rewards, {parts[2]} of training, {parts[3]} of weights
and waking. Shares are of prompts, as in §6.6 and the authors' code.

{table(head, rows)}

*Freed at*, *streamed*: as in the table before; then what streaming adds to the seconds of rollout and training."""


def table4(runs: Runs) -> str:
    """A single fetch."""
    without = by_seed(runs.like(STREAM_BASE), "step_s")
    stream = by_seed(runs.like(STREAM_FREED["Adpt."]), "step_s")
    rows = [["*Adpt.*", "as they end", shown(stream, _TENTH), f"{_TABLE3['Adpt.']:.1f}", "", "", ""]]
    for when, cases in STREAM_FETCHES.items():
        for name, case in cases.items():
            found, theirs = runs.like(case), _TABLE4[name]
            step = by_seed(found, "step_s")
            gains = shown(ratios(stream, step)), f"{_TABLE3['Adpt.'] / theirs:.2f}"
            streamed = share(by_seed(found, "streamed"))
            rows.append([when, f"once, {name} at most", shown(step, _TENTH), f"{theirs:.1f}", *gains, streamed])
    head = ["freed", "groups fetched", "s a step", "paper", "over the first row", "paper", "streamed"]
    return f"""## RollPacker Table 4: groups fetched once

Groups are fetched a single time, once devices are freed. The text leaves open when that is; the authors' code has a
fixed share.

{table(head, rows)}

Without a stream trainer: {shown(without, _TENTH)} s (paper: {_TABLE3["w/o"]:.1f})."""


_TENTH = "{:.1f}".format
