"""What a judge is asked, and how its verdicts are read."""

from dataclasses import replace
from typing import Any

import pytest

from jaxrl.config import ConfigError, from_mapping
from jaxrl.mechanisms.judge import Judge, template_fields
from jaxrl.mechanisms.judge.verdicts import MAX_KEPT_CHARS, JudgeText
from jaxrl.rewards.scorers import ScoreRequest

REQUEST = ScoreRequest(
    "essays", "I say {answer} and {{question}} \\boxed{4}.", "4", {"question": "2+2?", "level": 3, "tags": ["a", "ü"]}
)


def text(**options: Any) -> JudgeText:
    return JudgeText(replace(Judge.Options(), **options))


def test_default_prompt_holds_question_answer_and_response():
    (message,) = text().ask(REQUEST)
    assert message["role"] == "user"
    assert "Question:\n2+2?\n" in message["content"]
    assert "Reference answer:\n4\n" in message["content"]
    assert f"Response:\n{REQUEST.response}\n" in message["content"]


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{response}", REQUEST.response),  # its own braces are text
        ("<{answer}> {source} {level} {tags}", '<4> essays 3 ["a", "ü"]'),
        (r"\boxed{} {} { answer } {'a': {'b': 1}} {0}", r"\boxed{} {} { answer } {'a': {'b': 1}} {0}"),
        ("{{answer}} is {answer}", "{answer} is 4"),
        ("问题{question}。", "问题2+2?。"),
    ],
)
def test_template(template: str, content: str):
    assert text(prompt=template).ask(REQUEST) == [{"role": "user", "content": content}]


def test_system_message_is_sent_as_it_is():
    messages = text(prompt="{answer}", system_prompt="Be strict: {answer}").ask(REQUEST)
    assert messages == [{"role": "system", "content": "Be strict: {answer}"}, {"role": "user", "content": "4"}]


def test_question_is_the_whole_prompt_where_there_is_no_other():
    assert text(prompt="{question}").ask(ScoreRequest("s", "r", None, {"prompt": "all"}))[0]["content"] == "all"


def test_unknown_fields_are_refused():
    with pytest.raises(ConfigError, match=r"the field \{rubric\} is no column of the data; there are answer, level, q"):
        text(prompt="{response} {rubric}").ask(REQUEST)
    with pytest.raises(ConfigError, match=r"the field \{answer\} has no value here; there are response, source; for"):
        text(prompt="{answer}").ask(ScoreRequest("s", "r", None))
    assert template_fields("{a}{b}{a}{{c}}") == ["a", "b"]


@pytest.mark.parametrize(
    ("verdict", "score"),
    [
        ("Fine.\nScore: 7", 0.7),
        ("Score: 2, no: **Score:** 8.5/10", 0.85),
        ("score:10.", 1.0),
        ("Score: 11", None),
        ("Score: -1", None),
        ("Score: 3 ... Score: 30", None),  # the last one counts, and it is none
        ("I cannot tell.", None),
        ("", None),
    ],
)
def test_score(verdict: str, score: float | None):
    assert text().score(verdict) == score


def test_score_by_a_pattern_of_ones_own():
    letters = text(score_pattern=r"(?i)grade\s*=\s*([0-9a-z.]+)|none", min_score=-2.0, max_score=2.0)
    assert [letters.score(each) for each in ("Grade=1", "GRADE = -1", "grade=nan", "grade=inf", "grade=a", "none")] == [
        0.75,
        *[None] * 5,
    ]


def test_mean_of_those_that_can_be_read():
    reward, info = text().read(["Score: 4", "who knows", "Score: 10"])
    assert reward == pytest.approx(0.7)
    assert info == {"judge": ["Score: 4", "who knows", "Score: 10"], "scores": [0.4, None, 1.0], "unparsed": 1}


def test_nothing_to_read_is_an_error():
    reward, info = text().read(["?", "!"])
    assert (reward, info["unparsed"]) == (0.0, 2)
    assert info["error"] == "none of 2 verdicts of the judge holds a score (reward.judge.score_pattern)"
    assert text().read([])[1]["error"].startswith("none of 0 verdicts")


