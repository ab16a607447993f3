"""Agents on the nodes of a Ray cluster (`pip install jaxrl[ray]`), from the launcher's side.

`RayAgents` starts a process that uses ray (`ray_hosts`, which says why) for each world, and reads from it what the
agents say. When that process ends by itself, as ray makes it a minute after the cluster's head is gone, all hosts are
lost; the next world finds the head that has come back, or waits for it.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import time
from collections.abc import Mapping
from typing import Any

from jaxrl.config.hosts import HostsSection
from jaxrl.processes.messages import BadMessage
from jaxrl.processes.process_supervisor import Start
from jaxrl.processes.ray_process import RayProcess
from jaxrl.runtime.hosts.environment import PLATFORMS
from jaxrl.runtime.hosts.local_agents import Event, Note, events_of
from jaxrl.runtime.hosts.restarts import Lost
from jaxrl.types import RunFailed

_PREFIXES = ("JAX_", "JAXRL_", "XLA_", "NCCL_", "GLOO_", "LIBTPU_", "HF_")
_NAMES = ("PYTHONPATH", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONWARNINGS", "TF_CPP_MIN_LOG_LEVEL")
_THREADS = "_NUM_THREADS"  # how the names of what numpy's libraries read end
_SLACK_S = 2.0


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """What processes on other nodes get of the launcher's environment; the rest is their nodes' own."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_PREFIXES) or name in _NAMES or name.endswith(_THREADS)
    }


class RayAgents:
    """An agent on a node of its own for each process of a run. See `Agents` in `local_agents`.

    Args:
      again: whether the cluster was there before: it is then waited for.
    """

    def __init__(self, hosts: HostsSection, run_dir: str, *, again: bool) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ValueError("hosts.launcher=ray needs ray, which is not installed: pip install 'jaxrl[ray]'")
        from jaxrl.runtime.hosts.ray_hosts import HostsSetup

        self._hosts, self._is_lost = hosts, False
        env = forwarded(os.environ)
        on_cpu = env.get(PLATFORMS, "").split(",")[0].strip().lower() == "cpu"
        setup = HostsSetup(hosts, run_dir, env, on_cpu, again)
        self._process = RayProcess("jaxrl.runtime.hosts.ray_hosts", pickle.dumps(setup))

    def events(self, timeout_s: float) -> list[Event]:
        if self._is_lost:
            time.sleep(timeout_s)
            return []
        found: list[Event] = []
        problem = None
        try:
            for message in self._process.receive(timeout_s):
                found += _understood(message)
        except BadMessage as bad:
            problem = f"it sent {bad}"
        problem = problem or self._process.problem
        if problem is not None and not found:
            self._is_lost = True
            found = [Lost(i, f"the process that uses ray is lost: {problem}") for i in range(self._hosts.num)]
        return found

    def start(self, process: int, start: Start) -> None:
        self._process.send(process, start.message())

    def signal(self, process: int, number: int) -> None:
        self._process.send(process, {"signal": number})

    def close(self) -> None:
        self._process.end()
        if self._is_lost:  # nobody could end the actors: they end themselves when nobody has asked them for so long
            time.sleep(self._hosts.heartbeat_s + _SLACK_S)


def _understood(message: dict[str, Any]) -> list[Event]:
    """Raises ValueError or RunFailed for what ends a run."""
    match message:
        case {"fatal": sentence, "users": users}:
            raise (ValueError if users else RunFailed)(sentence)
        case {"note": text}:
            return [Note(text)]
        case {"lost": process, "why": why}:
            return [Lost(process, why)]
        case {"host": process, "address": address}:
            return events_of(process, message, address)
    return []
