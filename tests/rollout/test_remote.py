"""Executors behind a channel: plans and results go through bytes, and nothing of what is drawn changes."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from small_models import model_of, requests, weights_of

from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.rollout.remote import ExecutorFacts, LayoutFacts, RemoteExecutor
from jaxrl.rollout.worker_set import WorkerSet
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh, submeshes
from jaxrl.sharding.rules import train_shardings

SIZES = ExecutorConfig(
    num_slots=4, num_blocks=60, block_size=8, max_length=96, max_prefill_tokens=16, decode_steps=2, dtype=jnp.float32
)


class Wire:
    """A channel to a host in this process: every call and answer is pickled, and a call runs once it is waited for."""

    def __init__(self, executors: Sequence[MeshExecutor]) -> None:
        self._executors, self._tickets, self._calls = executors, deque[Any](), deque[tuple[int, bytes]]()
        self._answers: dict[int, bytes] = {}
        self._number = 0

    def send(self, method: str, *arguments: Any) -> int:
        self._number += 1
        self._calls.append((self._number, pickle.dumps((method, arguments))))
        return self._number

    def receive(self, sent: int) -> Any:
        while sent not in self._answers:
            number, call = self._calls.popleft()
            method, (worker, *rest) = pickle.loads(call)
            self._answers[number] = pickle.dumps(self._run(method, self._executors[worker], rest))
        return pickle.loads(self._answers.pop(sent))

    def _run(self, method: str, executor: MeshExecutor, rest: list[Any]) -> Any:
        if method == "submit":
            self._tickets.append(executor.submit(*rest))
            return None
        if method == "collect":
            return executor.collect(self._tickets.popleft())
        return getattr(executor, rest[0])(*rest[1:])


@pytest.fixture(scope="module")
def executors() -> list[MeshExecutor]:
    """Two, with weights and pools, at tp 1 and on devices of their own."""
    mesh, model = make_mesh(jax.devices()[:2]), model_of("llama")
    params = jax.device_put(weights_of("llama", "float32"), train_shardings(model, mesh))
    made = [MeshExecutor(model, Layout(part, 1), SIZES) for part in submeshes(mesh, 2)]
    workers = WorkerSet(mesh, made)
    workers.sync_weights(params, 3)
    workers.allocate()
    return made


def remote(executor: MeshExecutor) -> RemoteExecutor:
    layout = LayoutFacts(executor.capacity(1), executor.row_sizes(1), executor.verify_widths(1))
    facts = ExecutorFacts(executor.config, executor.max_prefill_tokens, executor.stacks, 1, {1: layout})
    return RemoteExecutor(Wire([executor]), 0, facts, executor.platform)


def run(executors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """What ends, in its order: with tokens, versions and log-probabilities; five requests are aborted on the way."""
    engines = [Engine(executor, BatcherConfig(decode_steps=SIZES.decode_steps)) for executor in executors]
    workers, ended = LocalWorkers(engines), list[tuple[Any, ...]]()
    for request in requests():
        workers.add(request)
    while not workers.is_idle:
        for one in workers.step():
            sample = one.sample
            arrays = (sample.token_ids, sample.versions, sample.rollout_logprobs, sample.sampled_logprobs)
            ended.append((sample.key, one.dispatch, one.slot, *(array.tobytes() for array in arrays)))
        if len(ended) == 7:
            workers.abort(workers.unfinished()[-5:])
    return ended


def test_remote_executors_draw_what_local_ones_draw(executors: list[MeshExecutor]):
    local = run(executors)
    for executor in executors:
        executor.allocate()
    assert run([remote(each) for each in executors]) == local
