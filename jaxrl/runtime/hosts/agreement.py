"""Agreement, before anything compiles: all hosts were given the same, and share the run directory.

Process 0 posts its facts (`jaxrl.runtime.hosts.facts`), every other process compares its own with them and posts what
differs, and process 0 publishes one sentence, or none. So a process reads one set of facts, however many there are. The
sentence names the first fact that differs: facts that explain others come first.

Memory need not be equal: the least counts, for all hosts.
"""

from __future__ import annotations

import json
import os
import secrets
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.config import Config, ConfigError
from jaxrl.record.files import refuse_folder, takes_files
from jaxrl.runtime.hosts.board import Disagreement, MissingHosts
from jaxrl.runtime.hosts.facts import differing, facts_of
from jaxrl.runtime.hosts.gate import Gate
from jaxrl.sharding.memory import device_bytes

_FOLDER, _FACTS, _VERDICT = "agreement", "agreement facts", "agreement verdict"
_SEEN_WITHIN_S = 5.0
"""For a file of another host to appear; network file systems keep what a folder held for some seconds."""
_MOST_VALUES, _MOST_LENGTH = 3, 300  # different values in a sentence, and characters of one


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all hosts have in common.

    Attributes:
      device_bytes: memory of one device, the least of all hosts; None if the platform does not tell.
    """

    device_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Report:
    """What one process has found, as it stands on the board."""

    host: str
    memory: int | None
    run_dir: str  # what is wrong with it here; empty: nothing
    differences: dict[str, tuple[str, str]]


def agree(gate: Gate, config: Config, devices: Sequence[Any], facts: Mapping[str, str] | None = None) -> Agreement:
    """Compares this process with the others.

    Args:
      devices: of this process.
      facts: in place of those that `config` and `devices` give.

    Raises:
      Disagreement: on every process, with the same sentence.
    """
    board = gate.board
    gate.at("comparing the hosts")
    facts = facts_of(config, devices) if facts is None else facts
    memory = device_bytes(devices)
    if board.num_processes == 1:
        return Agreement(memory)
    folder = config.trainer.run_dir
    with _written(folder if board.process == 0 else "") as mark:
        if board.process == 0:
            board.put(_FACTS, zlib.compress(json.dumps([facts, mark]).encode()))
            report = _Report(gate.host, memory, "", {})
        else:
            theirs, mark = json.loads(zlib.decompress(_awaited(gate, _FACTS)))
            report = _Report(gate.host, memory, _unseen(folder, mark), differing(facts, theirs))
        fields = [report.host, report.memory, report.run_dir, report.differences]
        board.put(f"{_FOLDER}/{board.process}", json.dumps(fields).encode())
        if board.process == 0:
            reports = _reports(gate)
            known = [each.memory for each in reports.values() if each.memory is not None]
            least = min(known) if len(known) == len(reports) else None
            board.put(_VERDICT, json.dumps([_sentence(reports, folder), least]).encode())
        said, least = json.loads(_awaited(gate, _VERDICT))  # before the mark is removed: all have looked for it
    if said:
        raise Disagreement(said)
    return Agreement(least)


def _awaited(gate: Gate, key: str) -> bytes:
    with gate.waiting("the comparison with process 0"):
        found = gate.board.get(key, gate.stall_timeout_s)
        if found is None:
            raise MissingHosts("the comparison of the hosts", (0,), gate.stall_timeout_s)
    return found


def _reports(gate: Gate) -> dict[int, _Report]:
    """Of all processes, on process 0."""
    reports: dict[int, _Report] = {}
    until_s = time.monotonic() + gate.stall_timeout_s
    with gate.waiting("the other hosts' facts"):
        for process in range(gate.board.num_processes):
            found = gate.board.get(f"{_FOLDER}/{process}", max(until_s - time.monotonic(), 0.001))
            if found is None:
                raise MissingHosts("the comparison of the hosts", (process,), gate.stall_timeout_s)
            host, memory, run_dir, differences = json.loads(found)
            reports[process] = _Report(host, memory, run_dir, {n: (a, b) for n, (a, b) in differences.items()})
    return reports


def _sentence(reports: Mapping[int, _Report], folder: str) -> str:
    """What the hosts do not agree on; empty: on nothing."""
    names = list(dict.fromkeys(name for each in reports.values() for name in each.differences))
    first = min(reports.items())
    if not names:
        blind = [(process, each) for process, each in sorted(reports.items()) if each.run_dir]
        if not blind:
            return ""
        more = f" (and {len(blind) - 1} more processes)" if len(blind) > 1 else ""
        return (
            f"all hosts must share the folder trainer.run_dir ({folder} on {_who(*first)}): on {_who(*blind[0])} "
            f"{blind[0][1].run_dir}{more}"
        )
    name = names[0]
    by_value: dict[str, list[int]] = {}
    for process, each in sorted(reports.items()):
        if name in each.differences:
            by_value.setdefault(each.differences[name][0], []).append(process)
    expected = next(each.differences[name][1] for each in reports.values() if name in each.differences)
    said = [f"{_cut(expected)} on {_who(*first)}"]
    for value, processes in list(by_value.items())[:_MOST_VALUES]:
        more = f" and {len(processes) - 1} more" if len(processes) > 1 else ""
        said.append(f"{_cut(value)} on {_who(processes[0], reports[processes[0]])}{more}")
    others = f"; {len(names) - 1} more differ, {names[1]} the first of them" if len(names) > 1 else ""
    return f"the hosts must agree on {name}: {', '.join(said)}{others}"


def _who(process: int, report: _Report) -> str:
    return f"process {process} ({report.host})"


def _cut(value: str) -> str:
    if not value:
        return "nothing"
    return value if len(value) <= _MOST_LENGTH else f"{value[:_MOST_LENGTH]}…"


@contextmanager
def _written(folder: str) -> Iterator[str]:
    """A file in `folder`, whose name is given, for others to see; it goes away afterwards, and so does the folder if it
    was made for it. No folder: nothing is written."""
    if not folder:
        yield ""
        return
    path = refuse_folder(folder, "trainer.run_dir")
    made = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    file = path / f".jaxrl-hosts-{secrets.token_hex(8)}"
    try:
        file.write_text(file.name, encoding="utf-8")
        yield file.name
    except OSError as error:
        raise ConfigError(f"trainer.run_dir: {path}: {(error.strerror or str(error)).lower()}") from None
    finally:
        file.unlink(missing_ok=True)
        for each in made:
            with suppress(OSError):  # something else is in it by now
                each.rmdir()


def _unseen(folder: str, mark: str) -> str:
    """What is wrong with the run directory here; empty: what process 0 wrote there is seen, and it can be written."""
    if not mark:
        return ""
    path = Path(os.path.expanduser(folder))
    until_s = time.monotonic() + _SEEN_WITHIN_S
    while not _reads(path / mark, mark):
        if time.monotonic() > until_s:
            return f"{path} does not show what process 0 has written there"
        time.sleep(0.1)
    return "" if takes_files(path) else f"{path} may not be changed by this user"


def _reads(file: Path, text: str) -> bool:
    try:
        return file.read_text(encoding="utf-8") == text
    except OSError:
        return False
