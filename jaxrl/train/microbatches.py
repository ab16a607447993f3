"""Microbatches on one mesh: log-probabilities or values, and gradients that add up.

Purpose: the part of the trainer that runs programs with given weights: its own, or a copy on other devices, for
gradients beside a rollout. What is done with the sums is the caller's part.

Each of the two is a generator that hands one microbatch to the devices per turn, so that its caller decides how far the
host may be ahead: the trainer waits for the microbatch before the last one; beside a rollout one goes on when one has
run.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from jaxrl.train.packing import Packed, TokenBatch, dealt, pack
from jaxrl.train.programs import Accumulator, TrainPrograms
from jaxrl.types import TrainBatch

Tree = Any


class Passes:
    """Forward and backward passes with the programs of one mesh.

    Attributes:
      programs: what runs.
      accumulator: the sums since the last `take` or `discard`; None: there are none.
    """

    def __init__(self, programs: TrainPrograms) -> None:
        self.programs = programs
        self.accumulator: Accumulator | None = None

    def forward(self, params: Tree, batch: TrainBatch, kind: str) -> Generator[jax.Array, None, list[np.ndarray]]:
        """Yields the result of each microbatch once it is handed over; returns float32 [T_i, ...] per sample.

        `kind`: the program: `logprobs`, `ref_logprobs` for weights of the reference's dtype, a critic's `values`, or a
        teacher's `top_logprobs`.

        Raises ValueError for a sample that is too long.
        """
        packed = self.pack(batch)
        results: list[jax.Array] = []
        for micro in packed.microbatches:
            program = self.programs.to_run((kind, *micro.tokens.shape))
            results.append(program(params, self.on_device(micro)))
            yield results[-1]
        found = [np.asarray(x)[:, np.argsort(self._order(x.shape[1]))] for x in results]
        return [x.astype(np.float32) for x in packed.unpack(found)]

    def accumulate(self, trainable: Tree, frozen: Tree, batch: TrainBatch) -> Generator[jax.Array, None, None]:
        """Adds the gradients and denominators of some samples; yields a number of each microbatch once it is handed
        over."""
        for micro in self.pack(batch, self.programs.objective.teacher_top_k).microbatches:
            if self.accumulator is None:
                self.accumulator = self.programs.to_run(("zeros", 0, 0))()
            program = self.programs.to_run(("accumulate", *micro.tokens.shape))
            self.accumulator, result = program(trainable, frozen, self.accumulator, self.on_device(micro))
            yield result

    def take(self) -> Accumulator | None:
        """The sums, which are the caller's from now on."""
        sums, self.accumulator = self.accumulator, None
        return sums

    def discard(self) -> None:
        """Frees the sums now, without waiting for Python's garbage collector: the KV pool takes their place."""
        for leaf in jax.tree.leaves(self.take()):
            leaf.delete()

    def pack(self, batch: TrainBatch, top_k: int = 0) -> Packed:
        """The samples in microbatches of this mesh's shapes; `top_k`: with so many tokens of a teacher's."""
        programs = self.programs
        return pack(
            batch,
            shapes=programs.microbatches,
            max_model_length=programs.config.max_model_length,
            num_groups=programs.layout.dp,
            share_prompts=programs.config.actor.share_prompts,
            top_k=top_k,
        )

    def on_device(self, batch: TokenBatch) -> TokenBatch:
        """A microbatch with its rows split over the mesh, the columns of each as `dealt` has them."""
        batch, rows = batch.with_columns(self._order(batch.tokens.shape[1])), self.programs.rows
        # the callback form works on several processes, each of which packs the same batch
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, rows(x.ndim), x.__getitem__), batch)

    def _order(self, length: int) -> np.ndarray:
        return dealt(length, self.programs.layout.tp)
