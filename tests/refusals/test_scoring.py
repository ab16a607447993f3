"""What `jaxrl score` refuses: its arguments, and rows of the file of responses."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from refusals import Refusal


def rows(*rows: dict[str, Any]) -> Callable[[Path], object]:
    """A file of responses, and a reward file."""

    def prepare(folder: Path) -> None:
        (folder / "reward.py").write_text("def compute_score(**kwargs): return 1.0\n")
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return prepare


def no_json(folder: Path) -> None:
    rows(GOOD)(folder)
    with (folder / "a.jsonl").open("a") as file:
        file.write('{"answer": \n')


GOOD = {"answer": "1", "response": "1"}
WRONG_ROW = rows(GOOD, {"answer": "1", "response": 1})
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
        WRONG_ROW,
    ),
    Refusal(CUSTOM, "a.jsonl, line 2: 'response' must be text, found 1", WRONG_ROW),
    Refusal(
        CUSTOM,
        "a.jsonl, line 1: no column 'response' (of the response): did you mean 'respons'?",
        rows({"answer": "1", "respons": "1"}),
    ),
    Refusal(SCORE, "a.jsonl, line 1: no column 'answer' (data.answer_key): found 'response'", rows({"response": "1"})),
    Refusal(
        (*SCORE, "--kind", "code", "reward.code.sandbox=none"),
        "a.jsonl, line 2: a: the reference answer asserts nothing, so that any program would pass: '42'",
        rows({"answer": "assert f(1) == 2", "response": "1"}, {"answer": "42", "response": "1"}),
    ),
    Refusal(CUSTOM, "a.jsonl, line 2: not valid JSON (Expecting value, column 11)", no_json),
    Refusal(
        (*CUSTOM, *LENGTH),
        "a.jsonl, line 1: no column 'response_length' (tokens), on which a part of the reward depends",
        no_json,
    ),
    Refusal(
        CUSTOM,
        "a.jsonl, line 1: the response's length must be a number of tokens, found 'many'",
        rows(GOOD | {"length": "many"}),
    ),
    Refusal(
        (*SCORE, "--kind", "judge", "reward.judge.model=m"),
        "reward.kind is judge, with a model on the devices, and score has none: use eval, or a model at an endpoint",
        WRONG_ROW,
    ),
)


def test_refused(refused: Callable[[Iterable[Refusal]], None]):
    refused(REFUSED)
