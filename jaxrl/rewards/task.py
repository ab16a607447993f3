"""The scorer of a reasoning-gym task, given the extracted answer (`reward.kind=task`).

Those scorers give part of the reward to a long text that contains the right answer, which a policy learns to exploit;
so a marked answer is scored alone. Without a mark, a task with numbers as answers takes the response's last number, any
other task the whole response.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxrl.rewards.answers import Extract, extract_answer, marked_answer
from jaxrl.rewards.quantities import to_number
from jaxrl.rewards.request import ScoreRequest

if TYPE_CHECKING:
    from jaxrl.rewards.scorers import Scorer


@dataclass(frozen=True, slots=True)
class TaskScorer:
    """`task_config` is JSON: a scorer may need the options that its problems were made with. `of_files`: scores prompts
    that come from no task, as when training uses a task and evaluation a file."""

    task: str
    task_config: str = "{}"
    extract: Extract = "auto"
    of_files: Scorer | None = None
    loads: str = "reward.kind: importing reasoning_gym"

    def load(self) -> None:
        _task_dataset(self.task, self.task_config)
        if self.of_files is not None:
            self.of_files.load()

    def __call__(self, request: ScoreRequest) -> tuple[float, dict[str, Any]]:
        entry = request.extra.get("entry")
        if entry is None and self.of_files is not None:
            return self.of_files(request)
        if not isinstance(entry, dict):
            raise ValueError(
                f"{request.source}: the prompt comes from no reasoning-gym task, which reward.kind=task needs"
            )
        answer, mark = self._extract(request)
        if answer is None:
            return 0.0, {"extracted": None, "extracted_by": mark}
        number = to_number(answer.strip())
        if request.answer is not None and number is not None and number == to_number(request.answer.strip()):
            answer = request.answer  # "3.0" for "3": most scorers compare text
        reward = _task_dataset(self.task, self.task_config).score_answer(answer, entry)
        return reward, {"extracted": answer, "extracted_by": mark}

    def _extract(self, request: ScoreRequest) -> tuple[str | None, str]:
        if self.extract != "auto":
            return extract_answer(request.response, self.extract)
        answer, mark = marked_answer(request.response)
        if answer is not None:
            return answer, mark
        is_number = request.answer is not None and to_number(request.answer.strip()) is not None
        return extract_answer(request.response, "last_number" if is_number else "none")


@functools.cache
def _task_dataset(task: str, task_config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(task_config), seed=0, size=10)
