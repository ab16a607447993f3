"""Worker processes: what they get of the trainer, what of them reaches it, and that nothing of them is left."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import reward_pools
from ended import have_ended
from reward_pools import Opened, collect, submit

from jaxrl.processes.messages import BadMessage, read_json, to_json
from jaxrl.processes.process_tree import descendants
from jaxrl.rewards.reward_pool import RewardPool
from jaxrl.scheduling.rounds.events import Verdict

SCORER = """
import os, subprocess, sys, time
COUNT = 0

def compute_score(data_source, solution_str, ground_truth, extra_info):
    global COUNT
    COUNT += 1
    result = {"score": 1.0, "pid": os.getpid(), "count": COUNT}
    exec(solution_str, {**globals(), "result": result})
    return result
"""


make = partial(reward_pools.make, source=SCORER, timeout_s=20.0)


@pytest.fixture
def opened(opened: Opened) -> Opened:
    """Pools over a scorer that runs a response as code."""
    return partial(opened, **make.keywords)


def score(pool: RewardPool, *codes: str) -> list[Verdict]:
    submit(pool, *codes)
    return [verdict for _, verdict in sorted(collect(pool, 40.0).items())]


def test_workers_start_while_the_trainer_goes_on(tmp_path: Path):
    gate, started = tmp_path / "gate", tmp_path / "started"
    waits = f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\n"
    pool = make(tmp_path, source=f"{waits}open({str(started)!r}, 'w').close()\n{SCORER}")
    assert not started.exists(), "the trainer got here, and no worker has started"
    gate.touch()
    pool.warm()
    assert started.exists()
    pool.close()


def test_the_file_is_read_once(tmp_path: Path):
    """Its text travels: a worker that starts later runs what the run began with, and tracebacks have its lines."""
    pool = make(tmp_path, source=SCORER.replace("exec(", "exec (", 1))
    (tmp_path / "reward.py").write_text("raise RuntimeError('changed')\n")
    pool.warm()
    score(pool, "os._exit(1)")
    (tmp_path / "reward.py").unlink()
    lines = "import linecache; result['line'] = linecache.getline(compute_score.__code__.co_filename, 9)"
    assert "exec (" in score(pool, "os._exit(1)", lines)[1].info["line"]
    pool.close()


def test_environment_and_standard_streams(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("MY_SETTING", "7")
    monkeypatch.setenv("LC_TIME", "C")
    pool = opened(log=tmp_path / "rewards.log", env=["MY_SETTING"], num_workers=1)
    code = "result['env'] = dict(os.environ); print('hello'); os.system('echo there >&2')"
    info = score(pool, f"{code}; result['in'] = sys.stdin.read()")[0].info
    assert "WANDB_API_KEY" not in info["env"]
    assert (info["env"]["MY_SETTING"], info["env"]["LC_TIME"], info["env"]["PATH"]) == ("7", "C", os.environ["PATH"])
    assert info["in"] == ""
    pool.close()
    assert (tmp_path / "rewards.log").read_text() == "hello\nthere\n"
    assert capfd.readouterr() == ("", "")


def test_a_worker_that_is_stopped_while_it_has_nothing_to_do(opened: Opened):
    pool = opened(num_workers=1, timeout_s=20.0)
    os.kill(score(pool, "")[0].info["pid"], signal.SIGSTOP)
    time.sleep(0.2)
    start = time.monotonic()
    assert [verdict.status for verdict in score(pool, "", "")] == ["ok", "ok"]
    assert time.monotonic() - start < 15, "not after the limit of a sample"
    assert pool.take_metrics()["reward/pool_restarts"] == 1


def test_what_the_reward_file_started_stays(tmp_path: Path):
    helper = "import subprocess\nHELPER = subprocess.Popen(['sleep', '300'])\n"
    pool = make(tmp_path, source=helper + SCORER, num_workers=1)
    alive = "result['alive'] = HELPER.poll() is None; result['helper'] = HELPER.pid"
    verdicts = score(pool, alive, "subprocess.Popen(['sleep', '300'])", alive)
    assert [verdict.info["alive"] for verdict in verdicts[::2]] == [True, True]
    assert verdicts[0].info["helper"] in descendants(os.getpid()), "far below this process"
    pool.close()
    assert have_ended([verdicts[0].info["helper"]])


def test_a_host_that_is_killed_is_replaced(tmp_path: Path):
    """Every sample has one verdict, and what the lost host had below it is gone."""
    pool = make(tmp_path, num_workers=2)
    seconds = f"300.{os.getpid()}"  # no other test of the machine waits so long
    daemon = f"subprocess.Popen(['sleep', '{seconds}'], start_new_session=True); time.sleep(0.5)"
    (info,) = (verdict.info for verdict in score(pool, "result['host'] = os.getppid()"))
    submit(pool, *[daemon] * 6)
    time.sleep(0.2)
    os.kill(info["host"], signal.SIGKILL)
    verdicts = collect(pool).values()
    assert [verdict.status for verdict in verdicts] == ["ok"] * 6
    assert pool.take_metrics()["reward/pool_restarts"] == 1
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            assert process.read_bytes() != f"sleep\0{seconds}\0".encode()
    pool.close()
    assert have_ended([info["pid"]])


def test_nothing_outlives_a_killed_trainer(tmp_path: Path):
    """Workers in loops of C code, their children, and daemons that left their session, all end with the trainer."""
    code = (
        "import json; pids = [os.getpid(), subprocess.Popen(['sleep', '300'], start_new_session=True).pid]; "
        "pids.append(os.fork() or (os.setsid(), time.sleep(300))); "
        f"open({str(tmp_path)!r} + f'/{{os.getpid()}}.pids', 'w').write(json.dumps(pids)); sum(iter(int, 1))"
    )
    (tmp_path / "trainer.py").write_text(
        "import sys, time\n"
        f"sys.path[:0] = {[str(Path(__file__).parent), str(Path(reward_pools.__file__).parent), os.getcwd()]!r}\n"
        "import test_workers\n"
        "from pathlib import Path\n"
        f"test_workers.score(test_workers.make(Path({str(tmp_path)!r}), num_workers=2), *[{code!r}] * 2)\n"
    )
    trainer = subprocess.Popen([sys.executable, str(tmp_path / "trainer.py")])
    deadline = time.monotonic() + 30
    while len(files := list(tmp_path.glob("*.pids"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    trainer.kill()
    trainer.wait()
    pids = [pid for file in files for pid in json.loads(file.read_text())]
    assert len(pids) == 6
    assert have_ended(pids)


def test_a_json_of_the_users_in_the_working_folder(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "json.py").write_text("raise SystemExit('not the one of Python')\n")
    monkeypatch.chdir(tmp_path)
    pool = opened(num_workers=1)
    assert [verdict.status for verdict in score(pool, "")] == ["ok"]


@pytest.mark.parametrize("sent", [b"\xff", b'{"a": NaN}', b"[" * 100_000, b"[1]"])
def test_a_message_that_is_no_object_is_refused(sent: bytes):
    assert read_json(to_json({"a": "\ud800"})) == {"a": "?"}
    with pytest.raises(BadMessage, match=r"bytes that are no JSON \(|JSON of type list, where an object is expected"):
        read_json(sent)
