"""Adapters in peft's format: a folder with adapter_config.json and adapter_model.safetensors.

`target_modules` and `exclude_modules` choose matrices by peft's rules. Settings that change a layer's function in
another way (DoRA, biases, other ranks for some matrices, other modules) are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from jaxrl.config.inputs import read_object
from jaxrl.models.config import ModelConfig
from jaxrl.models.fields import Fields
from jaxrl.models.lora import ALL_LINEAR, A, B, Lora, adapters_alone, matrices
from jaxrl.models.safetensors import check_tensors, place, read_header, shardings_of
from jaxrl.models.weights import Weight
from jaxrl.schema.declared import shown
from jaxrl.schema.limits import MAX_RANK
from jaxrl.sharding.rules import map_weights

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_OTHER_FUNCTIONS = (  # of peft 0.21: each makes a layer compute something else, and is null, false or empty here
    *("use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "use_qalora", "use_bdlora", "layer_replication"),
    *("target_parameters", "rank_pattern", "alpha_pattern", "layers_to_transform", "trainable_token_indices"),
    *("alora_invocation_tokens", "monteclora_config", "arrow_config", "kasa_config", "velora_config"),
)
_STARTS = (True, False, "gaussian", "eva", "orthogonal")  # others change the base's weights
_LARGEST_ALPHA = 1e6


def read_lora(folder: Path, model: ModelConfig) -> Lora:
    """The adapters that a folder describes, for a model without adapters; reads no tensor. Raises ValueError if
    adapter_config.json is missing, or asks for something that is not supported."""
    file = folder / CONFIG
    try:
        fields = Fields(read_object(file), str(file))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{file}: no such file; a folder of adapters, as peft writes it, has one") from None
    for name, wanted in (("peft_type", "LORA"), ("bias", "none")):
        if (found := fields.get(name, "none")) != wanted:
            fields.refuse(f"{name} {shown(found)}", f"it must be {wanted!r}")
    for name in _OTHER_FUNCTIONS:
        if fields.get(name):
            fields.refuse(f"{name} {shown(fields.get(name))}", "adapters must be plain ones (LoRA) of linear modules")
    if (start := fields.get("init_lora_weights", True)) not in _STARTS:
        fields.refuse(f"init_lora_weights {shown(start)}", "the base must be as its own files have it")
    return Lora(
        fields.integer("r", 8, high=int(MAX_RANK.most)),
        fields.number("lora_alpha", 8.0, high=_LARGEST_ALPHA),
        _targets(fields, model.weights()["layers"]),
        fields.flag("use_rslora"),
    )


def _targets(fields: Fields, layers: Mapping[str, Weight]) -> tuple[str, ...]:
    wanted, excluded = _rule(fields, "target_modules"), _rule(fields, "exclude_modules")
    found = []
    for name in matrices(layers).values():
        modules = [each.removesuffix(".weight") for each in layers[name].names()]
        hits = [of and not out for of, out in zip(_fits(wanted, modules), _fits(excluded, modules), strict=True)]
        if any(hits) != all(hits):
            missed = modules[hits.index(False)]
            fields.refuse(f"target_modules without {missed}", "a matrix has an adapter in all layers or in none")
        if all(hits):
            found.append(name)
    if not found:
        known = dict.fromkeys(_module(layers[name]) for name in matrices(layers).values())
        fields.wrong("target_modules", f"names of matrices in this model's layers ({', '.join(known)})")
    return tuple(found)


def _module(weight: Weight) -> str:
    """The name of a matrix's module in files; several matrices may share it."""
    return weight.hf_name.removesuffix(".weight").rpartition(".")[2]


def _rule(fields: Fields, name: str) -> str | list[str]:
    rule = fields.get(name, [])
    if isinstance(rule, str):
        try:
            re.compile(rule)
        except re.error as error:
            fields.wrong(name, f"a list of names or a regular expression ({error})")
    elif not isinstance(rule, list) or not all(isinstance(each, str) for each in rule):
        fields.wrong(name, "a list of names or a regular expression")
    return rule


