"""RollPacker's reward scheduler, ours beside theirs: adaptive time-outs, and where the judge runs."""

from __future__ import annotations

from papers.cases import REWARDS_JUDGE, REWARDS_STEPS, REWARDS_TIMEOUTS, ROLLPACKER_SETUPS, rewards_rows
from papers.reported import REPORTED
from papers.runs import Steps
from papers.setups import RESERVED_SHARE
from papers.tables import Runs, by_seed, ratios, seconds, shown, sums, table

_TIMEOUTS = REPORTED["RollPacker §6.5, adaptive over fixed time-outs"]["7B/8k"]
_MPS = REPORTED["RollPacker §6.5, judge and actor with MPS over without, at most"]["7B/8k"]


def sections(runs: Runs) -> list[str]:
    return [_figure14c(runs), _rows(runs), _judge(runs)]


def _skip(found: list[Steps]) -> int:
    """The steps of a first epoch that is only there to be learned from."""
    return found[0].case.epoch_steps


def _combined(found: list[Steps], long: bool | None = None) -> list[float]:
    """Seconds of rollout and rewards, as Fig. 14c adds them up."""
    return sums(*(by_seed(found, name, long, _skip(found)) for name in ("gen_s", "reward_s")))


def _figure14c(runs: Runs) -> str:
    rows = []
    named = [(setup, name, cases) for setup, of in REWARDS_TIMEOUTS.items() for name, cases in of.items()]
    for setup, name, cases in named:
        fixed, adaptive = (runs.like(case) for case in cases)
        if not fixed or not adaptive:
            continue
        cells = [setup, name]
        for long in (False, True, None):
            ours = _combined(fixed, long), _combined(adaptive, long)
            cells += [seconds(ours[0]), seconds(ours[1]), shown(ratios(*ours))]
        scoring = [by_seed(each, "scoring_s", None, _skip(each)) for each in (fixed, adaptive)]
        rows.append([*cells, *(seconds(each) for each in scoring)])
    kinds = [f"{kind}, {name}" for kind in ("short", "long", "all") for name in ("fixed", "adaptive", "ratio")]
    return f"""## RollPacker Fig. 14c: adaptive against fixed time-outs

Qwen2.5-7B/8k with tail batching on the code task, scored while others decode: seconds of rollout and rewards of a round
(periods of four short rounds and a long one). Of the programs, 5 % never end; the others take what the baseline's do.
The paper has {_TIMEOUTS} over all steps. *Authors' configuration*: that of their repository for this figure, 44 prompts
of 8 responses (55 of 10 begin) on 8 GPUs with 32 workers, twenty rounds. *Paper's set-up*: §6's 128 prompts of 8 on 16,
as many workers, five rounds.

{table(["set-up", "anchors", *kinds, "scoring, fixed", "adaptive"], rows)}

*A column, for every row*: `data.reference_time_key`, as the authors' code reads `reference_time` from every row of its
data; limits are twice that, from 2 to 30 s. What their column holds is not known here: it is read as what a right
program takes, 0.74 s, so every limit is 2 s. *Learnt*: by §4.3's rule, 1.5 times the longest time of a right response.
*As the first epoch goes*: no prompt has come before, so only a prompt's other responses of the same round tell
anything. *In the first epoch, second*: each was answered once before; a prompt has an anchor if one of its responses
was right. Half of all are, but with a spread of 2 in the logit between prompts, which leaves many prompts without a
right response. *No prompt much harder*: a spread of 0.5, which leaves few. *Scoring*: seconds of all workers together,
of all scorings of a round."""


def _rows(runs: Runs) -> str:
    rows = []
    for name, setup in ROLLPACKER_SETUPS.items():
        found = {row: runs.like(case) for row, case in rewards_rows(setup).items()}
        if not all(found.values()):
            continue
        tail = by_seed(found["+ tail batching"], "step_s", None, REWARDS_STEPS)
        above, own = (REPORTED[f"RollPacker Table 2, + {row}"][name] for row in ("tail batching", "reward scheduler"))
        sync = REPORTED["RollPacker §6.5, asynchronous reward computation"][name]
        for row, steps in found.items():
            step = by_seed(steps, "step_s", None, REWARDS_STEPS)
            theirs = {"+ rewards beside the rollout": sync, "+ adaptive time-outs": own / above}.get(row)
            parts = [seconds(by_seed(steps, each, None, REWARDS_STEPS)) for each in ("gen_s", "reward_s", "train_s")]
            cells = [shown(ratios(tail, step)), "" if theirs is None else f"{theirs:.2f}"]
            rows.append([name, row, *parts, seconds(step), *cells])
    head = ["model", "row", "rollout", "reward", "training", "s a step", "over tail batching", "paper"]
    return f"""## RollPacker Table 2, the row of the reward scheduler

The uniform mix of three tasks, a second epoch as above, each task with workers of its own once rewards are scored while
others decode. Anchors are learnt as above; *adaptive time-outs* alone has one for every row, as the authors' code. The
paper's figure for *beside the rollout* is §6.5's (asynchronous over synchronous), for *adaptive time-outs* Table 2's
row over the row before it, which holds the judge on the actor's devices as well.

{table(head, rows)}"""


def _judge(runs: Runs) -> str:
    rows, first = [], None
    for name, case in REWARDS_JUDGE.items():
        found = runs.like(case)
        step = by_seed(found, "step_s")
        first = first or step
        parts = [seconds(by_seed(found, each)) for each in ("gen_s", "reward_s", "train_s")]
        rows.append([name, *parts, seconds(step), shown(ratios(first, step))])
    head = ["the judge is", "rollout", "reward", "training", "s a step", "over the first row"]
    return f"""## Where the judge runs

Qwen2.5-7B/8k with tail batching on prompts that a judge scores, scored while others decode, one period. Elsewhere the
judge has {RESERVED_SHARE:.0%} of the devices for itself (§4.3), which then neither roll out nor train. Beside the
actor it needs as many device-seconds as the baseline's scoring has on those, and takes them from the rollout, between
two plans, as soon as a response is there: all devices then judge, not a quarter of them. The last row has the judge's
quarter besides the rollout's devices, which is more hardware. RollPacker shares devices by MPS, which gains up to
{_MPS} over sharing without it (Fig. 14a); here nothing runs at once on a device. What streaming a judge's weights costs
(Fig. 14b) is not in these figures.

{table(head, rows)}"""
