"""docs/life-of-a-prompt.md is the real chain: a training run is followed from file to file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tiny import write_tiny_model

ROOT = Path(__file__).resolve().parents[1]
FOLLOW = """
import json, sys, threading
from pathlib import Path

root, arguments, found = sys.argv[1], sys.argv[3:], set()

def follow(frame, event, argument):
    if event == "call":
        found.add(frame.f_code.co_filename)

from jaxrl import loop
from jaxrl.cli import main

step = loop.Loop._run_step

def followed(self):
    threading.setprofile(follow)
    sys.setprofile(follow)
    try:
        return step(self)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)

loop.Loop._run_step = followed
status = main(arguments)
Path(sys.argv[2]).write_text(json.dumps(sorted(each for each in found if each.startswith(root))))
raise SystemExit(status)
"""
OPTIONS = (
    *("model.path=tiny", "model.random_init=true", "trainer.num_devices=1", "trainer.run_dir=run"),
    *("reward.kind=custom", "reward.path=reward.py", "data.max_prompt_length=128", "data.max_response_length=8"),
    *("data.train_batch_size=2", "rollout.n=2", "actor.ppo_max_token_len_per_gpu=256", "rollout.warmup=false"),
    *("rollout.max_num_seqs=4", "rollout.decode_steps=8"),
    *("trainer.total_training_steps=1", "trainer.test_freq=0", "trainer.val_before_train=false", "trainer.save_freq=0"),
)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) % 7 / 7
"""
ONCE = {"data/files.py", "mechanisms/__init__.py"}
"""Passed when the run is built, `files.py` if its data is in files."""
ELSEWHERE = {"rewards/math.py"}
"""In a process of the reward pool."""


def named() -> set[str]:
    text = (ROOT / "docs" / "life-of-a-prompt.md").read_text(encoding="utf-8")
    return set(re.findall(r"\]\(\.\./jaxrl/([\w/]+\.py)\)", text))


def test_a_plain_step_passes_the_files_that_the_page_names_and_no_mechanism(tmp_path: Path):
    write_tiny_model(str(tmp_path / "tiny"), num_hidden_layers=1)
    (tmp_path / "reward.py").write_text(REWARD)
    command = [sys.executable, "-c", FOLLOW, f"{ROOT}/", "found.json", "train"]
    done = subprocess.run(
        [*command, "--config", str(ROOT / "configs" / "quickstart.yaml"), *OPTIONS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = json.loads((tmp_path / "found.json").read_text())
    passed = {str(Path(each).relative_to(ROOT / "jaxrl")) for each in files if each.startswith(f"{ROOT}/jaxrl/")}
    assert named() - passed == ONCE | ELSEWHERE, "named, and not passed"
    assert {each for each in passed if each.startswith("mechanisms/")} <= named(), "a mechanism that is off"
