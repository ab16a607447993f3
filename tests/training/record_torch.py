"""Writes data/turns_gradient.npz: the loss of a batch with turns, and its gradient, as plain torch computes them.

    python tests/training/record_torch.py

Needs torch and numpy, and nothing of jaxrl. One sample a row, padded, in float64: a small decoder of random weights
(RMSNorm, rotary embedding, grouped-query attention, SwiGLU, a tied or a separate head), PPO's clipped ratio, and a mean
over the tokens that the model wrote. What the environment answered is context: its advantages and log-probabilities are
made up, and large.

The file has the batch, and for each head the weights and the gradient by their names in jaxrl's training form, and
`old`, the log-probabilities before the update. Weights and the batch are float32: both sides read the same numbers.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

DATA = Path(__file__).parent / "data" / "turns_gradient.npz"
MODEL = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 8, "rope_theta": 100.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
TEMPERATURE, CLIP_LOW, CLIP_HIGH = 0.8, 0.2, 0.28
PROMPTS = (5, 11, 2)  # tokens, of four samples each
RESPONSES = (  # tokens that the model wrote, that the environment answered, that the model wrote, ...
    *((7,), (4, 3, 5), (2, 6, 3, 1, 8), (5, 9)),
    *((1,), (9, 1, 1), (6, 6, 6, 6, 6), (3, 2, 3, 2, 3, 2, 3)),
    *((12, 4, 1, 4), (1, 1, 1, 1, 1, 1, 1, 1, 1), (20,), (2, 17, 2)),
)
Arrays = dict[str, np.ndarray]


def draw_batch(random: np.random.Generator) -> Arrays:
    """Arrays [samples, tokens], prompt included; the samples of a prompt have the same one."""
    prompts = [random.integers(0, MODEL["vocab_size"], length) for length in PROMPTS]
    lengths = np.repeat(PROMPTS, 4)
    stops = lengths + [sum(turns) for turns in RESPONSES]
    shape = (len(RESPONSES), int(stops.max()))
    batch = {"prompt_length": lengths, "length": stops, "mask": np.zeros(shape, np.float32)}
    batch["tokens"] = random.integers(0, MODEL["vocab_size"], shape)
    for i, turns in enumerate(RESPONSES):
        batch["tokens"][i, : lengths[i]] = prompts[i // 4]
        batch["tokens"][i, stops[i] :] = 0
        written = np.arange(len(turns)) % 2 == 0
        batch["mask"][i, lengths[i] : stops[i]] = np.repeat(written, turns)
    batch["advantages"] = random.normal(size=shape).astype(np.float32)
    batch["advantages"][batch["mask"] == 0] *= 1e3
    return batch


def draw_weights(random: np.random.Generator, tied: bool) -> Arrays:
    """Large enough for attention and distributions that are far from flat; norms that are not 1."""
    vocab, width, inner, layers, heads, kv_heads, dim, *_ = MODEL.values()
    shapes = {
        "embed": (vocab, width),
        "layers/q": (layers, width, heads, dim),
        "layers/k": (layers, width, kv_heads, dim),
        "layers/v": (layers, width, kv_heads, dim),
        "layers/o": (layers, heads, dim, width),
        "layers/gate": (layers, width, inner),
        "layers/up": (layers, width, inner),
        "layers/down": (layers, inner, width),
    } | ({} if tied else {"lm_head": (width, vocab)})
    norms = {"layers/attn_norm": (layers, width), "layers/mlp_norm": (layers, width), "final_norm": (width,)}
    weights = {name: 0.4 * random.normal(size=shape) for name, shape in shapes.items()}
    weights |= {name: 1 + 0.3 * random.normal(size=shape) for name, shape in norms.items()}
    return {name: value.astype(np.float32) for name, value in weights.items()}


def rotated(x: torch.Tensor) -> torch.Tensor:
    """[..., tokens, dim]: each pair (i, i + dim / 2) is a complex number, turned by its angle at each position."""
    half = x.shape[-1] // 2
    turns = MODEL["rope_theta"] ** -(torch.arange(half, dtype=x.dtype) / half)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), turns)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


def log_probabilities(weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """[samples, tokens]: of each token after those before it; 0 at the first."""

    def normed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, scale.shape, scale, MODEL["rms_norm_eps"])

    def heads_of(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return (x @ matrix.flatten(1)).unflatten(-1, matrix.shape[1:]).transpose(1, 2)

    x = weights["embed"][tokens]
    for i in range(MODEL["num_layers"]):
        of = {name.removeprefix("layers/"): each[i] for name, each in weights.items() if name.startswith("layers/")}
        h = normed(x, of["attn_norm"])
        q, k, v = (heads_of(h, of[name]) for name in "qkv")
        out = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + out.transpose(1, 2).flatten(2) @ of["o"].flatten(0, 1)
        h = normed(x, of["mlp_norm"])
        x = x + (functional.silu(h @ of["gate"]) * (h @ of["up"])) @ of["down"]
    head = weights["lm_head"] if "lm_head" in weights else weights["embed"].T
    log_p = torch.log_softmax(normed(x, weights["final_norm"]) @ head / TEMPERATURE, -1)
    chosen = log_p[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    return functional.pad(chosen, (1, 0))


def loss_of(logprobs: torch.Tensor, old: torch.Tensor, batch: Arrays) -> torch.Tensor:
    advantages, learnt = torch.tensor(batch["advantages"]).double(), torch.tensor(batch["mask"]) > 0
    ratio = torch.exp(logprobs - old)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)
    return -surrogate[learnt].mean()


def record(weights: Arrays, batch: Arrays, random: np.random.Generator) -> Arrays:
    """The case's weights, old log-probabilities, loss and gradient."""
    leaves = {name: torch.tensor(value).double().requires_grad_() for name, value in weights.items()}
    logprobs = log_probabilities(leaves, torch.tensor(batch["tokens"]))
    learnt = batch["mask"] > 0
    old = (logprobs.detach().numpy() + 0.3 * random.normal(size=learnt.shape)).astype(np.float32)
    old[~learnt] = random.choice([-40, 40], size=np.sum(~learnt))
    for sign in (-1, 1):
        gap = sign * (logprobs.detach().numpy() - old)[learnt]
        assert np.mean(gap > 0.3) > 0.1, "too few tokens whose ratio is clipped on this side"
    loss = loss_of(logprobs, torch.tensor(old).double(), batch)
    gradient = torch.autograd.grad(loss, [*leaves.values()])
    return (
        {f"weights/{name}": value for name, value in weights.items()}
        | {f"gradient/{name}": value.numpy() for name, value in zip(leaves, gradient, strict=True)}
        | {"old": old, "loss": np.array(loss.item())}
    )


def main() -> None:
    random = np.random.default_rng(0)
    batch = draw_batch(random)
    options = {
        "rollout__temperature": TEMPERATURE,
        "actor__clip_ratio_low": CLIP_LOW,
        "actor__clip_ratio_high": CLIP_HIGH,
    }
    found: Arrays = {f"batch/{name}": value for name, value in batch.items()}
    found |= {"model": np.array(json.dumps(MODEL)), "options": np.array(json.dumps(options))}
    found["torch"] = np.array(torch.__version__)
    for head in ("tied", "untied"):
        case = record(draw_weights(random, head == "tied"), batch, random)
        found |= {f"{head}/{name}": value for name, value in case.items()}
        print(f"{head}: a loss of {case['loss']:.6f}")
    np.savez_compressed(DATA, **found)


if __name__ == "__main__":
    main()
