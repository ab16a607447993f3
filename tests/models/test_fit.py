"""Whether tokenizer, model and lengths belong together."""

from types import SimpleNamespace

import pytest

from jaxrl.models.fit import check_length, check_vocabulary

MODEL = SimpleNamespace(vocab_size=100, max_positions=50, num_experts=0, lora=None)


def test_a_tokenizer_of_another_model():
    check_vocabulary(SimpleNamespace(last_token=("z", 99)), MODEL, "path")
    words = "^path: the tokenizer's 'z' has the id 100, but the model's vocabulary has 100 "
    with pytest.raises(ValueError, match=words):
        check_vocabulary(SimpleNamespace(last_token=("z", 100)), MODEL, "path")


def test_lengths():
    check_length(MODEL, 50, "asked", "path")
    with pytest.raises(ValueError, match=r"^32 \+ 19 = 51 tokens, but path was made for at most 50 "):
        check_length(MODEL, 51, "32 + 19 = 51 tokens", "path")
