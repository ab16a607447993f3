"""Adapters as peft writes and reads them: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import adapters_alone, matrices, merged
from jaxrl.models.weights import Weight, leaves

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def merged_params(model: ModelConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of the model without adapters that computes the same, in training form and the base's dtype."""
    lora, names = model.lora, model.base.weights()["layers"]
    assert lora is not None

    def one(layer: Mapping[str, Any]) -> dict[str, Any]:
        return {name: merged(lora, name, layer).astype(layer[name].dtype) for name in names}

    return {**params, "layers": jax.jit(jax.vmap(one))(params["layers"])}


def export_adapter(params: Mapping[str, Any], model: ModelConfig, folder: Path, dtype: Any, base: str) -> None:
    """Writes the adapters of `params`, in training form.

    Args:
      base: where peft finds the model that they belong to.
    """
    lora = model.lora
    assert lora is not None
    by_matrix = {name: module for module, name in matrices(model.base.weights()["layers"]).items()}
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.use_rslora,
        "target_modules": [by_matrix[name] for name in lora.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
    }
    table = adapters_alone(model.weights())
    tensors: dict[str, np.ndarray] = {}
    for name, weight in table["layers"].items():
        tensors |= _tensors(weight, np.asarray(params["layers"][name]), dtype)
    assert len(tensors) == sum(len(weight.names()) for weight in leaves(table))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / TENSORS, {"format": "pt"})


def _tensors(weight: Weight, stacked: np.ndarray, dtype: Any) -> dict[str, np.ndarray]:
    names = enumerate(weight.names())
    return {name: np.ascontiguousarray(weight.to_file(stacked[layer]), dtype) for layer, name in names}
