"""The three benchmarks, tried with `--quick`: they end, their records hold what they should, and it adds up."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from benches import assert_refused, run_repeated

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_decode  # noqa: E402
import bench_step  # noqa: E402
import bench_train  # noqa: E402
from bench import decode_cases, records, step_case  # noqa: E402
from bench.loops import bare_weights  # noqa: E402
from bench.measure import Bench  # noqa: E402

from jaxrl.data.tokenizer import Tokenizer  # noqa: E402
from jaxrl.models.decoder import init  # noqa: E402
from jaxrl.models.safetensors import export_hf  # noqa: E402
from jaxrl.models.shapes import named_shape  # noqa: E402
from jaxrl.sharding.layout import Layout  # noqa: E402
from jaxrl.sharding.mesh import make_mesh  # noqa: E402

HEAD = {"schema", "bench", "date", "command", "commit", "dirty", "device", "versions", "model", "devices"}
HEAD |= {"ceilings", "kept", "dropped", "results"}
MAINS = {"bench_decode": bench_decode.main, "bench_train": bench_train.main, "bench_step": bench_step.main}


def run(folder: Path, script: str, *arguments: str) -> dict[str, Any]:
    """Runs a benchmark as a user does, on one CPU device; returns its record."""
    record, stdout = run_repeated(folder, script, *arguments)
    assert not HEAD - set(record)
    assert record["model"] == "tiny"
    assert record["ceilings"]["bandwidth_bytes_per_s"] > 0
    for case in record["results"]["cases"]:
        assert case["disturbed"] == (case["kept"] == 0)
        tokens = case.get("tokens", case.get("response_tokens"))
        assert case["tokens_per_s"] * case["seconds"] == pytest.approx(tokens)
    kept = sum(case["kept"] for case in record["results"]["cases"])
    dropped = sum(case["dropped"] for case in record["results"]["cases"])
    assert (record["kept"], record["dropped"]) == (kept, dropped)
    assert f"{kept} kept, {dropped} dropped" in stdout
    assert ("DISTURBED" in stdout) == any(case["disturbed"] for case in record["results"]["cases"])
    return record


@pytest.mark.slow
def test_decode(tmp_path):
    record = run(tmp_path, "bench_decode")
    cases = {case["case"]: case for case in record["results"]["cases"]}
    with_torch = records.installed("torch", "transformers")
    assert set(cases) == {"engine", "bare-contiguous", "bare-paged"} | ({"transformers"} if with_torch else set())
    assert ("torch" in record["versions"]) == with_torch
    for case in cases.values():
        assert (case["tokens"], case["decode_tokens"]) == (2 * 48, 2 * 47)
        assert case["decode_tokens_per_s"] * case["decode_s"] == pytest.approx(case["decode_tokens"])
        assert case["bytes_per_s"] * case["step_s"] == pytest.approx(case["bytes_per_step"])
        bandwidth = record["ceilings"]["bandwidth_bytes_per_s"]
        assert case["bandwidth_fraction"] * bandwidth == pytest.approx(case["bytes_per_s"])
    for ratio in record["results"]["ratios"]:
        above, below = (cases[name.strip()] for name in ratio["ratio"].split("/"))
        assert ratio["decode"] == pytest.approx(above["decode_tokens_per_s"] / below["decode_tokens_per_s"])
        assert ratio["total"] == pytest.approx(below["seconds"] / above["seconds"])
    assert len(record["results"]["ratios"]) == 2 + with_torch


@pytest.mark.slow
def test_decode_continuous(tmp_path):
    results = run(tmp_path, "bench_decode", "--continuous")["results"]
    assert results["recompiles"] == 0
    assert len(results["lengths"]) == 6
    assert all(1 <= length <= 16 for length in results["lengths"])
    cases = {case["case"]: case for case in results["cases"]}
    assert set(cases) == {"continuous", "static"}
    for case in cases.values():
        assert case["tokens"] == sum(results["lengths"])
        # prefill draws every response's first token, decode steps the others
        assert case["busy_row_steps"] == case["tokens"] - 6
        assert case["host_per_step_s"] * case["steps"] == pytest.approx(case["engine_s"] + case["submit_s"])
        assert 0 < case["host_share"] < 1
    seconds = {name: case["seconds"] for name, case in cases.items()}
    ratio = results["ratios"]["float32"]
    assert ratio["static_over_continuous"] == pytest.approx(seconds["static"] / seconds["continuous"])
    assert ratio["disturbed"] == any(case["disturbed"] for case in cases.values())
    assert cases["static"]["steps"] >= cases["continuous"]["steps"]


@pytest.mark.slow
def test_train(tmp_path):
    config = named_shape("tiny")
    export_hf(init(config, jax.random.key(0)), config, tmp_path / "tiny", dtype="float32")
    record = run(tmp_path / "records", "bench_train", "--model", str(tmp_path / "tiny"))
    cases = {case["case"]: case for case in record["results"]["cases"]}
    with_torch = records.installed("torch", "transformers")
    assert set(cases) == {"jaxrl"} | ({"torch"} if with_torch else set())
    assert cases["jaxrl"]["microbatches"] == [[2, 32]], "one microbatch holds all rows"
    for case in cases.values():
        assert case["tokens"] == 2 * 32
        assert case["peak_bytes"] > 0
        rate = record["ceilings"]["flops_per_s"]["float32_full"]
        assert case["mfu"] * rate * case["seconds"] == pytest.approx(case["flops"])
    if with_torch:
        # the same weights and tokens
        assert cases["torch"]["loss"] == pytest.approx(cases["jaxrl"]["loss"], rel=1e-3)


@pytest.mark.slow
def test_step(tmp_path):
    results = run(tmp_path, "bench_step", "--without-trl")["results"]
    (case,) = results["cases"]
    assert results["broken_promises"] == []
    assert case["response_tokens"] == 2 * 2 * 8
    assert 0 < case["prompt_tokens"] <= 2 * 2 * 12
    assert case["recompiles"] == 0
    assert abs(case["residual_share"]) <= bench_step.MAX_RESIDUAL_OF_A_TRIAL
    assert {"timing_s/gen", "timing_s/update_actor", "timing_s/sync", "timing_s/step"} <= set(case)
    assert case["timing_s/save"] == 0, "nothing is saved"
    assert "timing_s/testing" not in case
    assert 0 < case["peak_above_baseline_bytes"] < case["peak_bytes"]


REFUSED = [
    ("bench_decode", ["--shape", "SmolLM3"], r"--shape \(SmolLM3\) must be one of tiny, SmolLM2-135M"),
    ("bench_decode", ["--rows", "8", "0"], r"--rows \(0\) must be at least 1"),
    ("bench_decode", ["--new", "1"], r"--new \(1\) must be at least 2"),
    ("bench_decode", ["--model", "no/such/folder"], r"no/such/folder"),
    ("bench_train", ["--rows", "0"], r"--rows \(0\) must be at least 1"),
    ("bench_train", ["--response", "192"], r"--response \(192\) must be below --tokens \(192\)"),
    ("bench_step", ["--samples", "1"], r"--samples \(1\) must be at least 2"),
    ("bench_step", ["--repetitions", "0"], r"--repetitions \(0\) must be at least 1"),
]


@pytest.mark.parametrize(("script", "arguments", "sentence"), REFUSED)
def test_nonsense_is_refused_in_one_sentence(script, arguments, sentence, capsys):
    assert_refused(MAINS[script], script, arguments, sentence, capsys)


@pytest.mark.parametrize("script", MAINS)
def test_help_explains_the_figures(script, capsys):
    with pytest.raises(SystemExit):
        MAINS[script](["--help"])
    text = capsys.readouterr().out
    assert "tokens/s" in text
    assert "ceiling" in text or "measured bandwidth" in text or "measured matrix products" in text


def test_broken_promises_are_named():
    case = {"dtype": "float32", "residual_share": 0.05, "recompiles": 2.0}
    assert len(bench_step._broken([case])) == 2
    assert bench_step._broken([case | {"residual_share": -0.01, "recompiles": 0.0}]) == []


@pytest.mark.parametrize("shape", ["tiny", "biased"])
def test_bare_loops_draw_what_the_engine_draws(shape):
    """Same keys, same positions: in float32 the three differ by rounding only, far from any tie on so few tokens."""
    config = named_shape("tiny")
    if shape == "biased":
        config = dataclasses.replace(config, family="qwen2", qkv_bias=True, tie_word_embeddings=False)
    options = bench_decode.parser().parse_args(["--prompt", "20", "--new", "18", "--decode-steps", "4", "--seed", "3"])
    layout = Layout(make_mesh(jax.devices()[:1]), 1)
    setting = decode_cases.Setting(options, records.Model(shape="tiny"), config, layout, Bench(None, print))
    params, prompts = setting.params("float32"), setting.prompts(3)
    for i, name in enumerate(name for name in params["layers"] if name.endswith("bias")):  # they start as zeros
        params["layers"][name] += 0.1 * jax.random.normal(jax.random.key(i), params["layers"][name].shape)
    engine = decode_cases.EngineCase(setting, params, prompts, "float32")
    engine()
    weights = bare_weights(params, config, "float32")
    for kind in ("contiguous", "paged"):
        case = decode_cases.BareCase(kind, setting, weights, prompts)
        values = case()
        assert values["seconds"] == pytest.approx(values["prefill_s"] + values["decode_s"])
        assert case.tokens.shape == (3, 18)
        assert case.tokens.tolist() == [ids.tolist() for ids in engine.tokens]


def test_prompts_of_a_step_have_the_length_asked_for(tmp_path):
    folder = tmp_path / "shape"
    step_case.write_tokenizer(records.Model(shape="tiny").config(), folder)
    step_case.write_inputs(tmp_path, str(folder), 5, 12, seed=1)
    tokenizer = Tokenizer.from_path(folder)
    questions = [line["question"] for line in records.read_records(tmp_path / "train.jsonl")]
    assert len(set(questions)) == 5
    assert [len(tokenizer.encode(question)) for question in questions] == [12] * 5
