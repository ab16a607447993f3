"""How the layers of published models share a KV pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxrl.models.families import FULL, SLIDING
from jaxrl.models.kv_layers import MAX_STACKS, KvLayers, kv_layers, whole
from jaxrl.models.shapes import SHAPES


def of(name: str, max_length: int, num_layers: int | None = None, **more: object) -> KvLayers:
    model = SHAPES[name]
    if num_layers is not None:
        model = replace(model, num_layers=num_layers, **more)
    return kv_layers(model, max_length, max_prefill_tokens=512, decode_steps=16)


@pytest.mark.parametrize(
    ("name", "windows", "size"),
    [
        ("Gemma-2-2B", (0, 4096), 13),
        ("Gemma-3-1B", (0, *[512] * 6), 4),  # of 24 places with a window 22 are taken
        ("OLMo-3-7B", (0, 4096, 4096, 4096), 8),
        ("Qwen2.5-7B", (0,), 28),
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


def test_the_largest_gemma():
    """Gemma 3 27B: 10 layers that see all, and 52 with a window."""
    types = tuple(SLIDING if (i + 1) % 6 else FULL for i in range(62))
    kv = of("Gemma-3-1B", 32768, 62, layer_types=types, sliding_window=1024)
    assert (kv.stacks.windows, kv.size) == ((0, *[1024] * 6), 10)


@pytest.mark.parametrize("counts", [(1, 60), (17, 3), (13, 14), (1, 1)])
def test_few_stacks_and_none_without_a_window_with_an_empty_place(counts: tuple[int, int]):
    types = (FULL,) * counts[0] + (SLIDING,) * counts[1]
    kv = of("Gemma-3-1B", 32768, sum(counts), layer_types=types)
    assert len(kv.stacks) <= MAX_STACKS or kv.size == max(counts)
    if counts != (1, 60) and counts != (17, 3):
        assert kv.stacks.windows.count(0) * kv.size == counts[0]


def test_a_window_of_all_layers_is_one_stack():
    kv = of("Ministral-8B", 32769)
    assert (kv.stacks.windows, kv.size) == ((32768,), 36)
    assert kv.stacks.most_blocks(32769, 16) == 2049


@pytest.mark.parametrize("name", ["Gemma-3-1B", "Ministral-8B", "Gemma-2-2B"])
def test_where_no_sequence_reaches_behind_a_window_all_is_as_without(name: str):
    model = SHAPES[name]
    assert of(name, model.sliding_window) == whole(model.num_layers)
    assert not of(name, model.sliding_window + 1).stacks.is_whole
