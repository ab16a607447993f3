"""Writes data/verl.json: advantages and losses of random batches as verl's own functions compute them.

    python tests/training/record_verl.py path/to/a/checkout/of/verl

Needs torch. The functions are taken out of verl's files one by one, so nothing else that verl imports has to be there.
"""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import torch

DATA = Path(__file__).parent / "data" / "verl.json"
GROUPS, GROUP_SIZE, LENGTH = 3, 4, 9
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
KINDS = ("kl", "abs", "mse", "low_var_kl")
REJECTIONS = (
    *("token_k1 0.6_1.5", "seq_sum_k1 0.55_1.9", "seq_mean_k1 0.8_1.2", "seq_mean_k3 0.2", "seq_max_k2 0.5"),
    "token_k2,seq_sum_k3 0.6,1.5",
)
MEASURED = ("mean", "max", "fraction_high", "fraction_low")


class Actor(SimpleNamespace):
    """The part of verl's ActorConfig that its losses read."""

    clip_ratio = 0.2
    global_batch_info: dict[str, Any] = {}

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def functions(file: Path, names: tuple[str, ...], scope: dict[str, Any]) -> SimpleNamespace:
    """The functions of a file by their names, without what decorates them."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert {node.name for node in wanted} == set(names)
    for node in wanted:
        node.decorator_list = []
    exec(compile(ast.Module(wanted, []), str(file), "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


def batch(seed: int) -> dict[str, Any]:
    """Arrays [samples, tokens] and [samples]; a response has 1 token at least, and 1 of 8 tokens is not learnt from."""
    rng = np.random.default_rng(seed)
    rows = GROUPS * GROUP_SIZE
    lengths = rng.integers(1, LENGTH + 1, rows)
    response = np.arange(LENGTH) < lengths[:, None]
    learnt = response & (rng.random((rows, LENGTH)) < 0.875)
    learnt[np.arange(rows), lengths - 1] = True  # verl gives a masked last token's reward to nobody

    def draw(scale: float = 1.0) -> np.ndarray:
        return np.where(response, rng.normal(size=(rows, LENGTH)) * scale, 0).astype(np.float32)

    old = -np.abs(draw(2.0))
    return {
        "lengths": lengths,
        "response": response,
        "learnt": learnt,
        "rewards": rng.normal(size=rows).astype(np.float32),
        "old": old,
        "new": old + draw(0.3),
        "ref": old + draw(0.5),
        "values": draw(),
        "new_values": draw(),
        "returns": draw(),
        "advantages": draw(),
        "weights": np.minimum(np.exp(draw(0.7)), 2.0),
    }


def recorded(given: dict[str, Any], core: SimpleNamespace) -> dict[str, Any]:
    of = {name: torch.tensor(value) for name, value in given.items()}
    response, learnt = of["response"].float(), of["learnt"].float()
    index = np.repeat(np.arange(GROUPS), GROUP_SIZE)
    scores = torch.zeros(response.shape)
    scores[torch.arange(len(scores)), of["lengths"] - 1] = of["rewards"]
    out: dict[str, Any] = {}
    for kind in KINDS:
        out[f"kl {kind}"] = core.kl_penalty(of["new"], of["ref"], kind)
    taxed = scores - 0.1 * (of["old"] - of["ref"]) * response
    for name, rewards in (("", scores), (" with kl", taxed)):
        for norm in (True, False):
            found = core.compute_grpo_outcome_advantage(rewards, response, index, norm_adv_by_std_in_grpo=norm)
            out[("grpo" if norm else "dr_grpo") + name] = found[0]
        out["rloo" + name] = core.compute_rloo_outcome_advantage(rewards, response, index)[0]
        plus = core.compute_reinforce_plus_plus_outcome_advantage(rewards, response, config=SimpleNamespace(gamma=1.0))
        out["reinforce_plus_plus" + name] = plus[0]
    for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (1.0, 0.0)):
        found = core.compute_gae_advantage_return(scores, of["values"], learnt, gamma, lam)
        out[f"gae {gamma} {lam}"], out[f"returns {gamma} {lam}"] = (each * learnt for each in found)
    for mode in MODES:
        for c in (1.5, 3.0):
            actor = Actor(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=c)
            for weights in (None, of["weights"]):
                loss, metrics = core.compute_policy_loss_vanilla(
                    of["old"], of["new"], of["advantages"], learnt, mode, actor, weights
                )
                key = f"policy {mode} {c}" + (" weighted" if weights is not None else "")
                out[key] = {"loss": loss.item(), **metrics}
        loss, clipped = core.compute_value_loss(
            of["new_values"], of["returns"], of["values"], learnt, cliprange_value=0.5, loss_agg_mode=mode
        )
        out[f"value {mode}"] = {"loss": loss.item(), "critic/vf_clipfrac": clipped.item()}
    actor = Actor(clip_ratio_low=0.05, clip_ratio_high=0.08)
    loss, metrics = core.compute_policy_loss_gspo(of["old"], of["new"], of["advantages"], learnt, MODES[2], actor)
    out["gspo"] = {"loss": loss.item(), **metrics}
    actor, log_ratio = Actor(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=3.0), of["weights"].log() * response
    for mode in MODES:
        loss, metrics = core.compute_policy_loss_cispo(of["old"], of["new"], of["advantages"], learnt, mode, actor)
        out[f"cispo {mode}"] = {"loss": loss.item(), **metrics}
        for each in REJECTIONS:
            kept, rates = core.compute_rollout_rejection_mask(log_ratio, learnt, *each.split())
            loss, _ = core.compute_policy_loss_vanilla(of["old"], of["new"], of["advantages"], kept, mode, actor)
            wanted = ["masked_fraction", "seq_masked_fraction"]
            wanted += [f"{name}_{part}" for name in each.split()[0].split(",") for part in MEASURED]
            rates = {f"rollout_corr/rollout_rs_{name}": rates[f"rollout_rs_{name}"] for name in wanted}
            out[f"rejection {mode} {each}"] = {"loss": loss.item(), **(rates if mode == MODES[0] else {})}
    # in verl's bypass mode the weights are those of the policy in training
    ours = of["new"] - of["old"]
    for level in ("token", "sequence"):
        weights, _ = core.compute_rollout_correction_weights(ours, learnt, level, 1.3)
        kept, _ = core.compute_rollout_rejection_mask(ours, learnt, *REJECTIONS[2].split())
        loss, _ = core.compute_policy_loss_reinforce(
            of["old"], of["new"], of["advantages"], kept, MODES[1], actor, weights
        )
        out[f"bypass {level}"] = {"loss": loss.item()}
    return out


def plain(value: Any) -> Any:
    """Arrays and tensors as lists; floats with the digits that float32 has."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray):
        array = np.asarray(value)
        return array.astype(int).tolist() if array.dtype.kind in "bi" else [plain(each) for each in array.tolist()]
    if isinstance(value, list):
        return [plain(each) for each in value]
    return float(f"{value:.8g}")


