"""A judge's turns on the devices of the rollout: between two plans, while verdicts are awaited, and not in an update.

Source: RollPacker §4.3. `jaxrl.mechanisms.judge.turns` says when a turn may be taken.
"""

from __future__ import annotations

from jaxrl.mechanisms.judge.pool import JudgePool
from jaxrl.scheduling.mechanism import Mechanism, UnderWay


class JudgeSession(Mechanism):
    """Gives a judge its turns.

    Args:
      judge: the pool; it scores what the backend's scoring gives it.
    """

    def __init__(self, judge: JudgePool) -> None:
        self.judge = judge

    def attach(self, under_way: UnderWay) -> None:
        self._workers = under_way.workers

    def between_plans(self, busy_rows: int) -> bool:
        return self.judge.turn(busy_rows, self._workers.num_rows)

    def leave_rollout(self) -> None:
        self.judge.release()
