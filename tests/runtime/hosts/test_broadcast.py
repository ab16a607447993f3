"""What one process finds out, all hear, the errors among it; and so they compare a checkpoint together."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from damage import files_of, flip, saved

from jaxrl.runtime.hosts import broadcast
from jaxrl.runtime.hosts.broadcast import broadcast_from_any, broadcast_from_rank0
from jaxrl.runtime.hosts.key_value_store import MemoryStore
from jaxrl.train import manifest
from jaxrl.train.steps import Choice, Peers, choose
from jaxrl.types import RunFailed


@pytest.mark.parametrize("error", [None, ValueError, RunFailed])
def test_all_hear_the_same(error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(broadcast, "_LOOK_S", 0.05)
    asked, beats, go = [], [], threading.Event()

    def found() -> str:
        asked.append(1)
        go.wait(10)
        if error is not None:
            raise error("each step is damaged")
        return "step 7"

    def beat() -> None:
        beats.append(1)
        go.set()  # the others wait before it is there

    with ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(broadcast_from_rank0(store, beat), "a checkpoint", found) for store in MemoryStore.of(3)]
        for job in jobs:
            if error is None:
                assert job.result() == "step 7"
            else:
                with pytest.raises(error, match="each step is damaged"):
                    job.result()
    assert len(asked) == 1
    assert beats


@pytest.mark.parametrize("error", [None, ValueError, RunFailed])
@pytest.mark.parametrize("finder", [0, 1, 2, None])
def test_all_hear_what_any_has_found(finder: int | None, error: type[Exception] | None):
    def look(store: MemoryStore) -> str:
        def make() -> str:
            if store.process != finder:
                return ""
            if error is not None:
                raise error("a later version")
            return f"found by {finder}"

        return broadcast_from_any(store)("a step", make)

    with ThreadPoolExecutor(3) as threads:
        for job in [threads.submit(look, store) for store in MemoryStore.of(3)]:
            if finder is None or error is None:
                assert job.result() == ("" if finder is None else f"found by {finder}")
            else:
                with pytest.raises(error, match="a later version"):
                    job.result()


def test_each_process_compares_a_share_and_all_choose_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = saved(tmp_path / "checkpoints", 2, 4)
    really, compared = manifest._fault, Counter[str]()

    def fault(path: Path, *arguments: Any) -> str | None:
        compared[str(path.relative_to(folder))] += 1
        return really(path, *arguments)

    monkeypatch.setattr(manifest, "_fault", fault)

    def all_choose() -> list[Choice | None]:
        peers = [
            Peers(store.process, 3, broadcast_from_rank0(store), broadcast_from_any(store))
            for store in MemoryStore.of(3)
        ]
        with ThreadPoolExecutor(3) as threads:
            return [*threads.map(lambda each: choose(folder, peers=each), peers)]

    assert all_choose() == [Choice(4)] * 3
    files = {f"4/{file.relative_to(folder / '4')}" for file in files_of(folder / "4")} - {"4/manifest.json"}
    assert compared == dict.fromkeys(files, 1)
    for name in sorted(files):  # whoever has it in its share
        whole = (folder / name).read_bytes()
        flip(folder / name)
        fault_text = f"{name.removeprefix('4/')} has changed since it was written"
        assert all_choose() == [Choice(2, {4: fault_text})] * 3
        (folder / name).write_bytes(whole)
