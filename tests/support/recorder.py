"""An executor that remembers the float64 log-probabilities that pass through (a `Sample` keeps float32)."""

from __future__ import annotations

from typing import Any

from jaxrl.rollout.executor import MeshExecutor
from jaxrl.scheduling.tokens.plan import PlanResult, Ticket


class Recorder:
    """Stands before a `MeshExecutor`, and is one to an engine."""

    def __init__(self, inner: MeshExecutor) -> None:
        self.inner = inner
        self.seen: dict[int, list[tuple[list[float], list[float]]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def collect(self, ticket: Ticket) -> PlanResult:
        result = self.inner.collect(ticket)
        for row, request_id in enumerate(result.request_ids.tolist()):
            part = result.part(row)
            piece = (result.rollout_logprobs[part].tolist(), result.sampled_logprobs[part].tolist())
            self.seen.setdefault(request_id, []).append(piece)
        return result

    def logprobs(self, request_id: int, which: int) -> list[float]:
        """Of a request's tokens: 0, before truncation; 1, of the distribution drawn from."""
        return [value for piece in self.seen[request_id] for value in piece[which]]
