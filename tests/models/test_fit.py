"""Whether tokenizer, model and lengths belong together."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from jaxrl.data.tokenizer_files import token_ids
from jaxrl.models.fit import check_length, check_vocabulary


@dataclass
class Tokens:
    last_token: tuple[str, int] = ("z", 99)
    named_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class Model:
    vocab_size: int = 100
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = (7,)
    max_positions: int = 50
    num_experts: int = 0
    lora: object | None = None


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (0, (0,)), ([2, 0], (2, 0)), ([], ())])
def test_ids(value: Any, ids: tuple[int, ...]):
    assert token_ids(value, "file: eos_token_id") == ids


@pytest.mark.parametrize("value", ["2", 2.0, True, -1, [2, None], [[2]], {"id": 2}, float("nan")])
def test_what_is_no_id(value: Any):
    with pytest.raises(ValueError, match=r"^file: eos_token_id must be a token id, a list of them or null, found "):
        token_ids(value, "file: eos_token_id")


def test_what_fits():
    check_vocabulary(Tokens(), Model(), "path")
    check_vocabulary(Tokens(), Model(vocab_size=128), "path")  # padded
    check_vocabulary(Tokens(named_ids={"file: pad_token_id": (99,)}), Model(bos_token_id=0), "path")
    check_length(Model(), 50, "asked", "path")


@pytest.mark.parametrize(
    ("tokens", "model", "words"),
    [
        (Tokens(("z", 100)), Model(), "path: the tokenizer's 'z' has the id 100, but the model's vocabulary has 100 "),
        (Tokens(), Model(eos_token_ids=(7, 100)), r"path: eos_token_id \(100\) must be below the size of the model's"),
        (Tokens(), Model(bos_token_id=100), r"path: bos_token_id \(100\) must be below the size of the model's"),
        (Tokens(named_ids={"file: pad_token_id": (100,)}), Model(), r"file: pad_token_id \(100\) must be below the"),
    ],
)
def test_what_does_not(tokens: Tokens, model: Model, words: str):
    with pytest.raises(ValueError, match=f"^{words}"):
        check_vocabulary(tokens, model, "path")


def test_lengths():
    with pytest.raises(ValueError, match=r"^32 \+ 19 = 51 tokens, but path was made for at most 50 "):
        check_length(Model(), 51, "32 + 19 = 51 tokens", "path")
