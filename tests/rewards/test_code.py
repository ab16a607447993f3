"""What is taken from a response and from a prompt's columns, how it scores, and what limits it.

`tests/cases/code.jsonl` has responses and rows of every shape.
"""

import gzip
import json
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxrl.config import from_mapping
from jaxrl.config.rewards import CodeSection
from jaxrl.processes.process_tree import descendants
from jaxrl.rewards.code import CodeScorer
from jaxrl.rewards.domains import build_scorer
from jaxrl.rewards.programs import Checks, checks_of, chosen_block, program_of, same_output
from jaxrl.rewards.request import ScoreRequest
from jaxrl.rewards.reward_pool import build_pool
from jaxrl.types import Prompt, Sample, SampleKey

DATA = Path(os.environ.get("JAXRL_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
HUMAN_EVAL = DATA / "HumanEval.jsonl.gz"
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


def test_tests_in_a_nested_column_or_the_reference_answer(scorer: CodeScorer):
    assert scorer(ask(RIGHT, {}, answer=json.dumps(CALLS)))[0] == 1.0
    nested = replace(scorer, code=scorer.code.replace(tests_key="info.tests"))
    for info in ({"tests": CALLS}, json.dumps({"tests": json.dumps(CALLS)})):
        assert [nested(ask(program, {"info": info}))[0] for program in (RIGHT, HALF)] == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"the prompt has no column 'info\.tests'"):
        nested(ask(RIGHT, {"info": {"other": CALLS}}))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "the prompt has no tests"),
        ({"inputs": ["1"], "outputs": []}, "as many `inputs` as `outputs`"),
        ({"test": "def (\nassert x"}, "the tests cannot be read"),
        ({"test": "42"}, "column 'test' asserts nothing, so that any program would pass: '42'"),
        (
            {"public_test_cases": [{"input": [1], "output": [1], "type": "function_call"}]},
            "tests of a function name it",
        ),
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


def test_the_time_of_cases_that_pass_is_not_that_of_the_one_behind_them(share: CodeScorer):
    slow = "import time\ndef add(a, b):\n    time.sleep(9 if a == 9 else 0.2)\n    return a + b\n"
    made = replace(share, code=share.code.replace(max_timeout_s=0.8, max_failing_s=1.0))
    tests = [*["assert add(1, 2) == 3"] * 4, "assert add(9, 9) == 18", *["assert add(4, 4) == 8"] * 2]
    reward, info = made(ask(slow, {"test_list": tests}))
    assert (reward, len(info["case_s"]), info.get("timeouts")) == (6 / 7, 7, {"case_max": 1}), str(info)
    assert 0.8 <= info["case_s"][4] < 1.2


