"""configs/algorithms: one file per published method, each with the settings that make it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxrl.config.files import load
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.scheduling.rounds.group_filter import differs_in
from jaxrl.scheduling.rounds.shaping import RewardShaping
from jaxrl.train import advantages
from jaxrl.train.losses import METHODS
from jaxrl.types import Group, Prompt, Sample, SampleKey

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "algorithms"


def test_every_method_has_a_file_and_every_file_a_method():
    assert sorted(method.example for method in METHODS.values()) == sorted(file.stem for file in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("name", METHODS)
def test_a_file_has_its_methods_settings(name: str):
    method = METHODS[name]
    config = dataclasses.asdict(load(FOLDER / f"{method.example}.yaml", []))
    for option, value in method.settings.items():
        found = config
        for part in option.split("."):
            found = found[part]
        assert found == value, option


@pytest.mark.parametrize("name", METHODS)
def test_a_header_says_how_to_run_it_and_what_was_seen(name: str):
    file = FOLDER / f"{METHODS[name].example}.yaml"
    header = file.read_text(encoding="utf-8").partition("model:")[0]
    assert f"# Command: jaxrl train --config configs/algorithms/{file.name}" in header
    for part in ("Hardware: ", "Date: ", "# Seen"):
        assert part in header


@pytest.mark.parametrize(
    ("lengths", "scored", "kept", "expected"),
    [
        ((8, 8, 29, 32), (1.0, 1.0, 1.0, 1.0), False, None),  # all right: nothing but lengths to learn
        ((8, 8, 29, 32), (0.0, 0.0, 0.0, 0.0), False, None),
        ((32, 8, 8, 8), (1.0, 0.0, 0.0, 0.0), True, (0.0, -1.0, -1.0, -1.0)),  # right beats wrong at any length
    ],
)
def test_dapo_filters_by_accuracy_and_rewards_what_is_right_at_any_length(
    lengths: tuple[int, ...], scored: tuple[float, ...], kept: bool, expected: tuple[float, ...] | None
):
    config = load(FOLDER / "dapo.yaml", [])
    shaping = RewardShaping.configured(config)
    assert shaping is not None
    group = Group(Prompt(0, 0, (1,), "", ""), [Sample.empty(SampleKey(0, 0, i)) for i in range(len(lengths))])
    verdicts = []
    for sample, length, reward in zip(group.samples, lengths, scored, strict=True):
        verdicts.append(shaping.shaped(Verdict(0.0, sample.key, reward), length))
        sample.token_ids, sample.reward = np.zeros(length, np.int32), verdicts[-1].reward
    assert differs_in(config.algorithm.filter_groups.metric)(group, verdicts) == kept
    if expected is not None:
        assert tuple(verdict.reward for verdict in verdicts) == expected
        found, _ = advantages.compute([group], config.algorithm)
        np.testing.assert_allclose([each[0] for each in found], [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
