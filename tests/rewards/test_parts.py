"""Parts of a reward, and the weighted sum of them."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from jaxrl.config import Config, from_mapping
from jaxrl.config.domains import domains, needs_workers
from jaxrl.config.rewards import PartSection
from jaxrl.rewards.domains import RewardPart, build_scorer
from jaxrl.rewards.reward_pool import combined
from jaxrl.rewards.scorers import Scorer, ScoreRequest
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import SampleKey

SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str), "words": 3}

def shout(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.isupper())
"""


def configured(**reward: Any) -> Config:
    data = {"train_files": ["a.jsonl"], "max_response_length": 100}
    return from_mapping({"model": {"path": "x"}, "data": data, "reward": reward})


def built(config: Config) -> Scorer:
    scorer = pickle.loads(pickle.dumps(build_scorer(config)))
    scorer.load()
    return scorer


def score(config: Config, response: str, source: str = "a", tokens: int = 10) -> tuple[Any, dict[str, Any]]:
    reward, info = built(config)(ScoreRequest(source, response, "4", {}, num_tokens=tokens))
    found = domains(config.reward)
    weights = {name: part.weight for name, part in config.reward.parts.items()}
    own = Verdict(0.0, SampleKey(0, 0, 0), float(reward), info=info)
    verdict = combined(found.get(source) or found[""], weights, own)
    return verdict.reward, dict(verdict.info)


def test_format_and_length():
    tags = RewardPart(PartSection(pattern=r"<think>.*</think>\s*<answer>.*</answer>"))
    tagged = "<think>a\nb</think>\n<answer>4</answer>"
    assert [tags.value(ScoreRequest("a", text, None)) for text in (tagged, f"{tagged} more", "")] == [1.0, 0.0, 0.0]
    length = RewardPart(PartSection(kind="length", free_tokens=20), max_tokens=100)
    found = [length.value(ScoreRequest("a", "", None, num_tokens=tokens)) for tokens in (20, 60, 120)]
    assert list(map(str, found)) == ["0.0", "-0.5", "-1.0"], "0, not -0"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "reward.py").write_text(SCORER)
    return tmp_path / "reward.py"


def test_a_weighted_sum(file: Path):
    config = configured(
        parts={
            "tags": {"pattern": "<a>.*</a>", "weight": 0.5},
            "length": {"kind": "length", "free_tokens": 20, "weight": 0.25},
            "loud": {"kind": "custom", "path": str(file), "name": "shout", "weight": 2.0},
        },
        domains={"a": {"weight": 3.0}, "b": {"kind": "custom", "path": str(file)}},
    )
    reward, info = score(config, "<a>4</a>", tokens=60)
    assert reward == 3.0 * 1.0 + 0.5 * 1.0 + 0.25 * -0.5 + 2.0 * 0.0
    assert info["parts"] == {"tags": 1.0, "length": -0.5, "loud": 0.0}
    assert (info["own_reward"], info["acc"], info["extracted"]) == (1.0, 1.0, "4")
    reward, info = score(config, "AB", "b")
    assert (reward, info["own_reward"], info["words"]) == (2.0 + 2.0, 2.0, 3)
    assert score(config, "4", "other")[0] == 1.0, "other sources are scored as reward says"


def test_only_the_parts_of_what_is_scored_elsewhere():
    judge = {"endpoint": "http://localhost:1/v1", "endpoint_model": "m"}
    config = configured(
        judge=judge, domains={"a": {"kind": "judge", "weight": 9.0}}, parts={"tags": {"pattern": "x", "weight": 0.5}}
    )
    assert built(config)(ScoreRequest("a", "x", "4")) == (0.0, {"parts": {"tags": 1.0}})
    assert score(config, "x 4", "b")[0] == 1.0
    config = from_mapping({"model": {"path": "x"}, "reward": {"kind": "judge", "judge": judge}})
    assert not needs_workers(config.reward)
    assert needs_workers(from_mapping({"model": {"path": "x"}}).reward)
