"""Prompts of a simulation: lengths and identities, no text.

Purpose: `jaxrl.loop.Prompts` without files, tokenizer or grain (which brings jax along). A prompt's index decides its
length, kind and, through the workload, the lengths of its responses; epochs come in a new order each, as in training.

Departures: the order is numpy's for (seed, epoch), not grain's: equally random, but not the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl.sim.workload import Workload
from jaxrl.types import Prompt

_STATE_VERSION = 1


class SimulatedPrompts:
    """`num_prompts` prompts, epoch after epoch.

    Args:
      max_prompt_length: tokens at which prompts are cut.
      shuffle: a new order in each epoch; else that of the indices.
    """

    def __init__(
        self, workload: Workload, num_prompts: int, max_prompt_length: int, seed: int, shuffle: bool = True
    ) -> None:
        if num_prompts < 1:
            raise ValueError(f"simulate.num_prompts ({num_prompts}) must be >= 1")
        self.num_prompts = num_prompts
        self._workload = workload
        self._max_prompt_length = max_prompt_length
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def next(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; batches cross the ends of epochs."""
        positions = range(self._position, self._position + num_prompts)
        self._position += num_prompts
        return [self.prompt(self._index(p), p // self.num_prompts) for p in positions]

    def get(self, epoch: int, index: int) -> Prompt:
        """A prompt that was handed out before, by its key."""
        return self.prompt(index, epoch)

    def held_out(self, count: int) -> list[Prompt]:
        """Prompts for evaluation, which training never sees."""
        return [self.prompt(self.num_prompts + i, 0) for i in range(count)]

    def prompt(self, index: int, epoch: int) -> Prompt:
        kind = self._workload.kind_name(index)
        length = max(min(self._workload.prompt_length(index), self._max_prompt_length), 1)
        return Prompt(epoch, index, (0,) * length, f"simulated prompt {index} of {kind}", kind)

    def state(self) -> dict[str, Any]:
        """The cursor, as JSON values."""
        return {"version": _STATE_VERSION, "position": self._position, **self._identity()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved cursor. Raises ValueError for one of another set of prompts."""
        expected = {"version": _STATE_VERSION, **self._identity()}
        found = {name: state.get(name) for name in expected}
        if found != expected:
            raise ValueError(
                f"prompts: saved with {found}, found {expected}: simulate.num_prompts, data.seed and data.shuffle of a "
                "resumed simulation must be what they were"
            )
        self._position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {"num_prompts": self.num_prompts, "seed": self._seed, "shuffle": self._shuffle}

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, self.num_prompts)
        if not self._shuffle:
            return place
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(self.num_prompts)
        return int(self._order[1][place])