CROSSES = [
        ("def f(x): x.sort()", "a = [3, 1]; f(a); assert a == [1, 3]", True),
        ("def f(x): x[0][0] = 9", "a = [[1], [2]]; f(a); assert a == [[9], [2]]", True),
        ("def f(g, x): return g(g(x))", "assert f(lambda v: v + 1, 3) == 5", True),
        ("def f(x):\n  for i in range(x): yield i", "assert list(f(3)) == [0, 1, 2]", True),
        ("class Box:\n  def __init__(s, v): s.v = v\n  def get(s): return s.v",
         "assert Box(3).get() == 3 == Box(3).v", True),
        ("class Odd(ValueError): pass\ndef f(x): raise Odd('no ' + x)",
         "import pytest\nwith pytest.raises(Odd, match='no b'): f('b')\nassert True", True),
        ("def f(x): raise KeyError(x)", "import pytest\nwith pytest.raises(ValueError): f(1)\nassert True", False),
        ("import os\ndef f(x): os._exit(0)", "import pytest\nwith pytest.raises(Exception): f(1)\nassert True", False),
        ("def f(x): return {1: (2.5, None), 'a': {3}}", "assert f(0) == {1: (2.5, None), 'a': {3}}", True),
        ("def f(x): return (1, 2)", "assert f(0) == [1, 2]", False),
        ("def f(x): return 10 ** 5000", "assert f(0) == 10 ** 5000", True),
        ("def f(x): return float('nan')", "v = f(0); assert v != v", True),
        ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}", True),
        ("class Solution:\n  def f(self, x): return x + 1", "assert f(1) == 2", True),
        ("def abs(x): return 5\ndef f(x): return 7", "assert abs(f(1) - 5) < 1", False),
        ("def f(x): return 1\n1 / 0", "assert True", False),
        ("def f(x): raise StopIteration('x')", "import pytest\nwith pytest.raises(Exception): f(1)\nassert True", True),
        ("def f(x): return iter(x)",
         "import pytest\nit = f('a')\nassert next(it) == 'a'\nwith pytest.raises(StopIteration): next(it)", True),
        ("class Up:\n  n = 0\n  def __iter__(s): return s\n  def __next__(s):\n    s.n += 1\n"
         "    if s.n > 2: raise StopIteration\n    return s.n", "assert list(Up()) == [1, 2]", True),
        ("def f(x): return 2 * x", "assert math.isclose(f(1.5), 3) and np.allclose(f(2), 4)", True),
        ("def f(x): return x", "assert isclose(f(0.5), sqrt(0.25)) and f([1]) == deepcopy([1])", True),
        ("def sqrt(x): return 'mine'", "assert sqrt(4) == 'mine'", True),
        ("class copy:\n  def paper(): return 'A4'", "assert copy.paper() == 'A4'", True),
        ("def f(x) return 1", "assert True", False),
        ("class Own: pass\ndef f(x): return x.n",
         "class Own: pass\nv = Own(); v.n = Own(); v.n.m = 3\nassert f(v).m == 3", True),
        ("class Own: __slots__ = ()\ndef f(x): raise ValueError",
         "import pytest\nclass Own: pass\nv = Own(); v.n = 1\nwith pytest.raises(Exception): f(v)\nassert True", False),
        ("class Own: pass\ndef f(x): raise ValueError",
         "import pytest\nclass Own: pass\nv = Own(); v.n = v\nwith pytest.raises(Exception): f(v)\nassert True", False),
        ("def f(x): raise ValueError",
         "import pytest\nclass Own: pass\nwith pytest.raises(Exception): f(Own())\nassert True", False),
    ]  # fmt: skip


def test_what_crosses_between_tests_and_program(scorer: CodeScorer):
    said = {(program, test): (right, scorer(ask(program, {"test_list": [test]}))) for program, test, right in CROSSES}
    assert {case: info for case, (right, (reward, info)) in said.items() if reward != float(right)} == {}


def test_a_completion_continues_the_prompt(scorer: CodeScorer):
    for response in (
        "    return a + b\n\nprint(add(1, 2))\n",
        "```python\n    return a + b\n```",
        RIGHT,
        "Here it is:\n```python\ndef add(a: List, b):\n    return a + b - twice(0)\n```",
    ):
        assert scorer(ask(response, ADD))[0] == 1.0, program_of(ask(response, ADD), checks_of(ask(response, ADD)))


@pytest.mark.parametrize(
    "signature", ["def add(a, b):", "@lru_cache\ndef add(a, b):\n    # the sum\n", 'def add(a, b):\n\t"""The sum."""\n']
)
def test_a_prompt_that_ends_with_the_signature(signature: str, scorer: CodeScorer):
    helpers = "from functools import lru_cache\n\ndef twice(x):\n    return 2 * x\n\n"
    indent = "\t" if "\t" in signature else "    "
    tests = {**ADD, "prompt": helpers + signature}
    for response in (
        f"\n{indent}c = a\n{indent}return c + b\n",
        f"```python\n{indent}c = a\n{indent}return c + b\n```",
        RIGHT + "twice(1)\n",
    ):
        reward, info = scorer(ask(response, tests))
        assert reward == 1.0, info
        assert scorer(ask(response.replace("+ b", "- b"), tests))[0] == 0.0


