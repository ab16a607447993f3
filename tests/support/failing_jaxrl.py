"""The command `jaxrl` on a machine on which one thing goes wrong: `failing_jaxrl.py FAULT train ...`.

`late`: the host stops for moments of its own; verdicts, and room in the stream, are seen late or at once. `stream`: the
memory of the freed devices is full, at the third part whose gradients are computed there. `device`: a device of the
last worker is lost in the rollout. `nan`: gradients that some prompts give are not numbers.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from typing import Any

import jax
import numpy as np

from jaxrl.cli import main
from jaxrl.mechanisms.stream_trainer import StreamTrainer
from jaxrl.mechanisms.stream_trainer.gradients import TrainStream
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.runtime.verdicts import Verdicts
from jaxrl.train import batch_preparation

calls = itertools.count()
accumulate, collect, set_advantages = TrainStream._accumulate, MeshExecutor.collect, batch_preparation.set_advantages


def without_memory(self: TrainStream, *arguments: Any) -> Any:
    if next(calls) == 2:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nthe allocator's table")
    return accumulate(self, *arguments)


def lost(self: MeshExecutor, ticket: Any) -> Any:
    if jax.devices()[-1] in self.layout.mesh.devices.flat and next(calls) == 90:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is lost")
    return collect(self, ticket)


def not_numbers(config: Any, groups: Any, batch: Any) -> None:
    set_advantages(config, groups, batch)
    batch.advantages = [
        values * np.float32(np.nan if sample.key.prompt_index == 1 else 1)
        for values, sample in zip(batch.advantages, batch.samples, strict=True)
    ]


def late(call: Any, otherwise: Any) -> Any:
    chance = random.SystemRandom()

    def called(*arguments: Any) -> Any:
        time.sleep(chance.choice([0, 0, 0.02]))
        return call(*arguments) if chance.random() < 0.4 else otherwise()

    return called


fault = sys.argv.pop(1)
if fault == "late":
    Verdicts.completed = late(Verdicts.completed, list)
    StreamTrainer.feed = late(StreamTrainer.feed, lambda: None)
elif fault == "stream":
    TrainStream._accumulate = without_memory
elif fault == "device":
    MeshExecutor.collect = lost
else:
    assert fault == "nan"
    batch_preparation.set_advantages = not_numbers
sys.exit(main(sys.argv[1:]))
