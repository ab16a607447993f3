"""The roofline by hand for one small machine, its monotonicity and limits, tables behind the same protocol."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.models.config import ModelConfig
from jaxrl.models.shapes import named_shape
from jaxrl.scheduling.layouts.latency import LatencyPredictor, causal_pairs
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile, ProfileIdentity, SwitchCost
from jaxrl.sim.cost_model import CostModel, Efficiency, ParameterCounts, TableCost, TrainLoad
from jaxrl.sim.hardware import H800, HARDWARE, Hardware

SMALL = ModelConfig("llama", 1000, 64, 128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
LINKS = {"link_bytes_per_s": 1e8, "inter_node_bytes_per_s": 1e7, "host_bytes_per_s": 2e7, "node_size": 4}
SLOW = Hardware("slow", 1e12, 1e9, memory_bytes=1_000_000, **LINKS)
SHARES = dict.fromkeys(("memory", "kv", "compute", "link", "mfu"), 1.0)
SECONDS = {"launch_s": 1e-4, "step_s": 1e-3, "collective_s": 1e-6, "one_shot_s": 2e-7, "one_shot_peer_s": 1e-7}
WHOLE = Efficiency(**SHARES, **SECONDS, train_fixed_s=7, sync_fixed_s=3, switch_fixed_s=2)
COST = CostModel(SMALL, SLOW, WHOLE)
QWEN = CostModel(named_shape("Qwen2.5-14B"), H800)


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig("llama", 128, 64, 96, 2, 4, 2, 16),
        ModelConfig("qwen2", 100, 60, 96, 3, 6, 3, 10, qkv_bias=True),
        ModelConfig("qwen3", 100, 64, 96, 3, 4, 1, 32, qk_norm=True, tie_word_embeddings=True),
    ],
)
def test_parameters_by_hand(config: ModelConfig):
    """Matrices, norms and biases of a layer; the output head is an embedding of its own unless tied."""
    embed, query, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = 2 * embed * query + 2 * embed * kv + 3 * embed * config.intermediate_size + 2 * embed
    layer += config.qkv_bias * (query + 2 * kv) + config.qk_norm * 2 * config.head_dim
    counts = ParameterCounts.of(config)
    assert counts.layers == config.num_layers * layer
    assert counts.read == counts.layers + config.vocab_size * embed + embed
    assert counts.total == counts.read + (not config.tie_word_embeddings) * config.vocab_size * embed


def test_kv_bytes_and_their_split():
    assert COST.kv_bytes_per_token(1) == 2 * 2 * 2 * 16 * 2  # k and v, layers, heads, head_dim, bfloat16
    assert [COST.kv_bytes_per_token(tp) for tp in (1, 2, 4)] == [256, 128, 128]  # two heads split over two at most
    assert replace(COST, number_bytes=4).kv_bytes_per_token(1) == 512
    assert QWEN.kv_bytes_per_token(1) == 196_608
    assert replace(COST, kv_head_bytes=16 + 4).kv_bytes_per_token(1) == 2 * 2 * 2 * 20, "codes and a scale"


# ---------------------------------------------------------------- by hand


def test_decode_by_hand():
    weights = (2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 1000 * 64 + 64) * 2
    activations = 2 * (2 * 2 * (4 * 64 + 2 * 6 * 16 + 3 * 128) * 2 + 2 * 1000 * 4)
    assert (weights, activations) == (276_096, 29_312)
    seconds = (276_096 + 29_312 + 100 * 256) / 1e9  # far above the FLOPs: 603,392 / 1e12
    assert COST.decode_step_s(1, 2, 100) == pytest.approx(seconds + 1e-3 + 2 * 1e-4, rel=1e-12)


def test_layers_with_windows_read_what_they_see():
    """Of two rows of 300 tokens one of two layers reads all, the other 100 of each; short ones are read whole."""
    types = ("full_attention", "sliding_attention")
    slides = replace(COST, model=replace(SMALL, family="gemma2", sliding_window=100, layer_types=types))
    for batch, context, seen in ((2, 600, (600 + 200) / 2), (2, 150, 150), (1, 100, 100)):
        assert slides.decode_step_s(1, batch, context) == pytest.approx(COST.decode_step_s(1, batch, seen), rel=1e-12)
        steps = slides.decode_steps_s(1, np.array([batch]), np.array([context]))
        assert steps.tolist() == [slides.decode_step_s(1, batch, context)]
    narrow = (
        replace(COST, hardware=replace(SLOW, flops_per_s=1e6)),
        replace(slides, hardware=replace(SLOW, flops_per_s=1e6)),
    )
    assert narrow[1].prefill_s(1, 300, 45_000) == pytest.approx(narrow[0].prefill_s(1, 300, 37_500), rel=1e-12)
    whole = COST.num_kv_blocks(1, 4, 0.9)
    assert COST.num_kv_blocks(1, 4, 0.9, num_layers=1) in (2 * whole, 2 * whole + 1)


def test_all_reduce_is_the_better_of_ring_and_doubling():
    assert COST.all_reduce_s(1, 1e6) == 0
    assert COST.all_reduce_s(2, 256) == pytest.approx(1e-6 + 2.56e-6)  # doubling: one step with all bytes
    assert COST.all_reduce_s(4, 4e6) == pytest.approx(6 * (1e-6 + 1e6 / 1e8))  # ring: six steps with a quarter each
    assert COST.all_reduce_s(4, 40) == pytest.approx(2 * (1e-6 + 40 / 1e8))
    assert COST.all_reduce_s(8, 4e6) > 9 * COST.all_reduce_s(4, 4e6)  # leaves the node of four


H100_US = {
    1 << 14: (3.9, 3.7, 5.7),
    1 << 17: (4.5, 4.8, 7.8),
    1 << 20: (7.9, 13.9, 16.7),
    1 << 22: (19.9, 31.1, 33.8),
}  # by bytes: at tp 2, 4 and 8


@pytest.mark.parametrize("num_bytes", H100_US)
def test_one_shot_against_what_was_measured_on_the_h100(num_bytes: int):
    """sgl-project/sglang, pull request 2904."""
    cost = CostModel(named_shape("Llama-3.1-8B"), HARDWARE["H100"], Efficiency(link=0.56))
    for tp, measured_us in zip((2, 4, 8), H100_US[num_bytes], strict=True):
        assert cost.all_reduce_s(tp, num_bytes) * 1e6 == pytest.approx(measured_us, rel=0.25)


@given(st.integers(0, 40), st.integers(1, 40))
def test_causal_pairs_counts_them(start: int, tokens: int):
    assert causal_pairs(tokens, start) == sum(position + 1 for position in range(start, start + tokens))


def test_training_by_hand():
    load = TrainLoad(tokens=1000, pairs=5e4, updates=2, extra_forwards=4)
    forward = 2 * 138_048 * 1000 + 4 * 2 * 4 * 16 * 5e4
    optimizer = 28 * 202_048 / 4 / 1e9
    exchange = 3 / 4 * 202_048 * 6 / 1e8
    expected = 7 * forward / (4 * 1e12) + 2 * (optimizer + exchange) + 7
    assert COST.train_step_s(load, 4) == pytest.approx(expected, rel=1e-12)


def test_weight_sync_by_hand():
    total = 202_048 * 2
    assert COST.weight_sync_s(1, 4) == pytest.approx((total - total / 4) / 1e8 + total / 1e9 + 3)
    assert COST.weight_sync_s(2, 2) == pytest.approx(total / 2 / 1e9 + 3)  # as training has them: nothing to gather


def test_the_cost_of_a_switch_by_hand():
    up = COST.switch_cost(1, 2)
    assert (up.from_tp, up.to_tp, up.fixed_s) == (1, 2, 2)
    assert up.weights_s == pytest.approx(2 * 202_048 / 1e9)  # read and write of one half in bfloat16; nothing crosses
    assert up.kv_s_per_token == pytest.approx(256 / 2 / 1e8)  # half of what it holds goes to the other
    down = COST.switch_cost(2, 1)
    assert down.weights_s == pytest.approx(202_048 / 1e8 + 4 * 202_048 / 1e9)  # the other half comes in
    assert 100 * down.kv_s_per_token == pytest.approx(50 * 128 / 1e8)  # 50 rows' other half of the heads


def test_blocks_that_fit():
    weights = 202_048 * 2
    assert COST.num_kv_blocks(1, 16, 0.9) == math.floor((900_000 - weights) / (16 * 256))
    assert COST.num_kv_blocks(1, 16, 0.9, reserved_bytes=200_000) == math.floor((700_000 - weights) / (16 * 256))
    assert COST.num_kv_blocks(2, 16, 0.9) == math.floor((900_000 - weights / 2) / (16 * 128))
    assert COST.num_kv_blocks(1, 16, 0.4) == 0


def test_gradients_beside_the_rollout():
    """A forward and a backward pass on some of the devices; weights and sums cross the link; a swap crosses to the
    host."""
    assert COST.gradients_s(100, 5000, 2) == pytest.approx(3 * COST.forward_s(100, 5000, 2))
    whole, part = TrainLoad(100, 5000), TrainLoad(60, 3000)
    streamed = COST.gradients_s(40, 2000, 8)
    assert COST.train_step_s(whole, 8) == pytest.approx(COST.train_step_s(part, 8) + streamed), "nothing is lost"
    total = COST.params.total
    assert COST.regroup_s(4, 2) == pytest.approx(4 * total * (1 / 2 - 1 / 4) / 1e8)
    assert COST.regroup_s(8, 4) == pytest.approx(4 * total * (1 / 4 - 1 / 8) / 1e7), "between nodes"
    assert COST.regroup_s(8, 8) == 0
    assert COST.move_s_per_token(1, 2, 4) == pytest.approx(256 / 1e8), "all heads, on the smaller group"
    assert COST.swap_s(4) == pytest.approx(total * (2 + 4) / 4 / 2e7)


# ---------------------------------------------------------------- tables


IDENTITY = ProfileIdentity("m", "f", "cpu", 8, "0", "float32")
PROFILE = Profile(
    IDENTITY,
    decode=tuple(Measurement(1, b, c, 0.001 * b + 1e-6 * b * c) for b in (1, 4) for c in (16, 1024)),
    prefill=tuple(Measurement(tp, b, c, 1e-4 * b * c) for tp in (1, 2) for b in (1, 4) for c in (16, 1024)),
    switches=(SwitchCost(1, 2, weights_s=0.5, kv_s_per_token=0.001, fixed_s=0.25),),
)


def table() -> TableCost:
    return TableCost(COST.model, COST.hardware, COST.efficiency, predictor=LatencyPredictor(PROFILE))


def test_a_table_answers_for_inference_and_leaves_the_rest():
    cost: CostModel = table()
    assert cost.decode_step_s(1, 4, 4 * 16) == pytest.approx(0.004 + 64e-6)
    assert cost.decode_step_s(1, 0, 0) == 0
    assert cost.prefill_s(1, 0) == 0
    assert cost.prefill_s(1, 700, 90_000.0) == LatencyPredictor(PROFILE).prefill_s(1, 700, 90_000.0)
    assert cost.switch_cost(1, 2) == LatencyPredictor(PROFILE).switch_cost(1, 2)
    assert cost.verify_steps_s(1, np.array([4]), 0, np.array([64])) == pytest.approx(0.004 + 64e-6)
    for name, arguments in {
        "train_step_s": (TrainLoad(100, 100), 4),
        "forward_s": (100, 100, 4),
        "weight_sync_s": (1, 4),
        "gradients_s": (100, 100, 4),
        "regroup_s": (4, 2),
        "swap_s": (4,),
        "num_kv_blocks": (1, 16, 0.9),
    }.items():
        assert getattr(cost, name)(*arguments) == getattr(COST, name)(*arguments), name
