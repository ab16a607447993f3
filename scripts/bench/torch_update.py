"""The update of `bench.py train` in PyTorch: transformers' model of random weights, SDPA, fused AdamW."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from bench.harness import model_of, num_cores
from bench.train import CLIP, GRAD_CLIP, LR, random_tokens
from bench.worker import Ask, memory


def update(spec: tuple[argparse.Namespace, str], ask: Ask) -> None:
    """Forward, backward, clipping and AdamW; weights and moments in the dtype. Gradients of microbatches are added."""
    # transformers probes for a package called `kernels`, and would find our folder of that name
    root = Path(__file__).resolve().parents[2]
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != root]
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    sys.path.append(str(root))
    options, dtype = spec
    torch.set_num_threads(1 if options.quick else num_cores())
    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    baseline = memory()[0]
    shape = model_of(options).config().to_hf()
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    kind = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    model: Any = AutoModelForCausalLM.from_config(config, **kind).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    tokens = torch.from_numpy(random_tokens(options, config.vocab_size)).long().to(device)
    rows, response = len(tokens), options.response
    old = -float(torch.log(torch.tensor(config.vocab_size)))
    signs = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0).to(device)[:, None]

    def backward(tokens: Any, signs: Any) -> float:
        # one position more than the response, and its last logit belongs to no token
        logits = model(tokens, use_cache=False, logits_to_keep=response + 1).logits[:, :-1]
        chosen = logits.float().log_softmax(-1).gather(-1, tokens[:, -response:, None])[..., 0]
        ratio = (chosen - old).exp()
        loss = -torch.minimum(ratio * signs, ratio.clamp(1 - CLIP, 1 + CLIP) * signs).sum() / (rows * response)
        loss.backward()
        return float(loss.detach())

    values: dict[str, Any] = {"optimizer": "AdamW, fused"}
    while ask(values) is not None:
        began = time.perf_counter()
        loss = sum(map(backward, tokens.split(options.rows), signs.split(options.rows)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds, used = time.perf_counter() - began, memory()[1] - baseline
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else used
        values = {"seconds": seconds, "loss": loss, "peak_bytes": float(peak)}
