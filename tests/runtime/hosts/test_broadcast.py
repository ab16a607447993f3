"""What the first process finds out, all hear, the errors among it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrl.runtime.hosts.broadcast import broadcast_from_rank0, local_broadcast
from jaxrl.train.steps import Choice
from jaxrl.types import RunFailed


class Wall:
    """A store of threads."""

    def __init__(self, process: int, values: dict[str, bytes], written: threading.Condition) -> None:
        self.process, self._values, self._written = process, values, written

    def put(self, key: str, value: bytes) -> None:
        with self._written:
            assert key not in self._values
            self._values[key] = value
            self._written.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes | None:
        with self._written:
            self._written.wait_for(lambda: key in self._values, min(timeout_s, 0.05))
            return self._values.get(key)


@pytest.mark.parametrize("error", [None, ValueError, RunFailed])
def test_all_hear_the_same(error: type[Exception] | None):
    values: dict[str, bytes] = {}
    written, asked, beats, go = threading.Condition(), [], [], threading.Event()

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
        jobs = [
            threads.submit(broadcast_from_rank0(Wall(process, values, written), beat), "a checkpoint", found)
            for process in range(3)
        ]
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
