"""Packing: everything lands once, in its own segment, in few shapes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.train.packing import bucket_length, pack, row_buckets, row_length
from jaxrl.types import Prompt, Sample, SampleKey, TrainBatch


def batch_of(lengths):
    """Samples of (prompt, response) lengths whose tokens and numbers name themselves."""
    prompts, samples, advantages = [], [], []
    for i, (before, after) in enumerate(lengths):
        prompts.append(Prompt(0, i, tuple(100 * i + t for t in range(before)), "", ""))
        sample = Sample.empty(SampleKey(0, i, 0))
        sample.token_ids = 100 * i + before + np.arange(after, dtype=np.int32)
        sample.rollout_logprobs = -sample.token_ids.astype(np.float32)
        sample.versions = np.full(after, i, np.int32)
        samples.append(sample)
        advantages.append(np.full(after, i, np.float32))
    return TrainBatch(prompts, samples, advantages)


lengths_strategy = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 24)), min_size=1, max_size=20)


@given(lengths_strategy, st.sampled_from([16, 64, 100]), st.sampled_from([1, 2, 8]))
def test_every_token_once(lengths, budget, devices):
    batch = batch_of(lengths)
    packed = pack(batch, max_model_length=32, max_tokens_per_device=budget, num_devices=devices)
    seen = 0
    for micro in packed.microbatches:
        rows, width = micro.tokens.shape
        assert rows % devices == 0
        assert rows // devices == 1 or rows // devices * width <= budget
        for row in range(rows):
            for segment in range(1, micro.segment_ids[row].max() + 1):
                (columns,) = np.nonzero(micro.segment_ids[row] == segment)
                assert columns.tolist() == list(range(columns[0], columns[-1] + 1))
                i = micro.tokens[row, columns[0]] // 100
                before, after = lengths[i]
                assert (micro.tokens[row, columns] == 100 * i + np.arange(before + after)).all()
                assert (micro.positions[row, columns] == np.arange(before + after)).all()
                assert (micro.loss_mask[row, columns] == (np.arange(before + after) >= before)).all()
                assert (micro.sequence_length[row, columns] == after).all()
                seen += 1
            assert micro.num_sequences[row] == micro.segment_ids[row].max()
        assert (micro.loss_mask[micro.segment_ids == 0] == 0).all()
    assert seen == sum(after > 0 for _, after in lengths)
    for values, sample in zip(packed.unpack([m.old_logprobs for m in packed.microbatches]), batch.samples, strict=True):
        np.testing.assert_array_equal(values, sample.rollout_logprobs)


def test_is_deterministic_and_level():
    random = np.random.default_rng(0)
    lengths = [(8, int(n)) for n in random.integers(1, 25, 200)]
    packed = pack(batch_of(lengths), max_model_length=32, max_tokens_per_device=512, num_devices=4)
    again = pack(batch_of(lengths), max_model_length=32, max_tokens_per_device=512, num_devices=4)
    assert packed.places == again.places
    for micro in packed.microbatches:
        per_device = (micro.segment_ids.reshape(4, -1) > 0).sum(1)
        assert per_device.max() <= 1.1 * per_device.min()
    filled = sum((m.segment_ids > 0).sum() for m in packed.microbatches)
    assert filled > 0.85 * sum(m.tokens.size for m in packed.microbatches)


def test_shapes_are_few():
    assert [bucket_length(n) for n in (1, 17, 128, 129, 192, 257, 500, 513, 1100)] == [
        16, 32, 128, 160, 192, 320, 512, 640, 1280,
    ]  # fmt: skip
    assert row_length(300, 300) == 304
    assert row_buckets(1) == [1]
    assert row_buckets(8) == [1, 2, 4, 8]
    assert row_buckets(10) == [1, 2, 4, 8, 10]
    random = np.random.default_rng(0)
    shapes = set()
    for _ in range(50):
        lengths = [(8, int(n)) for n in random.integers(1, 25, 16)]
        packed = pack(batch_of([*lengths, (8, 24)]), max_model_length=32, max_tokens_per_device=128)
        shapes |= {m.tokens.shape for m in packed.microbatches}
    assert shapes <= {(1, 32), (2, 32), (4, 32)}


def test_several_spans():
    mask = np.array([1, 0, 0, 1, 1], np.float32)
    packed = pack(batch_of([(2, 5)]), max_model_length=16, max_tokens_per_device=16, loss_masks=[mask])
    (micro,) = packed.microbatches
    assert micro.loss_mask[0].tolist() == [0, 0, 1, 0, 0, 1, 1] + [0] * 9
    assert micro.sequence_length[0, :7].tolist() == [3] * 7


def test_errors():
    with pytest.raises(ValueError, match=r"exceeds data\.max_prompt_length"):
        pack(batch_of([(8, 9)]), max_model_length=16, max_tokens_per_device=16)
    with pytest.raises(ValueError, match="has no tokens"):
        pack(batch_of([(0, 9)]), max_model_length=16, max_tokens_per_device=16)
    assert pack(batch_of([(3, 0)]), max_model_length=16, max_tokens_per_device=16).microbatches == []
