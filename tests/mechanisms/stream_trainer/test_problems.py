"""On which devices no gradients can be computed beside the rollout."""

from __future__ import annotations

import re

import pytest

from jaxrl.config import from_mapping
from jaxrl.mechanisms.stream_trainer import StreamTrainer


@pytest.mark.parametrize(
    ("count", "sentence"),
    [
        (1, r"the number of devices \(trainer\.num_devices\) must be a power of two, found 1$"),
        (6, r"the number of devices \(trainer\.num_devices\) must be a power of two, found 6$"),
        (2, None),
        (8, None),
    ],
)
def test_devices_without_a_stream(count: int, sentence: str | None):
    problem = StreamTrainer.devices_problem(count)
    assert problem is None if sentence is None else re.search(sentence, problem or "")


@pytest.mark.parametrize(("actor", "refused"), [({"use_kl_loss": True}, True), ({}, False)])
def test_a_reference_in_the_hosts_memory_is_refused(actor: dict[str, bool], refused: bool):
    given = {
        "model": {"path": "x"},
        "rollout": {"num_workers": 2},
        "trainer": {"stream": {"enable": True}},
        "actor": actor | {"offload_reference": True},
    }
    problem = StreamTrainer.problem(from_mapping(given), ())
    assert ("trainer.stream.enable excludes actor.offload_reference" in str(problem)) == refused, problem
