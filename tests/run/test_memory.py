"""The plan of a device's memory: how many blocks fit, what is refused because nothing fits, and with which option."""

import math

import jax
import pytest
from known_sizes import SMOLLM2, config

from jaxrl.commands.explain import explain
from jaxrl.mechanisms.speculation import build_proposer
from jaxrl.models.shapes import SHAPES
from jaxrl.rollout import kv_cache
from jaxrl.run.memory import memory_plan, memory_problem, plan_num_blocks
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh


def test_the_pool_takes_what_is_left():
    c = config(rollout={"memory_fraction": 0.5, "max_num_seqs": 512})
    block = 2 * 30 * 3 * 64 * 16 * 4
    taken = 4 * SMOLLM2.num_params() * 4
    memory = 8 << 30
    blocks = plan_num_blocks(c, SMOLLM2, 1, memory)
    assert blocks == (memory // 2 - taken) // block
    assert blocks * block + taken <= memory // 2 < (blocks + 1) * block + taken
    assert plan_num_blocks(c, SMOLLM2, 1, None) == 512 * 24 + 1  # all that the rows can use
    assert plan_num_blocks(c, SMOLLM2, 1, 1 << 40) == 512 * 24 + 1
    e = explain(c, SMOLLM2, 1, memory)
    assert e.memory.pool_requests == (blocks - 1) // 24
    assert "requests will be preempted" in e.warnings[0]


def test_what_is_behind_windows_needs_no_room():
    """Gemma 3 1B: 4 layers that see all and 22 with a window of 512, as seven stacks of four layers: a request of 32k
    tokens holds 2048 blocks in one, and in each of the others those of the window and of two plans at the most."""
    gemma, lengths = SHAPES["Gemma-3-1B"], {"max_prompt_length": 1024, "max_response_length": 31744}
    actor = {"ppo_max_token_len_per_gpu": 32768}
    c = config(data=lengths, actor=actor, rollout={"max_num_seqs": 8, "dtype": "bfloat16"})
    each = 2048 + 6 * (-(-(511 + 512 + 65) // 16) + 2)
    assert plan_num_blocks(c, gemma, 1, None) == 8 * each + 1
    plan = memory_plan(c, gemma, 1, None, "cpu")
    block = 2 * 4 * 1 * 256 * 16 * 2
    assert plan.rollout["KV pool"] == (8 * each + 1) * block
    assert plan.pool_requests == 8
    kept = 8 * 2048 * 26 // 4 * block  # of the 26 layers, all that they have ever had
    assert 5.3 < kept / plan.rollout["KV pool"] < 5.4
    assert 8 * 32768 <= plan.pool_tokens < 8 * 32768 * 1.01
    short = config(data={"max_prompt_length": 256, "max_response_length": 256}, rollout={"max_num_seqs": 8})
    assert plan_num_blocks(short, gemma, 1, None) == 8 * 32 + 1, "nothing is ever behind a window"
    said = rf"rollout.num_blocks \({each}, one of .* one request of 32768 tokens: at least {each + 1} blocks of 16"
    with pytest.raises(ValueError, match=said):
        memory_plan(c.replace(rollout=c.rollout.replace(num_blocks=each)), gemma, 1, None, "cpu")


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_pool_of_codes_is_as_large_as_its_arrays(kind):
    """A byte a number, and a scale for each position and head; what memory leaves holds almost twice as many blocks."""
    wide, codes = (config(rollout={"dtype": "bfloat16", "kv_cache_dtype": each}) for each in ("auto", kind))
    plan = memory_plan(codes, SMOLLM2, 1, None, "gpu")
    layout = Layout(make_mesh(jax.devices()[:1]), 1)
    shape = kv_cache.CacheShape(30, 3, 64, plan.num_blocks, 16, jax.numpy.dtype("bfloat16"), kind)
    arrays = jax.tree.leaves(shape.made(layout, jax.ShapeDtypeStruct))
    assert plan.rollout["KV pool"] == sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    many = [each.replace(rollout=each.rollout.replace(max_num_seqs=4096)) for each in (wide, codes)]
    blocks = [plan_num_blocks(each, SMOLLM2, 1, 8 << 30) for each in many]
    assert blocks[1] == pytest.approx(blocks[0] * 128 / (64 + 4), rel=1e-3)
    with pytest.raises(ValueError, match=rf"rollout.kv_cache_dtype \({kind}\) must be auto on TPUs"):
        memory_plan(codes, SMOLLM2, 1, None, "tpu")


def problem(bytes_each, trains=True, **sections):
    c = config(**sections)
    plan = memory_plan(c, SMOLLM2, 1, None, "cpu")
    return memory_problem(c, SMOLLM2, plan, 1, bytes_each, trains)


def refusal(bytes_each, trains=True, **sections):
    text = problem(bytes_each, trains, **sections)
    assert text is not None
    return text


def test_a_pool_that_no_memory_holds_is_refused_with_the_option():
    assert problem(64 << 30) is None
    # 384 tokens of 30 layers, 3 heads of 64 numbers, keys and values, four bytes: 16.9 MiB for each of 2048 rows
    text = refusal(16 << 30, rollout={"max_num_seqs": 2048})
    assert text.endswith(
        "rollout.memory_fraction (0.85) leaves 13.6 GiB on each of 1: lower rollout.max_num_seqs (2048 rows of up to "
        "384 tokens per dp group, where a step has 64 samples)"
    )
    text = refusal(16 << 30, rollout={"num_blocks": 1_000_000})
    assert text.endswith("lower rollout.num_blocks (1000000 blocks of 16 tokens)")


SPECULATION = {"speculation": {"enable": True}}


def test_indexes_on_the_devices_are_counted_beside_the_pool():
    """Eight responses of 128 tokens: places of four bytes, and one index for each of 512 rows."""
    rollout, memory = {"memory_fraction": 0.5, "max_num_seqs": 512}, 8 << 30
    before = explain(config(rollout=rollout), SMOLLM2, 1, memory).memory
    c = config(rollout=rollout | SPECULATION)
    e = explain(c, SMOLLM2, 1, memory)
    drafting = build_proposer(c, "gpu")
    assert drafting is not None
    books = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(drafting.array_shapes(512)))
    assert e.memory.rollout["draft indexes"] == books
    assert "draft indexes" in str(e)
    assert "draft indexes" not in before.rollout
    block = 2 * 30 * 3 * 64 * 16 * 4
    fewer = before.num_blocks - e.memory.num_blocks
    assert abs(fewer * block - books) <= block
    assert sum(e.memory.resident.values()) + sum(e.memory.rollout.values()) <= memory // 2


def test_an_update_that_no_memory_holds_is_refused_where_there_is_one():
    many = {"train_batch_size": 20_000}
    text = refusal(16 << 30, actor={"ppo_max_token_len_per_gpu": 10_000_000}, data=many)
    assert "lower actor.ppo_max_token_len_per_gpu (10000000 tokens)" in text
    assert problem(16 << 30, trains=False, actor={"ppo_max_token_len_per_gpu": 10_000_000}) is None
    assert problem(1 << 20) is not None, "weights alone are more"


def test_memory_of_gradients_beside_the_rollout():
    """On a freed device: the trainer's own, and on half of the devices weights, sums and a microbatch's gradients."""
    stream, options = {"stream": {"enable": True}}, {"rollout": {"num_workers": 2}}
    plain, e = (explain(config(trainer=trainer, **options), SMOLLM2, 4) for trainer in ({}, stream))
    assert plain.memory.freed == []
    (freed,) = e.memory.freed
    assert (e.memory.resident, e.memory.rollout, e.memory.update) == (
        plain.memory.resident,
        plain.memory.rollout,
        plain.memory.update,
    )
    on_two = explain(config(), SMOLLM2, 2).memory
    assert freed.parts["weights of the half"] == on_two.resident["master weights"]
    assert freed.parts["gradients"] == on_two.update["gradients"]
    assert "stream" in str(e)
    assert "stream" not in str(plain)


def test_a_rollout_has_a_degree_that_divides_the_invariant_numbers():
    own = {"actor": {"numerics": "invariant", "numerics_tp": 4}, "rollout": {"tensor_model_parallel_size": 8}}
    with pytest.raises(ValueError, match=r"^actor.numerics_tp \(4\) must be a multiple of the largest tp"):
        memory_plan(config(**own), SMOLLM2, 8, None, "cpu")
