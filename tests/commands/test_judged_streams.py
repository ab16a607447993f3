"""Runs with a judge on the devices and gradients beside the rollout: they end as those without the stream trainer,
where every sample is judged and where domains are mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import PLAIN_REWARD, WIDE, Runs, assert_same_end, judged, state_of
from tiny import write_tiny_model

from jaxrl.record.metrics import read_metrics

pytestmark = pytest.mark.slow
OPTIONS = (
    *(*WIDE, "actor.use_kl_loss=true"),
    *("rollout.num_blocks=260", "rollout.max_num_seqs=16", "rollout.decode_steps=2", "rollout.num_workers=2"),
    *("rollout.stop=[a, b, c, d, e, f]", "data.max_response_length=96"),
    *("actor.ppo_mini_batch_size=0", "trainer.total_training_steps=3"),
)
STREAM = ("trainer.stream.enable=true",)
MIXED = ("data.source_key=of", "reward.domains={words: {kind: judge, weight: 0.5}}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("judged")
    made = Runs(folder, write_tiny_model(folder / "model", num_hidden_layers=1))
    rows = [
        f'{{"question": "{"x" * (1 + 3 * i)}", "answer": "{i}", "of": "{"words" if i % 2 else "sums"}"}}\n'
        for i in range(7)
    ]
    (folder / "train.jsonl").write_text("".join(rows))
    (folder / "reward.py").write_text(PLAIN_REWARD)
    made.config["trainer"]["compilation_cache_dir"] = str(folder / "cache")
    made.config["reward"] = judged(write_tiny_model(folder / "judge"))
    return made


def check_same(run_dir: Path, expected: Path) -> None:
    """All that was drawn and judged is the same; gradients and weights up to the order of sums in float64."""
    for ours, theirs in zip(read_metrics(run_dir), read_metrics(expected), strict=True):
        for name in ("critic/rewards/mean", "response_length/mean", "reward/num_scored"):
            assert ours[name] == theirs[name], name
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-9)
    (arrays, _), (others, _) = state_of(run_dir), state_of(expected)
    names = [name for name in others if "'params'" in name]
    assert names
    for name in names:
        assert np.linalg.norm(arrays[name] - others[name]) <= 1e-9 * np.linalg.norm(others[name]), name


def check_used(run_dir: Path) -> list[dict[str, Any]]:
    """Workers were freed, gradients streamed, and verdicts given while others decoded."""
    lines = read_metrics(run_dir)
    assert sum(line["rollout/scale_down/freed"] for line in lines) > 0
    assert sum(line["actor/streamed_share"] for line in lines) > 0
    assert sum(line["reward/judge/gap_turns"] for line in lines) > 0
    assert any(line["critic/rewards/mean"] > 0 for line in lines), "some verdicts hold a score"
    return lines


def test_a_streamed_run_with_a_judge(runs: Runs):
    """Of four devices: gradients, too, are of several then."""
    plain, streamed, cut = (runs.folder / name for name in ("plain", "streamed", "cut"))
    runs.finish(plain, *OPTIONS, devices=4)
    runs.finish(streamed, *OPTIONS, *STREAM, devices=4)
    check_used(streamed)
    check_same(streamed, plain)
    runs.kill_after(2, cut, *OPTIONS, *STREAM, devices=4)
    runs.finish(cut, *OPTIONS, *STREAM, devices=4)
    assert_same_end(cut, streamed)


def test_mixed_domains(runs: Runs):
    plain, streamed = runs.folder / "plain mixed", runs.folder / "streamed mixed"
    options = (*OPTIONS, *MIXED, "reward.kind=custom", f"reward.path={runs.folder / 'reward.py'}")
    runs.finish(plain, *options, devices=2)
    runs.finish(streamed, *options, *STREAM, devices=2)
    lines = check_used(streamed)
    assert all(sum(line[f"reward/{of}/num_scored"] for line in lines) > 0 for of in ("default", "words"))
    check_same(streamed, plain)
