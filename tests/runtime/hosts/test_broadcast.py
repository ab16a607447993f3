"""What the first process finds out, all hear, the errors among it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrl.runtime.hosts import broadcast
from jaxrl.runtime.hosts.broadcast import broadcast_from_rank0, local_broadcast
from jaxrl.runtime.hosts.key_value_store import MemoryStore
from jaxrl.train.steps import Choice
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
    assert local_broadcast("a checkpoint", lambda: "step 7") == "step 7"


def test_a_choice_is_told_whole():
    for choice in (Choice(3), Choice(0, {7: "host/metadata is missing", 5: "it is empty"})):
        assert Choice.from_json(choice.to_json()) == choice
