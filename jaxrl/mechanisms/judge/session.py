"""A judge's turns on the devices of the rollout: between two plans, while verdicts are awaited, and not in an update.

Source: RollPacker §4.3. `jaxrl.mechanisms.judge.turns` says when a turn may be taken.
"""

from __future__ import annotations

from jaxrl.mechanisms.judge.turns import Judge
from jaxrl.scheduling.mechanism import Mechanism, UnderWay


class JudgeSession(Mechanism):
    """Gives a judge its turns.

    Args:
      judge: scores what the backend's scoring gives it.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def attach(self, under_way: UnderWay) -> None:
        self._workers = under_way.workers

    def between_plans(self, busy_rows: int) -> bool:
        return self._judge.turn(busy_rows, self._workers.num_rows)

    def leave_rollout(self) -> None:
        self._judge.release()
