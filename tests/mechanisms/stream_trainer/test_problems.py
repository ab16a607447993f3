"""On which devices no gradients can be computed beside the rollout."""

from __future__ import annotations

import pytest

from jaxrl.config import from_mapping
from jaxrl.mechanisms.stream_trainer import StreamTrainer


def test_devices_without_a_stream():
    sentence = "the number of devices (trainer.num_devices) must be a power of two, found 6"
    assert (StreamTrainer.devices_problem(6) or "").endswith(sentence)
    assert StreamTrainer.devices_problem(8) is None


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
