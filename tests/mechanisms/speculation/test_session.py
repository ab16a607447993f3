"""Which index of earlier responses a request has, and what of it a round's metrics and a checkpoint say."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from draft_lookup import draft, find

from jaxrl.mechanisms.speculation import Speculation
from jaxrl.mechanisms.speculation.index import (
    DraftIndex,
    DraftLengths,
    IndexBuilder,
    SpeculationSession,
    build_index,
    history_store,
    index_bytes,
)
from jaxrl.scheduling.mechanism import RoundEnd, RoundInfo
from jaxrl.scheduling.rounds.batches import RoundResult
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.types import Group, Prompt, Sample, SampleKey, SamplingParams

ON = Speculation.Options(enable=True)


def prompt(index: int, epoch: int = 0) -> Prompt:
    return Prompt(epoch, index, (1, 2, index), f"prompt {index}", "test")


def sample(index: int, i: int, epoch: int = 0, length: int = 6, reward: float | None = 1.0) -> Sample:
    one = Sample.empty(SampleKey(epoch, index, i))
    one.token_ids = np.arange(length, dtype=np.int32) + 100 * index + 10 * i + 1000 * epoch
    one.finish_reason, one.reward = "stop", reward
    return one


def group(index: int, epoch: int = 0, rewards: Sequence[float] = (1.0, 0.0)) -> Group:
    return Group(prompt(index, epoch), [sample(index, i, epoch, reward=reward) for i, reward in enumerate(rewards)])


@pytest.fixture
def sessions() -> Iterator[Any]:
    opened: list[IndexBuilder] = []

    def build(options: Speculation.Options = ON) -> SpeculationSession:
        opened.append(IndexBuilder(None, map(float, itertools.count()).__next__))
        return SpeculationSession(history_store(options), opened[-1])

    yield build
    for builder in opened:
        builder.close()


def same(index: DraftIndex | None, other: DraftIndex) -> bool:
    assert index is not None
    pairs = zip((index.text, index.first, index.places), (other.text, other.first, other.places), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def index_of(session: SpeculationSession, of: Prompt) -> Any:
    request = Request(0, SampleKey(of.epoch, of.index, 0), of.token_ids, SamplingParams(max_tokens=1))
    return session.on_request(request, of).history


def end(session: SpeculationSession, *groups: Group) -> dict[str, float]:
    return session.round_ends(RoundEnd([Counters()], RoundResult("plain", list(groups), {}, {}, [], [])))


def play(session: SpeculationSession, *groups: Group) -> dict[str, float]:
    session.round_begins(RoundInfo(1))
    return end(session, *groups)


def test_the_next_round_drafts_from_the_last_one(sessions: Any):
    session = sessions()
    session.round_begins(RoundInfo(1))
    assert index_of(session, prompt(3)) is None, "nothing in the first epoch"
    measured = end(session, group(3), group(4))
    assert measured["rollout/spec/evicted_prompts"] == 0
    assert measured["rollout/spec/index_bytes"] == session.store.num_bytes > 0
    session.round_begins(RoundInfo(1))
    index = index_of(session, prompt(3, epoch=1))
    history = session.store.history(3)
    assert same(index, build_index(history))
    assert draft(index, [102, 103, 104], 9) == []
    assert draft(index, [300, 301, 302], 9) == [303, 304, 305]
    assert index_of(session, prompt(3, epoch=1)) is index, "one for all of its samples"
    end(session, group(3, epoch=1))
    session.round_begins(RoundInfo(1))
    assert draft(index_of(session, prompt(3, epoch=2)), [1300, 1301, 1302], 1) == [1303]
    assert find(index_of(session, prompt(3, epoch=2)), [300, 301, 302]) == (-1, 0), "one epoch"


def test_after_a_resume_the_indexes_are_there_again(sessions: Any):
    options = Speculation.Options(enable=True, epochs=2)
    session, again = sessions(options), sessions(options)
    for epoch in range(3):
        play(session, group(0, epoch, (1.0, 0.5)), group(1, epoch))
    again.load_state_dict(session.state_dict())
    for each in (session, again):
        each.round_begins(RoundInfo(1))
    for index in (0, 1):
        assert same(index_of(again, prompt(index)), index_of(session, prompt(index)))


def test_what_is_evicted_has_no_index(sessions: Any):
    lengths = DraftLengths()
    room = index_bytes(lengths, 2, 12) + 12 * 4 + 2 * 12
    options = Speculation.Options(enable=True, max_bytes=2 * room)
    session = sessions(options)
    measured = play(session, group(0), group(1), group(2))
    assert measured["rollout/spec/evicted_prompts"] == 1
    assert measured["rollout/spec/index_bytes"] == 2 * room
    session.round_begins(RoundInfo(1))
    assert [index_of(session, prompt(i)) is None for i in range(3)] == [True, False, False]
    after = end(session)["rollout/spec/index_bytes"]
    assert after == 2 * (12 * 4 + 2 * 12 + build_index(session.store.history(1)).num_bytes) < 2 * room
