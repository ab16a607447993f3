"""What processes tell each other about a round, and how it is written: notices to process 0, and the stream from it.

Purpose: a *notice* says what happened in one process; an *item* of the stream is what every process handles, in one
sequence (`jaxrl.runtime.hosts.stream`). Neither has tokens. Written, each is a short JSON list that begins with a
letter; a batch is a list of the version, the number of the round, that of the last batch that was read, and these.

Source: docs/architecture.md. Departures: of what a scorer says besides its reward, only what the journal would keep
goes through (`jaxrl.runtime.verdicts.recorded`). A number in it that is not finite arrives as text, as in the journal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxrl.record.files import to_short_json
from jaxrl.runtime.verdicts import Arrival, recorded
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.scheduling.tokens.order import Answer, End, Place, Report
from jaxrl.types import FinishReason, SampleKey

VERSION = 1
_DECODER = json.JSONDecoder()
_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True)
class Scored:
    """A verdict. `number`: of the sample, counted over the round's commands to score."""

    number: int
    arrival: Arrival


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision of a clock in another process, for the journal; see `jaxrl.record.journal.Journal.append`."""

    step: int
    kind: str
    key: tuple[int, ...]
    decision: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop is asked for, or has been agreed; `why`: empty where somebody asked, else why the run cannot go on."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class Counted:
    """What a process, or each of them, has counted in the round that ends."""

    counts: Sequence[Mapping[str, Any]]
    stops: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A process has failed, and leaves."""

    process: int
    why: str


@dataclass(frozen=True, slots=True)
class Floor:
    """Everything up to a tick stands before this in the stream."""

    tick: int


Notice = Report | Answer | Scored | Decided | Stop | Counted | Failed
Item = End | Answer | Scored | Floor | Stop | Counted | Failed


class HostChannel(Protocol):
    """What processes tell each other (`jaxrl.runtime.hosts.stream.HostStream`).

    Attributes:
      process, num_processes: this one, and of how many; process 0 leads.
    """

    process: int
    num_processes: int

    def begin(self) -> None:
        """A round begins: what is told from here on belongs to it."""
        ...

    def tell(self, notice: Notice) -> None:
        """Tells process 0; a process other than it."""
        ...

    def publish(self, item: Item) -> None:
        """Tells all others; process 0."""
        ...

    def pump(self) -> None:
        """Sends what was told or published, and takes in what has come; never waits."""
        ...

    def wait(self, timeout_s: float, process: int | None = None) -> None:
        """The same; waits for something to come: in process 0, from that process."""
        ...

    def notices(self) -> list[tuple[int, Notice]]:
        """Of this round, what has come to process 0, with the process that told it; they are forgotten here."""
        ...

    def next_item(self) -> Item | None:
        """The next item of the stream that has come; of a process other than 0."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """What telling and waiting have cost since the last call (`hosts/...`)."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """Notices, or items, that were written together. `read`: the last batch of the stream that the writer has read."""

    round: int
    read: int
    told: Sequence[Notice | Item] = field(default_factory=tuple)


def encode(batch: Batch) -> list[str]:
    """The parts of a batch, as text; `joined` puts some of them together."""
    return [to_short_json(_written(each)) for each in batch.told]


def joined(batch: Batch, parts: Sequence[str]) -> bytes:
    """A batch with these of its parts."""
    return f"[{VERSION},{batch.round},{batch.read},[{','.join(parts)}]]".encode()


def decode(value: bytes) -> Batch:
    """The reverse. Raises ValueError for a batch of another version."""
    text = value.decode()
    (version, *rest), end = _DECODER.raw_decode(text)  # `json.loads` looks for blanks around it, and takes longer
    if end != len(text):
        raise ValueError(f"a batch of {end} characters from another process, with {len(text) - end} more behind it")
    if version != VERSION:
        raise ValueError(f"a batch of version {version} from another process: this one reads version {VERSION}")
    number, read, told = rest
    return Batch(number, read, tuple(_read(each) for each in told))


def shortened(arrival: Arrival) -> Arrival:
    """A verdict as it arrives in other processes, so that all have the same."""
    written = json.loads(to_short_json(_arrival(arrival)))
    return _arrival_of(written)


def _written(told: Notice | Item) -> list[Any]:
    match told:
        case Report():
            ends = [[e.request_id, *e.place, e.length, _REASONS.index(e.reason)] for e in told.ends]
            return ["r", told.worker, told.stretch, told.tick, ends]
        case End():
            return ["e", told.request_id, *told.place, told.length, _REASONS.index(told.reason)]
        case Answer():
            return ["a", told.request_id, told.length, _REASONS.index(told.reason), told.dispatch]
        case Scored():
            return ["v", told.number, _arrival(told.arrival)]
        case Floor():
            return ["f", told.tick]
        case Decided():
            return ["d", told.step, told.kind, list(told.key), dict(told.decision)]
        case Stop():
            return ["s", told.why]
        case Counted():
            return ["c", [dict(each) for each in told.counts], told.stops]
        case Failed():
            return ["x", told.process, told.why]


def _read(written: Sequence[Any]) -> Notice | Item:
    kind, *rest = written
    match kind:
        case "r":
            worker, stretch, tick, ends = rest
            return Report(worker, stretch, tick, tuple(_end(each) for each in ends))
        case "e":
            return _end(rest)
        case "a":
            request_id, length, reason, dispatch = rest
            return Answer(request_id, length, _REASONS[reason], dispatch)
        case "v":
            return Scored(rest[0], _arrival_of(rest[1]))
        case "f":
            return Floor(rest[0])
        case "d":
            return Decided(rest[0], rest[1], tuple(rest[2]), rest[3])
        case "s":
            return Stop(rest[0])
        case "c":
            return Counted(rest[0], rest[1])
        case "x":
            return Failed(rest[0], rest[1])
        case _:
            raise ValueError(f"a notice of kind {kind!r}: this version does not know it")


def _end(values: Sequence[int]) -> End:
    request_id, *place, length, reason = values
    return End(request_id, Place(*place), length, _REASONS[reason])


def _arrival(arrival: Arrival) -> list[Any]:
    verdict = arrival.verdict
    key, kept = verdict.key, recorded(verdict)
    place = [key.epoch, key.prompt_index, key.sample_index, key.attempt]
    flags = int(verdict.outside) + 2 * int(arrival.is_decided) + 4 * int(verdict.is_replayed)
    # a reward that is not finite is text in JSON, and `float` reads it again
    return [place, kept["reward"], kept["status"], kept["info"], verdict.duration_s, flags, list(arrival.limits_s)]


def _arrival_of(written: Sequence[Any]) -> Arrival:
    place, reward, status, info, duration_s, flags, limits_s = written
    outside, is_replayed = bool(flags & 1), bool(flags & 4)
    verdict = Verdict(0.0, SampleKey(*place), float(reward), status, info, float(duration_s), outside, is_replayed)
    return Arrival(verdict, tuple(map(float, limits_s)), bool(flags & 2))
