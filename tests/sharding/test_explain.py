"""What each device holds and sends: against the shardings that really place the arrays, and compiled programs."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import jax
import pytest

from jaxrl.models.shapes import named_shape
from jaxrl.rollout.layout_programs import ExecutorConfig, LayoutPrograms
from jaxrl.rollout.sampling import BLOCK
from jaxrl.sharding.explain import (
    _BLOCK,
    abstract_mesh,
    device_share,
    explain_layout,
    step_traffic,
    update_traffic,
    weight_shares,
)
from jaxrl.sharding.layout import Layout, tp_degrees
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import padded_config, rollout_shardings

SMOLLM2, TINY = named_shape("SmolLM2-135M"), named_shape("tiny")


@pytest.mark.parametrize("count", [1, 6, 8])
def test_it_agrees_with_the_shardings(count):
    mesh = make_mesh(jax.devices()[:count])
    most = tp_degrees(mesh)[-1]
    for config, tp in itertools.product((SMOLLM2, TINY), tp_degrees(mesh)):
        layout, padded = Layout(abstract_mesh(count), tp), padded_config(config, most)
        shardings = rollout_shardings(config, Layout(mesh, tp), most)
        layer = shardings["layers"][0]
        for share in weight_shares(config, padded, layout):
            sharding = layer[share.name] if share.num_copies > 1 else shardings[share.name]
            assert sharding.shard_shape(share.shape) == share.held
        groups = Layout(mesh, tp).sharding("dp").devices_indices_map((layout.dp,))
        sizes = padded.num_heads, padded.num_kv_heads, padded.intermediate_size, padded.vocab_size
        for number, device in enumerate(mesh.devices.flat):
            shown = device_share(config, padded, layout, number)
            for size, (name, dim), held in zip(
                sizes,
                (("q", 1), ("k", 1), ("up", 1), ("embed", 0)),
                (shown.heads, shown.kv_heads, shown.mlp, shown.vocab),
                strict=True,
            ):
                sharding, shape = (shardings | layer)[name], [1] * (3 if name in "qk" else 2)
                shape[dim] = size
                index = sharding.devices_indices_map(tuple(shape))[device][dim]
                assert index.indices(size)[:2] == (held.start, held.stop)
            assert groups[device][0].indices(layout.dp)[0] == shown.dp_group


@pytest.mark.parametrize(("kind", "vocabulary"), [("decode", 256), ("prefill", 320)])
def test_what_a_step_sends_is_what_its_program_sends(kind: str, vocabulary: int):
    """Every sum and gather of the compiled program, on two devices as of two hosts; an all-reduce sends twice. A device
    has one block of 256 logits, and one and a quarter of 320."""
    rows, length, model = 4, 16, replace(TINY, vocab_size=vocabulary)
    sizes = ExecutorConfig(rows, max_length=64, max_prefill_tokens=length, decode_steps=2, max_tp=2)
    programs = LayoutPrograms(model, Layout(make_mesh(jax.devices()[:2]), 2), sizes)
    shape = [each for each in programs.shapes() if each[0] == kind][-1]
    text = programs.lower(*shape).compile().as_text()
    sent, num_sums = 0, 0
    for dims, name in re.findall(r"= \w32\[([\d,]+)\]\S* (all-reduce|all-gather)\(", text):
        numbers = math.prod(map(int, dims.split(",")))
        if numbers > 2 * rows:  # not what remains of a row's blocks
            num_sums += name == "all-reduce"
            sent += (2 if name == "all-reduce" else 1) * numbers * 4 // 2
    found = step_traffic(padded_config(model, 2), 2, 2, 4)
    assert num_sums == found.sums
    if kind == "decode":
        assert sent == shape[1] * found.decode_bytes
    else:
        assert sent == shape[1] * (shape[2] * found.prefill_bytes + found.decode_bytes - found.prefill_bytes)
    assert BLOCK == _BLOCK


def test_what_training_sends():
    """Seven eighths of all that is split, gathered twice in bfloat16 and reduced once in float32."""
    model = named_shape("Qwen2.5-7B")
    layers = 28 * (2 * 3584 * 28 * 128 + 2 * 3584 * 4 * 128 + 3 * 3584 * 18944)
    head = 152064 * 3584  # the embedding's rows are not counted
    found = update_traffic(model, 8)
    assert found.gathered == pytest.approx(7 / 8 * 2 * (2 * layers + head), rel=1e-3)
    assert found.reduced == pytest.approx(7 / 8 * 4 * (layers + head), rel=1e-3)
    assert found.copied == pytest.approx(7 / 8 * 8 * 28 * 2 * 3584, rel=0.5), "norms and biases"
    assert found.into_host == 0
    found = update_traffic(model, 16, 2)
    assert found.into_host == pytest.approx((2 * (2 * layers + head) + 4 * (layers + head)) / 2, rel=1e-3)
    assert explain_layout(model, 16, 1, num_hosts=2).endswith("gradients; 27.7 GB come into each host")


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((8, 1, 1), "KV: 8 pools, one per dp group; each device holds all 4 key/value heads of its pool"),
        ((8, 2, 1), "KV: 4 pools, one per dp group; each key/value head is on one device of its group"),
        ((8, 8, 1), "KV: one pool; each key/value head is on 2 devices of its group (4 heads, tp 8)"),
        ((5, 1, 1), "sends 0.0 GB of weights, 0.0 GB of gradients, 48.7 GB of gradients of copies"),
        ((16, 16, 2), "and 0.41 MB for each token of a prefill, in 57 sums one after another"),
        ((0, 1, 1), "--devices must be at least 1 and at most 16384, found 0"),
        ((8, 0, 1), "--tp must be at least 1, found 0"),
        ((8, 1, 3), "--hosts (3) must divide the number of devices (8)"),
        ((12, 8, 1), "tp (8) on 12 devices must be one of 1, 2, 4, 12"),
    ],
)
def test_what_is_said_of_a_layout(numbers: tuple[int, int, int], words: str):
    """5 divides no dim: a device sends 2 * 4 / 5 of 7.6e9 numbers of four bytes. A sum is of 3584 of two bytes."""
    devices, tp, hosts = numbers
    try:
        said = explain_layout(named_shape("Qwen2.5-7B"), devices, tp, num_hosts=hosts)
    except ValueError as error:
        said = str(error)
    assert words in said
