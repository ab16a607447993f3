"""A game: FrozenLake of gymnasium, on a lake of its own in each row.

`environment.kind=native environment.path=frozen_lake environment.name=FrozenLake`; columns, or `environment.args`:
`size` (of the square, 4 by default), `moves` (how many there are, 12) and `slippery` (whether moves may go astray).
"""

import hashlib
from typing import Any

from jaxrl.environments.env import Action, StepResult

_MOVES = ("left", "down", "right", "up")  # by gymnasium's numbers


class FrozenLake:
    """An episode: from the start S over frozen F to the goal G; holes H end it."""

    def __init__(self, number: str, size: int = 4, moves: int = 12, *, slippery: bool = False) -> None:
        import gymnasium
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        seed = int(hashlib.sha256(number.encode()).hexdigest()[:8], 16)
        self._lake: Any = gymnasium.make(
            "FrozenLake-v1", desc=generate_random_map(size, seed=seed), is_slippery=slippery
        ).unwrapped
        self._lake.reset(seed=seed)
        self._left = moves

    def initial_observation(self) -> str:
        return (
            "Walk from S to G over the frozen lake. F is frozen, H is a hole. You are at the place in brackets. Answer "
            f"with one word: left, down, right or up.\n{self._drawn()}"
        )

    def step(self, action: Action) -> StepResult:
        """1 at the goal. A turn moves where the first of the four words in it says."""
        self._left -= 1
        words = action.text.lower().replace(".", " ").replace(",", " ").split()
        move = next((_MOVES.index(word) for word in words if word in _MOVES), None)
        reward, done = 0.0, False
        if move is not None:
            _, reward, done, _, _ = self._lake.step(move)
        if done or not self._left:
            return StepResult(float(reward), episode_done=True, metrics={"solved": float(reward)})
        said = self._drawn() if move is not None else "Answer with one word: left, down, right or up."
        return StepResult(next_observation=said, metrics={"no_move": float(move is None)})

    def _drawn(self) -> str:
        here = divmod(int(self._lake.s), self._lake.ncol)
        return "\n".join(
            " ".join(f"[{cell.decode()}]" if (i, j) == here else cell.decode() for j, cell in enumerate(row))
            for i, row in enumerate(self._lake.desc)
        )


def problem(index: int, seed: int) -> dict[str, object]:
    """A row: the number of a lake."""
    return {"number": f"{seed}.{index}"}
