"""Heartbeats: where each process is, as it says every second or so, and which one has fallen silent.

Process 0 reads those of all; the others read that of process 0, which also shows them that the store, which it keeps,
answers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from jaxrl.runtime.hosts.key_value_store import KeyValueStore, StoreFailed

Kind = Literal["local", "waiting", "gate", "global"]
PROGRAM = "program"
"""The kind of digest (`PhaseBarrier.note`) whose entries are programs of all hosts."""
_FOLDER = "pulse"
_MOST_NAMED = 4  # processes of a sentence, and places


@dataclass(frozen=True, slots=True)
class Location:
    """Where a process is.

    Attributes:
      name: of the phase, or of what is waited for.
      kind: `local`: at work by itself; `waiting`: for other hosts; `gate`: at a barrier; `global`: in a phase.
      passed: how many barriers it has passed.
      host: its machine's name.
      counts: entries of each digest so far.
    """

    name: str
    kind: Kind
    passed: int = 0
    host: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_programs(self) -> int:
        return self.counts.get(PROGRAM, 0)


class Heartbeats:
    """Posts where this process is, and keeps what the others post.

    Args:
      heartbeat_s: a process whose heartbeat has not changed for so long is silent.
    """

    def __init__(self, store: KeyValueStore, heartbeat_s: float) -> None:
        self._store, self._heartbeat_s, self._number = store, heartbeat_s, 0
        self._heard: dict[
            int, tuple[int, float, Location]
        ] = {}  # number of the heartbeat, when it was new, what it said

    def exchange(self, here: Location) -> None:
        """Posts this process's heartbeat and reads those that concern it. Raises StoreFailed."""
        store = self._store
        self._number += 1
        fields = [self._number, here.name, here.kind, here.passed, here.host, dict(here.counts)]
        store.replace(f"{_FOLDER}/{store.process}", json.dumps(fields, separators=(",", ":")).encode())
        if store.process == 0:
            found = [(int(key.rpartition("/")[2]), value) for key, value in store.folder(_FOLDER)]
        else:
            value = store.get(f"{_FOLDER}/0", 0)
            found = [] if value is None else [(0, value)]
        now_s = time.monotonic()
        for process, value in found:
            number, location = _decoded(value)
            before = self._heard.get(process)
            if process != store.process and (before is None or before[0] != number):
                self._heard[process] = number, now_s, location

    def silent(self) -> list[int]:
        """Processes that were heard once, and not for the time of a heartbeat."""
        latest_s = time.monotonic() - self._heartbeat_s
        return sorted(process for process, (_, heard_s, _) in tuple(self._heard.items()) if heard_s < latest_s)

    def forgive(self, seconds: float) -> None:
        """This process was suspended for so long, and could hear nobody."""
        for process, (number, heard_s, location) in tuple(self._heard.items()):
            self._heard[process] = number, heard_s + seconds, location

    def skipped(self, here: Location) -> str | None:
        """A sentence about a process that waits at a barrier with fewer programs of all hosts than process 0 has
        dispatched since the barrier before, or the other way round: the collective of the others would never end."""
        for process, (_, _, there) in sorted(self._heard.items()):
            pair = ((self._store.process, here), (process, there))
            for (early, waits), (late, works) in (pair, pair[::-1]):
                if waits.kind == "gate" and waits.passed == works.passed and waits.num_programs < works.num_programs:
                    return (
                        f"process {early} ({waits.host}) has skipped a program of all hosts: it is at {waits.name} and "
                        f"has dispatched {waits.num_programs}, while process {late} ({works.host}) is in {works.name} "
                        f"and has dispatched {works.num_programs}"
                    )
        return None

    def fresh(self) -> dict[int, Location]:
        """Where all processes are; what was heard last where the store does not answer."""
        with suppress(StoreFailed):
            return {int(key.rpartition("/")[2]): _decoded(value)[1] for key, value in self._store.folder(_FOLDER)}
        return {process: location for process, (_, _, location) in tuple(self._heard.items())}

    def last_heard(self, process: int) -> Location | None:
        found = self._heard.get(process)
        return None if found is None else found[2]


def named(process: int, location: Location | None) -> str:
    """`process 1 (host-b)`."""
    return f"process {process}" + (f" ({location.host})" if location is not None and location.host else "")


def listed(processes: Sequence[int], locations: Mapping[int, Location]) -> str:
    """`process 1 (host-b), last heard in rollout; process 3 (host-d), ...`, and how many more there are."""
    said = [
        named(each, location) + (f", last heard in {location.name}" if location else ", never heard")
        for each in processes[:_MOST_NAMED]
        for location in (locations.get(each),)
    ]
    more = len(processes) - len(said)
    return "; ".join(said) + (f"; and {more} more" if more else "")


def grouped(locations: Mapping[int, Location]) -> str:
    """Who is where, the rarest place first: `process 1 (host-b) in rollout; process 0 (host-a) and 2 more in sync`. Who
    has dispatched fewer programs of all hosts than others, which may wait in one of them, is so many behind."""
    groups: dict[tuple[str, int], list[int]] = {}
    most = max((location.num_programs for location in locations.values()), default=0)
    for process, location in sorted(locations.items()):
        groups.setdefault((location.name, most - location.num_programs), []).append(process)
    said = []
    for (name, behind), processes in sorted(groups.items(), key=lambda item: (len(item[1]), -item[0][1], item[1])):
        more = f" and {len(processes) - 1} more" if len(processes) > 1 else ""
        left = f", {behind} program{'s' if behind > 1 else ''} behind" if behind else ""
        said.append(f"{named(processes[0], locations[processes[0]])}{more} in {name}{left}")
    return "; ".join(said[:_MOST_NAMED])


def _decoded(value: bytes) -> tuple[int, Location]:
    number, name, kind, passed, host, counts = json.loads(value)
    return number, Location(name, kind, passed, host, counts)
