"""Checks, before any weight is read, that a tokenizer, a model and a run's lengths belong together: on the devices
nothing would fail."""

from __future__ import annotations

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.config import ModelConfig


def check_vocabulary(tokenizer: Tokenizer, model: ModelConfig, path: str) -> None:
    """Raises ValueError for ids that the model has no row for. A model's vocabulary may be larger: some are padded."""
    size = model.vocab_size
    token, last = tokenizer.last_token
    if last >= size:
        raise ValueError(
            f"{path}: the tokenizer's {token!r} has the id {last}, but the model's vocabulary has {size} tokens "
            f"(ids up to {size - 1}): the tokenizer is of another model, or tokens were added to it alone"
        )


def check_length(model: ModelConfig, longest: int, asked: str, path: str) -> None:
    """Raises ValueError for sequences that are longer than the model was made for. `asked`: where the number of
    tokens comes from, for the message."""
    if longest > model.max_positions:
        raise ValueError(
            f"{asked}, but {path} was made for at most {model.max_positions} (max_position_embeddings, with rope "
            "scaling where there is any): ask for less, or give the model's config.json a rope scaling"
        )