def main() -> None:
    verl = Path(sys.argv[1])
    scope: dict[str, Any] = {"torch": torch, "np": np, "Optional": Optional, "Any": Any, "defaultdict": defaultdict}
    scope["DictConfig"] = dict
    masks = ("clip_by_value", "masked_sum", "masked_mean", "masked_var", "masked_whiten")
    verl_f = functions(verl / "verl" / "utils" / "torch_functional.py", masks, scope)
    scope |= {"verl_F": verl_f, "AlgoConfig": dict, "ActorConfig": Actor}
    names = (
        *("compute_gae_advantage_return", "compute_grpo_outcome_advantage", "compute_rloo_outcome_advantage"),
        *("compute_reinforce_plus_plus_outcome_advantage", "agg_loss", "compute_policy_loss_vanilla"),
        *("compute_policy_loss_gspo", "compute_value_loss", "kl_penalty", "kl_penalty_forward"),
        *("compute_policy_loss_cispo", "compute_policy_loss_reinforce"),
    )
    correction = (
        *("_parse_rollout_rs_thresholds", "compute_rollout_rejection_mask", "compute_rs_metrics"),
        *("compute_rollout_correction_weights", "compute_is_metrics"),
    )
    ppo = verl / "verl" / "trainer" / "ppo"
    levels = {f"token_k{k}" for k in (1, 2, 3)}
    options = levels | {f"seq_{over}_k{k}" for over in ("sum", "mean", "max") for k in (1, 2, 3)}
    scope |= {"math": math, "SAFETY_BOUND": 20.0}
    scope |= {"TOKEN_LEVEL_ROLLOUT_RS_OPTIONS": levels, "SUPPORTED_ROLLOUT_RS_OPTIONS": options}
    core = functions(ppo / "core_algos.py", names, scope)
    vars(core).update(vars(functions(ppo / "rollout_corr_helper.py", correction, scope)))
    commit = subprocess.run(["git", "-C", verl, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    batches = []
    for seed in range(4):
        given = batch(seed)
        batches.append({"given": plain(given), "expected": plain(recorded(given, core))})
    found = {"verl": commit.stdout.strip(), "torch": torch.__version__, "batches": batches}
    DATA.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
