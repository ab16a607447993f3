"""The consistency check at the start, before anything compiles: all hosts were given the same, and share the run
directory.

Process 0 posts its facts (`jaxrl.runtime.hosts.fingerprint`), every other process compares its own with them and posts
what differs, and process 0 publishes one sentence, or none. So a process reads one set of facts, however many there
are. The sentence names the first fact that differs: facts that explain others come first.

Memory need not be equal: the least counts, for all hosts.
"""

from __future__ import annotations

import json
import os
import secrets
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.config import Config, ConfigError
from jaxrl.record.files import refuse_folder, takes_files
from jaxrl.record.run_dir import remove_empty
from jaxrl.runtime.hosts.fingerprint import differences, fingerprint
from jaxrl.runtime.hosts.key_value_store import Disagreement, MissingHosts
from jaxrl.runtime.hosts.liveness import PhaseBarrier
from jaxrl.sharding.memory import device_bytes

_FOLDER, _FACTS, _VERDICT = "agreement", "agreement facts", "agreement verdict"
_SEEN_WITHIN_S = 5.0
"""For a file of another host to appear; network file systems keep what a folder held for some seconds."""
_MOST_VALUES, _MOST_LENGTH = 3, 300  # different values in a sentence, and characters of one


@dataclass(frozen=True, slots=True)
class _Report:
    """What one process has found, as it stands on the store."""

    host: str
    memory: int | None
    run_dir: str  # what is wrong with it here; empty: nothing
    differences: dict[str, tuple[str, str]]


def check_consistency(
    barrier: PhaseBarrier,
    config: Config,
    devices: Sequence[Any],
    facts: Mapping[str, str] | None = None,
    seen_within_s: float = _SEEN_WITHIN_S,
) -> int | None:
    """Compares this process with the others.

    Args:
      devices: of this process.
      facts: in place of those that `config` and `devices` give.
      seen_within_s: after so long, what process 0 writes into the run directory must be seen by all.

    Returns:
      Bytes of one device's memory, the least of all hosts; None if the platform does not tell.

    Raises:
      Disagreement: on every process, with the same sentence.
    """
    store = barrier.store
    barrier.at("comparing the hosts")
    facts = fingerprint(config, devices) if facts is None else facts
    memory = device_bytes(devices)
    if store.num_processes == 1:
        return memory
    # who fails on the way here ends all at once: nothing has been written by then
    barrier.enter("the comparison of the hosts")
    barrier.at("comparing the hosts")
    folder = config.trainer.run_dir
    with written(folder if store.process == 0 else "") as mark:
        if store.process == 0:
            store.put(_FACTS, zlib.compress(json.dumps([facts, mark]).encode()))
            report = _Report(barrier.host, memory, "", {})
        else:
            theirs, mark = json.loads(zlib.decompress(_awaited(barrier, _FACTS)))
            report = _Report(barrier.host, memory, unseen(folder, mark, seen_within_s), differences(facts, theirs))
        fields = [report.host, report.memory, report.run_dir, report.differences]
        store.put(f"{_FOLDER}/{store.process}", json.dumps(fields).encode())
        if store.process == 0:
            reports = _reports(barrier)
            known = [each.memory for each in reports.values() if each.memory is not None]
            least = min(known) if len(known) == len(reports) else None
            store.put(_VERDICT, json.dumps([_sentence(reports, folder), least]).encode())
        said, least = json.loads(_awaited(barrier, _VERDICT))  # before the mark is removed: all have looked for it
    if said:
        raise Disagreement(said)
    return least


def _awaited(barrier: PhaseBarrier, key: str) -> bytes:
    with barrier.waiting("the comparison with process 0"):
        found = barrier.store.get(key, barrier.stall_timeout_s)
        if found is None:
            raise MissingHosts("the comparison of the hosts", (0,), barrier.stall_timeout_s)
    return found


def _reports(barrier: PhaseBarrier) -> dict[int, _Report]:
    """Of all processes, on process 0."""
    reports: dict[int, _Report] = {}
    until_s = time.monotonic() + barrier.stall_timeout_s
    with barrier.waiting("the other hosts' facts"):
        for process in range(barrier.store.num_processes):
            found = barrier.store.get(f"{_FOLDER}/{process}", max(until_s - time.monotonic(), 0.001))
            if found is None:
                raise MissingHosts("the comparison of the hosts", (process,), barrier.stall_timeout_s)
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
def written(folder: str) -> Iterator[str]:
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
        remove_empty(made)


def unseen(folder: str, mark: str, within_s: float) -> str:
    """What is wrong with the run directory here; empty: what process 0 wrote there is seen, and it can be written."""
    if not mark:
        return ""
    path = Path(os.path.expanduser(folder))
    until_s = time.monotonic() + within_s
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
