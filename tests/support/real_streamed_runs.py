"""`streamed_runs` on (virtual) devices: a tiny model draws, and the trainer and its streams learn.

Before each update, what was added up is compared with the gradient of the whole batch, which a second trainer computes
at once with the same weights.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from small_models import TRAINED
from streamed_runs import LONGEST, Machine, Run, prepared

from jaxrl.config import Config
from jaxrl.mechanisms.stream_trainer.gradients import TrainStream
from jaxrl.mechanisms.stream_trainer.scale_down import halves
from jaxrl.models import decoder
from jaxrl.runtime.build import build_workers
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.split_mesh import Half
from jaxrl.train.trainer import MeshTrainer
from jaxrl.types import Group, StreamFailed, TrainBatch

ENDS = (0, 1, 2, 3, 4)  # tokens that end a response: about one in thirteen
WIDE = {
    "actor.dtype": "float64",
    "actor.param_dtype": "float64",
    "actor.ppo_max_token_len_per_gpu": 96,
    "actor.logprob_chunk_tokens": 16,
    "actor.optim": {"lr": 0.01},
    "rollout.dtype": "float64",
    "rollout.num_blocks": 60,
    "rollout.block_size": 8,
    "rollout.max_num_seqs": 16,
}


class Slow(TrainStream):
    """Has room later than its devices have, by some looks drawn from `chance`; fails where it is told so."""

    chance: random.Random
    fails: Callable[[str], bool]
    tell: Callable[[list[list[tuple[int, int]]]], None]  # what was given, when it has ended
    _wait = 0

    def open(self) -> None:
        self._may_fail("open")
        super().open()

    def give(self, groups: Sequence[Group], step: int) -> None:
        self._may_fail("give")
        self._wait = self.chance.choice([0, 1, 4])
        super().give(groups, step)

    def poll(self) -> bool:
        self._may_fail("poll")
        self._wait -= 1
        return super().poll() and self._wait < 0

    def finish(self) -> None:
        self._may_fail("finish")
        self._wait = 0
        super().finish()

    def close(self) -> list[TrainBatch]:
        self._may_fail("close")
        self.tell(self.given)
        return super().close()

    def _may_fail(self, call: str) -> None:
        if self.fails(call):
            raise StreamFailed(f"RESOURCE_EXHAUSTED: no memory in {call}")


class RealRun(Run):
    """A run of a tiny model.

    Attributes:
      gaps: by step, how far the gradient is from that of the whole batch, relative to it.
      is_finite: by step, whether the gradient of the whole batch is finite, and the one that was added up.
      weights: after the last update of the last process.
    """

    def __init__(
        self, folder: Path, values: Mapping[str, Any], seed: int = 3, num_devices: int = 2, timeouts: float = 0.0
    ) -> None:
        super().__init__(folder, WIDE | dict(values), seed, timeouts)
        self.mesh = make_mesh(jax.devices()[:num_devices])
        self.gaps: dict[int, float] = {}
        self.is_finite: dict[int, tuple[bool, bool]] = {}
        self._programs: Any = None
        self._learning: tuple[list[Group], int] = [], 0
        self.weights = np.zeros(0)
        self._given: list[list[tuple[int, int]]] = []

    def _trainer(self, config: Config) -> MeshTrainer:
        params = decoder.init(TRAINED, jax.random.key(0), config.actor.param_dtype)
        trainer = MeshTrainer(config, TRAINED, params, self.mesh, programs=self._programs)
        self._programs = trainer.programs
        trainer.programs.microbatches = trainer.programs.microbatches[-1:]  # one shape: less to compile
        return trainer

    def _machine(self, chance: random.Random) -> Machine:
        trainer, self._judge = self._trainer(self.config), self._trainer(self.config)
        workers = build_workers(self.config, TRAINED, self.mesh, lambda: trainer.params)
        streams = {}
        for index, freed in enumerate(halves(len(workers.executors))):
            stream = streams[freed] = Slow(trainer, Half(self.mesh, index))
            stream.chance, stream.fails, stream.tell = chance, lambda call: self.fails(call), self._closed
            stream.programs.microbatches = stream.programs.microbatches[-1:]
        self._apply, trainer.apply = trainer.apply, self._judged  # pyright: ignore[reportAttributeAccessIssue]
        return Machine(
            trainer,
            workers.executors,
            workers,
            streams,
            workers.release_some,
            lambda: trainer.params,
            ENDS,
            lambda: copy.deepcopy(jax.tree.map(np.asarray, trainer.state())),
            trainer.load_state,
        )

    def _loop(self, journal: Any, chance: random.Random) -> Any:
        loop: Any = super()._loop(journal, chance)
        learn = loop._learn_from

        def learning(groups: list[Group], step: int, track: str = "loop") -> Any:
            self._learning = groups, step
            return learn(groups, step, track)

        loop._learn_from = learning
        return loop

    def _judged(self) -> dict[str, float]:
        """An update, after its gradient has been compared."""
        (groups, step), judge, trainer = self._learning, self._judge, self.sums
        judge._trainable, judge._frozen = trainer._trainable, trainer._frozen
        judge.accumulate(prepared(self.config, judge, groups, step))
        expected, found = flat(judge.gradients()), flat(trainer.gradients())
        judge.discard()
        if np.isfinite(expected).all() and np.isfinite(found).all():
            self.gaps[step] = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        self.is_finite[step] = bool(np.isfinite(expected).all()), bool(np.isfinite(found).all())
        return self._apply()

    def _stepped(self, step: int, measured: dict[str, float], groups: Sequence[Group]) -> None:
        self.groups[step], self.metrics[step] = list(groups), measured
        self.streamed[step], self._given = self._given, []

    def _closed(self, given: list[list[tuple[int, int]]]) -> None:
        self._given = list(given)

    def _ended(self) -> Any:
        self.weights = flat(self.sums.params)
        return None

    def check_learnt(self, tolerance: float) -> None:
        """Every gradient is that of the whole batch, and some were streamed."""
        steps = range(1, self.config.trainer.total_training_steps + 1)
        assert sorted(self.is_finite) == sorted(self.groups) == list(steps)
        assert all(own == expected for expected, own in self.is_finite.values())
        assert max(self.gaps.values()) <= tolerance, self.gaps
        prompts = [group.prompt.key for groups in self.groups.values() for group in groups]
        assert len(set(prompts)) == len(prompts), "trained twice"
        for step in steps:
            given = [key for call in self.streamed[step] for key in call]
            assert len(set(given)) == len(given)
            assert {*given} <= {group.prompt.key for group in self.groups[step]}
            assert self.metrics[step].get("rollout/scale_down/freed", 0) <= 1
            assert 0.2 <= self.metrics[step].get("rollout/scale_down/done_share", 0.2) <= 0.5

    @property
    def streamed_share(self) -> float:
        """Of all prompts that were trained on."""
        return float(np.mean([measured["actor/streamed_share"] for measured in self.metrics.values()]))


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(jnp.ravel(x)) for x in jax.tree.leaves(tree)])


assert LONGEST % 8 == 0, "whole blocks"
