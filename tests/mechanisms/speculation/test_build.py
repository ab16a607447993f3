"""From options to what devices draft with, and from a latency profile to when it pays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxrl.config import Config, ConfigError, from_mapping
from jaxrl.mechanisms.speculation import Speculation, build_proposer, draft_config, step_costs, verify_rule
from jaxrl.mechanisms.speculation.index import DraftLengths
from jaxrl.mechanisms.speculation.proposer import Drafting
from jaxrl.mechanisms.speculation.rule import DraftConfig, DraftWindow
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile, ProfileIdentity, VerifyMeasurement

IDENTITY = ProfileIdentity("m", "f", "cpu", 1, "0", "float32")
SIZES = {1: (4, 8)}


def config(profile: str = "", **speculation: Any) -> Config:
    rollout = {"n": 3, "max_num_seqs": 5, "speculation": speculation, "layout": {"profile": profile}}
    return from_mapping({"model": {"path": "models/tiny"}, "data": {"max_response_length": 50}, "rollout": rollout})


def executor(tp: int = 1, widths: dict[int, int] | None = None) -> Any:
    return SimpleNamespace(tp=tp, verify_widths=lambda tp: {4: 4, 8: 2} if widths is None else widths)


def profile(**more: Any) -> Profile:
    decode = [Measurement(1, rows, context, 0.01 * rows + context / 1e5) for rows in (4, 8) for context in (16, 64)]
    verify = [
        VerifyMeasurement(1, rows, context, 0.02 * rows + context / 1e5, 16 // rows)
        for rows in (4, 8)
        for context in (16, 64)
    ]
    return Profile(IDENTITY, tuple(decode), verify=tuple(verify), **more)


def test_what_an_executor_is_built_for():
    assert build_proposer(config(), "cpu") is None
    chosen = config(enable=True, epochs=2, num_indexes=3, verify_tokens=9)
    expected = Drafting(6, 300, 9, DraftLengths(3, 7, 32), DraftWindow(2, 2, 32), 3)
    assert build_proposer(chosen, "cpu") == expected
    drafts = config(enable=True, verify_tokens=7, max_batch=3)
    assert draft_config(drafts, "cpu") == DraftConfig(DraftWindow(2, 2, 32), 7, 3)
    memory = Speculation.rollout_memory(chosen, 1, "cpu", 0, is_timeless=True)
    assert memory is not None
    assert (memory.total, memory.positions) == (3 * 4 * (sum(expected.sizes) + 2), 9)
    each_row = Speculation.rollout_memory(config(enable=True), 1, "cpu", 0, is_timeless=True)
    assert each_row is not None
    assert each_row.total % 5 == 0, "one for each row"
    told = {"": True, "p.json": False}
    assert {file: bool(Speculation.note(config(file, enable=True))) for file in told} == told
    with pytest.raises(ConfigError, match=r"tp 1 that verify \{4: 4, 8: 2\}, and rollout.speculation needs \{\}"):
        verify_rule(config("p.json", enable=True), executor(widths={}), profile(), SIZES)


def test_costs_are_those_of_the_layout_in_use():
    costs = step_costs(config("p.json", enable=True), profile(), executor(), SIZES)
    assert costs.decode_s(4, 4 * 16) == pytest.approx(0.04 + 16e-5)
    assert costs.verify_s(4, 4 * 64) == pytest.approx(0.08 + 64e-5)
    assert costs.verify_s(3, 4 * 64) == costs.verify_s(4, 4 * 64), "rows of its program"
    assert costs.verify_s(5, 8 * 16) == pytest.approx(0.16 + 16e-5)
