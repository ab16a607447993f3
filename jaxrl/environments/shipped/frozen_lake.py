"""A game: FrozenLake of gymnasium, with its own lake for each row.

`environment.kind=native environment.path=frozen_lake environment.name=FrozenLake`; columns, or `environment.args`:
`size` (of the square, 4 by default), `moves` (their number, 12) and `slippery` (whether moves may go astray).
"""

import hashlib
import re

from jaxrl.environments.env import Action, StepResult
from jaxrl.environments.shipped.gymnasium import Gymnasium

_MOVES = ("left", "down", "right", "up")  # by gymnasium's numbers
_BETWEEN = re.compile(r"(?<=[\]SFHG])(?=[\[SFHG])")  # two cells: a token for each


class FrozenLake(Gymnasium):
    """An episode: from the start S over frozen F to the goal G, for a reward of 1; holes H end it."""

    def __init__(self, number: str, size: int = 4, moves: int = 12, *, slippery: bool = False) -> None:
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        seed = int(hashlib.sha256(number.encode()).hexdigest()[:8], 16)
        lake = {"desc": generate_random_map(size, seed=seed), "is_slippery": slippery}
        rules = "Walk from S to G over the frozen lake. F is frozen, H is a hole. You are at the place in brackets."
        super().__init__(number, "FrozenLake-v1", _MOVES, rules, moves=moves, kwargs=lake)

    def step(self, action: Action) -> StepResult:
        result = super().step(action)
        solved = {"solved": result.reward} if result.episode_done else {}
        return StepResult(result.reward, result.episode_done, result.next_observation, {**result.metrics, **solved})

    def _shown(self) -> str:
        return _BETWEEN.sub(" ", super()._shown())


def problem(index: int, seed: int) -> dict[str, object]:
    """A row: the number of a lake."""
    return {"number": f"{seed}.{index}"}
