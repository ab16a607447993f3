"""The store in memory. `test_world.py` runs the same checks on the one of jax.distributed."""

import threading
from pathlib import Path

import pytest
from stores import check_store

from jaxrl.runtime.hosts.key_value_store import CoordinationStore, MemoryStore, MissingHosts, _missing_processes
from jaxrl.types import RunFailed


@pytest.mark.parametrize("num", [1, 2, 3])
def test_what_a_board_does(num: int):
    errors: list[BaseException] = []

    def run(store: MemoryStore) -> None:
        try:
            check_store(store)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(store,), daemon=True) for store in MemoryStore.of(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors


def test_who_comes_late_finds_the_barrier_broken():
    a, b = MemoryStore.of(2)
    for store in (a, b):
        with pytest.raises(MissingHosts) as caught:
            store.barrier("broken", 0.05)
        assert caught.value.processes == (1,)


def test_missing_hosts_fail_the_run():
    error = MissingHosts("the gate", (3, 1), 5)
    assert isinstance(error, RunFailed)
    assert str(error) == "process 1, 3 did not come to the gate within 5 s"


SAID = """DEADLINE_EXCEEDED: Barrier timed out. Id: b::0. This usually happens because ... to debug further.
# of tasks that reached the barrier: {there}/12.
The first task at the barrier: {first}. Some timed out task names:
{names}


RPC: /xla.coordination.CoordinationService/Barrier [type.googleapis.com/tensorflow.CoordinationServiceError='']"""


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ("1", [1]),
        ("1\n10\n11", [1, 10, 11]),
        ("/job:jax_worker/replica:0/task:7\n/job:jax_worker/replica:0/task:8", [7, 8]),
    ],
)
def test_reading_who_is_missing(names: str, missing: list[int]):
    assert _missing_processes(SAID.format(there=5, first=0, names=names)) == missing


def test_an_error_without_names_names_nobody():
    assert _missing_processes("DEADLINE_EXCEEDED: Barrier timed out.") == []


class Failing:
    """A client of the store that fails as often as it is told, in words of the store."""

    def __init__(self, *errors: str) -> None:
        self.errors, self.values, self.calls = list(errors), dict[str, bytes](), 0

    def key_value_set_bytes(self, key: str, value: bytes, overwrite: bool = False) -> None:
        self.calls += 1
        if key in self.values and not overwrite:
            raise RuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
        lost = self.errors.pop(0) if self.errors else ""
        if not lost or lost.startswith("heard "):
            self.values[key] = value
        if lost:
            raise RuntimeError(lost.removeprefix("heard "))

    def key_value_try_get_bytes(self, key: str) -> bytes:
        return self.values[key]

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        self.calls += 1
        raise RuntimeError(self.errors.pop(0))


def board_with(client: Failing) -> CoordinationStore:
    store = CoordinationStore.__new__(CoordinationStore)
    store.process, store.num_processes, store._client = 1, 2, client
    return store


@pytest.mark.parametrize("lost", ["", "heard "])
def test_a_write_is_tried_again(lost: str):
    """Whether the first try was heard or not, the key has the value and no error is left."""
    client = Failing(f"{lost}UNAVAILABLE: Connection reset by peer")
    board_with(client).put("key", b"value")
    assert (client.values, client.calls) == ({"jaxrl/key": b"\0value"}, 2)


def test_it_is_not_tried_for_ever():
    client = Failing(*["UNAVAILABLE: Socket closed\nmore"] * 9)
    with pytest.raises(
        RunFailed, match=r"process 0 does not answer \(writing jaxrl/key: UNAVAILABLE: Socket closed\)$"
    ):
        board_with(client).put("key", b"value")
    assert client.calls == 4


def test_a_wait_is_not_begun_again():
    """jax aborts in a moment where the store has gone, and a sentence must come before that."""
    client = Failing("UNAVAILABLE: Socket closed", "UNAVAILABLE: Socket closed")
    with pytest.raises(RunFailed, match="reading jaxrl/key"):
        board_with(client).get("key", 5)
    assert client.calls == 1


def test_a_bug_is_no_answer_of_the_store():
    client = Failing("list index out of range")
    with pytest.raises(RuntimeError, match="list index"):
        board_with(client).put("key", b"value")


def test_one_file_alone_knows_the_client():
    """It is a private part of jax."""
    root = Path(__file__).resolve().parents[3] / "jaxrl"
    private = "from jax._src import distributed"
    users = [file.name for file in root.rglob("*.py") if private in file.read_text(encoding="utf-8")]
    assert users == ["key_value_store.py"]
