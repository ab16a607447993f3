"""Agents on this machine, from the launcher's side: processes of its own, each with a socket."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrl.config.hosts import HostsSection
from jaxrl.processes.messages import BadMessage, Channel, read_message, to_bytes
from jaxrl.processes.process_tree import adopt_orphans, kill, kill_descendants
from jaxrl.runtime.hosts.agent import MAX_MESSAGE_BYTES, Start
from jaxrl.runtime.hosts.restarts import End, Ended, Lost, Refused

LOOPBACK = "127.0.0.1"
END_S = 10.0
"""For an agent, or the guard of one that does not (`agent.GUARD_S`), to have ended everything below it."""
_GONE_S = 5.0
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from jaxrl.runtime.hosts.agent import main; main()"


@dataclass(frozen=True, slots=True)
class Ready:
    """An agent is there.

    Attributes:
      address: of its machine, as the others reach it.
      port: a free one there.
      checkpoint: the step of the run's last one, as seen from there; None: there is none.
    """

    process: int
    address: str
    port: int
    checkpoint: int | None


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is complete."""

    step: int


@dataclass(frozen=True, slots=True)
class Asked:
    """An agent got a signal that asks the run to stop."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a process wrote to its stdout (`stream` 1) or stderr (2)."""

    process: int
    stream: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Note:
    """Something that is to be shown."""

    text: str


Event = Ready | Saved | Asked | Output | Note | End


class Agents(Protocol):
    """The agents of one world, one per host, from the launcher's side."""

    def events(self, timeout_s: float) -> list[Event]:
        """What has happened; waits so long for something.

        Raises:
          ValueError, RunFailed: there are not enough hosts.
        """
        ...

    def start(self, process: int, start: Start) -> None: ...

    def signal(self, process: int, number: int) -> None:
        """Sends a signal to a process that was started."""
        ...

    def close(self) -> None:
        """Ends the agents and all that they started, at once, and returns when that is gone."""
        ...


class AgentProcess:
    """One agent on this machine, and the way to it.

    Args:
      run_dir: whose checkpoints it looks for.
      host: the address that the port it finds is to be free on; empty: all of the machine's.
    """

    def __init__(self, run_dir: str, host: str) -> None:
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        path = [os.getcwd() if entry == "" else entry for entry in sys.path]
        self.pid = 0  # of the agent itself, once it has said so
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, json.dumps(path), str(theirs.fileno()), str(lifeline), run_dir, host],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), lifeline],
            start_new_session=True,
        )
        theirs.close()
        os.close(lifeline)
        self._channel = Channel(ours, MAX_MESSAGE_BYTES)

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def guard(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._channel.ended

    def tell(self, message: dict[str, Any]) -> None:
        self._channel.send(to_bytes(message))

    def hear(self) -> list[dict[str, Any]]:
        """What it has said by now."""
        self._channel.flush()
        try:
            messages = [read_message(frame) for frame in self._channel.receive()]
        except BadMessage:
            self._channel.ended = True
            return []
        for message in messages:
            self.pid = message.get("ready", self.pid)
        return messages

    def begin_end(self) -> None:
        """Asks it to end."""
        os.close(self._lifeline)
        with contextlib.suppress(OSError):
            self._channel.sock.shutdown(socket.SHUT_WR)

    def finish_end(self, deadline_s: float) -> None:
        """Returns when it is gone with all below it; kills it at `deadline_s`, by `time.monotonic`."""
        if not self._gone(deadline_s):
            for pid in filter(None, (self.pid, self.guard)):  # what is below the one is killed by the other
                kill(pid)
            self._gone(time.monotonic() + _GONE_S)
        self._channel.close()

    def _gone(self, deadline_s: float) -> bool:
        """Whether both the agent and its guard end by then."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while not self._channel.ended:
            poll.poll(max(deadline_s - time.monotonic(), 0.0) * 1000)
            self.hear()
            if time.monotonic() >= deadline_s and not self._channel.ended:
                return False
        try:
            self._process.wait(max(deadline_s - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            return False
        return True


class LocalAgents:
    """An agent on this machine for each process of a run. See `Agents`.

    All that is below this process belongs to it: where a guard and its agent were killed at once, what they leave comes
    here, and `close` kills it.

    Args:
      run_dir: whose checkpoints they look for.
    """

    def __init__(self, hosts: HostsSection, run_dir: str) -> None:
        adopt_orphans()
        self._agents = [AgentProcess(run_dir, LOOPBACK) for _ in range(hosts.num)]
        self._silent_s = silence_s(hosts)
        self._heard_s: dict[int, float] = {}
        self._lost: set[int] = set()

    def events(self, timeout_s: float) -> list[Event]:
        poll = select.poll()
        living = {agent.fileno(): i for i, agent in enumerate(self._agents) if i not in self._lost}
        for agent in living:
            poll.register(agent, select.POLLIN)
        found: list[Event] = []
        for source, _ in poll.poll(timeout_s * 1000):
            number = living[source]
            agent = self._agents[number]
            for message in agent.hear():
                self._heard_s[number] = time.monotonic()
                found += events_of(number, message, LOOPBACK)
            if agent.ended:
                self._lost.add(number)
                found.append(Lost(number, "its agent is gone"))
        for (
            number,
            heard_s,
        ) in self._heard_s.items():  # after all has been read that came while this process was stopped
            if number not in self._lost and time.monotonic() - heard_s > self._silent_s:
                self._lost.add(number)
                found.append(Lost(number, f"its agent has said nothing for {self._silent_s:g} s"))
        return found

    def start(self, process: int, start: Start) -> None:
        self._agents[process].tell(start.message())

    def signal(self, process: int, number: int) -> None:
        self._agents[process].tell({"signal": number})

    def close(self) -> None:
        for agent in self._agents:
            agent.begin_end()
        deadline_s = time.monotonic() + END_S
        for agent in self._agents:
            agent.finish_end(deadline_s)
        kill_descendants(())


def silence_s(hosts: HostsSection) -> float:
    """For how long an agent may say nothing. Less than the other processes wait: what they end with is an answer
    (`restarts`), and not this loss."""
    return 0.8 * hosts.heartbeat_s


def events_of(process: int, message: dict[str, Any], address: str) -> list[Event]:
    """What an agent's message says; nothing for one that only says that a process was started."""
    match message:
        case {"ready": _, "port": port, "checkpoint": checkpoint}:
            return [Ready(process, address, port, checkpoint)]
        case {"saved": step}:
            return [Saved(step)]
        case {"asked": _}:
            return [Asked()]
        case {"output": text, "stream": stream}:
            return [Output(process, stream, text.encode("latin-1"))]
        case {"ended": status, "tail": tail}:
            return [Ended(process, status, tuple(tail))]
        case {"refused": sentence}:
            return [Refused(process, sentence)]
    return []
