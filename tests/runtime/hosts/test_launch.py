"""What the launcher tells its agents and does with what they say, with made-up agents; and the real command."""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from runs import Runs, assert_same_end, end, wait_for_steps

from jaxrl.cli import main
from jaxrl.config.hosts import HostsSection
from jaxrl.processes.process_supervisor import Start
from jaxrl.processes.process_tree import descendants
from jaxrl.runtime.hosts.launch import Launch, Launcher
from jaxrl.runtime.hosts.local_agents import Event, Note, Output, Ready, Saved
from jaxrl.runtime.hosts.restarts import Ended, Lost, Refused
from jaxrl.runtime.stop import WISH, Stop

DONE = [Ended(0, 0), Ended(1, 0)]
READY = [Ready(0, "10.0.0.1", 4000, None), Ready(1, "10.0.0.2", 5000, None)]


class Scripted:
    """Agents of one world: each look at them gives the next events."""

    def __init__(self, *looks: Sequence[Event]) -> None:
        self.looks = [*looks]
        self.starts: dict[int, Start] = {}
        self.signals: list[tuple[int, int]] = []
        self.num_closed = 0

    def events(self, timeout_s: float) -> list[Event]:
        return [*self.looks.pop(0)] if self.looks else []

    def start(self, process: int, start: Start) -> None:
        self.starts[process] = start

    def signal(self, process: int, number: int) -> None:
        self.signals.append((process, number))

    def close(self) -> None:
        self.num_closed += 1


def launcher(
    folder: Path, *worlds: Scripted, clock: Callable[[], float] = lambda: 0.0, stop: Stop | None = None, **more
) -> Launcher:
    hosts = HostsSection(num=2, launcher="local", max_restarts=1)
    what = Launch(hosts, ("-m", "jaxrl", "train"), folder, more.pop("environments", ({}, {})))
    left = [*worlds]
    return Launcher(what, lambda _: left.pop(0), stop or Stop(), clock)


def test_a_world_is_told_where_process_0_is(tmp_path: Path):
    first, second = Scripted(READY, [Lost(1, "its agent is gone")]), Scripted(READY, DONE)
    assert launcher(tmp_path / "run", first, second).run() == 0
    assert (first.num_closed, second.num_closed) == (1, 1)
    log = str(tmp_path / "run" / "hosts" / "1.log")
    common = {"JAXRL_COORDINATOR": "10.0.0.1:4000"}
    arguments, here = ["-m", "jaxrl", "train"], os.getcwd()
    assert first.starts == {
        0: Start(arguments, {"JAXRL_PROCESS_ID": "0", **common}, here),
        1: Start(arguments, {"JAXRL_PROCESS_ID": "1", **common}, here, log=log),
    }
    assert second.starts[0].lock == str(tmp_path / "run" / ".lock")  # which a killed process may still seem to hold
    assert second.starts[1] == first.starts[1]


def test_addresses_with_colons(tmp_path: Path):
    world = Scripted([Ready(0, "fd00::1", 4000, None), READY[1]], DONE)
    launcher(tmp_path, world).run()
    assert world.starts[1].environment["JAXRL_COORDINATOR"] == "[fd00::1]:4000"


def test_what_process_0_writes_is_passed_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    said = [Output(0, 1, "ä".encode()), Output(0, 2, b"warning\n"), Output(1, 1, b"dropped"), Note("waiting")]
    launcher(tmp_path, Scripted(READY, said, DONE)).run()
    assert capfd.readouterr() == ("ä", "warning\njaxrl: waiting\n")


def test_a_checkpoint_that_was_there_before_is_none_in_between(tmp_path: Path):
    killed = Ended(1, -9)
    there = [Ready(0, "10.0.0.1", 4000, 4), READY[1]]
    assert launcher(tmp_path, Scripted(there, [killed]), Scripted(there, [killed])).run() == 1
    saved = [Saved(6)]
    worlds = Scripted(there, [killed]), Scripted(there, saved, [killed]), Scripted(there, DONE)
    assert launcher(tmp_path, *worlds).run() == 0


