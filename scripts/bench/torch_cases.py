"""The same work in PyTorch and transformers, each case in a process of its own (`worker.Work`).

Models are built by transformers from the config.json that jaxrl writes for the same `ModelConfig`: of random weights,
or loaded from a folder that jaxrl exported. Attention is SDPA; threads are as many as the process has cores (one for a
trial); on a GPU run they use it through CUDA.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from .worker import Ask, foreign_imports, peak_bytes, resident_bytes


@dataclass(frozen=True, slots=True)
class TorchModel:
    """What to build.

    Attributes:
      hf_config: config.json's content.
      folder: where weights lie; empty for random ones.
      dtype: of weights and products.
      device: "cpu" or "cuda".
      seed: of random weights, sampling and tokens.
      threads: on the CPU.
    """

    hf_config: dict[str, Any]
    folder: str
    dtype: str
    device: str
    seed: int
    threads: int


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """One optimizer step: `microbatches` times `rows` rows of `tokens` tokens, the last `response` of which are learnt
    from. Gradients of the microbatches are added."""

    model: TorchModel
    rows: int
    microbatches: int
    tokens: int
    response: int
    lr: float
    clip: float
    grad_clip: float


def _build(spec: TorchModel) -> Any:
    import torch  # pyright: ignore[reportMissingImports]

    with foreign_imports():
        from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

        dtype = getattr(torch, spec.dtype)
        torch.manual_seed(spec.seed)
        if spec.folder:
            model = AutoModelForCausalLM.from_pretrained(spec.folder, dtype=dtype, attn_implementation="sdpa")
        else:
            values = dict(spec.hf_config)
            config = AutoConfig.for_model(values.pop("model_type"), **values)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    placed: Any = model
    return placed.to(spec.device)


def _import_torch(threads: int) -> Any:
    with foreign_imports():
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    return torch


def generate(spec: TorchModel, ask: Ask) -> None:
    """`transformers.generate`: per request {"prompts": [B][T], "new": n}, seconds for one new token and for n."""
    torch = _import_torch(spec.threads)
    model = _build(spec).eval()
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id = None, 0

    def run(prompts: Any, new: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=new,
                max_new_tokens=new,
                use_cache=True,
            )
        _wait(torch, spec.device)
        assert out.shape[1] == prompts.shape[1] + new, f"generate drew {out.shape[1] - prompts.shape[1]} of {new}"
        return time.perf_counter() - began

    values: dict[str, Any] = {"threads": torch.get_num_threads()}
    while (request := ask(values)) is not None:
        prompts = torch.tensor(request["prompts"], device=spec.device)
        prefill_s, seconds = run(prompts, 1), run(prompts, request["new"])
        values = {"seconds": seconds, "prefill_s": prefill_s, "decode_s": seconds - prefill_s}


def train(spec: TrainSpec, ask: Ask) -> None:
    """Forward, backward, clipping and AdamW on a masked, clipped policy loss; weights and moments in the dtype."""
    torch = _import_torch(spec.model.threads)
    device = spec.model.device
    baseline = resident_bytes()
    model = _build(spec.model).train()
    fused = device == "cuda" or _fused_on_cpu(torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.lr, weight_decay=0.0, fused=fused, foreach=not fused)
    vocab = spec.model.hf_config["vocab_size"]
    rows = spec.rows * spec.microbatches
    draw = np.random.default_rng(spec.model.seed).integers(vocab, size=(rows, spec.tokens), dtype=np.int32)
    tokens = torch.from_numpy(draw).long().to(device)  # those of the jaxrl case
    old = -float(torch.log(torch.tensor(vocab)))
    signs = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0).to(device)[:, None]

    def backward(tokens: Any, signs: Any) -> Any:
        # one position more than the response, and its last logit belongs to no token
        logits = model(tokens, use_cache=False, logits_to_keep=spec.response + 1).logits[:, :-1]
        chosen = logits.float().log_softmax(-1).gather(-1, tokens[:, -spec.response :, None])[..., 0]
        ratio = (chosen - old).exp()
        clipped = ratio.clamp(1 - spec.clip, 1 + spec.clip)
        loss = -torch.minimum(ratio * signs, clipped * signs).sum() / (rows * spec.response)
        loss.backward()
        return loss.detach()

    def step() -> float:
        parts = zip(tokens.split(spec.rows), signs.split(spec.rows), strict=True)
        loss = sum(backward(*part) for part in parts)
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    values: dict[str, Any] = {"optimizer": "AdamW, fused" if fused else "AdamW, foreach"}
    while ask(values) is not None:
        began = time.perf_counter()
        loss = step()
        _wait(torch, device)
        seconds = time.perf_counter() - began
        values = {"seconds": seconds, "loss": loss, "peak_bytes": float(_peak(torch, device, baseline))}


def _fused_on_cpu(torch: Any) -> bool:
    """Whether this torch has a fused AdamW for CPUs (2.4 and later have)."""
    try:
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    except (RuntimeError, ValueError):
        return False
    return True


def _wait(torch: Any, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak(torch: Any, device: str, baseline: int) -> int:
    """The process's peak above what it held before the model; on a GPU, the most that torch allocated there."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else peak_bytes() - baseline
