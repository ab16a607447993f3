"""Trajectories under a real engine, with environments that answer when they like."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from replayed_backend import Bytes, Pool
from run_parts import made_run, text_by
from small_models import TRAINED

from jaxrl.config import Config, from_mapping
from jaxrl.mechanisms.turns import Turns
from jaxrl.mechanisms.turns.rule import Conversation, Observed
from jaxrl.models.decoder import init
from jaxrl.record.journal import Journal
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.run.backend import RolloutBackend
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.carried import as_carried, pack_samples, unpack_samples
from jaxrl.scheduling.rounds.events import Abort, Launch, SampleAborted, SampleFinished
from jaxrl.scheduling.rounds.round import Round
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.types import Prompt, Sample, SampleKey, SamplingParams

PROMPTS = [Prompt(0, i, tuple(range(20 + i, 31 + 2 * i)), "", "game" if i else "plain") for i in range(3)]
PARAMS = SamplingParams(max_tokens=60, stop_token_ids=tuple(range(0, TRAINED.vocab_size, TRAINED.vocab_size // 7)))
TURNS = 3


class Answers:
    """Each turn is answered with a number that its own tokens make, when it has been asked for often enough; after
    three turns the episode is over."""

    keeps = True

    def __init__(self, patience: int, seed: int = 0) -> None:
        self._random, self._patience = np.random.default_rng((patience, seed)), patience
        self._held: dict[SampleKey, tuple[int, Observed]] = {}
        self.asked: list[tuple[SampleKey, str, bytes | None]] = []

    def submit(self, key: SampleKey, prompt: Prompt, text: str, state: bytes | None) -> None:
        assert prompt.index == key.prompt_index
        self.asked.append((key, text, state))
        turn = 1 if state is None else state[0] + 1
        messages = ({"role": "user", "content": str(sum(map(int, text.split())))},)
        answer = Observed(key, turn == TURNS, messages, 0.5 * turn, bytes([turn]), {"tool_calls": 1.0})
        self._held[key] = int(self._random.integers(self._patience + 1)), answer

    def cancel(self, keys: Collection[SampleKey]) -> None:
        for key in keys:
            self._held.pop(key, None)

    def completed(self, timeout_s: float = 0.0) -> list[Observed]:
        due = [key for key, (left, _) in self._held.items() if left <= 0]
        self._held = {key: (left - 1, answer) for key, (left, answer) in self._held.items()}
        return [self._held.pop(key)[1] for key in due]


def text_of(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def tokens_of(messages: Sequence[Mapping[str, Any]], drawn: Sequence[int]) -> list[int]:
    (message,) = messages
    first = int(message["content"]) % (TRAINED.vocab_size - 3)
    return [first, first + 1, first + 2]


@pytest.fixture
def journal_at(tmp_path: Path) -> Iterator[Callable[[str], Journal]]:
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(closing(Journal(tmp_path / name, 0)))


@pytest.fixture(scope="module")
def parts() -> Iterator[Any]:
    with jax.enable_x64(True):
        model = TRAINED
        params = init(model, jax.random.key(0), "float64")
        sizes = ExecutorConfig(num_slots=4, max_length=96, dtype="float64", block_size=4, seed=3)
        yield MeshExecutor(model, Layout(make_mesh(jax.devices()[:1]), 1), sizes), params


def config_of(**limits: float) -> Config:
    environment = {"kind": "native", "path": "e.py", "name": "E", "max_trajectory_tokens": 20, **limits}
    data = {"max_response_length": 512}
    given = {"model": {"path": "m"}, "data": data, "environment": environment, "reward": {"kind": "environment"}}
    return from_mapping(given)


def conversation(answers: Answers, tokens: Any = tokens_of) -> Conversation:
    return Conversation(answers, lambda prompt: prompt.source == "game", text_of, tokens)


def backend_of(
    parts: Any, answers: Answers, *, journal: Journal | None = None, tokens: Any = tokens_of, **limits: float
) -> tuple[RolloutBackend, Turns]:
    executor, params = parts
    run = made_run(
        Engine(executor, BatcherConfig(decode_steps=4)),
        executor,
        Pool(),
        config=config_of(**limits),
        text_of=text_by(Bytes()),
        weights=lambda: params,
        journal=journal,
        conversation=conversation(answers, tokens),
    )
    session = Turns(run)
    run.mechanisms = (session,)
    backend = RolloutBackend(run)
    backend.enter_rollout(0)
    return backend, session


def round_of(backend: RolloutBackend, step: int = 1) -> dict[SampleKey, Sample]:
    backend.begin(RoundInfo(step), PARAMS)
    current = Round.of(PROMPTS, 2)
    while not current.done:
        backend.apply(current.handle(backend.wait()))
    backend.end()
    assert backend.engine.engines[0].batcher.blocks.num_parked(0) == 0, "nothing is kept beyond the weights it is of"
    return {sample.key: sample for group in current.groups() for sample in group.samples}


def turns_of(sample: Sample) -> tuple[Any, ...]:
    assert sample.episode is not None
    return sample.episode.turns


def check_spans(sample: Sample) -> None:
    """What lies between two turns is an answer, token by token; all else is the model's."""
    start = 0
    for turn in turns_of(sample):
        assert sample.drawn[start : turn.end].all()
        assert turn.text == text_of(sample.token_ids[start : turn.end].tolist())
        start = turn.end
        if turn.messages:
            answer = tokens_of(turn.messages, 0)
            assert sample.token_ids[start : start + 3].tolist() == answer
            assert not sample.drawn[start : start + 3].any()
            start += 3
    assert start == len(sample)


