"""A game: the model guesses a number, and learns whether it is higher or lower.

`environment.kind=native environment.path=number_guessing environment.name=NumberGuessing`; columns, or
`environment.args`: `high` (the largest number, 15 by default) and `guesses` (their number, 4).
"""

import random
import re

from jaxrl.environments.env import Action, StepResult

HIGH, GUESSES = 15, 4
_NUMBER = re.compile(r"\d{1,9}")


class NumberGuessing:
    """An episode. It begins with an example game, which helps small models."""

    def __init__(self, number: str, high: int = HIGH, guesses: int = GUESSES) -> None:
        self.high, self.left = high, guesses
        self.secret = random.Random(f"secret {number}").randint(1, high)

    def initial_observation(self) -> list[dict[str, str]]:
        middle = (1 + self.high) // 2
        said = [
            f"I think of a number from 1 to {self.high}. Guess it: answer with a number alone.",
            str(middle),
            "Higher.",
            str(middle + 1),
            f"Right. I think of another number from 1 to {self.high}.",
        ]
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]

    def step(self, action: Action) -> StepResult:
        """1 for the number, 0 for others. The first number in the text counts; a text without one is a guess as
        well."""
        self.left -= 1
        found = _NUMBER.search(action.text)
        guess = None if found is None else int(found[0])
        if guess == self.secret or not self.left:
            solved = float(guess == self.secret)
            return StepResult(solved, episode_done=True, metrics={"solved": solved})
        if guess is None:
            return StepResult(next_observation="Answer with a number alone.", metrics={"no_number": 1.0})
        return StepResult(next_observation="Higher." if guess < self.secret else "Lower.")


def problem(index: int, seed: int) -> dict[str, object]:
    """A row: the number of a secret, one of `high`."""
    return {"number": f"{seed}.{index}"}
