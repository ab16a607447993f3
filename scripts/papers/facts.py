"""What the papers published about their baselines: the only numbers that a calibration may be fitted to.

Purpose: facts as data, each with paper and place, so that a calibration can name its sources; and `SETUPS`, how the
papers ran those baselines. `papers.reported` has the gains of the papers' own methods.

Source: RollPacker (Gao et al., NSDI 2026), APRIL (Zhou et al. 2025), PAT (Zhao et al.), RhymeRL (He et al. 2025), read
from their text.

Departures: a number that a figure shows only as a drawing is not here, but for curves of RollPacker's baseline: the
figures in the authors' repository are vector graphics, and their coordinates are numbers. Left out: RollPacker Fig. 4a,
4b, 5, 8a's curve and 16; APRIL Fig. 3 (length histograms) and 5-9; PAT Fig. 3a's bars, 10 and 13-14; RhymeRL Fig. 2-3's
curves and 13. Facts that our reading cannot use have the
role `unused`, and a note that says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["fit", "check", "input", "unused"]
"""fit: enters the residuals; check: predicted and reported, with no weight; input: taken over as it is; unused: not
predicted, `note` says why."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One published number, or a range of which any value agrees (`low` == `high` for a number).

    Attributes:
      name: unique.
      paper, where: paper and table, figure or section.
      unit: of the value ("share", "s", "tokens", ...).
      low, high: the value or range.
      role: what a calibration may do with it.
      tolerance: relative error that counts as one standard deviation: rounding, or how far our reading may be off.
      note: how it was read or derived.
    """

    name: str
    paper: str
    where: str
    unit: str
    low: float
    high: float
    role: Role = "fit"
    tolerance: float = 0.05
    note: str = ""


def _fact(name: str, place: str, unit: str, value: float | tuple[float, float], note: str = "", **more) -> Fact:
    paper, where = place.split(": ", 1)
    low, high = value if isinstance(value, tuple) else (value, value)
    return Fact(name, paper, where, unit, low, high, note=note, **more)


_DRAWN = (
    "read off the curve's coordinates in the vector figure (the authors' repository Farrrrland/RollPacker, "
    "files/nsdi26fall-paper677.pdf, an earlier numbering)"
)
_FIG12 = (
    "the label of the bar ('annotated with the actual time'), as text in the authors' repository, "
    "files/nsdi26fall-paper677.pdf, Fig. 11 there. plot/plt_sensitive_squeezer.py there takes the longest of the plain "
    "steps, so one in which a response reaches the limit"
)


def _quantiles(task: str, median: float, p75: float, p90: float, p95: float, at_limit: float) -> tuple[Fact, ...]:
    """RollPacker Fig. 2a's curve of a task: 14B, up to 16k tokens."""
    place = "RollPacker: Fig. 2a"
    quantiles = {"p50": median, "p75": p75, "p90": p90, "p95": p95}
    return (
        *(_fact(f"rollpacker.{task}.{name}", place, "tokens", value, _DRAWN) for name, value in quantiles.items()),
        _fact(
            f"rollpacker.{task}.at_limit",
            place,
            "share",
            at_limit,
            _DRAWN + "; responses that end at 16,384 tokens",
            tolerance=0.1,
        ),
    )


