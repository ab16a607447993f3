"""Which runs each paper's tables and figures need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from papers.setups import EPOCH_STEPS, TASKS, Case

ROLLPACKER_SETUPS = {"7B/8k": "rollpacker.7b", "14B/16k": "rollpacker.14b", "32B/32k": "rollpacker.32b"}
"""RollPacker's names for its columns (Table 2), and our set-ups."""

APRIL_SETUPS = {"Qwen3-4B": "april.4b", "Qwen3-8B": "april.8b"}

JOINT = (1.25, 1.25)  # RollPacker's default

FACTORS = {
    "P and R 1.25": JOINT,
    "P 1.25": (1.25, 1.0),
    "P 1.5": (1.5, 1.0),
    "R 1.25": (1.0, 1.25),
    "R 1.5": (1.0, 1.5),
}
"""RollPacker Fig. 12: (prompt factor, response factor)."""

PAT_SERIES = {
    "Fig. 10a": ("Llama-3.1-8B", "pat.a40.8b", 8, (6144, 8192, 12288, 16384)),
    "Fig. 10b": ("Llama-3.1-8B", "pat.a40.8b", 16, (6144, 16384)),
    "Fig. 10c": ("Qwen3-14B", "pat.a40.14b", 16, (6144, 16384)),
    "Fig. 11a": ("Llama-3.1-8B", "pat.h100.8b", 8, (8192, 24576)),
    "Fig. 11b": ("Qwen3-14B", "pat.h100.14b", 8, (8192, 16384)),
}
"""By figure of PAT: model, our set-up, devices, and longest responses in tokens (where the axis is not in the text:
between the ends that it names, or those alone)."""

PAT_DEGREES = (1, 2, 4, 8)  # that the static baseline is the best of
PAT_ADAPTIVE = {
    "{1, 2} from 1": (1, (1, 2)),
    "{1, 2, 4, 8} from 1": (1, PAT_DEGREES),
    "{1, 2, 4, 8} from 2": (2, PAT_DEGREES),  # §5.4
}
"""Adaptive layouts: the degree that rounds start in, and the candidates (within a round tp only grows)."""

PAT_STEPS = 5  # that the paper's means are over (§5.1)

APRIL_WARM_UP = 8  # steps until the buffer is what it stays; left out of all means, the baseline's too


STREAM_BASE = Case("rollpacker.7b", "plain", tasks=("math",), steps=5, score_when="sample", workers=2, own_trainer=True)
"""RollPacker §6.6: math prompts, means over five rounds without speculation. Devices are freed by halves."""

STREAM_FREED = {"w/o": STREAM_BASE, "Adpt.": replace(STREAM_BASE, stream="adaptive")} | {
    f"{share:.0%}": replace(STREAM_BASE, stream="fixed", freed_at=share) for share in (0.2, 0.3, 0.4)
}
"""Table 3's columns."""

_SHARES = (0.2, 0.3, 0.4, 0.5)
STREAM_FETCHES = {
    "as *Adpt.*": {f"{x:.0%}": replace(STREAM_BASE, stream="adaptive", fetch=x) for x in _SHARES},
    "at that share": {f"{x:.0%}": replace(STREAM_BASE, stream="fixed", freed_at=x, fetch=x) for x in _SHARES},
}
"""Table 4's columns, by when devices are freed, which the text leaves open. The authors' code (fixed_async) has a fixed
share, and fetches then."""


def _of_table3(steps: int) -> list[Case]:
    found = [*STREAM_FREED.values(), *(case for cases in STREAM_FETCHES.values() for case in cases.values())]
    return [replace(case, steps=min(steps, case.steps)) for case in found]


def below_tail_batching(setup: str) -> dict[str, Case]:
    """Table 2's rows, each with what the rows above it have."""
    scored = Case(setup, "tail", *JOINT, steps=10, score_when="sample", workers=2)
    planned = replace(scored, planner=True)
    return {
        "+ reward scheduler": scored,
        "+ parallelism planner": planned,
        "+ stream trainer": replace(planned, stream="adaptive"),
    }


