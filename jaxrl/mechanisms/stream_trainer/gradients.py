"""Gradients of groups that are complete, on half of the trainer's devices, while the others still decode.

Source: RollPacker §4.4 ("Overlapped Stream Execution", "Preserving On-Policy Semantics") and §5 (gradients without
optimizer states). The weights are the trainer's, which does not update meanwhile. Sums are unnormalised and kept with
their denominator, so the update is the complete batch's, for any choice of streamed groups and any cut into parts. With
the same parts in the same order it is the same bit for bit.

Departures:

- The paper scales each replica's mean by n_i / N. Here nothing is divided before the update, so there is nothing to
  scale.
- Gradients wait on the devices, not in host memory: the next microbatch adds to them.
- Reference log-probabilities: the paper leaves open how weights are swapped. Here all sets of weights lie in host
  memory and one of them on the devices, for as long as the stream is open; a teacher's are one more. Without either
  there is no copy in host memory.

Memory on a device of the half: `StreamTrainer.freed_memory`. The other devices hold nothing for it until `close`.

A stream waits for its devices in `finish` and `close` alone. Where they fail, it says so with `StreamFailed`, at the
latest in `close`: nothing of it is in the trainer then. A gradient that is not finite is in the sums, for which the
update is skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jaxrl.models.lora import without_adapters
from jaxrl.sharding.split_mesh import Half
from jaxrl.training import batch_preparation
from jaxrl.training.programs import Accumulator, TrainPrograms
from jaxrl.training.teacher import MeshTeacher, base_weights, shares_base
from jaxrl.training.trainer import MeshTrainer
from jaxrl.types import Group, StreamFailed, TrainBatch

Tree = Any
Work = Generator[jax.Array, None, None]
"""Yields what was dispatched to the devices."""

AHEAD = 2
"""Microbatches of gradients that the devices have at once, so that they need not wait for the host."""


class TrainStream:
    """The stream of one trainer; open for one round at a time. Its methods, but `abandon`, raise `StreamFailed`.

    Attributes:
      programs, teacher_programs: what runs on the half.
      given: keys of the prompts that were given since `open`, as they were given together.
    """

    def __init__(self, trainer: MeshTrainer, half: Half, teacher: MeshTeacher | None = None) -> None:
        assert half.whole == trainer.mesh, "a half of other devices"
        self.half = half
        self.programs = trainer.programs.without_updates(half.mesh)
        self.given: list[list[tuple[int, int]]] = []
        self._trainer = trainer
        self._sums: Accumulator | None = None
        self._teacher = teacher
        self.teacher_programs = None if teacher is None else teacher.programs.without_updates(half.mesh)
        self._weights: _Weights | None = None
        self._work: Work | None = None
        self._running: deque[Any] = deque()  # arrays, of which the oldest is there first
        self._ahead = 1  # microbatches that the devices may have at once now
        self._batches: list[TrainBatch] = []

    def open(self) -> None:
        """Copies the trainer's weights, and the reference's, to the half. Nothing is waited for but copies."""
        assert self._weights is None, "the stream is open already"
        with _failures():
            has_base = self.programs.model_config.lora is not None
            others = {"ref": (None if has_base else self._trainer.ref_params, self.programs.shardings)}
            if self._teacher is not None and self.teacher_programs is not None:
                own = None if shares_base(self._trainer.config) else self._teacher.params
                others["teacher"] = own, self.teacher_programs.shardings
            self._weights = _Weights(self.half, self._trainer.params, self.programs.shardings, others)

    def give(self, groups: Sequence[Group], step: int) -> None:
        """Begins the gradients of scored groups that will be in the batch of update `step`, in this order; nothing
        that was given before may be under way."""
        assert self._weights is not None, "the stream is closed"
        assert self._work is None, "the stream is busy"
        self.given.append([group.prompt.key for group in groups])
        self._work = self._learn_from(list(groups), step, self._weights)
        self.poll()

    def poll(self) -> bool:
        """Collects what the devices have finished; returns whether nothing is left."""
        while True:
            with _failures():
                while self._running and self._running[0].is_ready():
                    self._running.popleft().block_until_ready()  # raises what has failed
                if self._work is None or len(self._running) >= self._ahead:
                    return self._work is None and not self._running
                try:
                    self._running.append(next(self._work))
                except StopIteration:
                    self._work = None

    def wait_quiet(self) -> None:
        """Waits until the devices have run what they have got of it so far."""
        with _failures():
            jax.block_until_ready(tuple(self._running))

    def finish(self) -> None:
        while not self.poll():
            with _failures():
                self._running[0].block_until_ready()

    def close(self) -> list[TrainBatch]:
        """Waits for what was given, and gives the sums to the trainer as the beginning of its minibatch. Returns a
        batch for each `give`, with log-probabilities, masks and advantages."""
        self.finish()
        sums, self._sums = self._sums, None
        self._release()
        if sums is not None:
            shardings = jax.tree.map(lambda x: x.sharding, self._trainer.programs.sums)
            with _failures():
                returned = jax.block_until_ready(self.half.give_back(sums, shardings))
            self._trainer.begin_with(returned)
        batches, self._batches, self.given = self._batches, [], []
        return batches

    def abandon(self) -> None:
        """Drops everything, as if nothing had been given: the round has been given up, or a device has failed."""
        self._work = None
        self._running.clear()
        _delete(self._sums)
        self._sums = None
        self._release()
        self._batches, self.given = [], []

    # -- inside ------------------------------------------------------------------------------------------------------

    def _learn_from(self, groups: list[Group], step: int, weights: _Weights) -> Work:
        """The loop's training on a batch (`jaxrl.loop`), for these groups alone."""
        config, batch = self._trainer.config, TrainBatch.of(groups)
        self._ahead = 1  # log-probabilities come back to the host, which must not wait for them
        current = None
        if batch_preparation.needs_policy(config, batch, step):
            current = yield from self._forward(self.programs, "logprobs", weights.on_device("actor"), batch)
        batch.old_logprobs = batch_preparation.old_logprobs(config, batch, step, current)
        if config.needs_ref:
            params = weights.on_device("ref")
            batch.ref_logprobs = yield from self._forward(self.programs, "ref_logprobs", params, batch)
        if (programs := self.teacher_programs) is not None:
            assert self._teacher is not None, "its programs are there"
            params = weights.on_device("teacher")
            if shares_base(config):
                params = base_weights(programs, params)
            (kind,) = programs.objective.passes
            found = yield from self._forward(programs, kind, params, self._teacher.read(batch))
            self._teacher.write(batch, found)
        batch.loss_masks = batch_preparation.loss_masks(config, batch, step)
        batch_preparation.set_advantages(config, groups, batch)
        self._ahead = AHEAD
        yield from self._accumulate(weights, batch)
        self._batches.append(batch)

    def _forward(
        self, programs: TrainPrograms, kind: str, params: Tree, batch: TrainBatch
    ) -> Generator[jax.Array, None, list[np.ndarray]]:
        """`TrainPrograms.forward`, one microbatch a turn."""
        packed, results = programs.pack(batch), list[jax.Array]()
        for microbatch in packed.microbatches:
            results.append(programs.dispatch(kind, params, microbatch))
            yield results[-1]
        return programs.unpack(packed, results)

    def _accumulate(self, weights: _Weights, batch: TrainBatch) -> Work:
        """`MeshTrainer.accumulate`, one microbatch a turn."""
        trainable, frozen = self.programs.partition(weights.on_device("actor"))
        for microbatch in self.programs.pack(batch, for_loss=True).microbatches:
            self._sums, result = self.programs.add_gradients(trainable, frozen, self._sums, microbatch)
            yield result

    def _release(self) -> None:
        if self._weights is not None:
            self._weights.release()
        self._weights = None


