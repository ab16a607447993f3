"""A backend over replayed lengths, and a pool that answers when it is told to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replay_executor import ReplayExecutor, ReplayWorkers
from run_parts import made_run, text_by

from jaxrl.config import Config
from jaxrl.record.journal import Journal
from jaxrl.record.timeline import Timeline
from jaxrl.run.backend import RolloutBackend
from jaxrl.scheduling.mechanism import Mechanism, RoundInfo
from jaxrl.scheduling.rounds.events import Event, Launch, RoundStarted, SampleFinished, Verdict
from jaxrl.scheduling.rounds.round import Round
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.types import Prompt, Sample, SampleKey, SamplingParams

PARAMS = SamplingParams(max_tokens=40, stop_token_ids=(2,))


def make_prompt(index: int) -> Prompt:
    return Prompt(0, index, (1, 2, index), f"prompt {index}", "test")


def key(p: int, s: int = 0) -> SampleKey:
    return SampleKey(0, p, s)


class Pool:
    """Answers in the order that it is told: `hold` keeps samples back until everything else is answered."""

    def __init__(
        self,
        hold: Sequence[SampleKey] = (),
        bad: dict[SampleKey, str] | None = None,
        outside: dict[SampleKey, tuple[float, dict[str, Any]]] | None = None,
    ) -> None:
        self.hold, self.bad, self.outside = list(hold), bad or {}, outside or {}
        self.submitted: list[SampleKey] = []
        self._queue: deque[SampleKey] = deque()
        self._held: list[SampleKey] = []

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        assert sample.text, "scorers get text"
        self.submitted.append(sample.key)
        (self._held if sample.key in self.hold else self._queue).append(sample.key)

    def cancel(self, keys: Collection[SampleKey]) -> None:
        self._queue = deque(one for one in self._queue if one not in keys)
        self._held = [one for one in self._held if one not in keys]

    def completed(self) -> list[Verdict]:
        answered = list(reversed(self._queue))  # the latest first
        self._queue.clear()
        return [self._verdict(one) for one in answered]

    def wait(self, timeout_s: float) -> list[Verdict]:
        if not self._queue:
            self._queue.extend(self._held)
            self._held = []
        return self.completed()

    @property
    def num_pending(self) -> int:
        return len(self._queue) + len(self._held)

    def take_metrics(self) -> dict[str, float]:
        return {"reward/num_scored": float(len(self.submitted))}

    def _verdict(self, one: SampleKey) -> Verdict:
        if one in self.outside:
            return Verdict(1.0, one, *self.outside[one][:1], "ok", self.outside[one][1], 0.5, True)
        status: Any = self.bad.get(one, "ok")
        if status != "ok":
            return Verdict(1.0, one, 0.0, status, {"error": f"{status} of {one.prompt_index}"})
        return Verdict(1.0, one, one.prompt_index + one.sample_index / 10, "ok", {}, 0.5)


class Bytes:
    """One token per character."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + int(i) % 26) for i in ids)


class House:
    def __init__(
        self,
        folder: Path,
        lengths: dict[SampleKey, int],
        pool: Pool,
        last_step: int = 0,
        num_workers: int = 1,
        mechanisms: Sequence[Mechanism] = (),
        config: Config | None = None,
    ) -> None:
        executors = [ReplayExecutor(lengths, num_slots=4 if num_workers == 1 else 2) for _ in range(num_workers)]
        self.worker: Any = ReplayWorkers(executors)
        engines = [Engine(executor, BatcherConfig(decode_steps=4)) for executor in executors]
        self.engine: Any = engines[0] if num_workers == 1 else LocalWorkers(engines)
        self.pool = pool
        self.journal = Journal(folder / "journal.jsonl", last_step)
        self.timeline = Timeline(folder / "timeline.json")
        self.progress: list[tuple[int, ...]] = []
        self.run = made_run(
            self.engine,
            self.worker,
            pool,
            config=config,
            text_of=text_by(Bytes()),
            weights=lambda: "weights",
            mechanisms=mechanisms,
            journal=self.journal,
            timeline=self.timeline,
            on_progress=lambda *at: self.progress.append(at),
        )
        self.backend = RolloutBackend(self.run)

    def close(self) -> None:
        self.journal.close()
        self.timeline.close()

    def run_round(
        self, prompts: Sequence[Prompt], n: int, step: int = 1, kind: str = "plain"
    ) -> tuple[Round, list[Event]]:
        round, events = Round.of(prompts, n), []
        self.backend.begin(RoundInfo(step, int(kind == "eval"), kind), PARAMS)
        while not round.done:
            events.append(self.backend.wait())
            self.backend.apply(round.handle(events[-1]))
        return round, events


@contextmanager
def opened(folder: Path, num_workers: int) -> Iterator[Callable[..., House]]:
    """Builds houses that have their first weights, and closes their files in the end."""
    made: list[House] = []

    def build(lengths: dict[SampleKey, int], pool: Pool, **more: Any) -> House:
        made.append(House(folder, lengths, pool, num_workers=num_workers, **more))
        made[-1].backend.enter_rollout(0)
        return made[-1]

    yield build
    for house in made:
        house.close()


LENGTHS = {key(p, s): 3 + 7 * ((5 * p + 3 * s) % 4) + s for p in range(5) for s in range(2)}
PROMPTS = [make_prompt(p) for p in range(5)]


def scored(events: Sequence[Event]) -> list[SampleKey]:
    return [event.key for event in events if isinstance(event, Verdict)]


def finished(events: Sequence[Event]) -> list[SampleKey]:
    return [event.sample.key for event in events if isinstance(event, SampleFinished)]


def begin(house: House, keys: Sequence[SampleKey], step: int = 1) -> RolloutBackend:
    house.backend.begin(RoundInfo(step), PARAMS)
    assert isinstance(house.backend.wait(), RoundStarted)
    house.backend.apply([Launch(PROMPTS[0], tuple(keys))])
    return house.backend


def next_finished(backend: RolloutBackend) -> Sample:
    event = backend.wait()
    assert isinstance(event, SampleFinished)
    return event.sample
