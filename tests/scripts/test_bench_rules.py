"""`bench_rules.py`: the simulator predicts the rounds that the engine then runs; the figures compared add up."""

from __future__ import annotations

import bench_rules
import pytest
from bench import rule_rounds
from bench.measure import Run
from bench_rules import compare
from gpu import figures

from jaxrl.models.shapes import named_shape
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.executor import MachineSizes
from jaxrl.sim.hardware import H100


def rounds(*seconds: float, samples: float = 4.0) -> list[dict[str, float]]:
    return [{"seconds": s, "samples": samples, "long": 0.0} for s in seconds]


def runs(name: str, seconds: list[float], gauges: list[float] | None = None) -> list[Run]:
    gauges = [1.0] * len(seconds) if gauges is None else gauges
    return [Run(f"{name} float32", values, (g, g)) for values, g in zip(rounds(*seconds), gauges, strict=True)]


def test_error_is_of_the_speed_and_not_of_the_seconds():
    """A machine half as fast as predicted slows all rules alike."""
    predicted = {"plain": rounds(4.0, 4.0), "other": rounds(2.0, 3.0)}
    plain, other = compare(predicted, [*runs("plain", [8.0, 8.0]), *runs("other", [4.0, 6.0])], "float32")
    assert plain["error"] == plain["undisturbed_error"] == 0
    assert other["speed"] == other["predicted_speed"] == pytest.approx(1.6)
    assert other["error"] == pytest.approx(0)


def test_a_disturbed_round_is_left_out_on_both_sides():
    predicted = {"plain": rounds(4.0, 4.0), "other": rounds(2.0, 4.0)}
    measured = [*runs("plain", [4.0, 4.0]), *runs("other", [2.0, 40.0], [1.0, 0.5])]
    _, other = compare(predicted, measured, "float32")
    assert other["kept"] == 1
    assert other["error"] < -0.5
    assert other["undisturbed_error"] == pytest.approx(0)


def test_an_undisturbed_round_that_takes_no_time_compares_nothing():
    """Partial rollout's last batch may be complete when its round begins; here all others were disturbed."""
    predicted = {"plain": rounds(4.0, 4.0), "other": rounds(2.0, 0.0)}
    measured = [*runs("plain", [4.0, 4.0]), *runs("other", [2.0, 0.001], [0.5, 1.0])]
    plain, other = compare(predicted, measured, "float32")
    assert (plain["kept"], other["kept"]) == (2, 1)
    assert other["real_over_predicted"] is other["undisturbed_error"] is None


def test_rounds_that_the_simulator_did_not_predict_are_no_comparison():
    predicted = {"plain": rounds(4.0, samples=5.0)}
    with pytest.raises(ValueError, match="plain, round 1: the simulator predicted another round"):
        compare(predicted, runs("plain", [4.0]), "float32")


def test_simulated_rounds_beside_themselves(capsys: pytest.CaptureFixture[str]):
    """All rules over the same lengths, twice; the second time stands for a real machine half as fast."""
    workload = rule_rounds.modelled(0, 6, 1.0, 24, 0.5, 8)
    sizes, cost = MachineSizes(1, 1, 8, 8 * 2 + 1, 16, 64), CostModel(named_shape("tiny"), H100)

    def played() -> dict[str, list[dict[str, float]]]:
        found = {}
        for name, rule in rule_rounds.rules(2, 2).items():
            prompts = rule_rounds.Prompts(0, 8, 256)
            one = rule_rounds.simulated_rounds(rule, prompts, sizes, cost, 4, workload, 24)
            found[name] = [one() for _ in range(6)]
        return found

    predicted, real = played(), played()
    slow = [
        Run(f"{name} float32", values | {"seconds": 2 * values["seconds"]})
        for name, own in real.items()
        for values in own
    ]
    cases = compare(predicted, slow, "float32")
    assert [case["case"] for case in cases] == ["plain", "tail-batching", "partial-rollout"]
    assert cases[1]["long_rounds"] > 0, "a cycle of short rounds and a long one"
    for case in cases:
        assert (case["rounds"], case["error"]) == (6, pytest.approx(0))
        assert case["s_per_sample"] == pytest.approx(2 * case["predicted_s_per_sample"])
        bench_rules._print(case)
    assert "tail-batching    float32: 6 rounds" in capsys.readouterr().out
    record = {"part": "rules", "bench": "rules", "results": {"cases": cases}}
    asked = [figure for figure in figures.trial_figures() if figure.part == "rules"]
    assert asked
    assert all(figure.value([record]) is not None for figure in asked), "what the battery's page looks for"
