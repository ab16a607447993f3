"""Bad inputs of the class "models": paths, config.json, safetensors files and their index.

Each is refused with one sentence that names the file, before anything of its size is allocated, and nothing is written.
`test_gguf_files.py` has the GGUF files of the class.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from damaged_models import (
    EMBED,
    INDEX,
    UP,
    Prepare,
    config,
    entry,
    index,
    model,
    pipe,
    placed,
    tensors,
    text,
    untied,
)
from refusals import Refusal
from tiny import CONFIG

from jaxrl.models import decoder
from jaxrl.models.families import FAMILIES

LAYOUT = ("explain-layout", "--model", "{tmp}/m")  # reads the config alone
EXPORT = ("export", "{tmp}/m", "{tmp}/out")  # reads the weights as well
KINDS = "a Hugging Face folder, a .gguf file, 'random:<folder>' or org/name of the Hugging Face Hub"
YARN = {"rope_type": "yarn", "factor": 4.0}


def in_config(sentence: str, **changes: Any) -> Refusal:
    return Refusal(LAYOUT, f"{{tmp}}/m/config.json: {sentence}", config(**changes))


def in_weights(sentence: str, prepare: Prepare, file: str = "model.safetensors") -> Refusal:
    return Refusal(EXPORT, f"{{tmp}}/m/{file}: {sentence}", prepare)


NOT_CACHED = (
    "model.path: there is no Qwen/Qwen2.5-0.5B on this machine, and the cache of the Hugging Face Hub (HF_HOME) has "
    "not all of its files; as a model of the Hub it cannot be had: Cannot reach "
    "https://huggingface.co/api/models/Qwen/Qwen2.5-0.5B/revision/main: offline mode is enabled. To disable it, please "
    "unset the `HF_HUB_OFFLINE` environment variable"
)


def a_run(folder: Path) -> None:
    """The folder of a run, as far as it is looked at."""
    (folder / "runs" / "first" / "checkpoints").mkdir(parents=True)
    for name in ("run.json", "config.yaml"):
        (folder / "runs" / "first" / name).write_text("{}")


PATHS = (
    Refusal(
        ("generate", "--model", "https://huggingface.co/Qwen/Qwen2.5-0.5B", "hi"),
        "model.path: https://huggingface.co/Qwen/Qwen2.5-0.5B is a URL; give Qwen/Qwen2.5-0.5B for a model of the "
        "Hugging Face Hub, or its folder or .gguf file on this machine",
    ),
    Refusal(
        ("generate", "--model", "random:s3://bucket/model", "hi"),
        "model.path: random:s3://bucket/model is a URL; download the model, and give its folder or its .gguf file",
    ),
    Refusal(("generate", "--model", "Qwen/Qwen2.5-0.5B", "hi"), NOT_CACHED),
    *(
        Refusal(command, f"{{tmp}}/m: there is no such file or folder; model.path must be {KINDS}")
        for command in (LAYOUT, ("explain-config", "model.path={tmp}/m", "data.task=leg_counting"))
    ),
    Refusal(
        ("explain-layout", "--model", "{tmp}/m.bin"),
        f"{{tmp}}/m.bin: this is another kind of file; model.path must be {KINDS}",
        lambda folder: (folder / "m.bin").write_bytes(b"PK\x03\x04"),
    ),
    Refusal(
        ("generate", "--model", "{tmp}/m/model.safetensors", "hi"),
        "{tmp}/m/model.safetensors: model.path must be the folder that such a file is in: {tmp}/m",
        model,
    ),
    Refusal(("explain-layout", "--model", "random:"), f"random:: model.path must be {KINDS}"),
    Refusal(
        ("explain-layout", "--model", "no_such_package:m.gguf"),
        "--model: no_such_package:m.gguf names a file of the package 'no_such_package', which is not installed; pip "
        "install --no-deps no-such-package",
    ),
    Refusal(
        ("explain-layout", "--model", "org/none:"),
        f"org/none:: there is no such file or folder; model.path must be {KINDS}",
    ),
    Refusal(
        ("explain-layout", "--model", "jaxrl:no.gguf"),
        f"{Path(decoder.__file__).parents[1]}/no.gguf: there is no such file or folder; model.path must be {KINDS}",
    ),
    Refusal(
        ("generate", "--model", "runs/first", "hi"),
        "runs/first: this is a run, not a model: `jaxrl export runs/first FOLDER` writes its model",
        a_run,
    ),
    Refusal(
        LAYOUT,
        "{tmp}/m/config.json: no such file; a model folder needs config.json",
        lambda folder: (folder / "m").mkdir(),
    ),
    Refusal(
        EXPORT,
        f"{{tmp}}/m: holds no model.safetensors and no {INDEX}; weights must be in safetensors files",
        lambda folder: (model(folder) / "model.safetensors").unlink(),
    ),
)

CLASSES = ", ".join(row.architecture for row in FAMILIES.values())
CONFIGS = (
    in_config(
        """architectures ('LlamaForCausalLM') must be a list of names, as ["LlamaForCausalLM"]""",
        architectures="LlamaForCausalLM",
    ),
    in_config(
        f"architectures ['GemmaForCausalLM'] is not supported; supported are {CLASSES}",
        architectures=["GemmaForCausalLM"],
    ),
    in_config(
        "architectures ['LlamaForCausalLM'] with model_type 'mistral' is not supported; the model_type of "
        "LlamaForCausalLM is 'llama'",
        model_type="mistral",
    ),
    in_config(f"model_type (['llama']) must be one of {', '.join(FAMILIES)}", model_type=["llama"]),
    in_config(
        "num_hidden_layers (1000000000000000000) must be a whole number from 1 to 10000", num_hidden_layers=10**18
    ),
    in_config("num_hidden_layers (0) must be a whole number from 1 to 10000", num_hidden_layers=0),
    in_config("vocab_size (4611686018427387904) must be a whole number from 1 to 16777216", vocab_size=2**62),
    in_config("hidden_size ('32') must be a whole number from 1 to 1048576", hidden_size="32"),
    in_config("hidden_size is missing; it must be a whole number from 1 to 1048576", gone=("hidden_size",)),
    in_config("num_heads (4) must be a multiple of num_kv_heads (3)", num_key_value_heads=3),
    in_config("head_dim (7) must be even: rope rotates pairs", head_dim=7),
    in_config("hidden_size (34) must be a multiple of num_attention_heads (4)", hidden_size=34, gone=("head_dim",)),
    in_config("tie_word_embeddings ('false') must be true or false", tie_word_embeddings="false"),
    in_config("bos_token_id ([1, 2]) must be one token id", bos_token_id=[1, 2]),
    in_config("rms_norm_eps (0) must be a number above 0, and at most 1", rms_norm_eps=0),
    in_config("rope_theta (1) must be a number above 1, and at most 1e+15", rope_theta=1),
    in_config("rope_scaling [2] is not supported; it must be an object", rope_scaling=[2]),
    in_config(
        "rope_type 'longrope' is not supported; supported are 'default', 'linear', 'llama3' and 'yarn'",
        rope_scaling={"rope_type": "longrope"},
    ),
    in_config("rope scaling 'linear' needs a factor", rope_scaling={"type": "linear"}),
    in_config("factor ('4x') must be a number above 0, and at most 1e+06", rope_scaling=YARN | {"factor": "4x"}),
    in_config(
        "original_max_position_embeddings ([64]) must be a whole number from 1 to 2147483647",
        rope_scaling=YARN,
        original_max_position_embeddings=[64],
    ),
    in_config(
        "rope of its own for 'full_attention' is not supported; all layers must have the same rope",
        rope_parameters={"full_attention": YARN},
    ),
    in_config(
        "high_freq_factor (4) must be above low_freq_factor (8)",
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 8.0},
    ),
    in_config(
        "quantization_config: quant_method None is not supported; it must be 'fp8', 'mxfp4' or "
        "'compressed-tensors' (or use a GGUF file)",
        quantization_config={"bits": 4},
    ),
    in_config(
        "layer_types with sliding_attention is not supported; there is no window: see sliding_window and "
        "use_sliding_window",
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        layer_types=["full_attention", "sliding_attention"],
    ),
    Refusal(LAYOUT, "{tmp}/m/config.json: must hold a JSON object, found list", text("config.json", "[]")),
    Refusal(
        LAYOUT,
        "{tmp}/m/config.json: not valid JSON (Expecting value, column 16)",
        text("config.json", '{"vocab_size": '),
    ),
    Refusal(
        LAYOUT, "{tmp}/m/config.json: not UTF-8 text (byte 0)", text("config.json", json.dumps(CONFIG).encode("utf-16"))
    ),
    Refusal(
        LAYOUT,
        "{tmp}/m/config.json: key 'rope_theta' stands twice in one object",
        text("config.json", '{"rope_theta": 1e4, "rope_theta": 1e6}'),
    ),
    Refusal(LAYOUT, "{tmp}/m/config.json: NaN is no number in JSON", text("config.json", '{"rope_theta": NaN}')),
    Refusal(LAYOUT, "{tmp}/m/config.json: nested too deeply", text("config.json", '{"a":' * 100_000)),
    Refusal(
        LAYOUT,
        "{tmp}/m/config.json: must be a file, found a folder",
        lambda folder: (folder / "m" / "config.json").mkdir(parents=True),
    ),
    Refusal(LAYOUT, "{tmp}/m/config.json: must be a file, found a pipe", pipe("config.json")),
    Refusal(
        LAYOUT,
        "{tmp}/m/generation_config.json: eos_token_id ({'id': 2}) must be a token id or a list of token ids",
        text("generation_config.json", '{"eos_token_id": {"id": 2}}'),
    ),
)

NO_FILE = "truncated or not a safetensors file"
TENSORS = (
    in_weights(f"tensor {EMBED} has shape (260, 32), but the config asks for (16777216, 32)", config(vocab_size=2**24)),
    in_weights(f"{NO_FILE} (header too large)", text("model.safetensors", b"version https://git-lfs.github.com/spec/")),
    in_weights(
        f'{NO_FILE} (invalid JSON in header: invalid type: string "48", expected usize at line 1 column 2191)',
        entry(shape=["48", 32]),
    ),
    in_weights(f"{NO_FILE} (invalid shape, data type, or offset for tensor)", entry(data_offsets=[0, 6140])),
    in_weights(
        f"tensor {UP} has dtype F8_E4M3, which is not supported; use F64, F32, F16, BF16",
        tensors(lambda entries: entries.update({UP: entries[UP].astype(ml_dtypes.float8_e4m3fn)})),
    ),
    in_weights(f"tensor {UP} has shape (32, 48), but the config asks for (48, 32)", entry(shape=[32, 48])),
    in_weights(
        "tensor extra of shape (0,) has no place in a model of this config",
        tensors(lambda entries: entries.update(extra=np.zeros(0, np.float32))),
    ),
    in_weights(
        f"tensor lm_head.weight differs from {EMBED}, though config.json says "
        "tie_word_embeddings true; set that to false to use both, or remove the tensor",
        untied,
    ),
    in_weights("must be a file, found a pipe", pipe("model.safetensors")),
    in_weights("must have an object weight_map", index(lambda content: {"weight_map": ["model.safetensors"]}), INDEX),
    in_weights(f"weight_map places tensor {UP} in 7; it must name a file in this folder", placed(7), INDEX),
    in_weights(
        f"weight_map places tensor {UP} in '../elsewhere'; it must name a file in this folder",
        placed("../elsewhere"),
        INDEX,
    ),
    in_weights(
        f"weight_map places tensor {UP} in '/etc/passwd'; it must name a file in this folder",
        placed("/etc/passwd"),
        INDEX,
    ),
    in_weights("no such file", placed("no.safetensors"), "no.safetensors"),
    in_weights(
        f"tensor {UP} is missing, though {INDEX} places it there",
        placed("model-00001-of-00005.safetensors"),
        "model-00001-of-00005.safetensors",
    ),
    Refusal(
        EXPORT,
        f"{{tmp}}/m: tensor {UP} of shape (48, 32) is missing",
        index(lambda content: content["weight_map"].pop(UP) and None),
    ),
)


def test_refused(refused: Callable[[Iterable[Refusal]], None]):
    refused((*PATHS, *CONFIGS, *TENSORS))


def test_a_null_quantization_config_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from jaxrl.cli import main

    config(quantization_config=None)(tmp_path)
    assert main(["explain-layout", "--model", str(tmp_path / "m")]) == 0
    assert capsys.readouterr().err == ""
