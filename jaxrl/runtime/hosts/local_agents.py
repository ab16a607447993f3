"""Agents on this machine, from the launcher's side: process supervisors that it starts, each with a socket."""

from __future__ import annotations

import select
import time
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrl.config.hosts import HostsSection
from jaxrl.processes.process_supervisor import END_S, Start, SupervisorProcess
from jaxrl.processes.process_tree import adopt_orphans, kill_descendants
from jaxrl.runtime.hosts.restarts import End, Ended, Lost, Refused

LOOPBACK = "127.0.0.1"


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


class LocalAgents:
    """An agent on this machine for each process of a run. See `Agents`.

    All that is below this process belongs to it: where a guard and its agent were killed at once, what they leave comes
    here, and `close` kills it.

    Args:
      run_dir: whose checkpoints they look for.
    """

    def __init__(self, hosts: HostsSection, run_dir: str) -> None:
        adopt_orphans()
        self._agents = [SupervisorProcess(run_dir, LOOPBACK) for _ in range(hosts.num)]
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
            for message in agent.receive():
                self._heard_s[number] = time.monotonic()
                found += events_of(number, message, LOOPBACK)
            if agent.ended:
                self._lost.add(number)
                found.append(Lost(number, "its agent is gone"))
        # after all has been read that came while this process was stopped
        for number, heard_s in self._heard_s.items():
            if number not in self._lost and time.monotonic() - heard_s > self._silent_s:
                self._lost.add(number)
                found.append(Lost(number, f"its agent has said nothing for {self._silent_s:g} s"))
        return found

    def start(self, process: int, start: Start) -> None:
        self._agents[process].send(start.message())

    def signal(self, process: int, number: int) -> None:
        self._agents[process].send({"signal": number})

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
