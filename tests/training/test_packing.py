"""Packing: every response lands once, behind its prompt, in its own segment, in few shapes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.config import from_mapping
from jaxrl.kernels.attention import Heads, choose_packed
from jaxrl.models.shapes import SHAPES
from jaxrl.training.packing import BatchShape, dealt, microbatch_shapes, pack
from jaxrl.types import Prompt, Sample, SampleKey, TrainBatch


def batch_of(groups):
    """Groups of (prompt length, response lengths) with tokens and numbers that name themselves."""
    prompts, samples, advantages = [], [], []
    for index, (before, responses) in enumerate(groups):
        prompt = Prompt(0, index, tuple(10_000 + 100 * index + t for t in range(before)), "", "")
        for j, after in enumerate(responses):
            sample = Sample.empty(SampleKey(0, index, j))
            sample.token_ids = 100 * len(samples) + np.arange(after, dtype=np.int32)
            sample.rollout_logprobs = -sample.token_ids.astype(np.float32)
            sample.versions = np.full(after, len(samples), np.int32)
            prompts.append(prompt)
            samples.append(sample)
            advantages.append(np.full(after, len(samples), np.float32))
    return TrainBatch(prompts, samples, advantages)


def check(packed, batch):
    """A response's tokens see exactly the prompt and the response, each place once; nothing else is filled."""
    used = [np.zeros(micro.tokens.shape, bool) for micro in packed.microbatches]
    for i, place in enumerate(packed.places):
        prompt, sample = batch.prompts[i].token_ids, batch.samples[i]
        if place is None:
            assert len(sample) == 0
            continue
        micro, row = packed.microbatches[place.microbatch], place.row
        segment, prefix = (x[row, place.start] for x in (micro.segment_ids, micro.prefix_ids))
        (own,) = np.nonzero(micro.segment_ids[row] == segment)
        (shared,) = np.nonzero(micro.segment_ids[row] == prefix) if prefix != segment else (np.zeros(0, int),)
        columns = np.concatenate([shared, own])
        assert segment > 0
        assert prefix > 0
        for part in (own, shared):
            assert (np.diff(part) == 1).all()
        assert len(shared) == 0 or shared[-1] < own[0]
        assert micro.tokens[row, columns].tolist() == [*prompt, *sample.token_ids]
        assert micro.positions[row, columns].tolist() == list(range(len(prompt) + len(sample)))
        assert (micro.prefix_ids[row, own] == prefix).all()
        assert (micro.prefix_ids[row, shared] == prefix).all()
        before = own[len(own) - len(sample) - 1 : -1]  # the columns that predict the response
        assert before[0] == place.start >= own[0]
        assert micro.targets[row, before].tolist() == sample.token_ids.tolist()
        assert micro.loss_mask[row, own].tolist() == [0] * (len(own) - len(sample) - 1) + [1] * len(sample) + [0]
        assert (micro.sequence_length[row, own] == len(sample)).all()
        assert not micro.loss_mask[row, shared].any()
        assert not micro.sequence_length[row, shared].any()
        assert not used[place.microbatch][row, own].any()
        used[place.microbatch][row, columns] = True
    for micro, filled in zip(packed.microbatches, used, strict=True):
        assert ((micro.segment_ids > 0) == filled).all()
        assert ((micro.prefix_ids > 0) == filled).all()
    assert sum(m.num_sequences.sum() for m in packed.microbatches) == sum(len(s) > 0 for s in batch.samples)
    for values, sample in zip(packed.unpack([m.old_logprobs for m in packed.microbatches]), batch.samples, strict=True):
        np.testing.assert_array_equal(values, sample.rollout_logprobs)


groups_strategy = st.lists(
    st.tuples(st.integers(1, 8), st.lists(st.integers(0, 24), min_size=1, max_size=6)), min_size=1, max_size=8
)