def _fits(rule: str | list[str], modules: list[str]) -> list[bool]:
    """Which modules a rule names."""
    if rule == ALL_LINEAR:
        return [True] * len(modules)
    if isinstance(rule, str):
        return [re.fullmatch(rule, module) is not None for module in modules]
    return [any(module == each or module.endswith(f".{each}") for each in rule) for module in modules]


def load_adapter(folder: Path, model: ModelConfig, mesh: Mesh | None, dtype: Any) -> dict[str, Any]:
    """A folder's adapters in training form, on the mesh's train shardings. Raises ValueError if its tensors do not
    fit the model's adapters."""
    table, file = adapters_alone(model.weights()), folder / TENSORS
    tensors = read_header(file)
    check_tensors(table, {name: tensor.shape for name, tensor in tensors.items()}, lambda _: str(file))

    def one(weight: Weight, sharding: Any) -> jax.Array:
        names = weight.names()
        return place(weight, lambda layer: tensors[names[layer]], dtype, sharding)

    return map_weights(one, table, adapters_alone(shardings_of(model, mesh)))


def merged_params(model: ModelConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of the model without adapters that computes the same; merged ones in at least float32."""
    names = model.base.weights()["layers"]

    def one(layer: Mapping[str, Any]) -> dict[str, Any]:
        return {name: model.merged(name, layer) for name in names}

    return {**params, "layers": jax.jit(jax.vmap(one))(params["layers"])}


def export_adapter(params: Mapping[str, Any], model: ModelConfig, folder: Path, dtype: Any, base: str) -> None:
    """Writes the adapters of `params`. `base`: where peft finds the model that they belong to; empty: nowhere. Raises
    ValueError if matrices share a tensor in the model's files, and their adapters are not one adapter of the whole
    tensor."""
    lora, layers = model.lora, model.base.weights()["layers"]
    assert lora is not None
    tensors: dict[str, np.ndarray] = {}
    for name, parts in _parts(model, params).items():
        tensors[name] = np.ascontiguousarray(_one_tensor(name, parts, folder), dtype)
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.use_rslora,
        "target_modules": list(dict.fromkeys(_module(layers[name]) for name in lora.targets)),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / TENSORS, {"format": "pt"})


def _parts(model: ModelConfig, params: Mapping[str, Any]) -> dict[str, list[tuple[str, Weight, np.ndarray]]]:
    """The contents of each tensor of a file: weights of adapters, in the order of the table."""
    found: dict[str, list[tuple[str, Weight, np.ndarray]]] = {}
    for name, weight in adapters_alone(model.weights())["layers"].items():
        stacked = np.asarray(params["layers"][name])
        for layer, tensor in enumerate(weight.names()):
            found.setdefault(tensor, []).append((name, weight, weight.to_file(stacked[layer])))
    return found


def _one_tensor(name: str, parts: Sequence[tuple[str, Weight, np.ndarray]], folder: Path) -> np.ndarray:
    """The tensor of its parts. Raises ValueError where matrices share a tensor, and their adapters are not one adapter
    of the whole."""
    weight, arrays = parts[0][1], [array for *_, array in parts]
    if weight.file_rows is None and all(np.array_equal(arrays[0], array) for array in arrays[1:]):
        return arrays[0]  # one matrix's, or the A of all
    whole = np.concatenate(arrays)
    if weight.file_rows is None or whole.shape != weight.file_shape:
        held = ", ".join(part.removesuffix(A).removesuffix(B) for part, *_ in parts)
        rule = "their A must be one" if weight.file_rows is None else "all matrices of the tensor must have one"
        raise ValueError(
            f"{folder}: {name}: peft has one adapter for a tensor that holds several matrices, and {rule} (here "
            f"{held}); export the merged model (--merge)"
        )
    return whole
