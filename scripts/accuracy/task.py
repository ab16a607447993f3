"""Running sums: a small task in which long prompts have long responses, with a long tail of lengths.

A prompt gives letters their digits, `a3b5c2=`; the response goes through the letters, repeats each digit and adds it
up, modulo 10: `a33b58c20`. Its last digit is the answer. So a response is as long as its prompt says, every further
step can go wrong, and the long prompts are the hard ones: a rule that lost them, or trained on them less, would show
in their accuracy. The number of digits is lognormal, with a cap.
"""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LETTERS = string.ascii_letters[:32]
MEDIAN, SIGMA, SHORTEST = 4.0, 0.9, 3  # digits of a prompt
LONGEST = len(LETTERS)
MAX_PROMPT, MAX_RESPONSE = 2 * LONGEST + 1, 3 * LONGEST + 8  # tokens
PAD, END = "<|pad|>", "<|end|>"
SPECIAL = (PAD, END)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
REWARD = '''"""1 for a response that ends in the sum of the prompt's digits, modulo 10."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.strip().endswith(ground_truth))
'''


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt without its `=`, and the right response."""

    question: str
    response: str

    @property
    def answer(self) -> str:
        return self.response[-1]


def problem(random: np.random.Generator) -> Problem:
    """One problem; its length and its digits are drawn."""
    count = int(np.clip(round(MEDIAN * float(np.exp(SIGMA * random.standard_normal()))), SHORTEST, LONGEST))
    digits = random.integers(0, 10, count)
    sums = np.cumsum(digits) % 10
    question = "".join(f"{letter}{digit}" for letter, digit in zip(LETTERS, digits, strict=False))
    steps = zip(LETTERS, digits, sums, strict=False)
    return Problem(question, "".join(f"{letter}{digit}{total}" for letter, digit, total in steps))


def write_files(folder: Path, num_train: int, num_held_out: int, seed: int) -> None:
    """train.jsonl and held_out.jsonl, which share no problem, and the reward function, reward.py."""
    random = np.random.default_rng(seed)
    held_out = [problem(random) for _ in range(num_held_out)]
    known = {one.question for one in held_out}
    train = (one for one in iter(lambda: problem(random), None) if one.question not in known)
    for name, part in (("held_out", held_out), ("train", islice(train, num_train))):
        rows = (json.dumps({"question": one.question, "answer": one.answer}) for one in part)
        (folder / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


# ---------------------------------------------------------------- tokens


def tokens() -> list[str]:
    """Ids are positions: one token per character."""
    return [*SPECIAL, "=", *string.digits, *LETTERS]


def write_tokenizer(folder: Path) -> list[Path]:
    """The files of a Hugging Face tokenizer."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens())}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    names: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=1), encoding="utf-8")
    return [folder / "tokenizer.json", folder / "tokenizer_config.json"]
