"""Whether tokenizer, model and lengths belong together."""

from dataclasses import dataclass

import pytest

from jaxrl.models.fit import check_length, check_vocabulary


@dataclass
class Tokens:
    last_token: tuple[str, int] = ("z", 99)


@dataclass
class Model:
    vocab_size: int = 100
    max_positions: int = 50
    num_experts: int = 0
    lora: object | None = None


def test_what_fits():
    check_vocabulary(Tokens(), Model(), "path")
    check_vocabulary(Tokens(), Model(vocab_size=128), "path")  # padded
    check_length(Model(), 50, "asked", "path")


def test_a_tokenizer_of_another_model():
    words = "^path: the tokenizer's 'z' has the id 100, but the model's vocabulary has 100 "
    with pytest.raises(ValueError, match=words):
        check_vocabulary(Tokens(("z", 100)), Model(), "path")


def test_lengths():
    with pytest.raises(ValueError, match=r"^32 \+ 19 = 51 tokens, but path was made for at most 50 "):
        check_length(Model(), 51, "32 + 19 = 51 tokens", "path")
