"""What hosts have drawn comes to all of them, bit for bit, whatever the lengths and who has drawn what."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from host_worlds import EXCHANGE, check_exchange, run_world

from jaxrl.runtime.devices import ProcessDevices
from jaxrl.runtime.hosts.tokens import Exchanged, TokenExchange, _header, _packed, _unpack
from jaxrl.sharding.memory import DeviceMemory
from jaxrl.types import RunFailed, Sample, SampleKey

MEMORY = DeviceMemory("cpu", None, 1 << 30)


def sample(number: int, length: int, seed: int = 0) -> Sample:
    words = np.random.default_rng((seed, number)).integers(-(2**31), 2**31, (4, length)).astype(np.int32)
    floats = words[2].view(np.float32), words[3].view(np.float32)
    return Sample(SampleKey(0, number, 0), words[0], *floats, words[1], "length")


def placeholder(like: Sample) -> Sample:
    ints, floats = np.broadcast_to(np.int32(0), len(like)), np.broadcast_to(np.float32(0), len(like))
    return Sample(like.key, ints, floats, floats, ints, "length")


@pytest.mark.slow
def test_three_hosts(tmp_path: Path):
    """`test_global_training.py` has two, and four."""
    check_exchange(run_world("tokens", tmp_path, 3, 2, **EXCHANGE))


def test_one_process_has_all_already():
    place = ProcessDevices(0, 1, (None,), (None,), MEMORY)
    mine = sample(0, 7)
    assert TokenExchange(place).exchange([mine], [0]) == Exchanged()


def test_samples_that_were_not_awaited_end_the_run():
    theirs = [sample(0, 5), sample(1, 0), sample(2, 9)]
    words = _packed(theirs)
    awaited = [placeholder(each) for each in theirs]
    _unpack(np.concatenate([words, np.zeros(99, np.int32)]), awaited, 1)
    for each, expected in zip(awaited, theirs, strict=True):
        assert each.token_ids.tobytes() == expected.token_ids.tobytes()
        assert each.rollout_logprobs.tobytes() == expected.rollout_logprobs.tobytes()
        assert each.token_ids.flags.owndata, "the buffer of all is not kept for one"
    for others in (
        [placeholder(theirs[0])],
        [placeholder(theirs[1]), placeholder(theirs[0]), placeholder(theirs[2])],
        [placeholder(sample(3, 5)), *awaited[1:]],
    ):
        with pytest.raises(
            RunFailed, match=r"host 1 sends 3 samples of 14 tokens where .* the hosts do not handle the"
        ):
            _unpack(words, others, 1)
    assert len(_header([])) == len(_packed([]))
