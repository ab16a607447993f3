"""`jaxrl hosts`: what it says of hosts that agree, and one sentence on all of those that do not."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import write_tiny_model
from worlds import ROOT, Done, ended, started

from jaxrl.cli import main

HOST = os.uname().nodename


class Pair:
    """What two processes are given; a test changes what the second one is."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.devices, self.command = folder, [1, 1], "hosts"
        self.own: dict[str, str] = {}
        write_tiny_model(folder / "model")
        (folder / "train.jsonl").write_text('{"question": "a", "answer": "1"}\n')
        (folder / "reward.py").write_text("def compute_score(*given): return 1.0\n")
        self.options = {
            "model.path": f"{folder}/model",
            "data.train_files": f"[{folder}/train.jsonl]",
            "reward.kind": "custom",
            "reward.path": f"{folder}/reward.py",
            "trainer.run_dir": f"{folder}/run",
            "hosts.num": "2",
        }
        self.other = dict(self.options)

    def copied(self, name: str) -> Path:
        """A copy of a file or folder for the second process."""
        copy = self.folder / "other" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (self.folder / name).is_dir():
            shutil.copytree(self.folder / name, copy)
        else:
            shutil.copy(self.folder / name, copy)
        for option, value in self.other.items():
            self.other[option] = value.replace(f"{self.folder}/{name}", str(copy))
        return copy

    def run(self, *arguments: str) -> list[Done]:
        def command(options: dict[str, str]) -> list[str]:
            return ["-m", "jaxrl", self.command, *(f"{name}={value}" for name, value in options.items()), *arguments]

        commands = [command(self.options), command(self.other)]
        with started(commands, devices=self.devices, own={1: self.own}, cwd=self.folder) as both:
            return ended(both)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def table(out: str) -> list[str]:
    return [line for line in out.splitlines() if not line.startswith("[Gloo]")]


def test_two_that_agree(pair: Pair):
    first, second = pair.run("--json", str(pair.folder / "hosts.json"))
    assert (first.status, first.err, second.status, second.err) == (0, "", 0, "")
    assert table(second.out) == []
    lines = table(first.out)
    assert lines[0].split() == ["process", "host", "devices", "kind", "memory", "of", "each", "jaxrl", "jax"]
    assert [line.split()[:4] for line in lines[1:3]] == [[str(i), HOST, "1", "cpu"] for i in range(2)]
    assert lines[3].startswith("they agree (world ")
    names = ["put 1 KiB", "get 1 KiB", "barrier", "gate", "all-gather", "all-reduce"]
    assert [line.partition("  ")[0] for line in lines[4:]] == names
    report = json.loads((pair.folder / "hosts.json").read_text())
    assert [row["process"] for row in report["hosts"]] == [0, 1]
    assert all(0 < each["p50_ms"] <= each["p95_ms"] < 1000 for each in report["board"].values())
    assert [each["num_bytes"] for each in report["collectives"].values()] == [2**22] * 2
    for name, passes in (("all-gather", 1), ("all-reduce", 2)):
        found = report["collectives"][name]
        assert found["bytes_per_s"] == pytest.approx(passes * 2**21 / found["seconds"])
    assert not (pair.folder / "run").exists()


