"""What a sink is sent: each step once and in order, now or, where the sink cannot be reached, later.

A run does not end because the server of a logger does. What such a server misses is tried again every
`RETRY_S` seconds and at the end; a run that goes on sends whatever is missing of the steps that count.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.config.inputs import one_line
from jaxrl.record.sinks import Sink, Unreachable

RETRY_S = 60.0
_log = logging.getLogger(__name__)

Step = tuple[int, Mapping[str, float], Sequence[Mapping[str, Any]]]


class Delivery:
    """The way of a run's steps to one sink.

    Args:
      name: of the sink, as in `trainer.logger`.
      clock: in seconds.
    """

    def __init__(self, name: str, sink: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._sink, self._clock = name, sink, clock
        self._waiting: deque[Step] = deque()
        self._again_s: float | None = None  # when it is tried again; None: it was reached last time

    def send(self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> None:
        """Sends a step's numbers and samples, unless the sink has them."""
        if step in self._sink.sent:
            return
        self._waiting.append((step, metrics, rows))
        if self._again_s is None or self._clock() >= self._again_s:
            self._send_waiting()

    def close(self) -> None:
        self._send_waiting()
        if self._waiting:
            first, count = self._waiting[0][0], len(self._waiting)
            _log.warning(
                "trainer.logger: %s lacks %d of the steps, from step %d on: a run that goes on sends them",
                *(self._name, count, first),
            )
        self._sink.close()

    def _send_waiting(self) -> None:
        while self._waiting:
            try:
                self._sink.write(*self._waiting[0])
            except Unreachable as error:
                if self._again_s is None:
                    _log.warning(
                        "trainer.logger: %s takes nothing (%s): it is tried again every %g s",
                        *(self._name, one_line(str(error)), RETRY_S),
                    )
                self._again_s = self._clock() + RETRY_S
                return
            self._again_s = None
            self._waiting.popleft()
