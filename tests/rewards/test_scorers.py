"""Scorers: the score of each kind for a response, and settings that are refused before anything runs."""

import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl.config import Config, from_mapping
from jaxrl.rewards.custom import CustomScorer
from jaxrl.rewards.domains import build_scorer
from jaxrl.rewards.scorers import MathScorer, Scorer, ScoreRequest, score_safely
from jaxrl.rewards.task import TaskScorer
from jaxrl.types import Prompt, Sample, SampleKey

ENTRY = {"question": "4 + 3 =", "answer": "7", "metadata": {}}


def config(reward: dict[str, Any] | None = None, data: dict[str, Any] | None = None) -> Config:
    return from_mapping({"model": {"path": "x"}, "reward": reward or {}, "data": data or {"train_files": ["a.jsonl"]}})


def task_request(response: str, answer: str = "7") -> ScoreRequest:
    return ScoreRequest("chain_sum", response, answer, {"entry": {**ENTRY, "answer": answer}})


AT = " ({path}, line 2, in compute_score)"
OURS = "ValueError: {{path}}: compute_score returned {!r} beside 'score', a name for what jaxrl itself adds"
ODD = "import numpy as np; return {'score': np.zeros(())+2, 'a': (1, np.int8(2), {3: object})}"
NO_SCORE = "ValueError: {path}: compute_score returned a mapping without 'score'; its keys: 'reward'"
NO_JSON = "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"


def custom(folder: Path, source: str, name: str = "compute_score") -> Scorer:
    path = folder / "reward.py"
    path.write_text(source)
    scorer = build_scorer(config({"kind": "custom", "path": str(path), "name": name}))
    scorer.load()
    return scorer


def test_kinds():
    task = {"task": "chain_sum", "task_config": {"max_terms": 2, "seed": 5}}
    assert build_scorer(config()) == MathScorer()
    assert build_scorer(config({"extract": "boxed"})) == MathScorer("boxed")
    assert build_scorer(config(data=task)) == TaskScorer("chain_sum", '{"max_terms": 2}')
    assert build_scorer(config({"kind": "math"}, task)) == MathScorer()
    mixed = build_scorer(config(data={**task, "val_files": ["b.jsonl"]}))
    assert mixed == TaskScorer("chain_sum", '{"max_terms": 2}', of_files=MathScorer())
    assert pickle.loads(pickle.dumps(mixed)) == mixed
    assert mixed(task_request("7"))[0] == 1.0
    assert mixed(ScoreRequest("gsm8k", "it is 8", "8"))[0] == 1.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("The answer is 7.", 1.0),
        (r"\boxed{7} and not 8", 1.0),
        ("7 or maybe 8", 0.0),  # reasoning-gym alone would pay 1/12 for this one
        (r"\boxed{17}", 0.5),  # reasoning-gym's own measure, of what was marked
        ("I do not know", 0.0),
    ],
)
def test_task_judges_the_extracted_answer(response: str, reward: float):
    assert TaskScorer("chain_sum")(task_request(response))[0] == reward


def test_every_task_scores_its_own_answer():
    """The data set that only scores is made with other sizes and seeds than the one that made the problem."""
    import reasoning_gym

    for task in ("basic_arithmetic", "countdown", "propositional_logic", "acre", "knights_knaves", "word_sorting"):
        entry = reasoning_gym.create_dataset(task, seed=3, size=10)[0]
        answer = entry["answer"]
        request = ScoreRequest(task, f"<answer>{answer}</answer>", answer, {"entry": entry})
        if answer is not None:
            assert TaskScorer(task)(request)[0] == pytest.approx(1.0), task


def test_math_without_a_reference_is_an_error():
    with pytest.raises(ValueError, match=r"gsm8k: the prompt has no reference answer .*data\.answer_key"):
        MathScorer()(ScoreRequest("gsm8k", "8", None))


def test_request_of_a_sample():
    prompt = Prompt(2, 7, (1,), "2+2=", "sums", "4", {"level": 3, "index": "mine"})
    sample = Sample.empty(SampleKey(2, 7, 0))
    sample.text, sample.finish_reason = "4", "stop"
    sample.token_ids = sample.versions = np.zeros(5, np.int32)
    request = ScoreRequest.of(prompt, sample)
    assert (request.source, request.response, request.answer) == ("sums", "4", "4")
    ours = {"prompt": "2+2=", "question": "2+2=", "epoch": 2, "finish_reason": "stop", "response_length": 5}
    assert request.extra == {**ours, "level": 3, "index": "mine"}
    assert request.limits_s == ()
    assert ScoreRequest.of(prompt, sample, (2.0, 30.0)).limits_s == (2.0, 30.0)


