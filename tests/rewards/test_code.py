"""What is taken from a response and from a prompt's columns, how it scores, and what limits it.

`tests/cases/code.jsonl` has responses and rows of every shape.
"""

import os
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from jaxrl.config import from_mapping
from jaxrl.config.rewards import CodeSection
from jaxrl.processes.process_tree import descendants
from jaxrl.rewards.code import CodeScorer
from jaxrl.rewards.domains import build_scorer
from jaxrl.rewards.programs import Checks, chosen_block, program_of
from jaxrl.rewards.request import ScoreRequest
from jaxrl.rewards.reward_pool import build_pool
from jaxrl.types import Prompt, Sample, SampleKey

ADD = {
    "prompt": "from typing import List\n\ndef twice(x: int) -> int:\n    return 2 * x\n\n"
    'def add(a: int, b: int) -> int:\n    """The sum."""\n',
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    "    s = candidate(4, 4)\n    assert s == twice(4)\n",
}
MBPP = {"test_list": ["assert add(1, 2) == 3", "assert add(4, 4) == 8"], "test_setup_code": "import math"}
CALLS = {"inputs": ["1\n2", "4\n4"], "outputs": ["3", "8"], "fn_name": "add"}
STDIN = {"inputs": ["1 2\n", "4 4\n"], "outputs": ["3\n", "8\n"]}
KODCODE = {
    "test": "import pytest\nfrom solution import add\n\ndef test_one():\n    assert add(1, 2) == 3\n\n"
    "@pytest.mark.parametrize('a, b', [(4, 4), (5, 3)])\n"
    "def test_two(a, b):\n    assert add(a, b) == pytest.approx(8)\n"
}
RIGHT = "def add(a, b):\n    return a + b\n"
HALF = "def add(a, b):\n    return 3\n"
MAIN = "a, b = map(int, input().split())\nprint({})\n"


@pytest.fixture
def share(scorer: CodeScorer) -> CodeScorer:
    """The same sandbox, with parts of a reward."""
    return replace(scorer, code=scorer.code.replace(score="share"))


def ask(response: str, extra: dict[str, Any], *limits_s: float, answer: str | None = None) -> ScoreRequest:
    return ScoreRequest("test", response, answer, extra, limits_s)


@pytest.mark.parametrize("tests", [ADD, MBPP, CALLS, KODCODE], ids=["add", "mbpp", "calls", "kodcode"])
def test_functions(tests: dict[str, Any], scorer: CodeScorer, share: CodeScorer):
    reward, info = scorer(ask(RIGHT, tests))
    assert (reward, info["passed"], info["cases"], info["correct"], info["cut_off"]) == (1.0, 2, 2, True, 0)
    assert len(info["case_s"]) == 2
    assert "error" not in info
    reward, info = share(ask(HALF, tests))
    assert (reward, info["passed"], info["cases"], info["correct"]) == (0.5, 1, 2, False)
    assert scorer(ask(HALF, tests))[0] == 0.0


def test_scripts(scorer: CodeScorer, share: CodeScorer):
    assert scorer(ask(MAIN.format("a + b"), STDIN))[0] == 1.0
    reward, info = share(ask(MAIN.format("3"), STDIN))
    assert (reward, info["passed"], info["cases"]) == (0.5, 1, 2)
    assert "it wrote '3" in info["error"]
    assert scorer(ask(MAIN.format("a + b") + "raise SystemExit(1)", STDIN))[0] == 0.0
    leaves = "import os\ndef add(a, b):\n    if a == 1: os._exit(0)\n    return a + b\n"
    assert share(ask(leaves, MBPP))[0] == 0.5, "a program that ends costs the cases after it nothing"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "the prompt has no tests"),
        ({"inputs": ["1"], "outputs": []}, "as many `inputs` as `outputs`"),
        ({"test": "42"}, "column 'test' asserts nothing, so that any program would pass: '42'"),
    ],
)
def test_tests_that_are_none(extra: dict[str, Any], words: str, scorer: CodeScorer):
    with pytest.raises(ValueError, match=words):
        scorer(ask(RIGHT, extra))


