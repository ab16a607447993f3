"""What is kept of earlier responses: which rollouts, within which bytes, and through a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from fake_rollout import make_sample
from rounds import Steps, filtering, fresh_batches, key

from jaxrl.scheduling.rounds.history import HistoryStore
from jaxrl.types import Group, Prompt, Sample, SampleKey


def group(index: int, lengths: Sequence[int], epoch: int = 0, rewards: Sequence[float] = ()) -> Group:
    """A scored group; sample i of a prompt has tokens that name it."""
    prompt = Prompt(epoch, index, (1, 2), f"prompt {index}", "test")
    samples: list[Sample] = []
    for i, length in enumerate(lengths):
        sample = make_sample(SampleKey(epoch, index, i), [0] * length, "stop")
        sample.token_ids = sample.token_ids + 100_000 * epoch
        sample.reward = rewards[i] if rewards else float(i)
        samples.append(sample)
    return Group(prompt, samples)


def contents(store: HistoryStore) -> dict[int, list[tuple[int, list[list[int]], list[float]]]]:
    found = {}
    for index in store.prompts():
        history = store.history(index)
        assert history is not None
        found[index] = [
            (each.epoch, [response.tolist() for response in each.responses()], each.rewards.tolist())
            for each in history.rollouts
        ]
    return found


def median(store: HistoryStore, index: int) -> float:
    lengths = store.lengths(index)
    assert lengths is not None
    return lengths.median


def test_the_last_rollouts_of_a_prompt_are_kept():
    store = HistoryStore(epochs=2)
    assert store.history(7) is None
    assert store.lengths(7) is None
    for epoch in range(4):
        assert store.add([group(7, (2, 3), epoch, (0.5, -1.0))]) == [7]
    history = store.history(7)
    assert history is not None
    assert [each.epoch for each in history.rollouts] == [2, 3]
    newest = history.rollouts[-1]
    assert [each.tolist() for each in newest.responses()] == [[307_000, 307_001], [307_100, 307_101, 307_102]]
    assert newest.rewards.tolist() == [0.5, -1.0]
    assert (history.num_responses, history.num_tokens) == (4, 10)


def test_a_rollout_that_comes_after_a_newer_one_counts_for_nothing():
    """A prompt of epoch 0 that waited in a queue until its next epoch had run."""
    store = HistoryStore(epochs=2)
    store.add([group(0, (4, 4), epoch=1)])
    before = contents(store)
    assert store.add([group(0, (9, 9), epoch=0)]) == []
    assert store.add([group(0, (9, 9), epoch=1)]) == [], "nor does another of the same epoch"
    assert contents(store) == before
    assert median(store, 0) == 4


def test_lengths_and_growth():
    store = HistoryStore(epochs=0)  # lengths alone
    assert store.add([group(0, (10, 20, 60)), group(1, (5, 5))]) == []
    assert store.prompts() == []
    assert store.growths().tolist() == []
    store.add([group(0, (30, 40, 50, 70), epoch=1)])
    lengths = store.lengths(0)
    assert lengths is not None
    assert (lengths.median, lengths.mean, lengths.longest, lengths.before) == (45, 47.5, 70, 20)
    assert (lengths.growth, median(store, 1)) == (2.25, 5)
    assert store.growths().tolist() == [2.25]
    store.add([group(1, (4, 4), epoch=1)])
    assert store.growths().tolist() == [2.25, 0.8]


def test_the_oldest_go_first_and_are_counted():
    """16 bytes a token (12 of them its share of the index), 12 a response: 100 bytes for a prompt here."""
    store = HistoryStore(1, 300, index_bytes=lambda responses, tokens: 12 * tokens)
    prompts = [group(i, (2, 2, 0)) for i in range(4)]
    assert store.add(prompts[:3]) == [0, 1, 2]
    assert (store.num_bytes, store.num_evicted) == (300, 0)
    assert store.add([group(0, (2, 2, 0), epoch=1)]) == [0]  # now the youngest
    assert store.add([prompts[3]]) == [3]
    assert (store.prompts(), store.num_evicted, store.num_bytes) == ([2, 0, 3], 1, 300)
    assert median(store, 1) == 2, "lengths stay"
    assert store.add([group(4, (60,))]) == [], "nothing that is larger than the bound is kept"
    assert (store.prompts(), store.num_bytes) == ([], 0)
    assert store.num_evicted == 1 + 4


def filled(rng: np.random.Generator, epochs: int = 2) -> HistoryStore:
    store = HistoryStore(epochs)
    for epoch in range(epochs):
        for index in rng.permutation(5).tolist():
            lengths = rng.integers(0 if index else 1, 40, 3).tolist()
            store.add([group(index, lengths, epoch, rng.normal(size=3).tolist())])
    return store


def test_a_checkpoint_brings_everything_back():
    store = filled(np.random.default_rng(0))
    state = store.state_dict()
    assert all(isinstance(value, int | np.ndarray) for value in state.values()), "flat arrays"
    again = HistoryStore(2)
    again.load_state_dict(state)
    assert contents(again) == contents(store)
    assert again.prompts() == store.prompts(), "the same goes first"
    assert again.num_bytes == store.num_bytes
    assert [again.lengths(i) for i in range(6)] == [store.lengths(i) for i in range(6)]
    for name, value in again.state_dict().items():
        np.testing.assert_array_equal(value, state[name], name)


def test_a_resumed_run_has_its_own_bounds():
    store = filled(np.random.default_rng(1))
    fewer = HistoryStore(1)
    fewer.load_state_dict(store.state_dict())
    assert contents(fewer) == {index: rollouts[-1:] for index, rollouts in contents(store).items()}
    again = HistoryStore(2)
    again.load_state_dict(fewer.state_dict())
    assert contents(again) == contents(fewer), "what was dropped is not in the next checkpoint"
    smaller = HistoryStore(2, max_bytes=store.num_bytes - 1)
    smaller.load_state_dict(store.state_dict())
    assert smaller.prompts() == store.prompts()[1:]
    assert smaller.num_evicted == 1
    none = HistoryStore(0)
    none.load_state_dict(store.state_dict())
    assert none.prompts() == []
    assert median(none, 3) == median(store, 3)


def test_what_dynamic_sampling_leaves_out_is_told():
    """Prompts whose samples all have one reward are filtered; their groups are scored all the same."""
    rule = fresh_batches(2, 2, **filtering(metric="seq_reward"))
    steps = Steps(rule, lambda k: 3, lambda k: float(k.sample_index if k.prompt_index > 1 else 1))
    (result,) = steps.run()
    assert [each.prompt.index for each in result.filtered] == [0, 1]
    assert [[sample.reward for sample in each.samples] for each in result.filtered] == [[1, 1], [1, 1]]
    assert [each.prompt.index for each in result.groups] == [2, 3]
    assert [sample.key for sample in result.filtered[0].samples] == [key(0, 0), key(0, 1)]
    store = HistoryStore(1)
    assert sorted(store.add([*result.groups, *result.filtered])) == [0, 1, 2, 3]