_ROLLPACKER = (
    _fact("rollpacker.math.rollout_share", "RollPacker: Table 1", "share", 0.72, tolerance=0.01),
    _fact("rollpacker.math.reward_share", "RollPacker: Table 1", "share", 0.05, tolerance=0.1),
    _fact("rollpacker.math.train_share", "RollPacker: Table 1", "share", 0.23, tolerance=0.02),
    _fact("rollpacker.code.rollout_share", "RollPacker: Table 1", "share", 0.66, tolerance=0.01),
    _fact("rollpacker.code.reward_share", "RollPacker: Table 1", "share", 0.13, tolerance=0.04),
    _fact("rollpacker.code.train_share", "RollPacker: Table 1", "share", 0.21, tolerance=0.02),
    _fact("rollpacker.judge.rollout_share", "RollPacker: Table 1", "share", 0.71, tolerance=0.01),
    _fact("rollpacker.judge.reward_share", "RollPacker: Table 1", "share", 0.07, tolerance=0.07),
    _fact("rollpacker.judge.train_share", "RollPacker: Table 1", "share", 0.22, tolerance=0.02),
    *_quantiles("math", 661, 1129, 2566, 4101, 0.0099),
    *_quantiles("code", 663, 945, 1667, 2815, 0.0091),
    *_quantiles("judge", 520, 755, 1064, 1422, 0.0018),
    _fact("rollpacker.7b.rollout_s", "RollPacker: Fig. 12 (P = R = 1.0, 8k)", "s", 82.0, _FIG12),
    _fact("rollpacker.14b.rollout_s", "RollPacker: Fig. 12 (P = R = 1.0, 16k)", "s", 277.0, _FIG12),
    _fact(
        "rollpacker.32b.rollout_s",
        "RollPacker: Fig. 11b (veRL)",
        "s",
        567.4,
        _DRAWN + "; mean of 40 steps (standard deviation 17). Fig. 12 has 673 for the longest of an unknown number",
        tolerance=0.03,
    ),
    _fact(
        "rollpacker.7b.step_s",
        "RollPacker: Fig. 10a (veRL)",
        "s",
        233.4,
        _DRAWN + "; mean of 40 steps (standard deviation 56)",
        tolerance=0.04,
    ),
    _fact(
        "rollpacker.14b.step_s",
        "RollPacker: Fig. 10b (veRL)",
        "s",
        382.8,
        _DRAWN + "; mean of 40 steps (standard deviation 26)",
        tolerance=0.03,
    ),
    _fact(
        "rollpacker.32b.step_s",
        "RollPacker: Fig. 10c (veRL)",
        "s",
        874.6,
        _DRAWN + "; mean of 40 steps (standard deviation 21)",
        tolerance=0.03,
    ),
    _fact(
        "rollpacker.14b.capped_steps",
        "RollPacker: Fig. 10b (veRL)",
        "share",
        (0.97, 1.0),
        _DRAWN + "; 39 of 40 steps take 360 s or more and the mean is 383 s: read as a response at the limit in each",
        tolerance=0.02,
    ),
    _fact(
        "rollpacker.32b.capped_steps",
        "RollPacker: Fig. 11a (veRL)",
        "share",
        (0.97, 1.0),
        _DRAWN + "; the longest response is 32,768 tokens in each of 40 steps",
        tolerance=0.02,
    ),
    _fact(
        "rollpacker.artifact_fixed_s",
        "RollPacker: artifact, files/step_gen.png over files/max_length.png",
        "s",
        (8.0, 9.0),
        "7B on 8 H800, 26 rounds of the authors' system: seconds of generation against the longest response lie on a "
        "line of 8.4 ms a token that meets 0 tokens at 8 to 9 s. The line is used, the ratio of short rounds and long "
        "ones is not",
        tolerance=0.2,
    ),
    _fact(
        "rollpacker.sandbox_timeout_share",
        "RollPacker: §4.3, Fig. 8a",
        "share",
        0.05,
        "'around 5% of prompts' reach the time-out; taken of samples",
        role="input",
    ),
    _fact("rollpacker.code.timeout", "RollPacker: §4.3, §5", "s", 30.0, role="input"),
    _fact("rollpacker.math.timeout", "RollPacker: §5", "s", 2.0, role="input"),
    _fact(
        "rollpacker.tpot_64_over_32",
        "RollPacker: §4.1",
        "ratio",
        1.23,
        "time per token, batch 64 over batch 32; model, TP and context are not said (read: 14B, TP 2, P75 context)",
        role="check",
    ),
    _fact(
        "rollpacker.prefill_max_length",
        "RollPacker: §4.1",
        "s",
        (0.0, 0.1),
        "prefill at the longest length, batch 1, 'within 100 milliseconds'; the model is not said: 14B at 16k on two "
        "devices takes three times that at their peak FLOP/s, so it can be none of §6's pairs of model and TP",
        role="unused",
    ),
    _fact(
        "rollpacker.7b_long_round_step",
        "RollPacker: Table 3 (column w/o)",
        "s",
        124.2,
        "Qwen2.5-7B/8k, math, mean of five long rounds without GPU scaling: a step of prompts chosen for their length "
        "and scored while others decode, by RollPacker's training and not veRL's: nearly but not quite a baseline",
        role="check",
    ),
    _fact(
        "rollpacker.7b_own_trainer_step",
        "RollPacker: Table 3 (column w/o)",
        "s",
        124.2,
        "the same step, as the baseline of the stream trainer: it says how fast RollPacker's own trainer is. The "
        "authors' configuration for the table has no speculation and no long-prompt queue (max_prompts_ratio 1, "
        "max_num_return_sequences as in a group): what is called long rounds there are rounds of fresh prompts",
        tolerance=0.01,
    ),
)

