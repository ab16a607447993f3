"""Scorers that misbehave while a run goes: each costs the sample at hand, with a status and a reason; the samples
beside it are right, and no process is left. `test_refused.py` has reward files that are refused at the start."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxrl.config import from_mapping
from jaxrl.rewards.domains import build_scorer
from jaxrl.rewards.reward_pool import build_pool
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, Sample, SampleKey

SCORER = """
import ctypes, json, os, pickle, signal, socket, struct, subprocess, sys, time
FOLDER = {folder!r}

def sleeper(seconds=300):
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({{seconds}})", FOLDER])

def to_all_descriptors(data):
    for fd in range(3, 40):
        try:
            os.write(fd, data)
        except OSError:
            pass

class Command:
    def __reduce__(self):
        return os.system, ("touch " + FOLDER + "/ran_in_the_trainer",)

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str.startswith("say "):
        return float(solution_str[4:])
    result = {{"score": 1.0}}
    exec(extra_info["code"], {{**globals(), "result": result}})
    return result["value"] if "value" in result else result
"""
FRAME = "to_all_descriptors(struct.pack('!I', len(data)) + data)"


@dataclass(frozen=True)
class Bad:
    """What a scorer does, and what its sample gets; `error` is the whole reason."""

    name: str
    code: str
    error: str = ""
    status: str = "error"
    info: dict[str, Any] | None = None


LINE = next(i for i, line in enumerate(SCORER.splitlines(), 1) if line.strip().startswith("exec("))
AT = f" ({{path}}, line {LINE}, in compute_score)"
MUST = (
    "ValueError: {path}: compute_score must return a finite number (at most 3.4e+38, the largest float32), or a "
    "mapping with one under 'score'; found"
)
TIMEOUT = "no score within reward.timeout_s (2 s)"
ENDED = "the scorer's process ended with exit code "
BAD = [
    Bad("raises", "raise KeyError('x')", "KeyError: 'x'" + AT),
    Bad("exits", "sys.exit(1)", "SystemExit: 1" + AT),
    Bad("NaN", "result['value'] = float('nan')", MUST + ": nan (float)"),
    Bad(
        "large info",
        "result['text'] = 'x' * (50 << 20)",
        "the scorer's info takes 52428812 bytes as JSON, above the 1048576 that are recorded",
    ),
    Bad("half a pair", "result['t'] = 'a\\ud800b'", status="ok", info={"t": "a?b"}),
    Bad("memory", "result['b'] = bytearray(3 << 30)", "MemoryError (reward.max_memory_gib is 1)"),
    Bad("leaves", "os._exit(0)", ENDED + "0", "crash"),
    Bad("native crash", "ctypes.string_at(0)", ENDED + "-11", "crash"),
    Bad("loops in C", "sum(iter(int, 1))", TIMEOUT, "timeout"),
    Bad("stops itself", "os.kill(os.getpid(), signal.SIGSTOP)", TIMEOUT, "timeout"),
    Bad("reads the terminal", "result['t'] = sys.stdin.read()", status="ok", info={"t": ""}),
    Bad(
        "a pickle",
        "data = pickle.dumps(Command()); " + FRAME + "; time.sleep(9)",
        "the scorer's process sent bytes that are no JSON ('utf-8' codec can't decode byte 0x80 in position 0: invalid "
        "start byte)",
        "crash",
    ),
    Bad(
        "a huge length",
        "to_all_descriptors(b'\\xff' * 8); time.sleep(9)",
        "the scorer's process sent a message of 4294967295 bytes, where 1114112 are the most",
        "crash",
    ),
    Bad(
        "a forged verdict",
        "data = json.dumps(dict(task='0' * 16, status='ok', reward=9, info={{}}, duration_s=0)).encode(); "
        + FRAME
        + "; time.sleep(9)",
        "the scorer's process sent a verdict that it was not asked for",
        "crash",
    ),
    Bad(
        "forged by a child",
        "data = b'garbage'\nif os.fork() == 0:\n    time.sleep(0.05); " + FRAME + "; os._exit(0)\ntime.sleep(0.2)",
        status="ok",
        info={},
    ),
    Bad("prints", "print('x' * (30 << 20)); print('y' * 99, file=sys.stderr)", status="ok", info={}),
    Bad(
        "leaves fifty",
        "[sleeper() for _ in range(8)]\n[os.fork() or time.sleep(300) for _ in range(42)]",
        status="ok",
        info={},
    ),
    Bad("a child, then hangs", "sleeper(); time.sleep(99)", TIMEOUT, "timeout"),
    Bad(
        "a daemon",
        "if os.fork() == 0:\n    os.setsid()\n    os.fork() or (sleeper(), time.sleep(300))\n    os._exit(0)",
        status="ok",
        info={},
    ),
    Bad(
        "leaves an alarm",
        "signal.signal(signal.SIGALRM, lambda *_: 1 / 0); signal.setitimer(signal.ITIMER_REAL, 0.05)",
        status="ok",
        info={},
    ),
    Bad(
        "kills its host",
        "os.kill(os.getppid(), signal.SIGKILL); time.sleep(9)",
        "the host of the scorer's process ended or did not answer",
        "crash",
    ),
    Bad(
        "stops its host",
        "os.kill(os.getppid(), signal.SIGSTOP); time.sleep(9)",
        "the host of the scorer's process ended or did not answer",
        "crash",
        info={
            "error": "the host of the scorer's process ended or did not answer (2 times in a row)",
            "timeouts": {"watchdog": 1},
        },
    ),
]


NUM_WORKERS = 8  # many of the samples wait for their limit


def test_scorers_that_misbehave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All at once: each costs its own sample, the samples between them are right, and no process is left."""
    path = tmp_path / "reward.py"
    path.write_text(SCORER.format(folder=str(tmp_path)))
    monkeypatch.setattr("jaxrl.rewards.pool.BEAT_S", 0.3)
    monkeypatch.setattr("jaxrl.rewards.pool.SILENT_S", 1.5)
    reward = {"kind": "custom", "path": str(path), "num_workers": NUM_WORKERS, "timeout_s": 2.0, "max_memory_gib": 1.0}
    config = from_mapping({"model": {"path": "x"}, "reward": reward})
    pool = build_pool(config, build_scorer(config), log=tmp_path / "rewards.log")
    try:
        pool.warm()
        path.unlink()  # read once: what becomes of it later is nothing to the run
        for i in range(2 * len(BAD)):
            sample = Sample.empty(SampleKey(0, 0, i))
            sample.text = "bad" if i % 2 else f"say {i}"
            extra = {"code": BAD[i // 2].code.replace("{{}}", "{}")}
            pool.submit(Prompt(0, 0, (1,), "?", "test", "a", extra), sample)
        verdicts: dict[int, Verdict] = {}
        deadline = time.monotonic() + 120
        while pool.num_pending and time.monotonic() < deadline:
            for verdict in pool.wait(1.0):
                assert verdict.key.sample_index not in verdicts
                verdicts[verdict.key.sample_index] = verdict
        left = _left("time.sleep(300)")
    finally:
        pool.close()
    said = {i: (each.status, each.reward) for i, each in verdicts.items() if i % 2 == 0}
    assert said == {i: ("ok", float(i)) for i in range(0, 2 * len(BAD), 2)}
    wrong = []
    for i, bad in enumerate(BAD):
        verdict = verdicts[2 * i + 1]
        error = bad.error.format(path=path) + " (2 times in a row)" * (bad.status == "crash")
        expected = (bad.status, float(bad.status == "ok"), {"error": error} if bad.info is None else bad.info)
        if (found := (verdict.status, verdict.reward, verdict.info)) != expected:
            wrong.append(f"{bad.name}: {found!s:.600}\n  and not {expected!s:.600}")
    assert not wrong, "\n".join(wrong)
    assert not (tmp_path / "ran_in_the_trainer").exists()
    assert (tmp_path / "rewards.log").stat().st_size <= 17 << 20
    assert (left, _left(str(tmp_path))) == ([], [])


def _left(word: str, patience_s: float = 3.0) -> list[int]:
    """Processes that have the word in their command line, after a moment for them to end."""
    deadline = time.monotonic() + patience_s
    while (found := _with(word)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _with(word: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