def test_a_run_that_cannot_be_started(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    seconds = iter(range(1000))
    world = Scripted(READY, [Refused(1, "/data: no such file or directory")])
    assert launcher(tmp_path, world, clock=lambda: float(next(seconds))).run() == 2
    assert capfd.readouterr().err == "jaxrl: host 1: /data: no such file or directory\n"


def test_agents_that_do_not_come(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    seconds = iter(range(0, 1_000_000, 500))
    worlds = Scripted(READY[:1]), Scripted(READY[:1])
    assert launcher(tmp_path, *worlds, clock=lambda: float(next(seconds))).run() == 1
    assert "jaxrl: host 1: its agent did not start after " in capfd.readouterr().err
    assert worlds[0].starts == {}


def test_a_signal_before_anything_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    stop = Stop()
    stop.asked, stop.number = True, signal.SIGINT
    world = Scripted(READY[:1])
    assert launcher(tmp_path, world, stop=stop).run() == 130
    assert (world.num_closed, capfd.readouterr().err) == (1, "jaxrl: interrupted\n")


def test_a_signal_goes_to_process_0_once(tmp_path: Path):
    stop = Stop()
    stop.asked, stop.number = True, signal.SIGINT
    world = Scripted(READY, [], [], DONE)
    assert launcher(tmp_path, world, stop=stop).run() == 0
    assert world.signals == [(0, WISH)]


REFUSED = {
    "no-folder": ([], "trainer.run_dir is missing: give the folder that the run writes to and resumes from"),
    "a-file-for-a-folder": (["trainer.run_dir={file}"], "trainer.run_dir: {file} is not a folder"),
    "too-few-gpus": (
        ["trainer.run_dir={folder}/run"],
        "hosts.launcher=local: hosts.num (2) needs 2 GPUs on this machine, which shows 0 (none)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_anything_is_launched(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    options, sentence = REFUSED[name]
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    places = {"file": tmp_path / "file", "folder": tmp_path}
    own = ["model.path=none", "reward.kind=math", "hosts.num=2", "hosts.launcher=local"]
    assert main(["train", *own, *(option.format(**places) for option in options)]) == 2
    assert capfd.readouterr().err == f"jaxrl: {sentence.format(**places)}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_a_real_run_whose_process_is_killed(tmp_path: Path, tiny_model: Path):
    """By the command: it ends bit for bit as one without a launcher, in the folder of one host."""
    runs = Runs(tmp_path, tiny_model)
    runs.finish(tmp_path / "undisturbed")
    options = ("hosts.launcher=local", "hosts.num=1", "hosts.devices_per_host=1")
    process = runs.start(tmp_path / "run", *options)
    wait_for_steps(process, tmp_path / "run", 3)
    below = descendants(process.pid)
    (victim,) = [pid for pid in below if b"jaxrl\0train" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(victim, signal.SIGKILL)
    output = end(process)
    assert "jaxrl: host 0 was ended by SIGKILL after " in output
    assert_same_end(tmp_path / "run", tmp_path / "undisturbed")
    starts = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert [start["from_step"] for start in starts] == [0, 2]


@pytest.mark.slow
def test_a_real_run_that_is_stopped(tmp_path: Path, tiny_model: Path):
    runs = Runs(tmp_path, tiny_model)
    options = ("hosts.launcher=local", "hosts.num=1", "trainer.total_training_steps=1000")
    process = runs.start(tmp_path / "run", *options)
    wait_for_steps(process, tmp_path / "run", 1)
    process.send_signal(signal.SIGINT)
    output = end(process)
    assert "the run saves its state and ends" in output
    assert "(stopped; run again to go on)" in output


def test_the_working_folder_is_looked_for_modules_as_by_the_launcher(monkeypatch: pytest.MonkeyPatch):
    from jaxrl.runtime.hosts.launch import _safe_path

    monkeypatch.setattr(sys, "path", ["/somewhere"])
    assert _safe_path() == ["-P"]
    monkeypatch.setattr(sys, "path", ["", "/somewhere"])
    assert _safe_path() == []
