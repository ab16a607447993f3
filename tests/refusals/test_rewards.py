"""The battery, rewards: reward files and options that cannot work, and scorers that misbehave while the run goes.

What is wrong at the start is one sentence, before anything is scored. What goes wrong later costs the sample at hand,
with a status and a reason; the samples beside it are right, and no process is left.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jaxrl.config import Config, from_mapping
from jaxrl.rewards.domains import build_scorer
from jaxrl.rewards.reward_pool import build_pool
from jaxrl.rewards.scorers import describe
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, Sample, SampleKey

GOOD = "def compute_score(**kwargs):\n    return 1.0\n"
IMPORTING = "reward.path: importing {path} failed"
FUNCTION = "reward.name: {path}: compute_score"


@dataclass(frozen=True)
class Wrong:
    """A reward file that is refused: `sentence` is all that the error says, `{path}` in it the file."""

    name: str
    sentence: str
    source: str | bytes = GOOD
    reward: dict[str, Any] = field(default_factory=dict)
    file: str = "reward.py"
    make: Callable[[Path], None] | None = None  # the file, if it is no plain one


FILES = [
    Wrong("no file", "reward.path: no such file: {path}", make=lambda path: None),
    Wrong("named pipe", "reward.path must name a Python file (.py), found a device: {path}", make=os.mkfifo),
    Wrong("Latin-1", "{path}: not UTF-8 text (byte 22)", b"import os\nimport re\n# \xe9t\xe9\n"),
    Wrong(
        "missing package",
        f"{IMPORTING} in line 2 with ModuleNotFoundError: No module named 'no_such_package'",
        "import os\nimport no_such_package\n",
    ),
    Wrong("exit", f"{IMPORTING} in line 1 with SystemExit: 2", "import sys; sys.exit(2)\n"),
    Wrong(
        "one function",
        "reward.name: {path} must define a function 'compute_score', found my_reward: reward.name=my_reward",
        "from math import gcd\ndef _part(): ...\ndef my_reward(): ...\n",
    ),
    Wrong(
        "arguments",
        f"{FUNCTION} must take one of response, solution_str, completions; found (text, answer)",
        "def compute_score(text, answer): ...\n",
    ),
    Wrong(
        "async",
        f"{FUNCTION} must be an ordinary function, found an async one: have an ordinary one call asyncio.run",
        "async def compute_score(**kwargs): ...\n",
    ),
    Wrong(
        "unset variable", "reward.env: the environment has no variable 'NO_SUCH_KEY'", reward={"env": ["NO_SUCH_KEY"]}
    ),
]
"""What is found where the file is read and its function looked up, in whichever process."""

IN_A_WORKER = [
    Wrong("a token", f"{IMPORTING} in line 1 with KeyError: 'SOME_TOKEN'", "import os; os.environ['SOME_TOKEN']\n"),
    Wrong("memory", f"{IMPORTING} in line 1 with MemoryError", "a = bytearray(3 << 30)\n", {"max_memory_gib": 1.0}),
    Wrong(
        "crash", f"{IMPORTING}: the scorer's process ended with exit code -11", "import ctypes; ctypes.string_at(0)\n"
    ),
    Wrong(
        "endless in C",
        "reward.path: importing {path} did not end within reward.start_timeout_s (0.5 s)",
        "sum(iter(int, 1))\n",
        {"start_timeout_s": 0.5},
    ),
]
"""What only a process of its own may try, and one that is found like all of `FILES`."""


def test_files_are_refused(tmp_path: Path):
    check(FILES, tmp_path, in_this_process)


def test_workers_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_TOKEN", "secret")
    check(IN_A_WORKER, tmp_path, in_a_pool)
    assert _left(str(tmp_path)) == []


def check(cases: Sequence[Wrong], folder: Path, load: Callable[[Config], None]) -> None:
    """Loads each file; fails with all that were not refused with their sentence."""
    wrong = []
    for i, case in enumerate(cases):
        path = folder / str(i) / case.file
        path.parent.mkdir()
        if case.make is not None:
            case.make(path)
        else:
            path.write_bytes(case.source if isinstance(case.source, bytes) else case.source.encode())
        reward = {"kind": "custom", "path": str(path), **case.reward}
        try:
            load(from_mapping({"model": {"path": "x"}, "reward": reward}))
            said = "nothing"
        except ValueError as error:
            said = str(error)
        if said != (sentence := case.sentence.format(path=path)):
            wrong.append(f"{case.name}: {said}\n  and not {sentence}")
    assert not wrong, "\n".join(wrong)


def in_this_process(config: Config) -> None:
    scorer = build_scorer(config)
    try:
        scorer.load()
    except (SystemExit, KeyboardInterrupt) as error:  # as a worker tells them
        raise ValueError(f"{scorer.loads} failed with {describe(error)}") from None
    build_pool(config, scorer).close()


def in_a_pool(config: Config) -> None:
    pool = build_pool(config, build_scorer(config))
    try:
        pool.warm()
    finally:
        pool.close()


# -- while the run goes ------------------------------------------------------------------------------------------------

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
    Bad("interrupts", "raise KeyboardInterrupt", "KeyboardInterrupt" + AT),
    Bad("exits", "sys.exit(1)", "SystemExit: 1" + AT),
    Bad("NaN", "result['value'] = float('nan')", MUST + ": nan (float)"),
    Bad("text as score", "result['score'] = '1.0'", MUST + " under 'score': '1.0' (str)"),
    Bad(
        "no score",
        "result['value'] = {'reward': 1, 'acc': 2}",
        "ValueError: {path}: compute_score returned a mapping without 'score'; its keys: 'reward', 'acc'",
    ),
    Bad(
        "large info",
        "result['text'] = 'x' * (50 << 20)",
        "the scorer's info takes 52428812 bytes as JSON, above the 1048576 that are recorded",
    ),
    Bad("half a pair", "result['t'] = 'a\\ud800b'", status="ok", info={"t": "a?b"}),
    Bad("memory", "result['b'] = bytearray(3 << 30)", "MemoryError (reward.max_memory_gib is 1)"),
    Bad("leaves", "os._exit(0)", ENDED + "0", "crash"),
    Bad("native crash", "ctypes.string_at(0)", ENDED + "-11", "crash"),
    Bad("sleeps", "time.sleep(99)", TIMEOUT, "timeout"),
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
    Bad("half a frame", "to_all_descriptors(b'\\0\\0\\0\\x10{'); time.sleep(9)", TIMEOUT, "timeout"),
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
    Bad("leaves a child", "sleeper()", status="ok", info={}),
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
