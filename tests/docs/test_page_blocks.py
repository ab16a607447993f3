"""The other blocks of the pages: Python runs, YAML is a configuration, JSON is read by what it is for."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
import yaml
from pages import CONFIGS, ROOT, Block, blocks

from jaxrl.cli import _parser, main
from jaxrl.commands.arguments import parse
from jaxrl.config.files import load
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.families import FAMILIES
from jaxrl.models.loading import load_model
from jaxrl.models.safetensors import export_hf


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=block.place) for block in blocks(*languages)]


# ---------------------------------------------------------------- configurations

MISSING = {
    "model.path": "random:tiny",
    "data.train_files": "[train.jsonl]",
    "data.max_response_length": "4096",
    "actor.ppo_max_token_len_per_gpu": "32768",
}
"""What a block may leave to the rest of the file that it is a part of."""


@pytest.mark.parametrize("block", of("yaml", "gin"))
def test_a_block_is_a_configuration(block: Block, folder: Path):
    values = list(yaml.safe_load_all(block.text)) if block.language == "yaml" else [{}]
    file = folder / f"run.{block.language}"
    file.write_text(block.text, encoding="utf-8")
    given = "" if block.language == "yaml" else block.text
    added = [f"{k}={v}" for k, v in MISSING.items() if k not in given and not _has(values[0], k)]
    notes: list[str] = []
    load(file, added, say=notes.append)
    assert notes == [], "every option has an effect"


def _has(values: dict[str, Any], option: str) -> bool:
    section, name = option.split(".")
    return name in values.get(section, {})


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "cluster").iterdir()), ids=lambda file: file.name)
def test_a_file_for_a_cluster_starts_a_command_of_ours(file: Path):
    text = file.read_text(encoding="utf-8")
    assert "# Not tried: " in text
    if file.suffix == ".sh":
        subprocess.run(["bash", "-n", file], check=True)
    else:
        yaml.safe_load(text)
    (command,) = re.findall(r"^[^#\n]*\bjaxrl (train (?:[^\"&\n]|\n +(?=hosts))+)", text, re.M)
    words = re.sub(r"\$\w+", "2", command.replace("\\\n", " ")).split()
    options = parse(*_parser(), words)
    hosts = load(None, [*options.overrides, "model.path=none"]).hosts
    assert hosts.num > 1
    assert hosts.address
    assert hosts.devices_per_host


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_configuration_loads_and_its_header_has_a_command(path: Path):
    notes: list[str] = []
    load(path, say=notes.append)
    assert notes == []
    header = path.read_text(encoding="utf-8").partition("\nmodel:")[0]
    name = path.relative_to(ROOT).as_posix()
    assert f"--config {name}" in header or "./scripts/quickstart.sh" in header


# ---------------------------------------------------------------- Python


def keep_group(block: Block, folder: Path) -> None:
    """Dynamic sampling with it."""
    (folder / "keep.py").write_text(block.text, encoding="utf-8")
    own = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.path=keep.py", "simulate.num_devices=8")
    assert main(["simulate", "--config", str(ROOT / "configs" / "tail_batching.yaml"), *own]) == 0
    rows = (folder / "runs" / "tail_batching-simulated" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert any(json.loads(row)["rollout/filtered_prompts"] for row in rows)


def reward(block: Block, folder: Path) -> None:
    """On the rows of a file; test_page_commands.py trains with it."""
    (folder / "my_reward.py").write_text(block.text, encoding="utf-8")
    rows = [{"answer": "4", "response": text} for text in ("2 + 2 is 4", "who knows")]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    own = ("--responses", "answers.jsonl", "--out", "out.jsonl", "reward.path=my_reward.py", "reward.num_workers=1")
    assert main(["score", "reward.kind=custom", *own]) == 0
    scored = [json.loads(line)["reward"] for line in (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert scored == [1.0, 0.0]


def invented_family(block: Block, folder: Path) -> None:
    """A model of the family that the page invents is made, written and read again."""
    own: dict[str, Any] = {}
    exec(compile(block.text, block.place, "exec"), own)
    sizes = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True}
    kind = {"architectures": ["AcmeForCausalLM"], "model_type": "acme", "sliding_window": 3, "residual_scale": 0.7}
    with mock.patch.dict(FAMILIES, acme=own["acme"]):
        model = ModelConfig.from_hf({**sizes, **heads, **kind})
        export_hf(decoder.init(model, jax.random.key(0)), model, folder, dtype=np.float32)
        loaded, _ = load_model(folder)
    assert loaded == model


PYTHON: dict[str, Callable[[Block, Path], None]] = {
    "docs/mechanisms/dynamic_sampling.md: def keep_group": keep_group,
    "docs/your-model.md: from jaxrl.models.families import": invented_family,
    "docs/your-reward.md: def compute_score": reward,
}
"""How blocks run that stand alone, by page and beginning."""
DEFINES = (
    "docs/environments.md: def word_count",
    "docs/environments.md: class Box",
    "docs/environments.md: from jaxrl",
)
"""What is run as it stands: definitions of a user's file."""


@pytest.mark.parametrize("block", of("python"))
def test_python_runs_or_imports_what_is_there(block: Block, folder: Path):
    named = f"{block.page}: {block.text}"
    ways = [way for name, way in PYTHON.items() if named.startswith(name)]
    if ways:
        ways[0](block, folder)
    elif named.startswith(DEFINES):
        exec(compile(block.text, block.place, "exec"), {})
    else:
        imports = [node for node in ast.parse(block.text).body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec("\n".join(ast.unparse(node) for node in imports if "jaxrl" in ast.unparse(node)), {})


# ---------------------------------------------------------------- commands in running text
