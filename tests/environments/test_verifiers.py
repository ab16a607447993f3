"""Environments of verifiers, in a Python of their own: a stand-in for the library, and the library itself under each
Python that JAXRL_VERIFIERS_PYTHON names (their paths, with a colon between)."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxrl.config import from_mapping
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.environments.kinds import OtherPython, Program
from jaxrl.mechanisms.turns.agents import AgentPool
from jaxrl.mechanisms.turns.pool import VERIFIERS, EnvironmentPool
from jaxrl.mechanisms.turns.rule import Observed
from jaxrl.types import Prompt, SampleKey

pytest.importorskip("openai")

HELD_OUT = 1_000_000_000
PYTHONS = [path for path in os.environ.get("JAXRL_VERIFIERS_PYTHON", "").split(":") if path]
CALL = '<tool_call>{"name": "calc_double", "arguments": {"x": 3}}</tool_call>'
STAND_INS = Path(__file__).parent / "stand_ins"
CHAT = """
def message_to_wire(message):
    return {"role": message.role, "content": message.content}
"""
MCP = """
async def connect_mcp(config, stack):
    assert config["mcpServers"]["calc"]["url"] == "http://tools"
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    function = {"name": "calc_double", "description": "Doubles.", "parameters": parameters}
    return [{"type": "function", "function": function}], {"calc_double": ("calc", "double")}, {}

async def call_mcp(servers, names, name, arguments):
    return str(2 * arguments["x"])
"""


def stand_in(folder: Path, version: str) -> Path:
    """A folder with a package that says it is this version of verifiers."""
    info = folder / f"verifiers-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n")
    files = {"__init__.py": "", "v1/__init__.py": (STAND_INS / "tasksets.py").read_text()}
    files |= {"v1/dialects/chat.py": CHAT, "v1/harnesses/utils/mcp.py": MCP}
    for name, text in files.items():
        path = folder / "verifiers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@contextmanager
def python_with(version: str, folder: Path) -> Iterator[OtherPython]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(stand_in(folder, version)))
        python = OtherPython(sys.executable, str(VERIFIERS))
    with closing(python):
        yield python


def program(python: OtherPython, id: str = "sums", **args: Any) -> Program:
    return Program(python, {"id": id, "args": args})


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherPython]:
    with python_with("0.4.0", tmp_path_factory.mktemp("verifiers")) as made:
        yield made


def test_tools_and_rows(python: OtherPython):
    made = program(python)
    assert [each["function"]["name"] for each in made.schemas] == ["calc_double"]
    assert made.problem(3, 0)["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "What is 3 + 3?"},
    ]
    assert made.problem(3, 0)["answer"] == "6"


def test_another_version_is_refused(tmp_path: Path):
    with (
        python_with("0.5.0", tmp_path) as other,
        pytest.raises(ValueError, match=r"has verifiers 0\.5\.0, and 0\.4 is supported"),
    ):
        program(other)


def test_held_out_tasks_of_a_taskset(python: OtherPython):
    def answers(made: Program, first: int, count: int) -> list[int]:
        return [int(made.problem(first + i, 0)["answer"]) // 2 for i in range(count)]

    tasks = {"count": 25}
    made = program(python, taskset=tasks)
    assert answers(made, 0, 25) == [*range(9), *range(10, 19), *range(20, 25), 0, 1], "23 of 25, and from the beginning"
    assert answers(made, HELD_OUT, 3) == [9, 19, 9]
    endless = program(python, "endless")
    assert answers(endless, HELD_OUT, 3) == [9, 19, 29]
    assert answers(endless, 100, 1) == [111]
    own = program(python, taskset=tasks, eval={"taskset": {"count": 2}})
    assert answers(own, HELD_OUT, 3) == [0, 1, 0], "what `eval` changes has them all"
    assert answers(own, 9, 1) == [10]


def test_a_conversation_that_the_environment_opens(python: OtherPython):
    assert program(python, "opened").problem(0, 0)["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "I open."},
    ]


@pytest.mark.parametrize(
    ("id", "args", "words"),
    [
        ("none", {}, "environment.id: none cannot be imported: No module named 'nothing'"),
        ("sums", {"taskset": {"count": 0}}, "the taskset sums has no tasks"),
        ("boxed", {}, "an episode fails before its first turn: ValueError: it needs a container"),
    ],
)
def test_what_cannot_be_driven(python: OtherPython, id: str, args: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=re.escape(words)):
        program(python, id, **args)


@pytest.fixture(params=["0.4.0", *PYTHONS])
def agents(
    request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[AgentPool, EnvironmentPool]]:
    """A run's processes, over a stand-in or the library itself with the same environment."""
    python, id = request.param, "sums"
    if python in PYTHONS:
        folder, id = tmp_path, "sums_tasks"
        for name in ("sums_tasks.py", "sums_tools.py"):
            shutil.copy(STAND_INS / name, folder)
    else:
        folder, python = stand_in(tmp_path, python), sys.executable
    monkeypatch.setenv("PYTHONPATH", str(folder))
    section = {"kind": "verifiers", "id": id, "python": python, "num_workers": 1, "timeout_s": 60}
    section |= {"env": ["PYTHONPATH"], "max_memory_gib": 0}
    config = from_mapping({"model": {"path": "m"}, "environment": section, "reward": {"kind": "environment"}})
    with ExitStack() as stack:
        pool = stack.enter_context(closing(EnvironmentPool(config)))
        made = pool.conversation(Tokenizer.from_path(tiny_model)).acting
        assert isinstance(made, AgentPool)
        yield made, pool


def observed(agents: AgentPool) -> Observed:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if found := agents.completed(0.1):
            return found[0]
    raise AssertionError("nothing came")


def test_an_episode_from_its_first_request_to_its_reward(agents: tuple[AgentPool, EnvironmentPool]):
    acting, pool = agents
    assert [each["function"]["name"] for each in pool.schemas({}, "row 1")] == ["calc_double"]
    ((row, messages),) = pool.problems(3, 4, 0)
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 3 + 3?"}]
    assert messages == asked
    key, prompt = SampleKey(0, 0, 0), Prompt(3, 0, (), "", row["answer"], extra={**row, "messages": messages})
    for last, reward in (("6", 1.0), ("seven", 0.0)):
        acting.submit(key, prompt, CALL, None)
        tool = observed(acting)
        assert (tool.done, [(each["role"], each["content"]) for each in tool.messages]) == (False, [("tool", "6")])
        acting.submit(key, prompt, last, tool.state)
        end = observed(acting)
        assert (end.done, end.status, end.reward, end.error) == (True, "ok", reward, "")
        assert end.metrics
