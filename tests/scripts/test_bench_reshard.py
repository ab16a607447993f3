"""The benchmark of layout changes, tried with `--quick`; and that its counters count."""

from __future__ import annotations

import itertools
import os
import sys

import jax
import jax.numpy as jnp
import pytest
from benches import ROOT, run_quick

sys.path.insert(0, str(ROOT / "scripts"))

import bench_reshard

from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh


@pytest.mark.slow
def test_every_transition_is_measured_and_judged(tmp_path):
    record, _ = run_quick(tmp_path, "bench_reshard")
    results = record["results"]
    cases = {(c["case"], c["from_tp"], c["to_tp"]): c for c in results["cases"]}
    assert set(cases) == {(w, *pair) for w in ("weights", "kv") for pair in itertools.permutations((1, 2, 4), 2)}
    assert results["failures"] == []
    for (what, before, after), case in cases.items():
        assert case["ratio"] == pytest.approx(case["seconds"] / case["copy_s"])
        assert (case["host_reads"], case["rematerialisations"]) == (0, 0)
        assert case["kept"] + case["dropped"] == 2
        if what == "weights":
            assert bool(case["collectives"]) == bool(case["crossed_bytes"]) == (after < before)


def test_a_way_through_the_host_is_counted():
    array = jax.device_put(jnp.zeros((8, 8)), Layout(make_mesh(), 8).sharding("tp"))
    with bench_reshard.host_reads() as read:
        jax.block_until_ready(jax.device_put(array, Layout(make_mesh(), 8).sharding(None, "tp")))
    assert len(read) >= 1
    with bench_reshard.host_reads() as read:
        jax.block_until_ready(jax.jit(lambda x: x + 1)(array))
    assert read == []


def test_what_the_compiler_says_is_heard():
    with bench_reshard.compiler_output() as said:
        os.write(2, b"Involuntary full rematerialization. And more")
    assert said == ["Involuntary full rematerialization. And more"]


def test_failures():
    facts = bench_reshard.Facts(0, 111, 0, 1, 1, {"all-gather": 2}, 3, 4, 0.0)
    assert [words.split()[0] for words in facts.failures(True, 100)] == ["extra", "the", "3", "collectives"]
    assert len([*facts.failures(False, 101)]) == 2
    with pytest.raises(ValueError, match="--rows"):
        bench_reshard.records.parse(bench_reshard.parser(), ["--rows", "0"], {}, ["rows"])


@pytest.mark.parametrize("arguments", [["--layers", "-1"], ["--quick", "--devices", "1"], ["--shape", "none"]])
def test_options_that_do_not_fit(arguments, capsys):
    assert bench_reshard.main(arguments) == 2
    assert capsys.readouterr().err.startswith("bench_reshard: ")