def one_row(tokens):
    """A row of so many tokens, and of a quarter, half and three quarters of them."""
    return tuple(BatchShape(1, tokens * part // 4) for part in range(1, 5))


ROWS_OF_32 = (BatchShape(1, 32), BatchShape(2, 32), BatchShape(4, 32), BatchShape(5, 32))


@given(
    groups_strategy,
    st.sampled_from([(BatchShape(1, 32),), one_row(64), one_row(256), ROWS_OF_32]),
    st.sampled_from([1, 2, 8]),
)
def test_every_token_once(groups, shapes, devices):
    batch = batch_of(groups)
    packed = pack(batch, shapes=shapes, max_model_length=32, num_row_groups=devices)
    found = [
        BatchShape(rows // devices, width) for rows, width in (micro.tokens.shape for micro in packed.microbatches)
    ]
    assert all(shape in shapes for shape in found)
    assert all(shape == shapes[-1] for shape in found[:-1])
    for micro in packed.microbatches:
        assert micro.tokens.shape[0] % devices == 0
    check(packed, batch)


def test_prompts_are_the_same_if_key_and_tokens_are():
    def filled(first, second):
        batch = batch_of([(6, [4]), (6, [4])])
        batch.prompts = [first, second]
        micros = pack(batch, max_model_length=64, shapes=[BatchShape(1, 64)]).microbatches
        return sum(int((m.segment_ids > 0).sum()) for m in micros)

    def prompt(index, tokens):
        return Prompt(0, index, tokens, "", "")

    shared, apart = 5 + 2 * 5, 2 * 10
    assert filled(prompt(0, (1, 2, 3, 4, 5, 6)), prompt(0, (1, 2, 3, 4, 5, 6))) == shared
    assert filled(prompt(0, (1, 2, 3, 4, 5, 6)), prompt(1, (1, 2, 3, 4, 5, 6))) == apart
    assert filled(prompt(0, (1, 2, 3, 4, 5, 6)), prompt(0, (1, 2, 3, 4, 5, 7))) == apart


def test_is_deterministic_and_level():
    random = np.random.default_rng(0)
    batch = batch_of([(8, [int(n)]) for n in random.integers(1, 25, 200)])
    options = {"max_model_length": 32, "shapes": one_row(512), "num_row_groups": 4}
    packed, again = pack(batch, **options), pack(batch, **options)
    assert packed.places == again.places
    for micro in packed.microbatches:
        per_device = (micro.segment_ids.reshape(4, -1) > 0).sum(1)
        assert per_device.max() <= 1.2 * per_device.min()
    filled = sum((m.segment_ids > 0).sum() for m in packed.microbatches)
    assert filled > 0.85 * sum(m.tokens.size for m in packed.microbatches)


def shapes_of(response_length, options, devices, platform, attention):
    data = {"max_prompt_length": 64, "max_response_length": response_length, "train_batch_size": 6}
    sections = {"model": {"path": "unused"}, "data": data, "rollout": {"n": 4}, "actor": options}
    model = SHAPES["SmolLM2-135M"]
    heads = Heads(model.num_heads, model.num_kv_heads, model.head_dim, "float32")
    return microbatch_shapes(from_mapping(sections), model, devices, choose_packed(attention, platform, heads))


def test_shapes():
    """On a CPU a row of the budget, in four sizes; where scores are held, rows of the longest sample."""
    options = {"ppo_max_token_len_per_gpu": 1024}
    assert list(shapes_of(32, options, 1, "cpu", "auto")) == [(1, 256), (1, 512), (1, 768), (1, 1024)]
    assert list(shapes_of(32, options, 1, "cpu", "reference")) == [(3, 96), (5, 96), (8, 96), (10, 96)]


@given(
    st.integers(1, 1500),
    st.integers(0, 1500),
    st.sampled_from([(1, 1), (8, 1), (2, 2), (8, 8)]),
    st.sampled_from([("cpu", "auto"), ("cpu", "reference"), ("tpu", "auto")]),
)
def test_the_longest_sample_has_a_row_and_the_budget_holds(response_length, room, devices, where):
    """Of the devices, `sharing` share a row, in two equal pieces each, and see as many keys as the others."""
    longest, (count, sharing) = 64 + response_length, devices
    each = -(-(longest + room) // sharing)
    options = {"ppo_max_token_len_per_gpu": each, "context_parallel_size": sharing}
    found = shapes_of(response_length, options, count, *where)
    assert found[-1].length >= longest
    assert found[-1].tokens <= max(each * sharing, -(-longest // 16) * 16) + 16 * sharing * (sharing > 1)
    assert all(shape.length % (16 * sharing) == 0 for shape in found)
    assert list(found) == sorted(set(found), key=lambda shape: shape.tokens)
    assert len({*(1 + dealt(1024, sharing).reshape(sharing, -1)).sum(1)}) == 1


def test_errors():
    with pytest.raises(ValueError, match=r"exceeds data\.max_prompt_length"):
        pack(batch_of([(8, [9])]), max_model_length=16, shapes=[BatchShape(1, 16)])
    with pytest.raises(ValueError, match="has no tokens"):
        pack(batch_of([(0, [9])]), max_model_length=16, shapes=[BatchShape(1, 16)])
    assert pack(batch_of([(3, [0])]), max_model_length=16, shapes=[BatchShape(1, 16)]).microbatches == []