_RHYMERL = (
    _fact(
        "rhymerl.math.rank_up_share",
        "RhymeRL: §6.1, Fig. 9",
        "share",
        0.16,
        "responses in a higher one of 8 ranking groups than their prompt's median in the epoch before",
        tolerance=0.02,
    ),
    _fact("rhymerl.code.rank_up_share", "RhymeRL: §6.1, Fig. 9", "share", 0.28, "as for math", tolerance=0.02),
    _fact(
        "rhymerl.growth_320_steps",
        "RhymeRL: §3.1, Fig. 3a",
        "ratio",
        10.0,
        "mean response length 'from 1K to 10K in 320 steps'",
        tolerance=0.02,
    ),
    _fact(
        "rhymerl.mean_tokens",
        "RhymeRL: §3.1, Fig. 3a",
        "tokens",
        1000.0,
        "mean response length at the first step, 'from 1K to 10K in 320 steps'; of a 32B model on math, taken for all",
    ),
    _fact(
        "rhymerl.math.rollout_share",
        "RhymeRL: §3.1, Fig. 2",
        "share",
        0.91,
        "veRL, 32B, 16k, 64 devices whose kind is not named: read as H800, with 512 prompts of 16 responses",
        tolerance=0.02,
    ),
    _fact("rhymerl.code.rollout_share", "RhymeRL: §3.1, Fig. 2", "share", 0.84, "as for math", tolerance=0.02),
    _fact(
        "rhymerl.first_device_idle",
        "RhymeRL: §3.1, Fig. 3c",
        "share",
        0.76,
        "of the rollout, the earliest device to finish; of the same runs as Fig. 2's math, read as above",
        tolerance=0.02,
    ),
    _fact(
        "rhymerl.math.similarity",
        "RhymeRL: §5.1, Fig. 6a",
        "share",
        0.93,
        "tokens that repeat a stretch of the epoch before, found by its last three tokens; mean of 8 epochs",
        tolerance=0.02,
    ),
    _fact("rhymerl.code.similarity", "RhymeRL: §5.1, Fig. 6a", "share", 0.75, "as for math", tolerance=0.02),
    _fact(
        "rhymerl.math.accept_rate",
        "RhymeRL: §7.2.2, Fig. 17",
        "share",
        (0.65, 0.79),
        "of drafted tokens; grows over the run. Of the paper's own method: taken as an input, since what is simulated "
        "is the gain at such a rate, not the rate",
        tolerance=0.02,
    ),
    _fact("rhymerl.code.accept_rate", "RhymeRL: §7.2.2, Fig. 17", "share", (0.65, 0.79), "as for math", tolerance=0.02),
    _fact(
        "rhymerl.math.rank_up_16_over_8",
        "RhymeRL: Table 2",
        "ratio",
        (1.35, 1.42),
        "the same share with 16 groups over that with 8: 20.3 over 14.3 %, 23.1 over 16.8 %, 28.4 over 21.0 %, which "
        "are 100 % less the row 'Accurate'. Columns are told apart by their sums of 100 %; the third pair is not named",
        tolerance=0.02,
    ),
)

