"""What a hostile program would change on the machine, put there to be watched; and one attack with all its checks."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.hostile import Attack
from jaxrl.rewards.code import CodeScorer
from jaxrl.rewards.request import ScoreRequest
from jaxrl.rewards.sandbox.client import SandboxFailed
from jaxrl.rewards.sandbox.processes import descendants

ROOT = Path(__file__).resolve().parents[2]
_WATCHED = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/run/lock", str(ROOT), os.path.dirname(os.__file__))
_GONE_S = 5.0  # until what an attack started is gone, on a loaded machine


class Canaries:
    """Files that all may write, listening sockets of each kind, and a process of the same user."""

    def __enter__(self) -> Canaries:
        self.token = f"canary{secrets.token_hex(6)}"
        self.secret = f"CANARY-{secrets.token_hex(8)}"
        self.home = Path(tempfile.mkdtemp(prefix="sandbox-bench-"))
        self.home.chmod(0o777)
        self._file = self.home / "secret.txt"
        self._file.write_text(self.secret)
        self._file.chmod(0o666)
        (self.home / "empty").mkdir(mode=0o777)
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.port = self._sockets[0].getsockname()[1]
        for kind, address in (
            (socket.SOCK_STREAM, str(self.home / "socket")),
            (socket.SOCK_STREAM, f"\0{self.token}"),
            (socket.SOCK_DGRAM, f"\0{self.token}d"),
        ):
            sock = socket.socket(socket.AF_UNIX, kind)
            sock.bind(address)
            if kind == socket.SOCK_STREAM:
                sock.listen()
            self._sockets.append(sock)
        (self.home / "socket").chmod(0o777)
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind(("127.0.0.1", self.port))
        self._sockets.append(datagrams)
        self._victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100000)"])
        self._before = self._state()
        return self

    def __exit__(self, *_: object) -> None:
        self._victim.kill()
        self._victim.wait()
        for sock in self._sockets:
            sock.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def places(self) -> dict[str, object]:
        return {
            "home": str(self.home),
            "token": self.token,
            "victim": self._victim.pid,
            "port": self.port,
            "root": str(ROOT),
        }

    def changed(self) -> list[str]:
        """What is not as it was."""
        now = self._state()
        return [f"{name}: {self._before[name]} is now {now[name]}" for name in now if now[name] != self._before[name]]

    def _state(self) -> dict[str, object]:
        status = self._file.stat() if self._file.exists() else None
        pid = self._victim.pid
        left: list[str] = []
        for folder in _WATCHED:
            with contextlib.suppress(OSError):
                left += [f"{folder}/{name}" for name in os.listdir(folder) if self.token in name]
        state: dict[str, object] = {
            "file": (self._file.read_text(), status.st_mode, status.st_mtime_ns) if status else None,
            "folder": sorted(os.listdir(self.home)),
            "left behind": left,
            "sockets": [sock.getsockname() for sock in select.select(self._sockets, [], [], 0)[0]],
            "hostname": socket.gethostname(),
            "ipc": [name for name in ("shm", "msg", "sem") if _has_key(f"/proc/sysvipc/{name}")],
            "victim": self._victim.poll(),
        }
        if self._victim.poll() is None:
            with open(f"/proc/{pid}/stat") as file:
                stopped = file.read().rpartition(")")[2].split()[0] in "Tt"
            limits = resource.prlimit(pid, resource.RLIMIT_CPU)
            state["victim"] = stopped, os.getpriority(os.PRIO_PROCESS, pid), os.sched_getaffinity(pid), limits
        return state


def _has_key(path: str) -> bool:
    with contextlib.suppress(OSError):
        return any(line.split()[0] == "4242" for line in Path(path).read_text().splitlines()[1:])
    return False


def trivial() -> ScoreRequest:
    """A program that is right, and costs nothing."""
    tests = {"inputs": ["40 2"], "outputs": ["42"]}
    return ScoreRequest("bench", "print(sum(map(int, input().split())))", None, {"inputs": [], **tests}, (20.0,))


def attack_once(scorer: CodeScorer, attack: Attack, canaries: Canaries, limit_s: float) -> tuple[list[str], float]:
    """Runs one attack, and the next verdict.

    Returns:
      What it broke, in sentences; and the seconds that the next verdict took.
    """
    program = attack.program(canaries.places())
    answer = f"ANSWER-{secrets.token_hex(8)}"
    if attack.shape == "script":
        tests: dict[str, object] = {"inputs": ["1"], "outputs": [answer]}
    else:
        check = f"def check(candidate):\n    assert candidate(1) == {answer!r}\n    assert {answer!r} in candidate(2)\n"
        tests = {"entry_point": "f", "prompt": "", "test": check}
        if attack.test:
            tests = {"test_list": attack.test.replace("ANSWER", repr(answer)).splitlines()}
    pid = scorer.server_pid
    opened, kept = len(os.listdir(f"/proc/{pid}/fd")), set(descendants(pid))
    try:
        reward, info = scorer(ScoreRequest("bench", program, None, tests, (limit_s, limit_s)))
    except (ValueError, SandboxFailed) as error:
        return [f"no verdict: {error}"], 0.0
    broken = [] if reward == 0 else [f"it scored {reward:g}"]
    said = json.dumps(info)
    broken += [f"it said {said[:300]}"] if "BROKE" in said or canaries.secret in said else []
    broken += canaries.changed()
    if scorer.server_pid != pid:
        broken.append("the fork server had to be started again")
    elif len(os.listdir(f"/proc/{pid}/fd")) != opened:
        broken.append("the fork server has other descriptors than before")
    deadline = time.monotonic() + _GONE_S
    while (left := set(descendants(scorer.server_pid)) - kept) and time.monotonic() < deadline:
        time.sleep(0.005)
    broken += [f"{len(left)} processes are left"] if left else []
    start = time.perf_counter()
    if scorer(trivial())[0] != 1:
        broken.append("the next program, which is right, did not score")
    return broken, time.perf_counter() - start
