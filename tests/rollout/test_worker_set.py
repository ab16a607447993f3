"""Several workers on real (virtual) devices: weights, memory, and tokens that do not depend on who draws them."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_parts import made_run
from small_models import model_of, requests, weights_of
from whole_pass import check

from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.rollout.remote import ExecutorFacts, LayoutFacts, RemoteExecutor
from jaxrl.rollout.worker_set import WorkerSet
from jaxrl.run.backend import RolloutBackend
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh, submeshes
from jaxrl.sharding.rules import train_shardings
from jaxrl.types import Sample

SIZES = ExecutorConfig(
    num_slots=4, num_blocks=60, block_size=8, max_length=96, max_prefill_tokens=16, decode_steps=2, dtype=jnp.float64
)


def worker_set(
    name: str, degrees: Sequence[int], train: slice = slice(None), rollout: slice = slice(None), **sizes: Any
) -> tuple[WorkerSet, Any]:
    """A worker for each degree on the rollout's devices, without weights; and the trainer's weights on its own."""
    devices, model = jax.devices(), model_of(name)
    mesh, config = make_mesh(devices[rollout]), replace(SIZES, **({"max_tp": max(degrees)} | sizes))
    params = jax.device_put(weights_of(name, "float64"), train_shardings(model, make_mesh(devices[train])))
    parts = submeshes(mesh, len(degrees))
    executors = [MeshExecutor(model, Layout(part, tp), config) for part, tp in zip(parts, degrees, strict=True)]
    return WorkerSet(mesh, executors), params


def started(workers: WorkerSet, params: Any) -> LocalWorkers:
    """Engines over workers that have weights and pools."""
    workers.sync_weights(params, 3)
    workers.allocate()
    batcher = BatcherConfig(decode_steps=SIZES.decode_steps)
    return LocalWorkers([Engine(executor, batcher) for executor in workers.executors])


def pointers(tree: Any) -> list[tuple[int, int]]:
    """The device and the address of every shard of every leaf."""
    leaves = jax.tree.leaves(tree)
    return [(s.device.id, s.data.unsafe_buffer_pointer()) for leaf in leaves for s in leaf.addressable_shards]


# ---------------------------------------------------------------- weights and memory


SYNCS = {  # model, degrees, the trainer's devices, the rollout's
    "single devices": ("llama", (1,) * 4, slice(4), slice(4)),
    "other degrees": ("qwen2", (4, 1), slice(None), slice(None)),
    "a trainer on other devices": ("smollm2", (1, 2), slice(4), slice(4, None)),
}


@pytest.mark.parametrize("case", SYNCS)
def test_weights_come_to_all_workers_by_one_program(case: str, x64: None, monkeypatch: pytest.MonkeyPatch):
    """`tests/sharding/test_split_mesh.py`: their arrays are shards of the whole, and not copies."""
    name, degrees, train, rollout = SYNCS[case]
    workers, params = worker_set(name, degrees, train, rollout)
    first, seen = workers.executors[0], []
    form = first.rollout_form
    monkeypatch.setattr(first, "rollout_form", lambda *given: (seen.append(form(*given)), seen[-1])[1])
    workers.sync_weights(params, 7)
    assert len(seen) == 1
    for executor in workers.executors:
        for a, b in zip(jax.tree.leaves(executor._params), jax.tree.leaves(seen[0]), strict=True):
            assert a.sharding.device_set == set(executor.layout.mesh.devices.flat)
            assert executor.tp < max(degrees) or a.shape == b.shape
        assert executor.policy_version == 7
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params)), "the trainer keeps its own"
    # again, over the weights that are there
    workers.sync_weights(params, 8)
    workers.allocate()
    batcher = BatcherConfig(decode_steps=SIZES.decode_steps)
    asked = requests(2, 2, 20)
    for executor in workers.executors:
        assert executor.policy_version == 8
        check(name, asked, Engine(executor, batcher).generate(asked))


def test_weights_of_the_next_round_wait_beside_those_in_use(x64: None):
    """Each worker takes its own when it is done; what the others draw with stays."""
    workers, params = worker_set("smollm2", (1, 1), slice(2), slice(2, 4))
    later = jax.tree.map(lambda x: jax.device_put(2 * np.asarray(x), x.sharding), params)
    workers.sync_weights(later, 9)
    expected = [jax.tree.map(np.asarray, executor._params) for executor in workers.executors]
    workers.sync_weights(params, 3)
    assert not workers.is_buffered
    workers.buffer_weights(later, 4)
    left, right = workers.executors
    kept, deadline = pointers(left._params), time.monotonic() + 60
    while not workers.is_buffered:
        assert time.monotonic() < deadline
    workers.take_buffered(1)
    assert [executor.policy_version for executor in workers.executors] == [3, 4]
    assert pointers(left._params) == kept
    assert workers.is_buffered
    workers.take_buffered(0)
    assert not workers.is_buffered
    assert [executor.policy_version for executor in workers.executors] == [4, 4]
    for executor, values in zip(workers.executors, expected, strict=True):
        own = set(executor.layout.mesh.devices.flat)
        assert all(leaf.sharding.device_set == own for leaf in jax.tree.leaves(executor._params))
        jax.tree.map(np.testing.assert_array_equal, executor._params, values)
    assert right.has_weights
    workers.buffer_weights(params, 5)


def test_a_worker_that_was_freed_has_a_pool_in_the_next_rollout(x64: None):
    """Also where nothing was released in between; the other worker's pool stays as it is."""
    workers, params = worker_set("llama", (1, 1), slice(2), slice(2, 4))
    engines = LocalWorkers([Engine(executor, BatcherConfig(decode_steps=2)) for executor in workers.executors])
    pool: Any = None
    backend = RolloutBackend(made_run(engines, workers, pool, weights=lambda: params))
    backend.enter_rollout(3)
    stays, freed = workers.executors
    kept = stays._pool
    engines.close(1)
    workers.release_some([1])
    assert (freed.has_pool, freed.has_weights) == (False, False)
    engines.open(1)
    backend.enter_rollout(4)
    assert stays._pool is kept
    assert len(run(engines, requests(4, 2, 20))) == 8
    assert freed.has_pool
    assert all(engine.counters.plans for engine in engines.engines), "both draw"


