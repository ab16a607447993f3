"""APRIL's table, ours beside theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from papers.cases import APRIL_SETUPS, APRIL_WARM_UP
from papers.facts import FACTS
from papers.reported import REPORTED
from papers.tables import OVER_SEEDS, Runs, by_seed, over_seeds, ratios, share, shown, table
from papers.what_if import AS_CALIBRATED, DAPO, STALE

Readings = Mapping[str, Sequence[Sequence[float]]]


def sections(runs: Runs, readings: Readings) -> list[str]:
    return [_grpo(runs, readings), _dapo(readings), _stale(runs, readings)]


def _tokens(values: Sequence[float]) -> str:
    return shown(values, "{:,.0f}".format)


def _grpo(runs: Runs, readings: Readings) -> str:
    rows = []
    for i, (name, setup) in enumerate(APRIL_SETUPS.items()):
        found = runs.of(setup, "plain", tasks=("math",)), runs.of(setup, "partial", (2.0, 1.0), ("math",))
        ours = [
            ratios(by_seed(each, "drawn_tokens", skip=APRIL_WARM_UP), by_seed(each, "gen_s", skip=APRIL_WARM_UP))
            for each in found
        ]
        before = FACTS[f"{setup}.throughput"]
        after = REPORTED[f"APRIL Table 1, GRPO, tokens/s with APRIL, {name}"].values()
        gain = REPORTED["APRIL Table 1, GRPO, mean improvement"][name]
        rows.append(
            [
                name,
                _tokens(ours[0]),
                f"{before.low:,.0f} to {before.high:,.0f}",
                _tokens(ours[1]),
                f"{min(after):,.0f} to {max(after):,.0f}",
                *over_seeds(ratios(ours[1], ours[0]), readings[AS_CALIBRATED.name][i], 1 + gain),
            ]
        )
    head = ["model", "plain, tokens/s", "paper (fitted to)", "APRIL, tokens/s", "paper", *OVER_SEEDS]
    return f"""## APRIL Table 1, GRPO

{table(head, rows)}

Tokens that the engines generate, those of aborted requests included, over seconds of rollout, as the authors' code
counts; without the first {APRIL_WARM_UP} steps, in which the buffer fills. The paper's gain is its mean over three data
sets."""


def _dapo(readings: Readings) -> str:
    rows = []
    for share_dropped, variant in DAPO.items():
        if variant not in readings:
            continue  # tried out at a tiny size
        row = [share_dropped]
        for i, name in enumerate(APRIL_SETUPS):
            gain = REPORTED["APRIL Table 1, DAPO, mean improvement"][name]
            row += [shown(readings[variant][i]), f"{1 + gain:.2f}"]
        rows.append(row)
    columns = [each for name in APRIL_SETUPS for each in (name, "paper")]
    return f"""## APRIL Table 1, DAPO

In closed form (`scripts/papers/slime.py`), constants fitted to the baselines anew for each share of dropped groups:

{table(["groups that DAPO drops", *columns], rows)}

The baseline launches a second batch as soon as one group is dropped and ends with the 32nd that is kept, so it leaves
the tail behind as APRIL does. Nothing is left to gain here, and about 10 % in the paper. Resumed requests read a long
context from the start; groups are dropped whatever their lengths. What would decide is how long dropped groups are, and
how many there are."""


def _stale(runs: Runs, readings: Readings) -> str:
    rows = []
    for i, (name, setup) in enumerate(APRIL_SETUPS.items()):
        found = runs.of(setup, "partial", (2.0, 1.0), ("math",))
        closed = [share(readings[each][i]) for each in STALE]
        ours = [share(by_seed(found, each, skip=APRIL_WARM_UP)) for each in ("stale_share", "stale_samples")]
        rows.append([name, closed[0], ours[0], closed[1], ours[1], closed[2]])
    head = [
        "model",
        "last segments of resumed requests (closed form)",
        "of trained tokens",
        "in closed form",
        "of trained responses",
        "in closed form",
    ]
    return f"""## How much of APRIL's data is stale, counted in three ways

{table(head, rows)}

The paper finds about 40 % (§3.2.3). Its code adds up the last segment of every request that it resumes and divides by
that and the rollout's tokens (`off_policy_ratio` in slime/backends/megatron_utils/data.py): what came before the last
segment does not count, nor does a response that ended while its group had not. Of the tokens that are trained on, a
larger share comes from earlier rollouts."""