def same(one: Mapping[SampleKey, Sample], other: Mapping[SampleKey, Sample]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(sample.token_ids, other[key].token_ids)
        and np.array_equal(sample.versions, other[key].versions)
        and np.array_equal(sample.rollout_logprobs, other[key].rollout_logprobs)
        for key, sample in one.items()
    )


def test_tokens_do_not_depend_on_when_answers_come(parts: Any, x64: None):
    found = []
    for patience in (0, 3, 40):
        answers = Answers(patience)
        backend, _ = backend_of(parts, answers)
        found.append(round_of(backend))
        # of each turn behind the first what is new: the answer, and the newest token of the turn before
        answered = sum(len(sample) - sample.num_drawn for sample in found[-1].values())
        behind = sum(len(turns_of(sample)) - 1 for sample in found[-1].values() if sample.episode)
        sizes = [len(prompt.token_ids) for prompt in PROMPTS]
        once = sum(size + (size - (size - 1) // 4 * 4) for size in sizes)  # a second sample runs what is no whole block
        assert backend.engine.counters.prefill_tokens == once + answered + behind
        for key, sample in found[-1].items():
            if key.prompt_index == 0:
                assert sample.drawn.all(), "a prompt without an environment"
                assert sample.episode is None
                continue
            check_spans(sample)
            asked = [(text, state) for each, text, state in answers.asked if each == key]
            assert [turn.text for turn in turns_of(sample)][: len(asked)] == [text for text, _ in asked]
            assert [state for _, state in asked] == [None, b"\x01", b"\x02"][: len(asked)]
            assert sample.episode is not None
            assert sample.episode.stop == ("done" if len(asked) == TURNS else "max_trajectory_tokens")
            assert sample.finish_reason == ("stop" if len(asked) == TURNS else "length")
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    assert {sample.episode.stop for sample in found[0].values() if sample.episode} == {"done", "max_trajectory_tokens"}


def test_a_step_that_runs_again_asks_only_what_the_journal_does_not_have(
    parts: Any, x64: None, journal_at: Callable[[str], Journal], tmp_path: Path
):
    """Whatever of the journal is there when a step begins anew: what was answered is not asked, and takes effect where
    it did, so that batches are the same and so, in every type, the bits."""
    journal, answers = journal_at("journal.jsonl"), Answers(6)
    backend, _ = backend_of(parts, answers, journal=journal)
    whole, admitted = round_of(backend), backend.engine.counters
    entries = journal.entries(1, "turn")
    assert len(entries) == len(answers.asked)
    lines = (tmp_path / "journal.jsonl").read_bytes().splitlines(keepends=True)
    for num_kept in (1, len(entries) // 2, len(entries)):
        again = tmp_path / f"{num_kept}.jsonl"
        begun = journal_at(again.name)
        for entry in entries[:num_kept]:
            said = {name: value for name, value in entry.items() if name not in ("step", "kind", "key")}
            begun.append(1, "turn", (*entry["key"],), said)
        others = Answers(6, 100)
        backend, _ = backend_of(parts, others, journal=journal_at(again.name))
        assert same(round_of(backend), whole)
        known = {(*entry["key"],) for entry in entries[:num_kept]}
        assert not known & {
            (0, key.epoch, key.prompt_index, key.sample_index, key.attempt, 0 if state is None else state[0])
            for key, _, state in others.asked
        }
        assert len(others.asked) == len(entries) - num_kept
        if num_kept == len(entries):
            assert backend.engine.counters == admitted, "plan by plan as before"
            assert again.read_bytes().splitlines(keepends=True)[1:] == lines[1:]


class Down(Answers):
    """Fails at the second turn of the first sample of each prompt."""

    def completed(self, timeout_s: float = 0.0) -> list[Observed]:
        found = super().completed(timeout_s)
        return [
            Observed(each.key, True, status="error", error="it is down", state=each.state)
            if each.key.sample_index == 0 and each.state == b"\x02"
            else each
            for each in found
        ]


def test_an_environment_that_fails_costs_its_sample(parts: Any, x64: None, journal_at: Callable[[str], Journal]):
    """A good turn before it counts for nothing; when the step runs again, the journal says so as well."""
    for answers in (Down(0), Answers(0, 7)):
        backend, _ = backend_of(parts, answers, max_trajectory_tokens=60, journal=journal_at("down.jsonl"))
        found = round_of(backend)
        down = {key for key, each in found.items() if each.episode is not None and each.episode.failed}
        assert down
        assert {key.sample_index for key in down} == {0}
        for key, each in found.items():
            assert (each.failure, each.reward == 0.0) == (
                ("it is down", True) if key in down else ("", key == SampleKey(0, 0, 0))
            )
            if key in down:
                assert ([turn.reward for turn in turns_of(each)], each.episode.stop) == ([0.5, 0.0], "error")
                assert unpack_samples(pack_samples([as_carried(each)]))[0].episode == each.episode


def test_a_trajectory_that_is_cut_off_goes_on_in_a_later_round(parts: Any, x64: None):
    """While it decodes, or while it waits for an answer; also out of a checkpoint."""
    plain, _ = backend_of(parts, Answers(0))
    whole = round_of(plain)
    backend, session = backend_of(parts, answers := Answers(4))
    keys = (SampleKey(0, 1, 0), SampleKey(0, 1, 1))
    begun: tuple[Sample, ...] = ()
    finished: dict[SampleKey, Sample] = {}
    waited = 0
    for step, num_plans in enumerate((2, 1, 1, 2, 3, 1, 50), 1):
        backend.begin(RoundInfo(step), PARAMS)
        backend.wait()
        left = tuple(key for key in keys if key not in finished)
        backend.apply([Launch(PROMPTS[1], left, begun)])
        for _ in range(num_plans):
            session.before_plan(None)
            if not backend.engine.is_idle:
                backend._serve()
        backend.apply([Abort(left, keep=True)])
        ended = [backend.wait() for _ in left]
        finished |= {event.sample.key: event.sample for event in ended if isinstance(event, SampleFinished)}
        cut = [as_carried(event.sample) for event in ended if isinstance(event, SampleAborted)]
        waited += sum(sample.episode is not None and sample.episode.awaits for sample in cut)
        begun = tuple(unpack_samples(pack_samples(cut)))
        assert [sample.episode for sample in begun] == [sample.episode for sample in cut]
        assert backend.engine.engines[0].batcher.blocks.num_parked(0) == 0
        backend.cancel()
        if step == 2:  # held-out prompts may have the same keys: what is carried has nothing to do with them
            backend.begin(RoundInfo(step, 1, "eval"), PARAMS)
            current = Round.of([PROMPTS[1]], 2)
            while not current.done:
                backend.apply(current.handle(backend.wait()))
            backend.end()
            for sample in current.groups()[0].samples:
                assert np.array_equal(sample.token_ids, whole[sample.key].token_ids)
    assert finished.keys() == set(keys)
    for key, sample in finished.items():
        assert np.array_equal(sample.token_ids, whole[key].token_ids)
        check_spans(sample)
    assert len({(key, state) for key, _, state in answers.asked}) == len(answers.asked), "nothing was asked twice"
    assert waited, "none was cut off while it waited"


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_trajectory_that_begins_again_is_not_told_what_the_last_one_asked(parts: Any, x64: None, attempt: int):
    """It was cut off while it waited for an answer, and has lost its tokens; also under the same key."""
    backend, session = backend_of(parts, answers := Answers(10**9))
    key = SampleKey(0, 1, 0)
    for step, launched in enumerate((key, SampleKey(0, 1, 0, attempt)), 1):
        backend.begin(RoundInfo(step), PARAMS)
        backend.wait()
        backend.apply([Launch(PROMPTS[1], (launched,))])
        if step == 1:
            while not session.has_pending:
                backend._serve()
            backend.apply([Abort((launched,), keep=True)])
            assert answers._held.keys() == {key}
        else:
            assert not answers._held
        backend.cancel()


def test_a_trajectory_that_takes_too_long_ends_between_two_turns(parts: Any, x64: None):
    backend, _ = backend_of(parts, Answers(10**9), rollout_timeout_s=0.05)
    found = [sample for sample in round_of(backend).values() if sample.episode is not None]
    assert "rollout_timeout" in {sample.episode.stop for sample in found if sample.episode}
    for sample in found:
        check_spans(sample)