def test_kept_text_is_bounded_and_keeps_its_end():
    _, info = text().read(["x" * 50_000 + " Score: 5"] * 4)
    assert sum(map(len, info["judge"])) == MAX_KEPT_CHARS
    assert all(kept.startswith("…x") and kept.endswith("Score: 5") for kept in info["judge"])


@pytest.mark.parametrize(
    "verdict",
    [
        *("Score:" * 20_000, "Score:" + " " * 100_000, "score:" + "*" * 100_000, "-1" * 50_000),
        *("score (" * 20_000, 'score"' * 20_000, "score\n" * 20_000, "Score: [" * 20_000, "Score: " + "9" * 100_000),
        *(
            "Score: \\(" * 20_000,
            "max score: 1" * 10_000,
            "Score: 1" + "*" * 100_000 + "/5",
            "Score: 1" + " " * 100_000 + "/ 5",
        ),
        *("Score: 8 to 9 " * 10_000, "Score: 8" + " " * 100_000 + "to 9"),
    ],
)
def test_the_default_pattern_is_linear(verdict: str):
    """At a hundred thousand characters a quadratic pattern takes minutes."""
    assert text().score(verdict) is None


ENDPOINT = {"endpoint": "http://localhost:8000/v1", "endpoint_model": "m"}


@pytest.mark.parametrize(
    ("judge", "sentence"),
    [
        ({}, "reward.kind=judge needs one of reward.judge.model and reward.judge.endpoint, found neither"),
        ({**ENDPOINT, "model": "m"}, "needs one of reward.judge.model and reward.judge.endpoint, found both"),
        ({"model": "m", "api_key_env": "K"}, "api_key_env (K) needs reward.judge.endpoint, which is empty"),
        ({**ENDPOINT, "endpoint_model": ""}, "reward.judge.endpoint_model is missing"),
        ({**ENDPOINT, "endpoint": "localhost:8000"}, "must be a URL such as http://localhost:8000/v1, found 'localh"),
        ({**ENDPOINT, "endpoint": "http://"}, "found 'http://'"),
        ({**ENDPOINT, "endpoint": "http://h:99999/v1"}, "found 'http://h:99999/v1'"),
        ({**ENDPOINT, "endpoint": "http://h/a b"}, "found 'http://h/a b'"),
        ({**ENDPOINT, "endpoint": "http://me:secret@h/v1"}, "found one with a name or password in it"),
        ({**ENDPOINT, "endpoint": "http://h/v1?a=b"}, "without a query and a fragment"),
        ({**ENDPOINT, "endpoint": "http://h/v1/chat/completions"}, "without /chat/completions at its end"),
        ({**ENDPOINT, "prompt": "{answer}"}, "reward.judge.prompt must have the field {response}, found '{answer}'"),
        ({**ENDPOINT, "score_pattern": "("}, "reward.judge.score_pattern ('(') is no regular expression: "),
        ({**ENDPOINT, "score_pattern": r"\d+"}, "must have a group"),
        ({**ENDPOINT, "min_score": 10.0}, "reward.judge.min_score (10) must be below reward.judge.max_score (10)"),
        ({**ENDPOINT, "num_samples": 2}, "reward.judge.num_samples (2) needs reward.judge.temperature above 0"),
    ],
)
def test_refused(judge: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError) as refused:
        from_mapping({"model": {"path": "m"}, "reward": {"kind": "judge", "judge": judge}})
    assert sentence in str(refused.value)
    assert "secret" not in str(refused.value)


def test_refused_with_other_options():
    judge = {"model": {"path": "m"}, "reward": {"kind": "judge", "judge": ENDPOINT}, "data": {"answer_key": ""}}
    with pytest.raises(ConfigError, match=r"has the field \{answer\}, but data\.answer_key is empty"):
        from_mapping(judge)
    in_a_domain = {"model": {"path": "m"}, "reward": {"domains": {"essays": {"kind": "judge"}}}}
    with pytest.raises(ConfigError, match="found neither"):
        from_mapping(in_a_domain)
    for reward, sentence in (
        ({"kind": "model"}, r"reward\.judge\.model is missing"),
        ({"kind": "model", "judge": {"model": "m", "endpoint": "http://h/v1"}}, r"needs reward\.kind=judge"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            from_mapping({"model": {"path": "m"}, "reward": reward})