_APRIL = (
    _fact(
        "april.4b.throughput",
        "APRIL: Table 1 (baseline, GRPO)",
        "tokens/s",
        (9252.0, 9814.0),
        "Qwen3-4B on three data sets: 9,814, 9,252, 9,459; tokens over wall-clock of a rollout, eight devices",
    ),
    _fact(
        "april.8b.throughput",
        "APRIL: Table 1 (baseline, GRPO)",
        "tokens/s",
        (7756.0, 8780.0),
        "Qwen3-8B on three data sets: 8,780, 8,031, 7,756",
    ),
    _fact(
        "april.batch_std",
        "APRIL: §3.2.3, Fig. 5a",
        "tokens",
        (4000.0, 4500.0),
        "standard deviation of response lengths over a batch, Qwen3-4B",
    ),
    _fact(
        "april.instance_std",
        "APRIL: §3.2.3, Fig. 5b",
        "tokens",
        (1200.0, 1500.0),
        "within a prompt, GRPO: 'typically less than 1,500'; the lower end is our reading of 'typically'",
    ),
    _fact(
        "april.4b.dapo_throughput",
        "APRIL: Table 1 (baseline, DAPO)",
        "tokens/s",
        (12257.0, 13038.0),
        "12,572, 12,257, 13,038; the authors' code launches 32 more groups when the first is dropped, ends with the "
        "32nd that is kept, and counts the tokens of all (papers.slime)",
    ),
    _fact(
        "april.8b.dapo_throughput",
        "APRIL: Table 1 (baseline, DAPO)",
        "tokens/s",
        (11419.0, 11860.0),
        "11,419, 11,470, 11,860; as for 4B",
    ),
)

_PAT = (
    _fact("pat.a40.tp2_batch1", "PAT: §3.1, Fig. 4", "s", 15.37e-3, "LLaMA3.1-8B, seconds per token"),
    _fact("pat.a40.tp8_batch1", "PAT: §3.1, Fig. 4", "s", 9.64e-3),
    _fact("pat.a40.tp2_batch128", "PAT: §3.1, Fig. 4", "s", 24.41e-3, "batch over all dp groups"),
    _fact("pat.a40.tp8_batch128", "PAT: §3.1, Fig. 4", "s", 30.87e-3),
    _fact(
        "pat.a40.single_row_share_6k",
        "PAT: §2.3, Fig. 3a",
        "share",
        0.4629,
        "of generation, 'with only a single remaining sample': 46.29 % to 81.58 % over the maximum lengths tried, "
        "which the text does not name; taken as 6K and 16K, the ends of Fig. 10a's axis",
    ),
    _fact("pat.a40.single_row_share_16k", "PAT: §2.3, Fig. 3a", "share", 0.8158, "as for 6K", tolerance=0.02),
    _fact(
        "pat.a40.generation_share_6k",
        "PAT: §2.3, Fig. 3a",
        "share",
        0.6422,
        "of an iteration: 64.22 % to 81.7 %, growing with the maximum length; 6K and 16K as above",
    ),
    _fact("pat.a40.generation_share_16k", "PAT: §2.3, Fig. 3a", "share", 0.817, "as for 6K", tolerance=0.02),
    _fact(
        "pat.share_over_8k",
        "PAT: §2.3, Fig. 3b",
        "share",
        0.1085,
        "LLaMA3.1-8B on DeepScaleR. 14 of 128 responses over 8K leave no single row for 46 % of a generation up to "
        "16K, as Fig. 3a has it: not of the same runs",
        role="check",
    ),
    _fact(
        "pat.share_over_16k",
        "PAT: §2.3, Fig. 3b",
        "share",
        0.0218,
        "2.8 of 128 responses, which a limit of 16K would end together: as above",
        role="check",
    ),
    _fact("pat.h100.8b_generation", "PAT: §5.3, Fig. 11c (VeRL)", "s", 134.3, "LLaMA3.1-8B, 24K, 8 H100"),
    _fact("pat.h100.8b_step", "PAT: §5.3, Fig. 11c (VeRL)", "s", 172.5),
    _fact("pat.h100.14b_generation", "PAT: §5.3, Fig. 11c (VeRL)", "s", 133.9, "Qwen3-14B, 16K, 8 H100"),
    _fact(
        "pat.h100.8b_mean_length",
        "PAT: §5.2-5.3, Fig. 11a, 11c (VeRL)",
        "tokens",
        2570.6 * 172.5 / 128,
        "VeRL's 2,570.6 tokens/s of an iteration, times its 172.5 s, over 128 responses. Fig. 3a's lengths would need "
        "three times as many responses in a step; how many GRPO draws for a prompt is not said",
        role="check",
    ),
)

