"""The launcher with agents on this machine, over stand-ins for the run's processes: whoever dies, the run ends as an
undisturbed one, and nothing is left behind. Each case looks for processes that were left (`Launched.end`)."""

import os
import pty
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from launching import BITS, PATIENCE_S, Launched

from jaxrl.runtime.hosts.restarts import SETTLE_S

DETECTION_S = 2.0
pytestmark = pytest.mark.usefixtures("nothing_is_ignored")
QUICK = ("killed", "guard-of-0-killed", "all-refused")  # the others are slow


def some_slow(names: Iterable[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", autouse=True)
def _linux():
    if not Path("/proc/self/environ").exists():
        pytest.skip("needs /proc: what dies with what is shown on Linux")


def test_a_run_that_nothing_disturbs(tmp_path: Path):
    """Process 0 has the terminal."""
    screen, terminal = pty.openpty()
    run = Launched(tmp_path, num=3, devices_per_host=2, stdout=terminal)
    os.close(terminal)
    status, _, err = run.end()
    assert (status, err) == (0, "")
    assert os.read(screen, 1000) == b"process 0 begins with step 0 on a terminal\r\n"
    os.close(screen)
    assert run.bits == BITS
    logs = {path.name: path.read_text() for path in (tmp_path / "run" / "hosts").iterdir()}
    assert logs == {f"{i}.log": f"process {i} begins with step 0\n" for i in (1, 2)}
    arguments = (tmp_path / "started.1.2").read_text().split()
    assert arguments[0] == "train"
    assert arguments[-1] == "hosts.launcher=none"
    (coordinator,) = tmp_path.glob("coordinator.*")
    assert coordinator.name.startswith("coordinator.127.0.0.1:")


DEATHS = {
    "killed": ({"1.1": {"3": "signal SIGKILL"}}, "host 1 was ended by SIGKILL"),
    "agent-killed": ({"1.1": {"3": "kill-agent"}}, "host 1: its agent is gone"),
    "both-killed": ({"1.1": {"3": "kill-both"}}, "host 1: its agent is gone"),
    "guard-of-0-killed": ({"1.0": {"3": "kill-guard"}}, "host 0: its agent is gone"),
}


@pytest.mark.parametrize("name", some_slow(DEATHS))
def test_a_death_starts_all_again_from_the_last_checkpoint(tmp_path: Path, name: str):
    plan, said = DEATHS[name]
    run = Launched(tmp_path, plan)
    status, out, err = run.end()
    assert (status, run.worlds, run.bits) == (0, 2, BITS), err
    assert out.splitlines()[-1] == "process 0 begins with step 2"
    (line,) = [line for line in err.splitlines() if line.startswith("jaxrl: ")]
    assert line.startswith(f"jaxrl: {said} after ")
    assert line.endswith(
        "all are started again from the checkpoint of step 2 (restart 1 of 3 without a checkpoint in between)"
    )
    assert len([*tmp_path.glob("coordinator.*")]) == 2  # a port of its own for each world


def test_a_death_is_noticed_at_once_and_ends_all(tmp_path: Path):
    run = Launched(tmp_path, {"1.0": {"3": "hang"}, "1.2": {"3": "hang"}}, num=3, max_restarts=0)
    run.until("at.1.1")
    time.sleep(0.5)
    before = run.living()
    victim = next(pid for pid, command in before.items() if "stand_in" in command and _process_of(pid) == "1")
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    run.process.wait(PATIENCE_S)
    assert time.monotonic() - began < DETECTION_S
    assert len(before) == 1 + 3 * (2 + 1 + 2)  # the launcher; by host a guard, an agent, a process, and what that left
    status, _, err = run.end()
    assert status == 1
    assert err.splitlines()[-1].startswith(
        "jaxrl: host 1 was ended by SIGKILL, after 0 restarts without a checkpoint in between (hosts.max_restarts); "
        "the last checkpoint is step 2"
    )


def _process_of(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(each.split("=", 1) for each in variables if "=" in each)["JAXRL_PROCESS_ID"]


@pytest.mark.slow
def test_restarts_end(tmp_path: Path):
    run = Launched(tmp_path, {f"{world}.1": {"1": "signal SIGSEGV"} for world in range(1, 9)}, max_restarts=2)
    status, _, err = run.end()
    assert (status, run.worlds) == (1, 3)
    assert err.splitlines()[-1] == (
        "jaxrl: host 1 was ended by SIGSEGV, after 2 restarts without a checkpoint in between (hosts.max_restarts); "
        "there is no checkpoint yet"
    )
    assert err.count("[host 1] process 1 is about to signal SIGSEGV\n") == 3  # the last lines of its log


ANSWERS = {
    # name: plan, exit status, last line on stderr
    "refused": ({"1.1": {"0": "exit 2"}}, 2, "jaxrl: host 1: process 1 cannot go on"),
    "process-0-cannot-go-on": ({"1.0": {"3": "exit 1"}}, 1, "jaxrl: process 0 cannot go on"),
    "all-refused": ({f"1.{i}": {"0": "exit 2"} for i in (0, 1)}, 2, "jaxrl: process 0 cannot go on"),
    "terminated": ({"1.1": {"3": "signal SIGTERM"}}, 143, "[host 1] process 1 is about to signal SIGTERM"),
}


@pytest.mark.parametrize("name", some_slow(ANSWERS))
def test_an_answer_is_not_asked_for_again(tmp_path: Path, name: str):
    plan, expected, last = ANSWERS[name]
    run = Launched(tmp_path, plan)
    began = time.monotonic()
    status, _, err = run.end()
    assert (status, run.worlds) == (expected, 1)
    assert err.splitlines()[-1] == last
    assert err.count("cannot go on") == (0 if name == "terminated" else 1)  # each sentence once
    assert time.monotonic() - began < SETTLE_S + 5.0


@pytest.mark.slow
def test_a_refused_run_leaves_its_folder_as_it_was(tmp_path: Path):
    run = Launched(tmp_path, {f"1.{i}": {"0": "exit 2"} for i in (0, 1)})
    run.end()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock"]  # which the stand-in leaves
    (tmp_path / "run" / "hosts").mkdir()
    (tmp_path / "run" / "hosts" / "1.log").write_text("before\n")
    (tmp_path / "plan.json").write_text('{"2.1": {"0": "exit 2"}}')
    run.again()
    assert run.end()[0] == 2
    assert (tmp_path / "run" / "hosts" / "1.log").read_text() == "before\n"


def test_a_signal_to_the_launcher_stops_the_run_at_a_boundary(tmp_path: Path):
    run = Launched(tmp_path)
    run.until("at.1.1")
    run.process.send_signal(signal.SIGINT)
    status, _, err = run.end()
    assert (status, err) == (0, "")
    assert not (tmp_path / "run" / "bits").exists()
    (tmp_path / "stop").unlink()
    run.again()
    assert run.end()[0] == 0
    assert run.bits == BITS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["agent", "guard", "all"])
def test_sigterm_to_an_agent_stops_the_run_at_a_boundary(tmp_path: Path, kind: str):
    """And so does SIGTERM to the launcher and all that it has started, once."""
    run = Launched(tmp_path)
    run.until("at.1.1")
    agents = [pid for pid, command in run.living().items() if "process_supervisor" in command]
    guards = [pid for pid in agents if _parent_of(pid) == run.process.pid]
    (agent, *_) = [pid for pid in agents if _parent_of(pid) == guards[1]]
    for pid in {"agent": [agent], "guard": [guards[1]], "all": [*agents, run.process.pid]}[kind]:
        os.kill(pid, signal.SIGTERM)
    status, _, err = run.end()
    assert (status, err) == (0, "")
    assert not (tmp_path / "run" / "bits").exists()


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_second_signal_ends_all_at_once(tmp_path: Path):
    run = Launched(tmp_path, {f"1.{i}": {"1": "hang"} for i in (0, 1)})  # deaf to SIGTERM
    run.until("at.1.0")
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.process.poll() is None
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    status, _, err = run.end()
    assert time.monotonic() - began < DETECTION_S
    assert (status, err) == (130, "jaxrl: interrupted\n")


def test_the_launcher_killed(tmp_path: Path):
    """Nothing survives it, and the same command goes on."""
    run = Launched(tmp_path, {"1.1": {"3": "hang"}})
    run.until("at.1.1")
    time.sleep(0.5)
    began = time.monotonic()
    run.process.kill()
    run.process.wait()
    run.assert_nothing_left()
    assert time.monotonic() - began < DETECTION_S
    run.again()
    assert run.end()[0] == 0
    assert run.bits == BITS


@pytest.mark.slow
def test_a_stopped_agent_is_lost(tmp_path: Path):
    run = Launched(tmp_path, {"1.1": {"3": "stop-agent"}}, heartbeat_s=2)
    status, _, err = run.end()
    assert (status, run.worlds, run.bits) == (0, 2, BITS)
    assert "jaxrl: host 1: its agent has said nothing for 1.6 s after " in err


@pytest.mark.slow
def test_a_process_that_outlives_the_others(tmp_path: Path):
    run = Launched(tmp_path, {"1.1": {"end": "hang"}}, stall_timeout_s=0.1)
    status, _, err = run.end()
    assert status == 1
    assert err.splitlines()[-1].startswith("jaxrl: host 1 has not ended 15 s after others did")


@pytest.mark.slow
def test_a_command_that_writes_nothing_has_no_logs(tmp_path: Path):
    run = Launched(tmp_path, {"1.1": {"1": "exit 1"}}, writes=False)
    status, _, err = run.end()
    assert (status, err) == (1, "jaxrl: host 1: process 1 cannot go on\n")
    assert not (tmp_path / "run" / "hosts").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_kills_at_random(tmp_path: Path, seed: int):
    """Of any process but the launcher, at any moment, starts included: it goes on by itself. And of the launcher: the
    same command goes on."""
    chance = random.Random(seed)
    run = Launched(tmp_path, {"step_s": 0.2}, num=3, max_restarts=1000, stall_timeout_s=60)
    kills = 0
    while kills < 12:
        time.sleep(chance.uniform(0.0, 0.6))
        if run.process.poll() is not None:
            break
        living = [pid for pid, command in run.living().items() if "sleep" not in command]
        victim = chance.choice(sorted(living))
        if victim == run.process.pid and chance.random() < 0.7:
            continue
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            continue
        kills += 1
        if victim == run.process.pid:
            run.process.wait()
            run.assert_nothing_left()
            run.again()
    status, out, err = run.end()
    assert (status, run.bits) == (0, BITS), f"{out}\n{err}"
    assert kills > 3


def test_the_launcher_never_loads_jax():
    """`launching.py` asserts the same of a whole run."""
    code = "import sys, jaxrl.runtime.hosts.launch; "
    code += "print(*{'jax', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
