"""How a model's layers share a KV pool: in stacks of equally many layers, all of a stack with one window.

A block holds the KV of one stack's layers (`jaxrl.scheduling.tokens.stacks`), so the pool has a pair of arrays for each
place in a stack. Source: the hybrid KV cache manager of vLLM; the size of a stack is chosen otherwise.

The size is the largest with which no place of a stack without a window stays empty and, of those, few with a window do.
Where no sequence is longer than the windows, nothing can be freed: all layers are one stack without a window.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl.models.config import ModelConfig
from jaxrl.scheduling.tokens.plan import TOKENS_PER_STEP
from jaxrl.scheduling.tokens.stacks import WHOLE, KvStacks, most_ahead

MAX_STACKS = 8
"""Tables list a block for each stack, so there are few."""


@dataclass(frozen=True, slots=True)
class KvLayers:
    """A model's layers in a KV pool."""

    stacks: KvStacks
    size: int  # layers of a stack, and pairs of arrays in the pool
    places: tuple[tuple[int, int], ...]  # (stack, place in the stack) of each layer


def whole(num_layers: int) -> KvLayers:
    """All layers in one stack, of which every block is kept."""
    return KvLayers(WHOLE, num_layers, tuple((0, i) for i in range(num_layers)))


def kv_layers(config: ModelConfig, max_length: int, max_prefill_tokens: int, decode_steps: int) -> KvLayers:
    """The layers of a model with sequences of at most `max_length` tokens, whose plans have at most this many prefill
    tokens and decode steps."""
    windows = [config.kind(i).window for i in range(config.num_layers)]
    if max_length <= max(windows):
        return whole(config.num_layers)
    layers = {window: [i for i, own in enumerate(windows) if own == window] for window in sorted(set(windows))}
    size = _size({window: len(own) for window, own in layers.items()})
    places: dict[int, tuple[int, int]] = {}
    stacks: list[int] = []
    for window, own in layers.items():
        for at, layer in enumerate(own):
            places[layer] = len(stacks) + at // size, at % size
        stacks += [window] * -(-len(own) // size)
    if stacks == [0]:
        return whole(config.num_layers)
    ahead = most_ahead(max_prefill_tokens, TOKENS_PER_STEP * decode_steps + 1)
    in_order = tuple(places[i] for i in range(config.num_layers))
    return KvLayers(KvStacks(tuple(stacks), ahead, max_length), size, in_order)


def _size(counts: dict[int, int]) -> int:
    def empty(size: int) -> tuple[int, int, int]:
        of = {window: -count % size for window, count in counts.items()}
        return of.get(0, 0), sum(of.values()), -size

    sizes = range(1, max(counts.values()) + 1)
    return min((size for size in sizes if sum(-(-n // size) for n in counts.values()) <= MAX_STACKS), key=empty)
