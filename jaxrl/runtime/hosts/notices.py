"""The messages between processes about a round, and their encoding: notices to process 0, and the stream from it.

Purpose: a *notice* says what happened in one process; an *item* of the stream is what every process handles, in one
sequence (`jaxrl.runtime.hosts.event_stream`). Neither has tokens. Written, each is a short JSON list that begins with a
letter; a batch is a list of the version, the number of the round, that of the last batch that was read, and these.

Source: docs/architecture.md. Departures: of what a scorer says besides its reward, only what the journal would keep
goes through (`jaxrl.runtime.verdicts.recorded`). A number in it that is not finite arrives as text, as in the journal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl.record.files import to_short_json
from jaxrl.runtime.verdicts import Arrival, recorded
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.scheduling.tokens.event_merger import AbortResult, Completion, SortKey, WorkerProgress
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
class LowWatermark:
    """Everything up to a tick stands before this in the stream."""

    tick: int


Notice = WorkerProgress | AbortResult | Scored | Decided | Stop | Counted | Failed
Item = Completion | AbortResult | Scored | LowWatermark | Stop | Counted | Failed


@dataclass(frozen=True, slots=True)
class Batch:
    """Notices, or items, that were written together. `read`: the last batch of the stream that the writer has read."""

    round: int
    read: int
    messages: Sequence[Notice | Item] = field(default_factory=tuple)


def encode(batch: Batch) -> list[str]:
    """The parts of a batch, as text; `joined` puts some of them together."""
    return [to_short_json(_written(each)) for each in batch.messages]


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
    number, read, messages = rest
    return Batch(number, read, tuple(_read(each) for each in messages))


def shortened(arrival: Arrival) -> Arrival:
    """A verdict as it arrives in other processes, so that all have the same."""
    written = json.loads(to_short_json(_arrival(arrival)))
    return _arrival_of(written)


def _written(message: Notice | Item) -> list[Any]:
    match message:
        case WorkerProgress():
            completed = [[c.request_id, *c.sort_key, c.length, _REASONS.index(c.reason)] for c in message.completions]
            return ["r", message.worker, message.busy_period, message.tick, completed]
        case Completion():
            return ["e", message.request_id, *message.sort_key, message.length, _REASONS.index(message.reason)]
        case AbortResult():
            return ["a", message.request_id, message.length, _REASONS.index(message.reason), message.dispatch]
        case Scored():
            return ["v", message.number, _arrival(message.arrival)]
        case LowWatermark():
            return ["f", message.tick]
        case Decided():
            return ["d", message.step, message.kind, list(message.key), dict(message.decision)]
        case Stop():
            return ["s", message.why]
        case Counted():
            return ["c", [dict(each) for each in message.counts], message.stops]
        case Failed():
            return ["x", message.process, message.why]


def _read(written: Sequence[Any]) -> Notice | Item:
    kind, *rest = written
    match kind:
        case "r":
            worker, busy_period, tick, completed = rest
            return WorkerProgress(worker, busy_period, tick, tuple(_completion(each) for each in completed))
        case "e":
            return _completion(rest)
        case "a":
            request_id, length, reason, dispatch = rest
            return AbortResult(request_id, length, _REASONS[reason], dispatch)
        case "v":
            return Scored(rest[0], _arrival_of(rest[1]))
        case "f":
            return LowWatermark(rest[0])
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


def _completion(values: Sequence[int]) -> Completion:
    request_id, *sort_key, length, reason = values
    return Completion(request_id, SortKey(*sort_key), length, _REASONS[reason])


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
