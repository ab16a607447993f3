"""The tensor-parallel degree that a run starts with, from a latency profile.

Purpose: `fastest_degree` is what `rollout.tensor_model_parallel_size=auto` chooses.

Source: RollPacker §4.2: the planner profiles the best degree of a plain round, and begins with it.

Departures: the paper measures rollouts; here a rollout is predicted from the profile of decode steps, for a plain batch
of equal rows: all have the longest prompt and go on to the longest response, as PAT bounds what is left of a generation
(§4.2). Prefill is left out. Where a dp group has no room for its share of the batch, rows and KV taken together, the
rows come in waves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxrl.scheduling.layouts.batch_state import GroupCapacity, LiveRow, StepTimes, remaining_s


@dataclass(frozen=True, slots=True)
class DegreeChoice:
    """The chosen degree, and the predicted seconds of decoding a batch in each possible one."""

    degree: int
    predicted_s: Mapping[int, float]

    def __str__(self) -> str:
        return ", ".join(f"{seconds:.4g} s at tp {tp}" for tp, seconds in self.predicted_s.items())


def fastest_degree(
    model: StepTimes,
    capacities: Mapping[int, GroupCapacity],
    num_rows: int,
    prompt_tokens: int,
    response_tokens: int,
) -> DegreeChoice:
    """The degree in which a batch of equal rows is predicted to decode fastest; the smallest of equals.

    Args:
      model: what step times are taken from.
      capacities: by possible degree, what one dp group has room for: at least one whole row.
      num_rows: responses of the batch, dealt evenly to the dp groups.
      prompt_tokens, response_tokens: of each.
    """
    length = prompt_tokens + response_tokens

    def wave_s(tp: int, rows: int) -> float:
        group = tuple(LiveRow(i, prompt_tokens, length) for i in range(rows))
        return remaining_s(model, tp, (group,), "max_length") if rows else 0.0

    def decode_s(tp: int) -> float:
        share = -(-num_rows // (model.num_devices // tp))
        room = capacities[tp]
        at_once = min(share, room.rows, room.tokens // length)
        assert at_once >= 1, f"tp {tp} has no room for one row"
        waves, rest = divmod(share, at_once)
        return waves * wave_s(tp, at_once) + wave_s(tp, rest)

    predicted = {tp: decode_s(tp) for tp in sorted(capacities)}
    return DegreeChoice(min(predicted, key=lambda tp: predicted[tp]), predicted)
