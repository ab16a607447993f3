"""How the layers of published models share a KV pool."""

from __future__ import annotations

import pytest

from jaxrl.models.kv_layers import KvLayers, kv_layers, whole
from jaxrl.models.shapes import SHAPES


def of(name: str, max_length: int) -> KvLayers:
    return kv_layers(SHAPES[name], max_length, max_prefill_tokens=512, decode_steps=16)


@pytest.mark.parametrize(
    ("name", "windows", "size"),
    [
        ("Gemma-2-2B", (0, 4096), 13),
        ("Gemma-3-1B", (0, *[512] * 6), 4),  # of 24 places with a window 22 are taken
        ("OLMo-3-7B", (0, 4096, 4096, 4096), 8),
        ("SmolLM3-3B", (0,), 36),
    ],
)
def test_published_models(name: str, windows: tuple[int, ...], size: int):
    kv = of(name, 32768)
    assert (kv.stacks.windows, kv.size) == (windows, size)
    assert kv.stacks.is_whole == (windows == (0,))
    model = SHAPES[name]
    assert len(set(kv.places)) == len(kv.places) == model.num_layers, "each has a place of its own"
    assert all(place < size for _, place in kv.places)
    assert [windows[stack] for stack, _ in kv.places] == [model.kind(i).window for i in range(model.num_layers)]


def test_a_window_of_all_layers_is_one_stack():
    kv = of("Ministral-8B", 32769)
    assert (kv.stacks.windows, kv.size) == ((32768,), 36)
    assert kv.stacks.most_blocks(32769, 16) == 2049


@pytest.mark.parametrize("name", ["Gemma-3-1B", "Ministral-8B"])
def test_where_no_sequence_reaches_behind_a_window_all_is_as_without(name: str):
    model = SHAPES[name]
    assert of(name, model.sliding_window) == whole(model.num_layers)
    assert not of(name, model.sliding_window + 1).stacks.is_whole