class _Weights:
    """The trainer's weights on the half, and in turns with them others: each with its shardings there. A reference or a
    teacher that is not among them is the base of adapters."""

    def __init__(self, half: Half, actor: Tree, shardings: Tree, others: dict[str, tuple[Tree | None, Tree]]) -> None:
        self._shardings: dict[str, Tree] = {"actor": shardings}
        self._in_host: dict[str, Tree] = {}
        self._resident = "actor"
        for name, (params, own) in others.items():
            if params is not None:
                self._shardings[name] = own
                self._in_host[name] = self._to_host(half.lend(params, own), own)
        self._on_device = half.lend(actor, shardings)
        if self._in_host:
            self._in_host["actor"] = self._to_host(self._on_device, shardings, keep=True)

    def on_device(self, which: str) -> Tree:
        """Moves these weights to the devices, in place of the others."""
        if which not in self._shardings:
            return without_adapters(self.on_device("actor"))
        if which != self._resident:
            _delete(self._on_device)
            self._on_device = jax.device_put(self._in_host[which], self._shardings[which])
            self._resident = which
        return self._on_device

    def release(self) -> None:
        for tree in (self._on_device, *self._in_host.values()):
            _delete(tree)

    def _to_host(self, tree: Tree, shardings: Tree, keep: bool = False) -> Tree:
        places = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), shardings)
        copied = jax.device_put(tree, places)
        if not keep:
            jax.block_until_ready(copied)  # before the devices get the other weights
            _delete(tree)
        return copied


@contextmanager
def _failures() -> Iterator[None]:
    """The first line of jax's message about devices that fail."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise StreamFailed(str(error).partition("\n")[0]) from error


def _delete(tree: Tree) -> None:
    for leaf in jax.tree.leaves(tree):
        leaf.delete()
