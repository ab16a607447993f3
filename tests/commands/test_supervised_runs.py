"""`jaxrl sft` and `jaxrl dpo`: they learn, go on to the same bits after a kill, and hand over to `jaxrl train`."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from runs import STEPS, Runs, assert_same_end, copied_after
from tiny import write_tiny_model

from jaxrl.cli import main
from jaxrl.record.metrics import read_metrics


class Learning(Runs):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, write_tiny_model(folder / "model"))
        said = [f"{'ab' * (1 + i)}." for i in range(9)]
        self._rows("sft", [{"prompt": f"{i} + 1", "completion": text} for i, text in enumerate(said)])
        self._rows("held_out", [{"prompt": "9 + 1", "completion": "abab."}, {"prompt": "1", "completion": "ab"}])
        self._rows("dpo", [{"prompt": f"{i}?", "chosen": text, "rejected": text[::-1]} for i, text in enumerate(said)])
        self._rows("dpo_held_out", [{"prompt": "9?", "chosen": "abab.", "rejected": ".baba"}])
        self.config["trainer"] |= {"save_freq": 1, "test_freq": 3}
        self.config["data"] |= {"train_batch_size": 4}

    def _rows(self, name: str, rows: Sequence[Any]) -> None:
        (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def arguments(self, command: str, run_dir: Path, *overrides: str, devices: int = 1) -> list[str]:
        held_out = {"sft": "held_out", "dpo": "dpo_held_out"}[command]
        file = self.folder / f"{command}.yaml"
        files = {"train_files": [f"{self.folder}/{command}.jsonl"], "val_files": [f"{self.folder}/{held_out}.jsonl"]}
        rest = {name: section for name, section in self.config.items() if name not in ("rollout", "reward")}
        file.write_text(yaml.safe_dump(rest | {"data": self.config["data"] | files}))
        return [f"--config={file}", f"trainer.run_dir={run_dir}", f"trainer.num_devices={devices}", *overrides]

    def learn(self, command: str, run_dir: Path, *overrides: str, devices: int = 1, status: int = 0) -> str:
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            ended = main([command, *self.arguments(command, run_dir, *overrides, devices=devices)])
        assert ended == status, output.getvalue()
        return output.getvalue()


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Learning:
    return Learning(tmp_path_factory.mktemp("supervised"))


@pytest.fixture(scope="module")
def sft(learning: Learning) -> tuple[Path, Path, str]:
    """A run, what a kill after four steps leaves, and what was printed."""
    whole, killed = learning.folder / "sft", learning.folder / "sft_killed"
    with copied_after({4: killed}):
        said = learning.learn("sft", whole)
    return whole, killed, said


def test_it_learns_and_says_so(sft: tuple[Path, Path, str]):
    whole, _, said = sft
    lines = read_metrics(whole)
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] - 1
    assert lines[-1]["val/loss"] < lines[2]["val/loss"] < lines[0]["train/loss"]
    assert lines[-1]["training/epoch"] == 2  # 9 rows, four at a time
    assert re.search(r"step 6/6  loss [\d.]+ .*tokens/s/device", said)
    assert re.search(r"step 6: held-out loss [\d.]+\n", said)
    page = (whole / "report.html").read_text()
    assert "Loss <small>per step" in page
    assert "critic/rewards/mean" not in page, "what such a run has not is not missed"
    assert "grpo" not in page.partition("<h2>")[0]
    assert "Samples" not in page


def test_a_run_that_is_killed_goes_on(learning: Learning, sft: tuple[Path, Path, str]):
    whole, killed, _ = sft
    assert f"resuming {killed} after step 3 of {STEPS}" in learning.learn("sft", killed)
    assert_same_end(killed, whole)
    told = learning.learn("sft", killed, "algorithm.adv_estimator=gae")
    assert "already at step 6 of 6" in told, "what RL alone reads has no part in it: there is no critic to miss"


def test_preferences_are_learnt_and_a_kill_changes_nothing(learning: Learning, sft: tuple[Path, Path, str]):
    """The reference is the checkpoint that the run began with, also after a kill."""
    whole, killed, options = learning.folder / "dpo", learning.folder / "dpo_killed", [f"trainer.init_from={sft[0]}"]
    with copied_after({4: killed}):
        said = learning.learn("dpo", whole, *options, "dpo.beta=0.5")
    lines = read_metrics(whole)
    assert lines[0]["train/loss"] == pytest.approx(np.log(2), abs=1e-6), "at first it is its own reference"
    assert lines[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert lines[-1]["train/loss"] < 0.6
    assert lines[-1]["rewards/accuracies"] == 1
    assert lines[-1]["val/rewards/accuracies"] == 1
    assert re.search(r"step 6: held-out loss [\d.]+, accuracy 1.000", said)
    said = learning.learn("dpo", killed, "trainer.init_from=", "dpo.beta=0.5", status=2)
    assert f"{killed} holds a run that began with trainer.init_from={sft[0]}/checkpoints/6" in said
    assert f"now that would be model.path={learning.folder}/model" in said
    learning.learn("dpo", killed, *options, "dpo.beta=0.5")
    assert_same_end(killed, whole)