# ---------------------------------------------------------------- what runs in a process of its own


def run(workers: LocalWorkers, asked: Sequence[Request], at: Callable[[int], None] = lambda _: None) -> list[Sample]:
    """Runs requests to their ends; `at` is called before each plan, with its number."""
    for request in asked:
        workers.add(request)
    samples: dict[int, Sample] = {}
    plan = 0
    while not workers.is_idle:
        at(plan)
        for finished in workers.step():
            assert finished.request_id not in samples, "told twice"
            samples[finished.request_id] = finished.sample
        plan += 1
    return [samples[request.request_id] for request in asked]


# ---------------------------------------------------------------- tests


def test_two_single_devices_draw_what_one_draws(x64: None):
    asked = requests(4, 3, 40)
    check("llama", asked, run(started(*worker_set("llama", (1, 1), slice(2), slice(2))), asked))


# ---------------------------------------------------------------- executors behind a channel


class Wire:
    """A channel to a host in this process: every call and answer is pickled, and a call runs once it is waited for."""

    def __init__(self, executor: MeshExecutor) -> None:
        self._executor, self._tickets, self._calls = executor, deque[Any](), deque[tuple[int, bytes]]()
        self._answers: dict[int, bytes] = {}
        self._number = 0

    def send(self, method: str, *arguments: Any) -> int:
        self._number += 1
        self._calls.append((self._number, pickle.dumps((method, arguments))))
        return self._number

    def receive(self, sent: int) -> Any:
        while sent not in self._answers:
            number, call = self._calls.popleft()
            method, (_, *rest) = pickle.loads(call)
            self._answers[number] = pickle.dumps(self._run(method, rest))
        return pickle.loads(self._answers.pop(sent))

    def _run(self, method: str, rest: list[Any]) -> Any:
        if method == "submit":
            self._tickets.append(self._executor.submit(*rest))
            return None
        if method == "collect":
            return self._executor.collect(self._tickets.popleft())
        return getattr(self._executor, rest[0])(*rest[1:])


def remote(executor: MeshExecutor) -> RemoteExecutor:
    layout = LayoutFacts(executor.capacity(1), executor.row_sizes(1), executor.verify_widths(1))
    facts = ExecutorFacts(executor.config, 1, {1: layout})
    return RemoteExecutor(Wire(executor), 0, facts, executor.platform)


def ended(executors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """What ends, in its order: with tokens, versions and log-probabilities; five requests are aborted on the way."""
    workers = LocalWorkers([Engine(executor, BatcherConfig(decode_steps=SIZES.decode_steps)) for executor in executors])
    found, aborted = list[tuple[Any, ...]](), list[Sample]()
    for request in requests(6, 3, 40):
        workers.add(request)
    while not workers.is_idle:
        for one in workers.step():
            sample = one.sample
            arrays = (sample.token_ids, sample.versions, sample.rollout_logprobs, sample.sampled_logprobs)
            found.append((sample.key, one.dispatch, one.slot, *(array.tobytes() for array in arrays)))
        if len(found) >= 5 and not aborted:
            aborted = workers.abort(workers.unfinished()[-5:])
    assert len(aborted) == 5
    return found


def test_remote_executors_draw_what_local_ones_draw(x64: None):
    """Plans and results go through bytes, and nothing of what is drawn changes."""
    workers, params = worker_set("llama", (1, 1), slice(2), slice(2))
    started(workers, params)
    local = ended(workers.executors)
    workers.release()
    workers.allocate()
    assert ended([remote(each) for each in workers.executors]) == local
