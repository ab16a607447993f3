"""transformers in float64 throughout: its models compute norms, rope and the softmax in float32 whatever they have.

Each modeling file names these types `torch.float32`, `torch.float` or `x.float()`. `in_float64` gives the files that
the models come from a `torch` in which those are float64, so that a comparison can be as exact as float64 is.
"""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np


class _Float64:
    """A module in which float32 is float64."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.float32 = self.float = module.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def in_float64(transformers: Any, families: list[str]) -> None:
    """Makes the families' models compute in float64; for the rest of the process."""
    import torch

    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    exact = _Float64(torch)
    files = ["modeling_rope_utils", *(f"models.{family}.modeling_{family}" for family in families)]
    for file in files:
        importlib.import_module(f"{transformers.__name__}.{file}").torch = exact


def load(transformers: Any, folder: Path) -> Any:
    """A folder's model, in float64."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )


def logits_and_gradients(model: Any, tokens: np.ndarray, cotangent: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """Logits [B, T, V], and by the names in files the gradients of the sum of log-softmax times `cotangent`."""
    import torch

    model.zero_grad()
    logits = model(torch.tensor(tokens)).logits
    (torch.log_softmax(logits, -1) * torch.tensor(cotangent)).sum().backward()
    found = {}
    for name, weight in model.named_parameters():
        found[name] = np.zeros(weight.shape) if weight.grad is None else weight.grad.numpy()
    return logits.detach().numpy(), found


def write_config(folder: Path, content: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(content))
