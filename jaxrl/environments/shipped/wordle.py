"""A game: Wordle. The model guesses a word of five letters, and learns which of its letters are right.

`environment.kind=native environment.path=wordle environment.name=Wordle`; columns, or `environment.args`: `guesses` (6
by default).
"""

import random
import re
from collections import Counter

from jaxrl.environments.env import Action, StepResult

_WORDS = (
    "about above actor after again agent alarm album alive allow alone along angle ankle apple April arena argue arise "
    "basic basin beach begin being below bench birth black blade blame blank blend block blood board boost brain brand "
    "bread break brick bride brief bring broad brown brush build bunch cabin cable candy carry catch cause chain chair "
    "chalk charm chart chase cheap check chess chest chief child choir civil claim class clean clear clerk climb clock "
    "close cloth cloud coach coast count court cover crack craft crash cream crime crisp cross crowd crown curve cycle "
    "daily dance depth dirty doubt dozen draft drama dream dress drift drink drive eager early earth eight elbow empty "
    "enemy enjoy enter equal event every exact exist extra faith false favor fence field fifth fight final first flame "
    "flash fleet floor flour fluid focus force forge forum found frame fresh front frost fruit funny ghost giant given "
    "glass globe glory grace grade grain grand grant grape graph grass great green greet group grown guard guess guest "
    "guide habit happy harsh heart heavy hello hobby honey honor horse hotel house human humor ideal image index inner "
    "input issue ivory japan jelly jewel joint judge juice knife knock known label labor large laser later laugh layer "
    "learn lemon level light limit liver local logic loose lucky lunch magic major maple march match maybe mayor medal "
    "media metal minor mixed model money month moral motor mount mouse mouth movie music naked nerve never night noise "
    "north novel nurse ocean offer often olive onion opera orbit order other ought outer owner paint panel paper party "
    "patch peace pearl phase phone photo piano piece pilot pitch place plain plane plant plate point pound power press "
    "price pride prime print prize proof proud pupil queen quick quiet quite radio raise range rapid ratio reach ready "
    "right rival river robot rough round route royal rural salad sauce scale scene scope score sense serve seven shade "
    "shake shape share sharp sheet shelf shell shift shine shirt shock shore short shown sight skill sleep slice slide "
    "small smart smile smoke snake solid solve sound south space spare speak speed spell spend spice split spoon sport "
    "staff stage stair stand start state steam steel steep stick still stock stone store storm story strip study style "
    "sugar sunny super sweet swing table taste teach thank theme thick thing think third throw tiger tight title today "
    "token tooth topic total touch tower trace track trade trail train treat trend trial tribe trick truck trust truth "
    "twice uncle under union unity until upper urban usual value video virus visit vital vocal voice waste watch water "
    "wheel where which while white whole whose woman world worry worth would wound write wrong yield young youth zebra"
).lower()
WORDS = tuple(_WORDS.split())
_WORD = re.compile(r"\b[a-z]{5}\b")


class Wordle:
    def __init__(self, number: str, guesses: int = 6) -> None:
        self.word, self.left = random.Random(f"word {number}").choice(WORDS), guesses

    def initial_observation(self) -> str:
        return (
            "Guess an English word of five letters. After each guess, G is said of a letter in its right place, Y of "
            "one that is elsewhere in the word, and - of one that is not in it. "
            f"You have {self.left} guesses. Answer with a "
            "word alone."
        )

    def step(self, action: Action) -> StepResult:
        """1 for the word. The first word of five letters in the text is the guess."""
        self.left -= 1
        found = _WORD.search(action.text.lower())
        guess = found[0] if found else ""
        if guess == self.word or not self.left:
            solved = float(guess == self.word)
            return StepResult(solved, episode_done=True, metrics={"solved": solved})
        said = f"{guess}: {marks(guess, self.word)}" if guess else "Answer with a word of five letters alone."
        return StepResult(next_observation=said, metrics={"no_word": float(not guess)})


def marks(guess: str, word: str) -> str:
    """G, Y or - for each letter of the guess. A letter gets no more marks than the word has of it; those in their
    right places are counted first."""
    left = Counter(of for said, of in zip(guess, word, strict=True) if said != of)
    found = []
    for said, of in zip(guess, word, strict=True):
        if said == of:
            found.append("G")
        elif left[said]:
            left[said] -= 1
            found.append("Y")
        else:
            found.append("-")
    return "".join(found)


def problem(index: int, seed: int) -> dict[str, object]:
    """A row: the number of a word."""
    return {"number": f"{seed}.{index}"}