def whole_rows(setup: str) -> dict[str, Case]:
    """The same with all of the reward scheduler: adaptive time-outs, with anchors as in the authors' code, and a judge
    on the actor's devices."""
    return {
        row: replace(case, timeout="adaptive", anchors="rows", judge="devices")
        for row, case in below_tail_batching(setup).items()
    }


def _of_table2(rows: dict[str, Case], steps: int) -> list[Case]:
    return [replace(case, steps=min(steps, case.steps)) for case in rows.values()]


def _whole(steps: int) -> list[Case]:
    found = []
    for setup in ROLLPACKER_SETUPS.values():
        tail = Case(setup, "tail", *JOINT, steps=steps)
        found += [replace(tail, rule="plain", prompt_factor=1.0, response_factor=1.0), tail]
        found += _of_table2(whole_rows(setup), steps)
    return found


def _rollpacker(steps: int) -> list[Case]:
    cases = []
    for setup in ROLLPACKER_SETUPS.values():
        cases.append(Case(setup, "plain", steps=steps))  # Table 2, Fig. 10, 11
        cases.append(Case(setup, "tail", *JOINT, steps=steps))
    for setup in ROLLPACKER_SETUPS.values():  # Table 2, the rows below
        cases += _of_table2(below_tail_batching(setup), steps)
    cases += _of_table3(steps)
    code = {"tasks": ("code",), "steps": min(steps, 10)}
    cases.append(Case("rollpacker.14b", "plain", **code))  # Fig. 4
    cases.append(Case("rollpacker.14b", "tail", *JOINT, **code))
    cases += [Case("rollpacker.14b", "plain", tasks=(task,), steps=min(steps, 5)) for task in TASKS if task != "code"]
    return cases


def _april(steps: int) -> list[Case]:
    steps = min(steps, 10)  # the paper does not say how many; shares and tokens per second settle within a few
    return [
        case
        for setup in APRIL_SETUPS.values()
        for case in (
            Case(setup, "plain", tasks=("math",), steps=steps + APRIL_WARM_UP),
            Case(setup, "partial", 2.0, tasks=("math",), steps=steps + APRIL_WARM_UP),
        )
    ]


def _pat(steps: int) -> list[Case]:
    found = []
    for _, setup, devices, longest in PAT_SERIES.values():
        for tokens in longest:
            case = Case(setup, "plain", tasks=("math",), steps=min(steps, PAT_STEPS), tokens=tokens, devices=devices)
            found += [replace(case, tp=tp) for tp in PAT_DEGREES]
            found += [replace(case, rule="adaptive", tp=tp, degrees=degrees) for tp, degrees in PAT_ADAPTIVE.values()]
    return found


REWARDS_STEPS = 5  # a period of short rounds and a long one, and an epoch where prompts come again
_CODE = Case("rollpacker.7b", "tail", *JOINT, tasks=("code",), steps=REWARDS_STEPS, score_when="sample")
_OWN = replace(_CODE, devices=8, prompts=44, steps=20)


def _timeouts(of: Case) -> dict[str, tuple[Case, Case]]:
    """A set-up with fixed and with adaptive time-outs, by where anchors come from."""
    again = replace(of, epoch_steps=of.steps, steps=2 * of.steps)
    fixed, adaptive = (tuple(replace(each, timeout=name) for each in (of, again)) for name in ("fixed", "adaptive"))
    return {
        "a column, for every row": (fixed[0], replace(adaptive[0], anchors="rows")),
        "learnt as the first epoch goes": (fixed[0], adaptive[0]),
        "learnt in the first epoch, second": (fixed[1], adaptive[1]),
        "the same, no prompt much harder": (fixed[1], replace(adaptive[1], pass_spread=0.5)),
    }


REWARDS_TIMEOUTS = {"authors' configuration": _timeouts(_OWN), "paper's set-up": _timeouts(_CODE)}
"""RollPacker Fig. 14c, by set-up: what the authors' configuration for it says (Farrrrland/RollPacker,
examples/benchmark_fig13/rlvr_config_qwen2-7B_code_adaptive_timeout.yaml: 44 prompts of 8 responses, of which 55 of 10
begin, on 8 GPUs with 32 workers; its plot leaves out one of 21 steps), and §6's. What is right makes no difference to
how long fixed time-outs take."""

