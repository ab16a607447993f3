"""`jaxrl sft` and `jaxrl dpo`: they learn, go on to the same bits after a kill, and hand over to `jaxrl train`."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from runs import STEPS, WIDE, Runs, assert_same_end, copied_after, end, kill, state_of, wait_for_steps
from tiny import write_tiny_model

from jaxrl.cli import main
from jaxrl.record.metrics import read_metrics

LORA = ("model.lora_rank=4",)
SLOW = pytest.mark.slow
HOSTS = ("hosts.num=2", "hosts.devices_per_host=1")


class Learning(Runs):
    """Runs of one command on a few rows."""

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


def preferring(learning: Learning, name: str, *options: str) -> tuple[Path, Path, str]:
    """As `sft`, of `jaxrl dpo`."""
    whole, killed = learning.folder / name, learning.folder / f"{name}_killed"
    with copied_after({4: killed}):
        said = learning.learn("dpo", whole, *options)
    return whole, killed, said


@pytest.fixture(scope="module")
def dpo(learning: Learning, sft: tuple[Path, Path, str]) -> tuple[Path, Path, str]:
    return preferring(learning, "dpo", f"trainer.init_from={sft[0]}", "dpo.beta=0.5")


@pytest.mark.parametrize("is_lora", [False, pytest.param(True, marks=SLOW)])
def test_preferences_are_learnt_and_a_kill_changes_nothing(
    learning: Learning, sft: tuple[Path, Path, str], dpo: tuple[Path, Path, str], is_lora: bool
):
    """The reference is the checkpoint that the run began with, also after a kill; with adapters the base."""
    options = [*(LORA if is_lora else (f"trainer.init_from={sft[0]}",)), "dpo.beta=0.5"]
    whole, killed, said = preferring(learning, "dpo_lora", *options) if is_lora else dpo
    lines = read_metrics(whole)
    assert lines[0]["train/loss"] == pytest.approx(np.log(2), abs=1e-6), "at first it is its own reference"
    assert lines[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert lines[-1]["train/loss"] < 0.6
    assert lines[-1]["rewards/accuracies"] == 1
    assert lines[-1]["val/rewards/accuracies"] == 1
    assert re.search(r"step 6: held-out loss [\d.]+, accuracy 1.000", said)
    began = f"model.path={learning.folder}/model" if is_lora else f"trainer.init_from={sft[0]}/checkpoints/6"
    refused = f"{killed} holds a run that began with {began}"
    for change, now in other_beginnings(learning, sft[0], is_lora):
        said = learning.learn("dpo", killed, *options, *change, status=2)
        assert refused in said, said
        assert f"now that would be {now}" in said
    learning.learn("dpo", killed, *options)
    assert_same_end(killed, whole)


def other_beginnings(learning: Learning, sft: Path, is_lora: bool) -> list[tuple[list[str], str]]:
    """Options of a resume, with which its reference would be another model, though the policy fits."""
    model, run = learning.folder / "model2", learning.folder / "sft2"
    if is_lora:
        shutil.copytree(learning.folder / "model", model)
        return [
            ([f"model.path={model}"], f"model.path={model} ("),
            (["trainer.seed=9"], f"model.path={sft.parent}/model"),
        ]
    shutil.copytree(sft, run)
    shutil.rmtree(run / "checkpoints" / "6")  # of two that are kept
    return [
        (["trainer.init_from="], f"model.path={learning.folder}/model"),
        ([f"trainer.init_from={run}"], f"trainer.init_from={run}/checkpoints/5"),
    ]


def test_what_the_reference_says_may_be_known_before(
    learning: Learning, sft: tuple[Path, Path, str], dpo: tuple[Path, Path, str]
):
    """The same run, without a copy of the weights; a kill changes nothing, though no first weights are read."""
    folder, steps = learning.folder, ("trainer.total_training_steps=3", "dpo.beta=0.5")
    given = (f"trainer.init_from={sft[0]}", *steps)
    whole, killed = folder / "before", folder / "before_killed"
    with copied_after({2: killed}):
        learning.learn("dpo", whole, *given, "dpo.precompute_ref_log_probs=true")
    for line, other in zip(read_metrics(whole), read_metrics(dpo[0])[:3], strict=True):
        for name in ("train/loss", "rewards/margins", "actor/grad_norm"):
            assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    longer = (*steps, "dpo.precompute_ref_log_probs=true")
    other = [{"prompt": "9?", "chosen": "aaaaa", "rejected": "b"}]
    refused = {
        "the run began with it": ["dpo.precompute_ref_log_probs=false", given[0]],
        "the run began with other held-out rows": [changed(learning, "dpo_other", other, "val")],
    }
    for reason, options in refused.items():
        assert reason in learning.learn("dpo", killed, *longer, *options, status=2)
    learning.learn("dpo", killed, *longer, "trainer.init_from=")  # which is not read any more
    assert_same_end(killed, whole)


@SLOW  # tests/train/test_supervised.py has gradients on several devices
def test_it_is_the_same_on_several_devices(learning: Learning, sft: tuple[Path, Path, str]):
    learning.learn("sft", learning.folder / "four", devices=4)
    (ours, _), (theirs, _) = state_of(learning.folder / "four"), state_of(sft[0])
    names = [name for name in theirs if "params" in name]
    assert len(names) > 5
    for name in names:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-3, atol=2e-4, err_msg=name)


@SLOW  # a run of RL; that one begins from another's parameters is tried in test_train.py and test_lora_runs.py
def test_rl_begins_from_what_was_learnt(learning: Learning, sft: tuple[Path, Path, str]):
    """With a learning rate of 0 the weights after a step of RL are those that supervised learning ended with."""
    run_dir = learning.folder / "rl"
    given = (f"trainer.init_from={sft[0]}", "actor.optim.lr=0", "trainer.total_training_steps=1", "trainer.test_freq=0")
    learning.here(run_dir, *given)
    (ours, _), (theirs, _) = state_of(run_dir), state_of(sft[0])
    for name in [name for name in theirs if "params" in name]:
        assert ours[name].tobytes() == theirs[name].tobytes(), name


def test_a_run_s_own_file_is_explained_as_its_command_reads_it(
    sft: tuple[Path, Path, str], capsys: pytest.CaptureFixture[str]
):
    file = f"--config={sft[0]}/config.yaml"
    assert main(["explain-config", file, "--devices=1", "rollout.n=1"]) == 0
    said = capsys.readouterr()
    assert "learnt: what the assistant says" in said.out
    assert "rollout.n=1 has no effect: `jaxrl sft` does not read it" in said.err
    assert main(["explain-config", file, "--devices=1", "--command=train"]) == 0
    assert "KV pool" in capsys.readouterr().out


def changed(learning: Learning, name: str, rows: Sequence[Any], part: str = "train") -> str:
    learning._rows(name, rows)
    return f"data.{part}_files=[{learning.folder}/{name}.jsonl]"


ROW = {"prompt": "a", "completion": "b"}
REFUSED: dict[str, tuple[Callable[[Learning], Sequence[str]], str]] = {
    "other data": (
        lambda learning: [changed(learning, "other", [ROW] * 9)],
        r"holds a run with other data: the files, .* have changed .*: choose another trainer.run_dir",
    ),
    "another order": (lambda learning: ["data.seed=1"], r"data.seed or data.shuffle have changed since the checkpoint"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_resumed_run_has_its_data(learning: Learning, sft: tuple[Path, Path, str], name: str):
    make, pattern = REFUSED[name]
    said = learning.learn("sft", sft[0], *make(learning), "trainer.total_training_steps=8", status=2)
    assert re.search(pattern, said), said


def test_runs_of_other_commands_are_refused(learning: Learning, sft: tuple[Path, Path, str]):
    said = learning.learn("dpo", sft[0], status=2)
    assert f"{sft[0]} holds a run of `jaxrl sft`, and this is `jaxrl dpo`" in said
    assert "data.train_files is missing: jaxrl sft learns from files" in learning.learn(
        "sft", learning.folder / "none", "data.train_files=[]", "data.task=chain_sum", "data.val_files=[]", status=2
    )


@pytest.mark.slow
def test_kills_in_each_part_of_sft_and_rl(tmp_path: Path):
    """SIGKILLs in both: the last checkpoint of RL is that of a chain that nobody broke."""
    learning = Learning(tmp_path)
    rl = ("trainer.test_freq=0", *WIDE)

    def chain(name: str, kills: Sequence[int]) -> Path:
        first, second = tmp_path / f"{name}_sft", tmp_path / f"{name}_rl"
        parts: list[tuple[Path, Sequence[str], Sequence[str]]] = [
            (first, ("-m", "jaxrl", "sft"), learning.arguments("sft", first, *WIDE[1:])[2:]),
            (second, ("-m", "jaxrl", "train"), (*rl, f"trainer.init_from={first}")),
        ]
        for run_dir, program, given in parts:
            own = [f"--config={learning.folder}/sft.yaml"] if run_dir is first else []
            for steps in kills:
                with learning.start(run_dir, *own, *given, program=program) as process:
                    wait_for_steps(process, run_dir, steps)
                    kill(process)
            with learning.start(run_dir, *own, *given, program=program) as process:
                end(process)
        return second

    assert_same_end(chain("killed", (2, 4)), chain("whole", ()))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_two_hosts_are_one(learning: Learning, command: str):
    more = ("actor.offload_reference=true",) if command == "dpo" else ()  # each streams its own part of a layer
    own = learning.arguments(command, learning.folder / f"{command}_hosts", *WIDE[1:], *HOSTS, *more)
    own = [each for each in own if not each.startswith(("trainer.num_devices", "trainer.run_dir"))]
    run_dir, alone = learning.folder / f"{command}_hosts", learning.folder / f"{command}_one"
    with learning.start(run_dir, *own, program=("-m", "jaxrl", command)) as process:
        end(process)
    learning.learn(command, alone, *WIDE[1:], devices=2)
    (ours, _), (theirs, _) = state_of(run_dir), state_of(alone)
    for name in [name for name in theirs if "params" in name]:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-9, atol=1e-12, err_msg=name)