def test_what_the_model_saw_around_a_question_is_not_part_of_the_program(scorer: CodeScorer):
    """The text of a chat, which the prompt is in training, is no Python."""
    row = {key: value for key, value in ADD.items() if key != "prompt"}
    chat = f"<|user|>\nComplete the function.\n\n{ADD['prompt']}<|assistant|>\n"
    messages = {"question": "Complete it:\n\n" + ADD["prompt"]}
    in_training = Prompt(0, 0, (1,), chat, "s", None, row, ADD["prompt"])
    for extra in (ScoreRequest.of(in_training, Sample.empty(SampleKey(0, 0, 0))).extra, {**ADD, **messages}):
        for response in (RIGHT + "twice(1)\n", "    return a + b\n"):
            assert scorer(ask(response, dict(extra)))[0] == 1.0
    own_helpers = "def twice(x):\n    return 2 * x\n"
    for prose in (chat, messages["question"]):  # nothing to continue
        reward, info = scorer(ask(own_helpers + RIGHT, {**row, "test": ADD["test"].split("    s")[0], "prompt": prose}))
        assert reward == 1.0, info


def test_long_responses_are_read_in_linear_time():
    for response in ("```\n" * 199_999 + "x = 1", "```python\n'''\n" + "```\n" * 50_000, "```python\n" * 50_000 + "x"):
        assert chosen_block(response, Checks("stdin")) is not None
    begun = Checks("tests", entry_point="add", prompt="def add(a, b):\n")
    assert program_of(ask("\n" * 200_000 + "    return a + b", {}), begun).endswith("    return a + b\n")


@pytest.mark.parametrize(
    ("output", "wanted", "same"),
    [("3\n", "3", True), ("3 \n4\n\n", "3\n4", True), ("3.0", "3", True), ("3 4", "3\n4", False), ("a", "A", False),
     ("nan", "nan", True), ("1e400000000", "2", False)],
)  # fmt: skip
def test_same_output(output: str, wanted: str, same: bool):
    assert same_output(output, wanted) == same


def test_a_command_runs_the_program():
    with closing(CodeScorer(CodeSection(command=["sh", "{file}"], max_memory_mib=256))) as made:
        made.load()
        assert made(ask("read a b; echo $((a + b))", STDIN))[0] == 1.0
        assert made(ask("echo 3; cat /etc/passwd", STDIN))[0] == 0.0
        with pytest.raises(ValueError, match=r"reward\.code\.command takes tests with inputs and outputs"):
            made(ask(RIGHT, MBPP))


@pytest.mark.parametrize("where", ["process", "fresh_process", pytest.param("ray", marks=pytest.mark.slow)])
def test_in_a_pool(where: str):
    """The server is the worker's child, on ray as well: one for all samples, and gone with the pool."""
    if where == "ray":
        pytest.importorskip("ray")
    reward = {"kind": "code", "num_workers": 1, "code": {"max_timeout_s": 20.0, "max_memory_mib": 256}}
    reward |= {"pool": "ray", "start_timeout_s": 120.0} if where == "ray" else {"max_memory_gib": 1.0}
    reward["fresh_process"] = where == "fresh_process"
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


def human_eval() -> list[dict[str, Any]]:
    with gzip.open(HUMAN_EVAL, "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.skipif(not HUMAN_EVAL.exists(), reason="needs HumanEval")
def test_human_eval(scorer: CodeScorer):
    for row in human_eval()[::20]:
        assert scorer(ask(row["canonical_solution"], row))[0] == 1.0, row["task_id"]
        wrong = f"```python\ndef {row['entry_point']}(*a):\n    return [v for v in a if v]\n```"
        assert scorer(ask(wrong, row))[0] == 0.0, row["task_id"]
