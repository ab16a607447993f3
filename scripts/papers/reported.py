"""The gains of the papers' own methods, for tables that set ours beside theirs.

Source: RollPacker (Gao et al., NSDI 2026), APRIL (Zhou et al. 2025), PAT (Zhao et al.), RhymeRL (He et al. 2025), read
from their text; the
labels of Fig. 12's bars as `papers.facts` reads the plain ones. Neither a calibration nor the code that runs a case
reads this file: tests check their sources.
"""

from __future__ import annotations

REPORTED: dict[str, dict[str, float]] = {
    "RollPacker Table 2, + tail batching": {"7B/8k": 1.30, "14B/16k": 1.48, "32B/32k": 2.21},
    "RollPacker Table 2, + reward scheduler": {"7B/8k": 2.01, "14B/16k": 1.99, "32B/32k": 2.48},
    "RollPacker Table 2, + parallelism planner": {"7B/8k": 2.01, "14B/16k": 2.02, "32B/32k": 2.52},
    "RollPacker Table 2, + stream trainer": {"7B/8k": 2.03, "14B/16k": 2.22, "32B/32k": 2.56},
    "RollPacker Fig. 12, s of a rollout, plain": {"7B/8k": 82.0, "14B/16k": 277.0, "32B/32k": 673.0},
    "RollPacker Fig. 12, s of a rollout, P and R 1.25": {"7B/8k": 47.0, "14B/16k": 88.0, "32B/32k": 170.0},
    "RollPacker Fig. 12, s of a rollout, P 1.25": {"7B/8k": 72.0, "14B/16k": 169.0, "32B/32k": 259.0},
    "RollPacker Fig. 12, s of a rollout, P 1.5": {"7B/8k": 60.0, "14B/16k": 143.0, "32B/32k": 279.0},
    "RollPacker Fig. 12, s of a rollout, R 1.25": {"7B/8k": 71.0, "14B/16k": 232.0, "32B/32k": 655.0},
    "RollPacker Fig. 12, s of a rollout, R 1.5": {"7B/8k": 54.0, "14B/16k": 115.0, "32B/32k": 265.0},
    "RollPacker Table 3, s a step": {"w/o": 124.2, "20%": 122.7, "30%": 118.2, "40%": 119.8, "Adpt.": 115.2},
    "RollPacker Table 4, s a step": {"20%": 128.6, "30%": 129.5, "40%": 133.8, "50%": 132.0},
    "RollPacker §6.5, asynchronous reward computation": {"7B/8k": 1.48, "14B/16k": 1.35, "32B/32k": 1.18},
    "RollPacker §6.5, adaptive over fixed time-outs": {"7B/8k": 1.6},
    "RollPacker §6.5, judge and actor with MPS over without, at most": {"7B/8k": 1.25},
    "RollPacker §6.7, one-off pipeline": {"7B/8k": 1.71},
    "APRIL Table 1, GRPO, tokens/s with APRIL, Qwen3-4B": {
        "DAPO-Math-17k": 12210.0,
        "DeepScaleR": 12183.0,
        "DeepMath": 13027.0,
    },
    "APRIL Table 1, GRPO, tokens/s with APRIL, Qwen3-8B": {
        "DAPO-Math-17k": 11096.0,
        "DeepScaleR": 10821.0,
        "DeepMath": 11594.0,
    },
    "APRIL Table 1, GRPO, mean improvement": {"Qwen3-4B": 0.313, "Qwen3-8B": 0.369},
    "APRIL Table 1, DAPO, mean improvement": {"Qwen3-4B": 0.108, "Qwen3-8B": 0.091},
    "RhymeRL Fig. 14, Math-14B": {"+ ranking groups": 1.43, "+ two tiers": 1.10, "+ speculation": 1.50},
    "RhymeRL Fig. 14, Code-14B": {"+ ranking groups": 1.41, "+ two tiers": 1.08, "+ speculation": 1.40},
    "RhymeRL Fig. 18, share of samples that move": {
        "math": 0.022,
        "math, most": 0.055,
        "code": 0.016,
        "code, most": 0.046,
    },
    "PAT §5.2-5.3, H100, speed-up of an iteration": {"Llama-3.1-8B/24K": 1.37, "Qwen3-14B/16K": 1.29},
    "PAT §5.3, H100, generation with PAT in s": {"Llama-3.1-8B/24K": 87.9, "Qwen3-14B/16K": 91.1},
    "PAT §5.2, A40, largest speed-up": {"Llama-3.1-8B, 8 devices": 1.27, "16 devices": 1.19, "Qwen3-14B, 16": 1.18},
    "PAT §5.4, A40, switch TP 2 to 8 in s": {"all": 5.52, "weights": 1.03, "KV": 2.36, "graphs": 0.73},
}
"""What the papers' own methods reached. For comparison only: no calibration reads it."""