FACTS: dict[str, Fact] = {fact.name: fact for fact in (*_ROLLPACKER, *_RHYMERL, *_APRIL, *_PAT)}


@dataclass(frozen=True, slots=True)
class Setup:
    """How a paper ran a baseline. `tp` is of rollout; `max_tokens` counts response tokens; groups of `group_size`."""

    paper: str
    where: str
    model: str
    hardware: str
    num_devices: int
    tp: int
    num_prompts: int
    group_size: int
    max_tokens: int
    note: str = ""


_APRIL_TP = (
    "the paper does not say TP; the authors' scripts have --rollout-num-gpus-per-engine 2 (RLsys-Foundation/APRIL, "
    "scripts/partial_rollout/qwen/{grpo,dapo}/*.sh), and none for the 8B model is there: read as the 4B's"
)

_RHYMERL_PROMPTS = 512
"""Of a step: 8K prompts (§7) in epochs of 16 steps, since 20 epochs are 300 to 1,000 steps (§6.1: 160 to 546 prompts),
and 20 steps of warm-up (§7) hold the first epoch, which has no history."""

_RHYMERL_NOTE = (
    "devices are not named. Prompts of a step: 8K prompts (§7), and 20 epochs in 300 to 1,000 steps (§6.1), are 160 to "
    "546; read: 512, an epoch of 16 steps. TP and the group of 16: §7"
)

SETUPS: dict[str, Setup] = {
    "rollpacker.table1": Setup(
        "RollPacker", "§2.2, Table 1", "Qwen2.5-14B", "H800", 32, 2, 128, 8, 16384, "TP 2: §2.2 on Fig. 2b"
    ),
    "rollpacker.7b": Setup("RollPacker", "§6", "Qwen2.5-7B", "H800", 16, 1, 128, 8, 8192),
    "rollpacker.14b": Setup("RollPacker", "§6", "Qwen2.5-14B", "H800", 32, 2, 128, 8, 16384),
    "rollpacker.32b": Setup("RollPacker", "§6", "Qwen2.5-32B", "H800", 64, 2, 128, 8, 32768),
    "rollpacker.14b_512": Setup("RollPacker", "§6.8", "Qwen2.5-14B", "H800", 128, 2, 512, 8, 16384),
    "april.4b": Setup("APRIL", "§3.1", "Qwen3-4B", "MI300X", 8, 2, 32, 8, 16384, _APRIL_TP),
    "april.8b": Setup("APRIL", "§3.1", "Qwen3-8B", "MI300X", 8, 2, 32, 8, 16384, _APRIL_TP),
    "rhymerl.32b": Setup(
        "RhymeRL", "§3.1, Fig. 2, 3", "Qwen2.5-32B", "H800", 64, 4, _RHYMERL_PROMPTS, 16, 16384, _RHYMERL_NOTE
    ),
    "rhymerl.math": Setup(
        "RhymeRL", "§7.2.1, Fig. 14", "Qwen3-14B", "H800", 128, 2, _RHYMERL_PROMPTS, 16, 16384, _RHYMERL_NOTE
    ),
    "rhymerl.code": Setup(
        "RhymeRL", "§7.2.1, Fig. 14", "Qwen3-14B", "H800", 128, 2, _RHYMERL_PROMPTS, 16, 16384, _RHYMERL_NOTE
    ),
    "pat.a40.8b": Setup(
        "PAT", "§2.3", "Llama-3.1-8B", "A40", 8, 2, 128, 1, 16384, "TP 2: §3.1; 128 responses, prompts x group not said"
    ),
    "pat.a40.14b": Setup("PAT", "§5.2, Fig. 10c", "Qwen3-14B", "A40", 16, 2, 128, 1, 16384, "as for 8B"),
    "pat.h100.8b": Setup(
        "PAT", "§5", "Llama-3.1-8B", "H100", 8, 2, 128, 1, 24576, "the tuned TP is not said; read: 2, as on the A40"
    ),
    "pat.h100.14b": Setup("PAT", "§5", "Qwen3-14B", "H100", 8, 2, 128, 1, 16384, "as for 8B"),
}
