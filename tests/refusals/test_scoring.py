"""What `jaxrl score` refuses: its arguments, and rows of the file of responses."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from refusals import Refusal


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.with_name("reward.py").write_text("def compute_score(**kwargs): return 1.0\n")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def wrong_row(folder: Path) -> None:
    write(folder / "a.jsonl", [{"answer": "1", "response": "1"}, {"answer": "1", "response": 1}])


def no_response(folder: Path) -> None:
    write(folder / "a.jsonl", [{"answer": "1", "respons": "1"}])


def no_answer(folder: Path) -> None:
    write(folder / "a.jsonl", [{"response": "1"}])


def no_tests(folder: Path) -> None:
    write(folder / "a.jsonl", [{"answer": "assert f(1) == 2", "response": "1"}, {"answer": "42", "response": "1"}])


def no_json(folder: Path) -> None:
    write(folder / "a.jsonl", [{"answer": "1", "response": "1"}])
    (folder / "a.jsonl").write_text('{"answer": "1", "response": "1"}\n{"answer": \n')


def wrong_length(folder: Path) -> None:
    write(folder / "a.jsonl", [{"answer": "1", "response": "1", "length": "many"}])


SCORE = ("score", "--responses", "a.jsonl", "--out", "o.jsonl")
CUSTOM = (*SCORE, "--kind", "custom", "reward.path=reward.py")  # its workers import little
LENGTH = ("reward.parts.short.kind=length",)
REFUSED = (
    Refusal(("score", "--out", "o"), "score: --responses must be given"),
    Refusal(("score", "--responses", "a"), "score: --out must be given"),
    Refusal(SCORE, "a.jsonl: no such file; --responses must name existing files"),
    Refusal((*SCORE, "--kind", "math", "--config", "a"), "score: --kind and --config exclude each other"),
    Refusal(
        (*SCORE, "--kind", "maths"),
        "score: --kind must be one of auto, math, task, code, judge, custom, found 'maths': did you mean math?",
    ),
    Refusal(
        ("score", "--responses", "a.jsonl", "--out", "a.jsonl"),
        "--out (a.jsonl) would replace a.jsonl, which this command reads: name another file",
        wrong_row,
    ),
    Refusal(CUSTOM, "a.jsonl, line 2: 'response' must be text, found 1", wrong_row),
    Refusal(CUSTOM, "a.jsonl, line 1: no column 'response' (of the response): did you mean 'respons'?", no_response),
    Refusal(SCORE, "a.jsonl, line 1: no column 'answer' (data.answer_key): found 'response'", no_answer),
    Refusal(
        (*SCORE, "--kind", "code", "reward.code.sandbox=none"),
        "a.jsonl, line 2: a: the reference answer asserts nothing, so that any program would pass: '42'",
        no_tests,
    ),
    Refusal(CUSTOM, "a.jsonl, line 2: not valid JSON (Expecting value, column 11)", no_json),
    Refusal(
        (*CUSTOM, *LENGTH),
        "a.jsonl, line 1: no column 'response_length' (tokens), on which a part of the reward depends",
        no_json,
    ),
    Refusal(CUSTOM, "a.jsonl, line 1: the response's length must be a number of tokens, found 'many'", wrong_length),
    Refusal(
        (*SCORE, "--kind", "judge", "reward.judge.model=m"),
        "reward.kind is judge, with a model on the devices, and score has none: use eval, or a model at an endpoint",
        wrong_row,
    ),
)


def test_refused(refused: Callable[[Iterable[Refusal]], None]):
    refused(REFUSED)