_JUDGED = replace(_CODE, tasks=("judge",))
REWARDS_JUDGE = {
    "a quarter of the devices for itself": replace(_JUDGED, devices=12),
    "on all devices, which it takes for each verdict": replace(_JUDGED, judge="devices"),
    "beside all devices, on a third as many more": _JUDGED,
}
"""Where the judge of the 7B model runs (RollPacker §4.3, §6.5)."""


def rewards_rows(setup: str) -> dict[str, Case]:
    """Table 2's row above the reward scheduler, and that row without and with adaptive time-outs, of either anchors."""
    tail = Case(setup, "tail", *JOINT, steps=2 * REWARDS_STEPS, epoch_steps=REWARDS_STEPS)
    beside = replace(tail, score_when="sample")
    return {
        "+ tail batching": tail,
        "+ rewards beside the rollout": replace(beside, timeout="fixed"),
        "+ adaptive time-outs, anchors learnt": replace(beside, timeout="adaptive"),
        "+ adaptive time-outs": replace(beside, timeout="adaptive", anchors="rows"),
    }


def _rewards(steps: int) -> list[Case]:
    found = dict.fromkeys(case for of in REWARDS_TIMEOUTS.values() for pair in of.values() for case in pair)
    found |= dict.fromkeys(REWARDS_JUDGE.values())
    return [*found, *(case for setup in ROLLPACKER_SETUPS.values() for case in rewards_rows(setup).values())]


RHYMERL_TASKS = ("math", "code")
RHYMERL_ROWS = {
    "plain": {},
    "+ ranking groups": {"pipeline": "naive"},
    "+ two tiers": {"pipeline": "two_tier"},
    "+ speculation": {"pipeline": "two_tier", "speculation": True},
}
"""RhymeRL Fig. 14: the baseline, and what each bar has besides those before it."""

RHYMERL_STEPS = 8  # that means are over: two epochs


def rhymerl_rows(task: str) -> dict[str, Case]:
    """Fig. 14's bars for a task. Two workers for each of 16 groups, four for each of 8."""
    plain = Case(f"rhymerl.{task}", "plain", tasks=(task,), workers=32, score_when="sample")
    return {name: replace(plain, **more) for name, more in RHYMERL_ROWS.items()}


def _rhymerl(steps: int) -> list[Case]:
    pairs = -(-min(steps, RHYMERL_STEPS) // 2)  # of an odd and an even step
    whole = EPOCH_STEPS + 2 * pairs + 1  # an epoch without history before, a step that only learns after
    return [replace(case, steps=whole) for task in RHYMERL_TASKS for case in rhymerl_rows(task).values()]


EXPERIMENTS = {
    "rollpacker": _rollpacker,
    "april": _april,
    "pat": _pat,
    "rhymerl": _rhymerl,
    "rollpacker-rewards": _rewards,
    "rollpacker-whole": _whole,
}


def cases_of(paper: str, steps: int, seeds: Iterable[int], decode_steps: int, scale: int) -> list[Case]:
    """Every run, of whole periods of short rounds and a long one where there are such."""
    chosen = list(seeds)
    found = [
        replace(case, seed=seed, decode_steps=decode_steps, scale=scale, workers=_workers(case, scale))
        for case in EXPERIMENTS[paper](steps)
        for seed in chosen
    ]
    return [replace(case, steps=-(-case.steps // case.period) * case.period) for case in found]


def _workers(case: Case, scale: int) -> int:
    """Two are enough to try something out."""
    return case.workers if scale == 1 else min(case.workers, 2)


def headline(cases: Iterable[Case]) -> list[Case]:
    """The runs, a model's seeds together, of those that a paper's main table reports."""
    return [
        case
        for case in cases
        if case.paper in ("rollpacker", "april")
        and not case.epoch_steps
        and (case.rule == "partial" or (case.rule == "tail" and case.tasks == TASKS and case.score_when == "rollout"))
    ]


def jobs_of(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases that are run together: one without a stream trainer, and those that differ from it in the stream alone."""
    jobs: dict[Case, list[Case]] = {}
    for case in cases:
        jobs.setdefault(case.base, []).append(case)
    for base, found in jobs.items():
        assert found[0] == base, "a stream trainer is compared with the same without it"
    return list(jobs.values())
