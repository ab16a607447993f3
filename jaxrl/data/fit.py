"""Whether a tokenizer, a model and a run's lengths belong together; looked at before any weight is read.

An id beyond the model's vocabulary has no row of the embedding: on the devices its row is another one, or none, and no
error says so. A position beyond those that a model was made for gives text, and worse text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class FittingTokenizer(Protocol):
    """What is looked at of a tokenizer (`jaxrl.data.tokenizer.Tokenizer` has it)."""

    @property
    def last_token(self) -> tuple[str, int]: ...

    @property
    def named_ids(self) -> Mapping[str, Sequence[int]]: ...


class FittingModel(Protocol):
    """What is looked at of a model (`jaxrl.models.config.ModelConfig` has it)."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    @property
    def max_positions(self) -> int: ...


def token_ids(value: Any, place: str) -> tuple[int, ...]:
    """The ids of an entry such as `eos_token_id`: none (null), one, or a list of them. `place`: file and entry."""
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise ValueError(f"{place} must be a token id, a list of them or null, found {value!r:.80}")
    return ids


def check_vocabulary(tokenizer: FittingTokenizer, model: FittingModel, path: str) -> None:
    """Raises ValueError for ids that the model has no row for. A model's vocabulary may be larger: some are padded."""
    size = model.vocab_size
    token, last = tokenizer.last_token
    if last >= size:
        raise ValueError(
            f"{path}: the tokenizer's {token!r} has the id {last}, but the model's vocabulary has {size} tokens "
            f"(ids up to {size - 1}): the tokenizer is of another model, or tokens were added to it alone"
        )
    bos = () if model.bos_token_id is None else (model.bos_token_id,)
    named = {
        **tokenizer.named_ids,
        f"{path}: bos_token_id": bos,
        f"{path}: eos_token_id": model.eos_token_ids,
    }
    for place, ids in named.items():
        for i in ids:
            if i >= size:
                raise ValueError(f"{place} ({i}) must be below the size of the model's vocabulary ({size} tokens)")


def check_length(model: FittingModel, longest: int, asked: str, path: str) -> None:
    """Raises ValueError for sequences that are longer than the model was made for.

    Args:
      longest: tokens of the longest prompt and response.
      asked: where that number comes from, for the message.
    """
    if longest > model.max_positions:
        raise ValueError(
            f"{asked}, but {path} was made for at most {model.max_positions} (max_position_embeddings, with rope "
            "scaling where there is any): ask for less, or give the model's config.json a rope scaling"
        )
