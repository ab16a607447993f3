"""Worlds of several real processes on this machine, for what threads cannot show. None of them outlives a test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quick_xla import flags

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0  # on a loaded machine

OPEN = """
import os, signal, sys, threading, time
from jaxrl.config.hosts import HostsSection
from jaxrl.runtime.hosts.world import open_world
hosts = HostsSection(num={num}, heartbeat_s={heartbeat_s}, stall_timeout_s={stall_timeout_s})
{before}
with open_world(hosts{wish}) as world:
    gate, board, me = world.barrier, world.store, world.process
    print("open", flush=True)
{body}
print("left", flush=True)
"""
"""A program of each process; `body` is what it does in the world, the same text in all."""


@dataclass(frozen=True, slots=True)
class Done:
    """How a process ended: its exit status (below 0: by that signal), its output, and when, of `time.monotonic`."""

    status: int
    out: str
    err: str
    ended_s: float

    @property
    def sentence(self) -> str:
        """The last line on stderr that is ours."""
        said = [line for line in self.err.splitlines() if line.startswith("jaxrl: ")]
        return said[-1].removeprefix("jaxrl: ") if said else ""


def script(
    body: str,
    *,
    num: int = 2,
    heartbeat_s: float = 10,
    stall_timeout_s: float = 20,
    before: str = "",
    wish: str = "",
) -> list[str]:
    """Arguments of python for a world in which each process runs `body`."""
    indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
    text = OPEN.format(
        num=num, heartbeat_s=heartbeat_s, stall_timeout_s=stall_timeout_s, before=before, wish=wish, body=indented
    )
    return ["-c", text]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started(
    arguments: Sequence[str] | Sequence[Sequence[str]],
    num: int = 2,
    *,
    devices: Sequence[int] | int = 1,
    own: Mapping[int, Mapping[str, str]] | None = None,
    cwd: Path = ROOT,
) -> Iterator[list[subprocess.Popen[str]]]:
    """`num` processes of python that find each other; what is left of them is killed when the block ends.

    Args:
      arguments: of python, the same for all or one list for each.
      devices: of each process, or of all the same.
      own: environment variables of single processes.
      cwd: where they run; a package that lies there comes before others.
    """
    address = f"127.0.0.1:{free_port()}"
    each = [arguments] * num if isinstance(arguments[0], str) else arguments
    counts = [devices] * num if isinstance(devices, int) else devices
    processes = []
    try:
        for i in range(num):
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": flags(counts[i]),
                "PYTHONPATH": str(ROOT),
                "JAXRL_COORDINATOR": address,
                "JAXRL_PROCESS_ID": str(i),
                "OMP_NUM_THREADS": "1",
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, *each[i]],
                    env=environment | (own or {}).get(i, {}),
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    """Reads a process's output up to a line that is `line`."""
    assert process.stdout is not None
    for each in process.stdout:
        if each.strip() == line:
            return
    raise AssertionError(f"it ended without {line!r}: {process.stderr.read() if process.stderr else ''}")


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[Done]:
    """Waits for all to end."""
    until_s = time.monotonic() + PATIENCE_S
    at_s: dict[int, float] = {}
    while len(at_s) < len(processes):
        assert time.monotonic() < until_s, f"process {sorted(set(range(len(processes))) - set(at_s))} does not end"
        for i, process in enumerate(processes):
            if i not in at_s and process.poll() is not None:
                at_s[i] = time.monotonic()
        time.sleep(0.01)
    found = []
    for i, process in enumerate(processes):
        out, err = process.communicate()
        found.append(Done(process.returncode, out, err, at_s[i]))
    return found
