"""The benchmarks that a battery on an accelerator runs, tried on a CPU: their records hold what its reader asks for."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benches import assert_refused, run_repeated

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_attention  # noqa: E402
import bench_ceilings  # noqa: E402
import bench_decode  # noqa: E402
import bench_sync  # noqa: E402
import bench_train  # noqa: E402
from bench import at_context, costs, decode_cases, jax_cases, loops, records  # noqa: E402
from bench.measure import Bench  # noqa: E402

from jaxrl.kernels import reference  # noqa: E402
from jaxrl.models.shapes import named_shape  # noqa: E402
from jaxrl.scheduling.tokens.batcher import BatcherConfig  # noqa: E402
from jaxrl.scheduling.tokens.engine import Engine  # noqa: E402
from jaxrl.sharding.layout import Layout  # noqa: E402
from jaxrl.sharding.mesh import make_mesh  # noqa: E402

MAINS = {
    "bench_attention": bench_attention.main,
    "bench_ceilings": bench_ceilings.main,
    "bench_decode": bench_decode.main,
    "bench_sync": bench_sync.main,
    "bench_train": bench_train.main,
}


def run(folder: Path, script: str, *arguments: str) -> dict[str, Any]:
    """Runs a benchmark as a user does, on one CPU device; returns its record."""
    record, _ = run_repeated(folder, script, *arguments)
    assert record["ceilings"]["copy_bytes_per_s"] > 0
    assert record["ceilings"]["datasheet"] is None
    for case in record["results"]["cases"]:
        assert case["seconds"] > 0
    return record


@pytest.mark.slow
def test_ceilings(tmp_path):
    record = run(tmp_path, "bench_ceilings", "--rows", "1", "4")
    cases = record["results"]["cases"]
    assert record["bench"] == "ceilings"
    assert {(case["case"], case["rows"]) for case in cases} == {
        (name, rows) for name in ("qkv", "o", "gate_up", "down", "head") for rows in (1, 4)
    }
    for case in cases:
        weight_bytes = 4 * case["inner"] * case["outer"]
        assert case["bytes_per_s"] * case["seconds"] == pytest.approx(weight_bytes)
        assert case["copy_fraction"] * record["ceilings"]["copy_bytes_per_s"] == pytest.approx(case["bytes_per_s"])
        assert case["flops_per_s"] * case["seconds"] == pytest.approx(2 * case["rows"] * weight_bytes / 4)


@pytest.mark.slow
def test_decode_at_context(tmp_path):
    record = run(tmp_path, "bench_decode", "--at-context", "40", "300", "--rows", "1", "3", "--profile")
    results = record["results"]
    assert record["bench"] == "decode-at-context"
    assert [(c["rows"], c["context"]) for c in results["cases"]] == [(1, 40), (3, 40), (1, 300), (3, 300)]
    assert results["left_out"] == []
    for case in results["cases"]:
        assert case["tokens_per_s"] * case["step_s"] == pytest.approx(case["rows"])
        assert case["plan_s"] == pytest.approx(case["step_s"] * 4, rel=0.5)  # medians of two runs each
        assert case["kv_bytes"] == case["rows"] * case["context"] * 2 * 2 * 2 * 8 * 4
        assert case["bytes_per_step"] == case["weight_bytes"] + case["kv_bytes"]
        assert case["copy_fraction"] * record["ceilings"]["copy_bytes_per_s"] == pytest.approx(case["bytes_per_s"])
        assert 0 < case["host_share"] <= 1
        assert case["profile"]["launches"] == pytest.approx(4 * case["launches_per_step"])
        assert case["gap_share"] == pytest.approx(1 - case["kernels_per_step_s"] / case["step_s"])


@pytest.mark.slow
def test_train_with_microbatches(tmp_path):
    arguments = ("--microbatches", "3", "--chunk", "16", "--attention", "reference", "--profile", "--without-torch")
    record = run(tmp_path, "bench_train", *arguments)
    (case,) = record["results"]["cases"]
    assert record["results"]["microbatches"] == 3
    assert [rows * tokens for rows, tokens in case["microbatches"]] == [2 * 32] * 3
    assert case["tokens"] == 3 * 2 * 32
    assert case["flops"] == costs.train_flops(named_shape("tiny"), 6, 32, 16)
    assert case["mfu_datasheet"] is None
    assert case["peak_over_plan"] * case["planned_bytes"] == pytest.approx(case["peak_bytes"])
    assert case["profile"]["groups"]["products"]["seconds"] > 0


@pytest.mark.slow
def test_train_on_one_long_row(tmp_path):
    record = run(tmp_path, "bench_train", "--rows", "1", "--tokens", "256", "--without-torch")
    (case,) = record["results"]["cases"]
    assert case["microbatches"] == [[1, 256]]
    assert case["profile"] is None


@pytest.mark.slow
def test_attention(tmp_path):
    record = run(tmp_path, "bench_attention")
    results = record["results"]
    cases = {(case["what"], case["case"]): case for case in results["cases"]}
    paged = {("paged", name) for name in ("jaxrl", "paged", "jnp", "jax-1", "jax-4")}
    assert set(cases) == paged | {("packed", name) for name in ("pallas", "tiles", "xla")}
    assert [(left["case"], left["reason"]) for left in results["left_out"]] == [
        ("jax-16", "4 blocks are no multiple of 16")
    ]
    case = cases["paged", "jaxrl"]
    assert case["bytes_per_s"] * case["seconds"] == pytest.approx(2 * 64 * (2 * 2 * 16 * 4))
    case = cases["packed", "tiles"]
    assert case["forward_flops_per_s"] * case["forward_s"] == pytest.approx(4 * 4 * 16 * 64 * 64 / 2)
    assert case["flops_per_s"] * case["seconds"] == pytest.approx(3.5 * 4 * 4 * 16 * 64 * 64 / 2)
    ratios = {ratio["ratio"]: ratio for ratio in results["ratios"]}
    assert ratios["jaxrl / jax-4"]["speed"] == pytest.approx(
        cases["paged", "jax-4"]["seconds"] / cases["paged", "jaxrl"]["seconds"]
    )
    assert {"pallas / tiles", "pallas / xla", "jaxrl / jnp", "jaxrl / paged"} <= set(ratios)


@pytest.mark.slow
def test_sync(tmp_path):
    record = run(tmp_path, "bench_sync", "--dtypes", "bfloat16", "--devices", "2", "--workers", "1", "2")
    cases = record["results"]["cases"]
    assert [case["workers"] for case in cases] == [1, 2]
    numbers = named_shape("tiny").num_params()
    for case in cases:
        # norms stay float32
        assert 6 * numbers <= case["moved_bytes"] < 6.1 * numbers
        copy_s = case["moved_bytes"] / record["ceilings"]["copy_bytes_per_s"]
        assert case["over_copy"] == pytest.approx(case["seconds"] / copy_s)


REFUSED = [
    ("bench_attention", ["--packed", "16"], r"--packed \(16\) must be rows and tokens, such as 16x1024"),
    ("bench_attention", ["--packed", "0x64"], r"--packed \(0x64\) must be rows and tokens"),
    ("bench_attention", ["--segments", "3"], r"1024 tokens must be a multiple of --segments \(3\)"),
    ("bench_attention", ["--contexts", "0"], r"--contexts \(0\) must be at least 1"),
    ("bench_ceilings", ["--rows", "-1"], r"--rows \(-1\) must be at least 1"),
    ("bench_decode", ["--at-context", "64"], r"--at-context \(64\) must be at least 81: the middle of 8 plans"),
    ("bench_decode", ["--at-context", "1024", "--continuous"], r"two benchmarks: choose one"),
    ("bench_decode", ["--profile"], r"--profile needs --at-context"),
    ("bench_decode", ["--prefill-tokens", "0"], r"--prefill-tokens \(0\) must be at least 1"),
    ("bench_sync", ["--tp", "0"], r"--tp \(0\) must be at least 1"),
    ("bench_train", ["--microbatches", "0"], r"--microbatches \(0\) must be at least 1"),
    ("bench_train", ["--attention", "none"], r"actor.attention must be one of .*, found 'none'"),
    ("bench_train", ["--chunk", "0"], r"actor.logprob_chunk_tokens.*0"),
    ("bench_train", ["--chunk", "few"], r"actor.logprob_chunk_tokens .*'few'"),
]


@pytest.mark.parametrize(("script", "arguments", "sentence"), REFUSED)
def test_nonsense_is_refused_in_one_sentence(script, arguments, sentence, capsys):
    assert_refused(MAINS[script], script, arguments, sentence, capsys)


@pytest.mark.parametrize("script", MAINS)
def test_help_explains_the_figures(script, capsys):
    with pytest.raises(SystemExit):
        MAINS[script](["--help"])
    text = capsys.readouterr().out
    assert "measured" in text


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
    ended = case._end

    def look() -> None:
        batcher = case._engine.batcher
        for request_id in case._engine.unfinished():
            progress = batcher.progress(request_id)
            written.append(progress.num_prompt + progress.num_tokens - 1)  # of plans that were collected
            tables.append((batcher.progress(request_id).group, *batcher.blocks.table(request_id)))
        ended()

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


def test_placed_rows_read_the_random_pool(monkeypatch):
    setting, params = placed(100)
    case = at_context.PlacedCase(setting, params, 2, 100, "float32")
    drawn: list[list[int]] = []
    ended = case._end

    def look() -> None:
        progress = [case._engine.batcher.progress(i) for i in case._engine.unfinished()]
        drawn.append([token for each in progress for token in each.tokens])
        ended()

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


def test_points_that_do_not_fit_are_left_out(monkeypatch):
    setting, _ = placed(4096)
    stats = {"bytes_limit": 10_000_000, "bytes_in_use": 1_000_000}

    class Device:
        platform = "gpu"

        def memory_stats(self) -> dict[str, int]:
            return stats

    class Mesh:
        size = 1
        devices = np.array([Device()])

    layout: Any = type("Layout", (), {"mesh": Mesh(), "tp": 1, "dp": 1})()
    setting.layout = layout
    # tiny has 256 bytes of keys and values a token in float32
    assert at_context._misfit(setting, 4, 4096, "float32") is None
    reason = at_context._misfit(setting, 9, 4096, "float32")
    assert reason is not None
    assert "GB are needed" in reason
    assert at_context._misfit(setting, 9, 4096, "bfloat16") is None


# -- bare loops --------------------------------------------------------------------------------------------------------


def test_bare_loops_prefill_in_calls_of_bounded_tokens():
    sizes = loops.Sizes(rows=6, prompt=20, new=4, prefill_tokens=90)
    assert sizes.rows_at_once == 3, "four fit, but three divide six"
    assert loops.Sizes(rows=7, prompt=20, new=4, prefill_tokens=10).rows_at_once == 1
    assert loops.Sizes(rows=7, prompt=20, new=4).rows_at_once == 7
    drawn = []
    for kind, tokens in (("paged", "1000"), ("paged", "45"), ("contiguous", "45")):
        setting, params = placed(100, "--prompt", "20", "--new", "6", "--prefill-tokens", tokens)
        weights = loops.bare_weights(params, setting.config, "float32")
        case = decode_cases.BareCase(kind, setting, weights, setting.prompts(4))
        case()
        drawn.append(case.tokens.tolist())
    assert drawn[0] == drawn[1] == drawn[2]


def test_prompts_attend_in_parts_of_queries(monkeypatch):
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 21, h, 8)) for i, h in enumerate((4, 2, 2)))
    whole = loops._prompt_attention(q, k, v)
    monkeypatch.setattr(loops, "QUERIES", 8)
    assert jnp.abs(loops._prompt_attention(q, k, v) - whole).max() < 1e-6
    ids, at = jnp.ones((2, 21), jnp.int32), jnp.tile(jnp.arange(21), (2, 1))
    assert jnp.abs(whole - reference.packed_attention(q, k, v, ids, at)).max() < 1e-5


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
    for make in (lambda: bench_attention._ours(nowhere), lambda: bench_attention._jax_paged(nowhere, 4, 1)):
        with pytest.raises(bench_attention.LeftOut, match="GPUs alone"):
            make()
    with pytest.raises(bench_attention.LeftOut, match="one sample"):
        bench_attention._rival("cudnn", "bfloat16", 2)
    with pytest.raises(bench_attention.LeftOut, match="16 bits"):
        bench_attention._rival("cudnn", "float32", 1)


def test_an_update_has_the_options_that_it_was_asked_for():
    options = bench_train.parser().parse_args(
        ["--rows", "4", "--microbatches", "2", "--chunk", "64", "--remat", "full"]
    )
    spec = bench_train._spec(options, records.Model(shape="tiny"), "bfloat16")
    config = jax_cases.train_config(spec)
    assert config.actor.ppo_max_token_len_per_gpu == 4 * 192
    assert (config.actor.logprob_chunk_tokens, config.actor.remat, config.actor.dtype) == (64, "full", "bfloat16")
    batch = jax_cases._batch(spec, 256)
    assert len(batch.samples) == 8
    assert len({sample.token_ids.tobytes() for sample in batch.samples}) == 8
