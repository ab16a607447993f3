"""Verdicts as messages: what scoring came to, as the JSON that a worker's process sends.

A worker runs foreign code, so every field is checked where it is read (`read_scored`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from jaxrl.processes.messages import BadMessage
from jaxrl.schema.declared import MAX_FLOAT

if TYPE_CHECKING:  # numpy comes with it, and what only carries verdicts has no use for that
    from jaxrl.rewards.scorers import Scored


def read_scored(message: dict[str, Any]) -> Scored:
    """The verdict in a message, with every value in its bounds. Raises BadMessage for anything else."""
    status, reward = message.get("status"), message.get("reward")
    info, duration_s = message.get("info"), message.get("duration_s")
    if status not in ("ok", "error", "timeout", "crash"):
        raise BadMessage(f"a verdict with the status {status!r:.100}")
    if not _is_finite(reward) or not _is_finite(duration_s) or cast(float, duration_s) < 0:
        raise BadMessage(f"a verdict with the reward {reward!r:.100} after {duration_s!r:.100} s")
    if not isinstance(info, dict):
        raise BadMessage(f"a verdict with info of type {type(info).__name__}")
    try:  # neither infinite numbers (`1e999`) nor halves of surrogate pairs: no file of the run could hold them
        json.dumps(info, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"a verdict with info that cannot be recorded ({error})"[:200]) from None
    return status, float(cast(float, reward)), info, float(cast(float, duration_s))


def verdict_message(scored: Scored) -> dict[str, Any]:
    status, reward, info, duration_s = scored
    return {"status": status, "reward": reward, "info": info, "duration_s": duration_s}


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_FLOAT
