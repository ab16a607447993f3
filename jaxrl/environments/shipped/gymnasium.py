"""Games of gymnasium: any of its environments with discrete actions, in text.

`environment.kind=native environment.path=gymnasium environment.name=Gymnasium`; `environment.args`, or columns: `id`
(as `gymnasium.make` takes it, `package:Name-v0` too) with `kwargs` for it, `actions` (their names in words, in order),
`rules` (the first message) and `moves` (the number of turns; 0: as many as the environment allows).

The model sees the environment's picture with render_mode="ansi" if there is one, else the observation: as it is, or in
a sentence (`sentence`) with {0}, {1} ... for its parts.

Between turns the environment is pickled together with its random numbers; one that cannot be is refused in its first
turn.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from jaxrl.environments.env import Action, StepResult

_COLOURED = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", re.DOTALL)
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")  # by the last digit of their code


class Gymnasium:
    """An episode. Its rewards are the environment's own, turn by turn; its seed is derived from the row's `number`.
    Raises ValueError if its actions are not discrete, or `actions` does not name each of them."""

    def __init__(
        self,
        number: str,
        id: str,
        actions: Sequence[str] = (),
        rules: str = "",
        sentence: str = "",
        moves: int = 0,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        import gymnasium

        def made(**given: Any) -> Any:
            return gymnasium.make(id, disable_env_checker=True, **given | (kwargs or {}))

        self._env = made()
        if not sentence and "ansi" in self._env.metadata.get("render_modes", ()):
            self._env = made(render_mode="ansi")
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"environment.args: the actions of {id} are {space}: they must be discrete")
        self._first = int(space.start)
        self._actions = [*actions] or [str(self._first + i) for i in range(int(space.n))]
        if len(self._actions) != space.n or len(set(self._actions)) != space.n:
            raise ValueError(f"environment.args: {id} has {space.n} actions, each with a name, found {actions}")
        self._rules, self._sentence, self._left = rules, sentence, moves
        self._seen, _ = self._env.reset(seed=int(hashlib.sha256(number.encode()).hexdigest()[:8], 16))

    def initial_observation(self) -> str:
        return f"{self._rules} {self._asked}\n{self._shown()}".strip()

    def step(self, action: Action) -> StepResult:
        """Does the action that the turn names first; a turn that names none counts as well."""
        self._left -= 1
        move = self._move(action.text)
        reward, done = 0.0, False
        if move is not None:
            self._seen, reward, over, cut, _ = self._env.step(self._first + move)
            done = over or cut
        metrics = {"no_move": float(move is None)}
        if done or self._left == 0:
            return StepResult(float(reward), episode_done=True, metrics=metrics)
        return StepResult(float(reward), False, self._asked if move is None else self._shown(), metrics)

    @property
    def _asked(self) -> str:
        return f"Answer with one of: {', '.join(self._actions)}."

    def _move(self, text: str) -> int | None:
        """The number of the action that is named first; of two names with the same beginning the longer one."""
        found = [
            (match.start(), -len(name), number)
            for number, name in enumerate(self._actions)
            if (match := re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE))
        ]
        return min(found)[2] if found else None

    def _shown(self) -> str:
        seen = _plain(self._seen)
        if self._sentence:
            try:
                return self._sentence.format(*(seen if isinstance(seen, list) else [seen]))
            except (IndexError, KeyError) as error:
                raise ValueError(f"environment.args: `sentence` needs parts that {seen} has not: {error}") from None
        if self._env.render_mode == "ansi":
            return _COLOURED.sub(_without_colour, self._env.render()).strip("\n")
        return str(seen)


def _plain(value: Any) -> Any:
    """Numpy's values as Python's."""
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _without_colour(match: re.Match[str]) -> str:
    """Text on a coloured ground in brackets; coloured text with its colour behind it."""
    codes, text = match[1].split(";"), match[2]
    if any(len(code) == 2 and code[0] == "4" for code in codes):
        return f"[{text}]"
    colour = next((code for code in codes if len(code) == 2 and code[0] == "3"), "")
    return f"{text}({_COLOURS[int(colour[1])]})" if colour and int(colour[1]) < 8 else text


def problem(index: int, seed: int) -> dict[str, object]:
    """A row: the number of an episode."""
    return {"number": f"{seed}.{index}"}
