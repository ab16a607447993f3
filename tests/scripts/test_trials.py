"""Whole benchmarks at their tiniest, each as a user runs it; what the battery's trial runs too is left to that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from bench import records
from benches import ROOT, run_quick
from runs import Runs

from jaxrl.models.decoder import init
from jaxrl.models.safetensors import export_hf
from jaxrl.models.shapes import named_shape

Cases = dict[str, dict[str, Any]]


def decode(cases: Cases) -> None:
    assert set(cases) == {"engine"} | ({"transformers"} if records.installed("torch", "transformers") else set())
    assert all((case["tokens"], case["decode_tokens"]) == (2 * 48, 2 * 47) for case in cases.values())


def judge(cases: Cases) -> None:
    assert set(cases) == {"resident", "pipelined", "serial", "rollout", "gaps", "after"}
    assert cases["resident"]["over"] == cases["rollout"]["over"] == 1
    assert cases["gaps"]["gap_turns"] > 0
    assert cases["pipelined"]["steps"] == cases["serial"]["steps"] == cases["resident"]["steps"] > 0


def rules(cases: Cases) -> None:
    assert cases["tail-batching"]["long_rounds"] > 0, "a cycle of short rounds and a long one"
    assert all(case["rounds"] == 6 for case in cases.values())


def speculation(cases: Cases) -> None:
    plain, drafted = cases["2 rows, plain"], cases["2 rows, 1"]
    assert (plain["faster"], plain["tokens_per_step"], plain["other"]) == (1, 1, 0)
    assert (drafted["accept_rate"], drafted["other"]) == (1, 0)
    assert drafted["tokens_per_step"] > 3


def stream(cases: Cases) -> None:
    plain, streamed = cases["plain"], cases["stream"]
    for name in ("response_tokens", "longest"):
        assert plain[name] == streamed[name], "medians over the same turns"
    assert plain["hidden_s"] == plain["beside_s"] == plain["streamed_share"] == 0
    assert plain["recompiles"] == streamed["recompiles"] == 0


def sync(cases: Cases) -> None:
    numbers = named_shape("tiny").num_params()
    assert 6 * numbers <= cases["weights"]["moved_bytes"] < 6.1 * numbers, "norms stay float32"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("look", "words"),
    [
        *((look, "") for look in (decode, judge, rules, stream)),
        (speculation, "--acceptance 1 --new 40"),
        (sync, "--dtypes bfloat16 --devices 2 --workers 1 2"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_trial(tmp_path: Path, look: Callable[[Cases], None], words: str):
    record, stdout = run_quick(tmp_path, f"bench_{look.__name__}", *words.split())
    assert record["bench"] == look.__name__
    results = record["results"]["cases"]
    assert record["kept"] == sum(case["kept"] for case in results)
    assert ("DISTURBED" in stdout) == (record["kept"] == 0 or any(case.get("disturbed") for case in results))
    look({case["case"]: case for case in results})


@pytest.mark.slow
def test_a_server_draws_what_the_engine_draws_and_bears_a_bad_day(tmp_path: Path, tiny_model: Path):
    asked = ("bench_serving", "--model", f"random:{tiny_model}", "--length=128")
    cases = run_quick(tmp_path / "throughput", *asked)[0]["results"]["cases"]
    tokens = {case["case"]: case["tokens"] for case in cases}
    assert [tokens[f"server, {count}"] for count in (1, 2)] == [tokens[f"engine, {count}"] for count in (1, 2)]
    record, _ = run_quick(tmp_path / "load", *asked, "--load-s=10")
    assert {kind.rpartition(" ")[0] for kind in record["results"]["load"]["answered"]} >= {"whole", "stream", "garbage"}


@pytest.mark.slow
def test_an_update_has_torchs_loss(tmp_path: Path):
    """The same weights and tokens."""
    config = named_shape("tiny")
    export_hf(init(config, jax.random.key(0)), config, tmp_path / "tiny", dtype="float32")
    record, _ = run_quick(tmp_path / "records", "bench_train", "--model", str(tmp_path / "tiny"))
    cases = {case["case"]: case for case in record["results"]["cases"]}
    assert cases["jaxrl"]["microbatches"] == [[2, 32]], "one microbatch holds all rows"
    assert set(cases) == {"jaxrl"} | ({"torch"} if records.installed("torch", "transformers") else set())
    if "torch" in cases:
        assert cases["torch"]["loss"] == pytest.approx(cases["jaxrl"]["loss"], rel=1e-3)


@pytest.mark.slow
def test_a_profile_is_held_against_loads_that_it_does_not_hold(tmp_path: Path, tiny_model: Path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(Runs(tmp_path, tiny_model).config))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    shared = (f"--config={config}", "trainer.num_devices=2")
    sizes = ("--max-batch=4", "--token-budget=256", "--repeats=1")
    profile, folder = tmp_path / "profile.json", tmp_path / "records"
    asked = (f"--profile={profile}", "--points=4", "--limit=1e9", f"--json={folder}")
    for words in (
        ("-m", "jaxrl", "profile", *shared, f"--out={profile}", *sizes),
        ("scripts/bench_latency.py", *asked, *shared),
    ):
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.iterdir()
    results = json.loads(file.read_text())["results"]
    assert {tp: len(errors) for tp, errors in results["alone"].items()} == {"1": 2, "2": 2}
    errors = [error for own in results["corrected"].values() for error in own]
    assert results["corrected_mean"] == pytest.approx(sum(errors) / 4)
