"""What the benchmarks for accelerators measure: rows stand at their context, cases of attention compute the same."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import bench_attention
import bench_decode
import bench_train
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench import at_context, decode_cases, jax_cases, records
from bench.measure import Bench

from jaxrl.kernels import reference
from jaxrl.models.shapes import named_shape
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh

# -- rows at a context -------------------------------------------------------------------------------------------------


def placed(context: int, *arguments: str, devices: int = 1) -> tuple[decode_cases.Setting, Any]:
    """A setting of tiny, and its weights."""
    options = bench_decode.parser().parse_args(
        ["--at-context", str(context), "--decode-steps", "4", "--plans", "2", "--seed", "3", *arguments]
    )
    layout = Layout(make_mesh(jax.devices()[:devices]), 1)
    config = named_shape("tiny")
    setting = decode_cases.Setting(options, records.Model(shape="tiny"), config, layout, Bench(None, print))
    return setting, setting.params("float32")


def test_rows_stand_at_their_context_in_the_middle_of_the_timed_steps(monkeypatch):
    setting, params = placed(200, devices=2)
    case = at_context.PlacedCase(setting, params, 3, 200, "float32")
    written: list[int] = []
    tables: list[tuple[int, ...]] = []

    def look() -> None:
        batcher = case._engine.batcher
        for request_id in case._engine.unfinished():
            progress = batcher.progress(request_id)
            written.append(progress.num_prompt + progress.num_tokens - 1)  # of plans that were collected
            tables.append((progress.group, *batcher.blocks.table(request_id)))
        at_context.PlacedCase._end(case)

    monkeypatch.setattr(case, "_end", look)
    free = [case._engine.batcher.blocks.num_free(group) for group in range(2)]
    values = case()
    # two timed plans of four steps lie behind each row
    assert written == [200 + 4] * 3
    assert [group for group, *_ in tables] == [0, 1, 0]
    assert tables[0][2] - tables[0][1] == 2, "the blocks of rows that grow together take turns"
    assert values["seconds"] == pytest.approx(8 * values["step_s"])
    assert 0 < values["host_per_plan_s"] <= values["plan_s"]
    assert free == [case._engine.batcher.blocks.num_free(group) for group in range(2)]
    case()
    assert case._engine.is_idle
    assert case.executor.recompiles == 0
    case.close()


def test_one_row_stands_further_than_the_others(monkeypatch):
    setting, params = placed(100, "--longest", "200")
    case = at_context.PlacedCase(setting, params, 3, 100, "float32")
    written: list[int] = []

    def look() -> None:
        found = [case._engine.batcher.progress(i) for i in case._engine.unfinished()]
        written.extend(each.num_prompt + each.num_tokens - 1 for each in found)
        at_context.PlacedCase._end(case)

    monkeypatch.setattr(case, "_end", look)
    case()
    assert written == [204, 104, 104]
    assert case.executor.num_blocks == 1 + 14 + 7 + 7, "of 16 positions: up to 210 and 110 tokens"
    case.close()


def test_placed_rows_read_the_random_pool(monkeypatch):
    setting, params = placed(100)
    case = at_context.PlacedCase(setting, params, 2, 100, "float32")
    drawn: list[list[int]] = []

    def look() -> None:
        progress = [case._engine.batcher.progress(i) for i in case._engine.unfinished()]
        drawn.append([token for each in progress for token in each.tokens])
        at_context.PlacedCase._end(case)

    monkeypatch.setattr(case, "_end", look)
    case()
    for pool in (None, decode_cases._random_pool(case.executor)):
        case.executor.release()
        case.executor.allocate(pool)
        case._engine = Engine(case._timed, BatcherConfig(decode_steps=4))  # its blocks are in their first order
        case()
    assert drawn[0] != drawn[1], "zeros give other tokens"
    assert drawn[0] == drawn[2]
    case.close()


def test_points_that_do_not_fit_are_left_out():
    setting, _ = placed(4096)
    stats = {"bytes_limit": 10_000_000, "bytes_in_use": 1_000_000}
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    mesh = SimpleNamespace(size=1, devices=np.array([device]))
    setting.layout = SimpleNamespace(mesh=mesh, tp=1, dp=1)  # type: ignore[assignment]
    # tiny has 256 bytes of keys and values a token in float32
    assert at_context._misfit(setting, 4, 4096, "float32") is None
    reason = at_context._misfit(setting, 9, 4096, "float32")
    assert reason is not None
    assert "GB are needed" in reason
    assert at_context._misfit(setting, 9, 4096, "bfloat16") is None


# -- what is compared --------------------------------------------------------------------------------------------------


def test_cases_of_paged_attention_compute_the_same():
    place = bench_attention.Place(named_shape("SmolLM2-135M"), on_gpu=False, interpret=True)
    config, context = place.config, 64
    pool = (config.num_kv_heads, 9, bench_attention.BLOCK, config.head_dim)
    k, v = (jax.random.normal(jax.random.key(i), pool) for i in range(2))
    q = jax.random.normal(jax.random.key(2), (2, 1, config.num_heads, config.head_dim))
    tables = jnp.asarray(np.arange(1, 9).reshape(2, 4), jnp.int32)
    positions = jnp.full((2, 1), context - 1, jnp.int32)
    expected = reference.paged_attention(q, k, v, tables, positions)
    for one in (bench_attention._ours(place), bench_attention._jax_paged(place, 4, 2)):
        assert jnp.abs(one(q, k, v, tables, positions) - expected).max() < 1e-5


def test_a_decode_step_reads_and_replaces_all_pools():
    config = dataclasses.replace(named_shape("Qwen2.5-1.5B"), head_dim=16)
    place = bench_attention.Place(config, on_gpu=False, interpret=True)
    pools = bench_attention.Pools(config, {"rows": 2, "context": 40, "dtype": "float32"}, 2)
    before = [np.asarray(array) for array in (*pools.keys, *pools.values)]
    outs = bench_attention._decode_step(place, pools)()
    assert len(outs) == 2
    for out in outs:
        assert out.shape == (2, config.num_heads, 16)
        assert bool(jnp.isfinite(out).all())
    assert jnp.abs(outs[0] - outs[1]).max() > 1e-3, "each layer reads its own pool"
    for old, new in zip(before, (*pools.keys, *pools.values), strict=True):
        # one position of each row, and of each key/value head, is new
        changed = {tuple(at) for at in np.argwhere((old != np.asarray(new)).any(-1))[:, 1:]}
        assert changed == {(int(row[39 // 16]), 39 % 16) for row in pools.tables}


@pytest.mark.parametrize("segments", [1, 2])
def test_cases_of_packed_attention_compute_the_same(segments):
    place = bench_attention.Place(named_shape("SmolLM2-135M"), on_gpu=False, interpret=True)
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 32, h, 64)) for i, h in enumerate((9, 3, 3)))
    point = {"what": "packed", "rows": 1, "tokens": 32, "segments": segments, "dtype": "float32"}
    cases = [bench_attention._packed(place, name, point) for name in ("tiles", "pallas")]
    if segments == 1:
        cases.append(bench_attention._rival("xla", "float32", 1))
    first, *rest = (one(q, k, v) for one in cases)
    for other in rest:
        assert jnp.abs(first - other).max() < 1e-5


def test_attention_says_what_it_leaves_out():
    nowhere = bench_attention.Place(named_shape("tiny"), on_gpu=False, interpret=False)
    for make, arguments, words in (
        (bench_attention._ours, (nowhere,), "GPUs alone"),
        (bench_attention._mosaic, (nowhere, "bfloat16"), "GPUs alone"),
        (bench_attention._jax_paged, (nowhere, 4, 1), "GPUs alone"),
        (bench_attention._rival, ("cudnn", "bfloat16", 2), "one sample"),
        (bench_attention._rival, ("cudnn", "float32", 1), "16 bits"),
    ):
        with pytest.raises(bench_attention.LeftOut, match=words):
            make(*arguments)


def test_an_update_has_the_options_that_it_was_asked_for():
    words = ["--rows", "4", "--microbatches", "2", "--chunk", "64", "--remat", "full"]
    options = bench_train.parser().parse_args(words)
    spec = bench_train._spec(options, records.Model(shape="tiny"), "bfloat16")
    config = jax_cases.train_config(spec)
    assert config.actor.ppo_max_token_len_per_gpu == 4 * 192
    assert (config.actor.logprob_chunk_tokens, config.actor.remat, config.actor.dtype) == (64, "full", "bfloat16")
    batch = jax_cases._batch(spec, 256)
    assert len(batch.samples) == 8
    assert len({sample.token_ids.tobytes() for sample in batch.samples}) == 8
