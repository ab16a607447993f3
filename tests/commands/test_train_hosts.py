"""A run of two processes up to its first step: built on both, written by the first, resumed from what it has saved."""

from __future__ import annotations

import json
from pathlib import Path

from host_worlds import run_world

from jaxrl.record.host_timelines import merge_timelines

REWARD = """
print("read")


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 1.0
"""


def test_a_run_is_built_saved_and_resumed_by_two_processes(tmp_path: Path, tiny_model: Path):
    run, problems = tmp_path / "run", tmp_path / "train.jsonl"
    problems.write_text("".join(json.dumps({"question": "x" * i, "answer": str(i)}) + "\n" for i in range(1, 8)))
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    options = {
        "model": {"path": str(tiny_model), "random_init": True},
        "data": {
            "train_files": [str(problems)],
            "train_batch_size": 4,
            "max_prompt_length": 96,
            "max_response_length": 16,
        },
        "reward": {"kind": "custom", "path": str(reward)},
        "rollout": {"n": 2, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 60, "warmup": False},
        "actor": {"ppo_max_token_len_per_gpu": 512, "ppo_mini_batch_size": 4},
        "trainer": {"total_training_steps": 3, "run_dir": str(run), "compilation_cache_dir": ""},
        "hosts": {"num": 2},
    }
    first, other = run_world("begin", tmp_path / "new", 2, 2, **options)
    assert first["step"] == other["step"] == 0
    recorded = json.loads((run / "run.json").read_text())
    assert recorded["devices"]["count"] == 4
    assert recorded["checkpoint"] == 0
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"0"}
    own = {path.relative_to(run / "hosts").as_posix() for path in (run / "hosts").rglob("*") if path.is_file()}
    assert {"1/timeline.json", "1/rewards.log"} <= own <= {"1/timeline.json", "1/rewards.log", "timeline.json"}

    again, other = run_world("begin", tmp_path / "again", 2, 2, **options)
    assert again["said"].tolist() == [f"resuming {run} after step 0 of 3"]
    assert other["said"].tolist() == [], "the first one says what there is to say"
    assert len(json.loads((run / "run.json").read_text())["starts"]) == 2
    assert merge_timelines(run) == run / "hosts" / "timeline.json"
    names = (run / "hosts" / "timeline.json").read_text()
    for start in ("host 0, start 1,", "host 0, start 2,", "host 1, start 1,", "host 1, start 2,"):
        assert start in names