def test_custom_gets_verls_arguments(tmp_path: Path):
    scorer = custom(
        tmp_path,
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Seen:\n    all: tuple\n"
        "def mine(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 0.5, 'seen': Seen((data_source, solution_str, ground_truth, extra_info['level']))}\n",
        "mine",
    )
    assert isinstance(scorer, CustomScorer)
    again = pickle.loads(pickle.dumps(scorer))
    reward, info = again(ScoreRequest("sums", "4", "5", {"level": 3}))
    assert (reward, info["seen"].all) == (0.5, ("sums", "4", "5", 3))


TRL = """def compute_score(prompts, completions, answer, **columns):
    asked, said = prompts[0], completions[0]
    if isinstance(said, str):
        return [float(answer[0] in said)]
    return [10.0 * len(asked) + len(said) + float(answer[0] in said[-1]["content"])]
"""


def test_a_function_of_trl_gets_texts_or_conversations(tmp_path: Path):
    """As the prompts are: with `data.messages_key` lists of messages, with turns all that follow the prompt."""
    (tmp_path / "reward.py").write_text(TRL)
    reward = {"kind": "custom", "path": str(tmp_path / "reward.py")}
    data = {"train_files": ["a.jsonl"], "answer_key": ""}
    plain = build_scorer(config(reward, data))
    talk = build_scorer(config(reward, {**data, "messages_key": "prompt"}))
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]
    columns = {"question": "2+2=", "answer": "4"}
    assert plain(ScoreRequest("sums", "it is 4", None, columns))[0] == 1.0
    assert talk(ScoreRequest("sums", "it is 4", None, {**columns, "messages": asked}))[0] == 22.0
    turns = (
        {"role": "assistant", "content": "?"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
    )
    request = ScoreRequest("sums", "4", None, {**columns, "messages": [*asked, *turns]}, turns=turns)
    assert talk(request)[0] == 24.0


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ("response, word", ""),
        ("response, wrod", "takes 'wrod', which is no column of the data; it may take data_source, epoch, "),
        ("response, wrod=1, **others", ""),
        ("completions, word, answer=0", ""),
        ("solution_str, ground_truth", "takes 'ground_truth', and no row of the data has one .data.answer_key.; "),
    ],
)
def test_a_function_takes_what_a_row_has(tmp_path: Path, arguments: str, refused: str):
    path = tmp_path / "reward.py"
    path.write_text(f"def compute_score({arguments}):\n    return 1.0\n")
    scorer = build_scorer(config({"kind": "custom", "path": str(path)}), [{"word": 1}, {}])
    with pytest.raises(ValueError, match=f"^reward.path: .*{refused}") if refused else nullcontext():
        scorer.load()


@pytest.mark.parametrize(
    ("body", "status", "reward", "info"),
    [
        ("return True", "ok", 1.0, {}),
        (ODD, "ok", 2.0, {"a": [1, 2, {"3": "<class 'object'>"}]}),
        ("import numpy as np; return np.array(0.5)", "ok", 0.5, {}),
        ("return {'score': 1, 'parts': 3}", "error", 0.0, {"error": OURS.format("parts")}),
        ("return {'reward': 1}", "error", 0.0, {"error": NO_SCORE}),
        ("import json; json.loads('{')", "error", 0.0, {"error": NO_JSON + AT}),  # the innermost line that is theirs
    ],
)
def test_score_safely(tmp_path: Path, body: str, status: str, reward: float, info: dict[str, Any]):
    # a file of its own each: a loaded file is kept
    scorer = custom(tmp_path, f"def compute_score(**kwargs):\n    {body}\n")
    got, _ = score_safely(scorer, pickle.dumps(ScoreRequest("s", "r", "a")))
    wanted = {n: v.format(path=tmp_path / "reward.py") if isinstance(v, str) else v for n, v in info.items()}
    assert got[:3] == (status, reward, wanted)
    assert got[3] >= 0