def test_one_alone(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "hosts.json"
    arguments = ["hosts", f"model.path={tiny_model}", "data.task=leg_counting", f"trainer.run_dir={tmp_path}/run"]
    assert main([*arguments, "--json", str(out)]) == 0
    lines = table(capsys.readouterr().out)
    assert lines[1].split()[:4] == ["0", HOST, "8", "cpu"]
    assert [line.partition("  ")[0] for line in lines[3:]] == ["all-gather", "all-reduce"]
    assert json.loads(out.read_text())["board"] == {}
    assert not (tmp_path / "run").exists()


def refused(pair: Pair) -> str:
    """The sentence that both end with, within ten seconds of being there. `pytest -rP` shows when that was."""
    began_s = time.monotonic()
    first, second = pair.run()
    print(f"{max(first.ended_s, second.ended_s) - began_s:.1f} s after both were started: {first.sentence}")
    for each in (first, second):
        assert each.status == 2, each
        assert each.err.count("\n") == 1, each.err
        assert table(each.out) == []
        assert each.ended_s - began_s < 40  # importing on a loaded machine, and ten seconds
    assert first.sentence == second.sentence
    run = pair.folder / "run"
    if pair.command == "train":  # a process that the others have ended leaves its lock
        assert {file.name for file in run.rglob("*.*")} <= {".lock"}
    else:
        assert not run.exists()
    return first.sentence


def another_source(pair: Pair) -> None:
    package = pair.folder / "source" / "jaxrl"
    shutil.copytree(ROOT / "jaxrl", package, ignore=shutil.ignore_patterns("__pycache__"))
    with open(package / "loop.py", "a", encoding="utf-8") as file:
        file.write("# changed\n")
    pair.own["PYTHONPATH"] = str(package.parent)


def another_version(pair: Pair) -> None:
    folder = pair.folder / "versions" / "optax-99.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 99.0\n")
    pair.own["PYTHONPATH"] = f"{folder.parent}{os.pathsep}{ROOT}"


def another_file(pair: Pair) -> None:
    with open(pair.copied("train.jsonl"), "a", encoding="utf-8") as file:
        file.write("\n")


def set_variable(name: str, value: str) -> Callable[[Pair], None]:
    return lambda pair: pair.own.update({name: value})


def another_run_dir(pair: Pair) -> None:
    pair.other["trainer.run_dir"] = f"{pair.folder}/elsewhere"


def another_count(pair: Pair) -> None:
    pair.devices[1] = 2


def set_option(name: str, value: str) -> Callable[[Pair], None]:
    return lambda pair: pair.other.update({name: value})


DIFFERENT: dict[str, tuple[Callable[[Pair], None], str]] = {
    "option": (
        set_option("actor.optim.lr", "0.5"),
        f"the hosts must agree on the option actor.optim.lr: 1e-06 on process 0 ({HOST}), 0.5 on process 1 ({HOST})",
    ),
    "count": (set_option("hosts.num", "3"), "hosts.num "),
    "source": (another_source, "the hosts must agree on the source of jaxrl: "),
    "version": (another_version, "the hosts must agree on the version of optax: "),
    "data": (another_file, "the hosts must agree on the content of data.train_files[0]: "),
    "x64": (
        set_variable("JAX_ENABLE_X64", "1"),
        f"the hosts must agree on the setting jax_enable_x64: False on process 0 ({HOST}), True on process 1 ({HOST})",
    ),
    "flags": (
        set_variable("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
        "the hosts must agree on the variable XLA_FLAGS: ",
    ),
    "devices": (another_count, "all hosts must have as many devices: process 0 "),
    "run_dir": (another_run_dir, "all hosts must share the folder trainer.run_dir ("),
}


@pytest.mark.slow  # tests/runtime/hosts/ has the sentences (test_consistency.py) and the facts (test_fingerprint.py)
@pytest.mark.parametrize("command", ["hosts", "train"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs(pair: Pair, name: str, command: str):
    change, words = DIFFERENT[name]
    pair.command = command
    change(pair)
    assert refused(pair).startswith(words)


@pytest.mark.slow
def test_files_that_lie_elsewhere_are_the_same(pair: Pair):
    for name in ("model", "train.jsonl", "reward.py"):
        pair.copied(name)
    assert [each.status for each in pair.run()] == [0, 0]


@pytest.mark.slow
def test_a_degree_that_crosses_hosts(pair: Pair):
    for options in (pair.options, pair.other):
        options["rollout.tensor_model_parallel_size"] = "2"
    assert "rollout.tensor_model_parallel_size (2) must divide the devices of a host (1)" in refused(pair)
