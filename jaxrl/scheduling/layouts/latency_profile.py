"""The latency profile: the table that `jaxrl profile` measures once per model and hardware, and the points to measure.

Source: PAT §4.2 (offline profiler).

A batch is the rows of one dp group, and every group is measured with as many: the dp groups of a layout run one program
in lockstep (docs/architecture.md), so the fullest group sets the pace. (The paper counts the rows of the whole
deployment.)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

SCHEMA = 3
MIN_CONTEXT, DENSE_BELOW = 8, 512  # tokens of a row: the shortest measured, and where points begin to thin out
NEW_PROFILE = "make a new one with `jaxrl profile`"

Source = Literal["measured", "synthetic"]


@dataclass(frozen=True, slots=True)
class ProfileIdentity:
    """The machine and model that a table was measured on; a table with another identity is refused. `model` is for
    people: weights of the same shape (`fingerprint`) take the same time. `dtype` names `rollout.quantization` too, if
    there is any."""

    model: str
    fingerprint: str
    device_kind: str
    device_count: int
    jax_version: str
    dtype: str


@dataclass(frozen=True, slots=True, order=True)
class ProfilePoint:
    """A load to measure: `batch` rows of `context` tokens each in every dp group of the layout with degree `tp`."""

    tp: int
    batch: int
    context: int


@dataclass(frozen=True, slots=True)
class Measurement(ProfilePoint):
    """The time of a `ProfilePoint`: `seconds` for one decode step, or for a complete prefill."""

    seconds: float

    @property
    def point(self) -> ProfilePoint:
        return ProfilePoint(self.tp, self.batch, self.context)


@dataclass(frozen=True, slots=True)
class VerifyMeasurement(Measurement):
    """The time of a step that verifies `width` proposed tokens of each row."""

    width: int


@dataclass(frozen=True, slots=True)
class SwitchCost:
    """The cost of a change of layout.

    Attributes:
      weights_s: resharding the weights.
      kv_s_per_token: migrating KV, per live token of the fullest dp group before the change.
      fixed_s: the rest: draining, a new pool, the first dispatch of other programs.
    """

    from_tp: int
    to_tp: int
    weights_s: float
    kv_s_per_token: float
    fixed_s: float


@dataclass(frozen=True, slots=True)
class RowSizes:
    """The row counts, ascending, of a dp group's decode programs. A step with a count in between is padded to the
    next."""

    tp: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """The table of one model on one machine, complete or not. Raises ValueError for an impossible entry.

    Attributes:
      decode, prefill: seconds per decode step, and of a whole prefill; each load once.
      verify: seconds per step that verifies, each load once, and of one width for each number of rows.
      switches: each ordered pair of degrees once.
      row_sizes: of the measured programs; none: no batch is padded.
      source: "synthetic" for a table that was made up (to try switches out); reports must say so.
    """

    identity: ProfileIdentity
    decode: tuple[Measurement, ...] = ()
    prefill: tuple[Measurement, ...] = ()
    switches: tuple[SwitchCost, ...] = ()
    row_sizes: tuple[RowSizes, ...] = ()
    source: Source = "measured"
    verify: tuple[VerifyMeasurement, ...] = ()

    def __post_init__(self) -> None:
        for entry in (*self.decode, *self.prefill, *self.verify):
            self._refuse_degrees(entry, entry.tp)
            if min(entry.batch, entry.context) < 1 or not 0 < entry.seconds < math.inf:
                raise ValueError(f"profile: {entry}: batch, context and seconds must be > 0, and finite")
        for cost in self.switches:
            self._refuse_degrees(cost, cost.from_tp, cost.to_tp)
            seconds = (cost.weights_s, cost.kv_s_per_token, cost.fixed_s)
            if cost.from_tp == cost.to_tp or not all(0 <= s < math.inf for s in seconds):
                raise ValueError(f"profile: {cost}: two different degrees, and seconds >= 0 and finite")

    def _refuse_degrees(self, entry: object, *degrees: int) -> None:
        for tp in degrees:
            if tp < 1 or self.identity.device_count % tp:
                raise ValueError(
                    f"profile: {entry}: tp ({tp}) must divide the number of devices ({self.identity.device_count})"
                )

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(sorted({point.tp for point in self.decode}))

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def verify_widths(self, tp: int) -> dict[int, int]:
        """Proposed tokens of each row in the steps that were measured, by the number of rows."""
        own = sorted((entry for entry in self.verify if entry.tp == tp), key=lambda entry: entry.point)
        return {entry.batch: entry.width for entry in own}

    def check(self, identity: ProfileIdentity) -> None:
        """Raises ValueError if the table is not of this model, machine and jax."""
        mine, theirs = asdict(self.identity), asdict(identity)
        differing = [
            f"{name} is {mine[name]!r} there and {theirs[name]!r} here" for name in mine if mine[name] != theirs[name]
        ]
        if differing:
            raise ValueError(f"the latency profile is of something else: {'; '.join(differing)}: {NEW_PROFILE}")

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, entry: Any) -> Profile:
        """Raises ValueError for another schema, or for anything missing or unknown."""
        schema = entry.get("schema") if isinstance(entry, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"latency profile of schema {schema!r}: this version reads {SCHEMA}: {NEW_PROFILE}")
        kinds = {"decode": Measurement, "prefill": Measurement, "verify": VerifyMeasurement, "switches": SwitchCost}
        try:
            tables: dict[str, Any] = {name: tuple(kind(**each) for each in entry[name]) for name, kind in kinds.items()}
            rows = tuple(RowSizes(each["tp"], tuple(each["sizes"])) for each in entry["row_sizes"])
            return cls(ProfileIdentity(**entry["identity"]), row_sizes=rows, source=entry["source"], **tables)
        except (KeyError, TypeError) as error:
            raise ValueError(f"latency profile: a part is missing or wrong ({error}): {NEW_PROFILE}") from None


def profile_points(
    max_batch: int,
    token_budget: int,
    degrees: Iterable[int],
    device_count: int,
    max_context: int,
    row_sizes: Mapping[int, Sequence[int]] | None = None,
) -> tuple[ProfilePoint, ...]:
    """The loads to measure, sorted: one layout after another, and in it one batch (one program) after another.

    Batches double from 1, or are the `row_sizes` of the programs (others would be padded to these). Contexts double
    below `DENSE_BELOW`, where latency is least linear, and continue by factors of four. They include a degree's largest
    batch and longest context. A batch with one point has no slope, so batches for which two contexts do not fit are
    left out.

    Args:
      max_batch, token_budget: the most live rows, and tokens (the paper's T_cap), of all dp groups together.

    Raises ValueError if a degree does not divide the devices, or if nothing fits the budget.
    """
    if max_context <= MIN_CONTEXT or max_batch < 1:
        raise ValueError(
            f"profile: contexts from {MIN_CONTEXT} to {max_context} must ascend, max_batch ({max_batch}) must be >= 1"
        )
    contexts = [MIN_CONTEXT]
    while contexts[-1] < max_context:
        factor = 2 if contexts[-1] < DENSE_BELOW else 4
        contexts.append(min(contexts[-1] * factor, max_context))
    points: list[ProfilePoint] = []
    for tp in sorted(set(degrees)):
        if tp < 1 or device_count % tp:
            raise ValueError(f"profile: tp ({tp}) must divide the number of devices ({device_count})")
        dp = device_count // tp
        largest, budget = -(-max_batch // dp), token_budget // dp
        batches = [*(1 << i for i in range((largest - 1).bit_length())), largest]
        if row_sizes is not None:
            # up to the one that holds the largest batch
            batches = [size for i, size in enumerate(row_sizes[tp]) if i == 0 or row_sizes[tp][i - 1] < largest]
        for batch in batches:
            fitting = [context for context in contexts if batch * context <= budget]
            if len(fitting) > 1:
                points.extend(ProfilePoint(tp, batch, context) for context in fitting)
        if not points or points[-1].tp != tp:
            raise ValueError(
                f"profile: a token budget of {token_budget} leaves {budget} tokens per dp group at tp {tp}, and two "
                f"contexts ({contexts[:2]}) of {batches[0]} rows must fit: raise the budget"
            )
    return tuple(points)


def prefill_points(points: Iterable[ProfilePoint]) -> tuple[ProfilePoint, ...]:
    """Where prefills are measured: for each degree one row, whatever rows decode programs have, at all contexts of the
    `points`, because chunks of any size are looked up there; and the largest batch, with every second of its contexts
    and the longest, which tells what a token costs from what its context does."""
    chosen: set[ProfilePoint] = set()
    by_degree: dict[int, list[ProfilePoint]] = {}
    for point in sorted(points):
        by_degree.setdefault(point.tp, []).append(point)
    for tp, of_degree in by_degree.items():
        chosen |= {ProfilePoint(tp, 1, point.context) for point in of_degree}
        own = [point for point in of_degree if point.batch == of_degree[-1].batch]
        chosen |= {*own[len(own) % 2 :: 2], own[-1]}
    return tuple(sorted(chosen))


def verify_points(points: Iterable[ProfilePoint], widths: Mapping[int, Mapping[int, int]]) -> tuple[ProfilePoint, ...]:
    """The `points` at which steps that verify are measured: the shortest and the longest context of every batch that
    has such steps (`widths`, by degree and rows). In between the time is as good as linear."""
    chosen: dict[tuple[int, int], list[ProfilePoint]] = {}
    for point in sorted(points):
        if point.batch in widths.get(point.tp, {}):
            chosen.setdefault((point.tp, point.batch), []).append(point)
    return tuple(point for own in chosen.values() for point in dict.fromkeys((own[0], own[-1])))


def missing_points(measured: Iterable[Measurement], points: Iterable[ProfilePoint]) -> tuple[ProfilePoint, ...]:
    known = {entry.point for entry in measured}
    return tuple(point for point in points if point not in known)