def test_a_case_that_hangs_is_cut_off_and_the_others_count(share: CodeScorer):
    hangs = "def add(a, b):\n    while a == 4: pass\n    return a + b\n"
    three = {"test_list": [*MBPP["test_list"], "assert add(5, 5) == 10"]}
    reward, info = share(ask(hangs, three, 20.0, 0.3, 20.0))
    assert (info["passed"], info["cut_off"], info["cases"]) == (2, 1, 3)
    assert reward == pytest.approx(2 / 3)
    assert info["case_s"][1] >= 0.3
    assert info["error"] == "it took longer than 0.3 s"
    assert info["timeouts"] == {"case": 1}
    script = "a, b = map(int, input().split())\nwhile a == 4: pass\nprint(a + b)"
    info = share(ask(script, STDIN, 20.0, 0.3))[1]
    assert (info["passed"], info["cut_off"], info["cases"]) == (1, 1, 2)
    at_most = replace(share, code=share.code.replace(max_timeout_s=0.3))
    assert at_most(ask(script, STDIN, 0.3, 0.3))[1]["timeouts"] == {"case_max": 1}
    assert at_most(ask(hangs, three))[1]["timeouts"] == {"case_max": 1}


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("import time\na, b = map(int, input().split())\nif a > 2: time.sleep(9)\nprint(a + b)", ("1 2", "3")),
        ("import time\ndef add(a, b):\n    if a > 2: time.sleep(0.4)\n    return 3\n", MBPP["test_list"][0]),
    ],
    ids=["script", "wrong"],
)
def test_a_program_that_hangs_on_every_case_has_a_limit(program: str, tests: Any, share: CodeScorer):
    """Whether each case is cut off or merely slow and wrong. What passes costs nothing of it."""
    if isinstance(tests, str):
        extra: dict[str, Any] = {"test_list": [tests] * 3 + ["assert add(5, 5) == 10"] * 20 + [tests]}
    else:
        extra = {"inputs": [tests[0]] * 3 + ["5 5"] * 20 + [tests[0]], "outputs": [tests[1]] * 3 + ["10"] * 20 + ["3"]}
    made = replace(share, code=share.code.replace(max_timeout_s=0.5, max_failing_s=1.0))
    reward, info = made(ask(program, extra))
    assert (info["passed"], info["cases"], len(info["case_s"])) == (3, 24, 3 + (3 if "0.4" in program else 2))
    assert reward == 3 / 24
    assert info["timeouts"]["program"] == 1
    assert info["outside"] is True, "a clock decided it"
    whole = replace(made, code=made.code.replace(max_failing_s=0.0, max_timeout_s=0.2))
    info = whole(ask(program, {name: rows[:6] for name, rows in extra.items()}))[1]
    assert len(info["case_s"]) == info["cases"] == 6
    assert "program" not in info["timeouts"]
    assert "outside" not in info


def test_what_the_model_saw_around_a_question_is_not_part_of_the_program(scorer: CodeScorer):
    """The text of a chat, which the prompt is in training, is no Python."""
    row = {key: value for key, value in ADD.items() if key != "prompt"}
    chat = f"<|user|>\nComplete the function.\n\n{ADD['prompt']}<|assistant|>\n"
    prompt = Prompt(0, 0, (1,), chat, "s", None, row, ADD["prompt"])
    extra = dict(ScoreRequest.of(prompt, Sample.empty(SampleKey(0, 0, 0))).extra)
    for response in (RIGHT + "twice(1)\n", "    return a + b\n"):
        assert scorer(ask(response, extra))[0] == 1.0


def test_long_responses_are_read_in_linear_time():
    for response in ("```\n" * 199_999 + "x = 1", "```python\n'''\n" + "```\n" * 50_000, "```python\n" * 50_000 + "x"):
        assert chosen_block(response, Checks("stdin")) is not None
    begun = Checks("tests", entry_point="add", prompt="def add(a, b):\n")
    assert program_of(ask("\n" * 200_000 + "    return a + b", {}), begun).endswith("    return a + b\n")


def test_a_command_runs_the_program():
    with closing(CodeScorer(CodeSection(command=["sh", "{file}"], max_memory_mib=256))) as made:
        made.load()
        assert made(ask("read a b; echo $((a + b))", STDIN))[0] == 1.0
        assert made(ask("echo 3; cat /etc/passwd", STDIN))[0] == 0.0
        with pytest.raises(ValueError, match=r"reward\.code\.command takes tests with inputs and outputs"):
            made(ask(RIGHT, MBPP))


@pytest.mark.parametrize("where", ["process", pytest.param("ray", marks=pytest.mark.slow)])
def test_in_a_pool(where: str):
    """The server is the worker's child, on ray as well: one for all samples, and gone with the pool."""
    if where == "ray":
        pytest.importorskip("ray")
    reward = {"kind": "code", "num_workers": 1, "code": {"max_timeout_s": 20.0, "max_memory_mib": 256}}
    reward |= {"pool": "ray", "start_timeout_s": 120.0} if where == "ray" else {"max_memory_gib": 1.0}
    config = from_mapping({"model": {"path": "x"}, "data": {"train_files": ["a.jsonl"]}, "reward": reward})
    others = descendants(os.getpid())
    with closing(build_pool(config, build_scorer(config))) as pool:
        pool.warm()
        warm = set(descendants(os.getpid(), others))
        responses = [RIGHT, "while True: pass", "import os\nos.kill(os.getppid(), 9)\n" + RIGHT, HALF, RIGHT]
        for i, response in enumerate(responses):
            sample = Sample.empty(SampleKey(0, 7, i))
            sample.text = response
            pool.submit(Prompt(0, 7, (1,), "?", "test", None, MBPP), sample, (0.5, 0.5) if i == 1 else ())
        verdicts = {}
        while pool.num_pending:
            verdicts |= {verdict.key.sample_index: verdict for verdict in pool.wait(1.0)}
        assert [verdicts[i].status for i in range(5)] == ["ok"] * 5
        assert [verdicts[i].reward for i in range(5)] == [1, 0, 0, 0, 1]
        assert [verdicts[i].info["cut_off"] for i in range(5)] == [0, 1, 0, 0, 0]
        assert verdicts[1].info["timeouts"] == {"case": 1}, "the limits have come along"
        assert verdicts[1].outside
        assert verdicts[3].info["passed"] == 1
        assert where == "ray" or set(descendants(os.getpid(), others)) == warm
    assert where == "ray" or descendants(os.getpid(), others) == []
