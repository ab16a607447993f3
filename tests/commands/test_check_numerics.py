"""`jaxrl check-numerics`: what it counts, that it finds what differs, and that each path is one."""

from __future__ import annotations

import json
from pathlib import Path as File

import numpy as np
import pytest
from drawn_models import runnable
from tiny import write_tiny_model

from jaxrl.cli import main
from jaxrl.commands import check_numerics as command
from jaxrl.commands.check_numerics import CheckOptions, Path, _rows, compare, paths
from jaxrl.models.config import ModelConfig
from jaxrl.models.families import FAMILIES
from jaxrl.types import SampleKey

KEYS = [SampleKey(0, 4, 0), SampleKey(0, 4, 1)]
SMALL = ["--rows", "1,4", "--tokens", "100"]


def rows(values: list[list[float]], tokens: list[list[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.array(a, np.float32), np.array(b)) for a, b in zip(values, tokens, strict=True)]


def test_what_is_counted():
    wanted = rows([[-1.0, -2.0, -0.75], [-4.0, -0.5, -3.0]], [[5, 6, 7], [8, 9, 1]])
    off = 2.0**-21
    found = rows([[-1.0, -2.0, -0.75], [-4.0, -0.5 - 2 * off, -3.0 + off]], [[5, 6, 7], [8, 3, 1]])
    both = compare("some", KEYS, wanted, found, "float32")
    assert (both.tokens, both.differ, both.flips, both.first) == (6, 2, 1, (4, 1, 1))
    assert both.largest == 2 * off
    assert both.ulps == 2 * off / 2.0**-24  # 0.5 has its next neighbour below at 2^-24 in float32
    assert compare("some", KEYS, wanted, found, "bfloat16").ulps == 2 * off / 2.0**-8
    same = compare("some", KEYS, wanted, [(values, None) for values, _ in wanted], "float32")
    assert (same.differ, same.flips, same.first, same.ulps) == (0, None, None, 0)
    no_number = compare(
        "some", KEYS, wanted, rows([[-1.0, -2.0, -0.75], [-4.0, float("nan"), -3.0]], [[5, 6, 7], [8, 9, 1]]), "float32"
    )
    assert (no_number.differ, no_number.largest) == (1, float("inf"))


def checked(tiny_model: File, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict, str]:
    status = main(["check-numerics", "--model", f"random:{tiny_model}", *SMALL, "--json", *words])
    said = capsys.readouterr()
    assert said.out, said.err
    return status, json.loads(said.out), said.err


def test_the_same_again_is_the_same_and_another_type_is_not(
    tiny_model: File, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Tokens that are forced change nothing, and a path that must differ is seen to."""
    again = Path("the same again")
    monkeypatch.setattr(command, "paths", lambda options, _stacks: [again])
    status, found, _ = checked(tiny_model, capsys)
    assert status == 0
    (line,) = found["paths"]
    assert (line["tokens"], line["differ"], line["flips"], line["first"]) == (8 * 24, 0, 0, None)

    other = Path("bfloat16", ("rollout.dtype=bfloat16",))
    trainer = next(path for path in paths(CheckOptions(rows=(4,))) if path.drive is None)
    monkeypatch.setattr(command, "paths", lambda options, _stacks: [other, trainer])
    status, found, said = checked(tiny_model, capsys)
    assert status == 1
    assert "of 2 paths differ from 4 rows at once" in said
    unlike, trained = found["paths"]
    assert unlike["differ"] > unlike["tokens"] / 2
    assert unlike["ulps"] > 100
    assert 0 < unlike["largest"] < 0.1
    assert trained["flips"] is None
    assert trained["largest"] < 1e-5


def test_invariant_numbers_are_the_same_bits(
    tiny_model: File, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    every = {path.name: path for path in paths(CheckOptions(rows=(1, 4)))}
    monkeypatch.setattr(
        command, "paths", lambda options, _stacks: [every["1 row at once"], every["trainer, packed rows"]]
    )
    status, found, _ = checked(tiny_model, capsys, "--dtype", "bfloat16", "actor.numerics=invariant")
    assert status == 0
    assert [(line["tokens"], line["differ"]) for line in found["paths"]] == [(8 * 24, 0)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_invariant_numbers_are_the_same_bits_on_every_path(
    tiny_model: File, capsys: pytest.CaptureFixture[str], dtype: str
):
    """0 of more than 10^5 tokens."""
    more = ("--rows", "1,3,8,32", "--tokens", "8000", "--dtype", dtype)
    status, found, said = checked(tiny_model, capsys, *more, "actor.numerics=invariant")
    assert status == 0, said
    assert sum(line["tokens"] for line in found["paths"]) >= 10**5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_invariant_numbers_are_the_same_bits_at_every_degree(
    tiny_model: File, capsys: pytest.CaptureFixture[str], dtype: str
):
    """And over each of the twelve switches."""
    more = ("--rows", "8", "--tokens", "192", "--dtype", dtype, "--tp", "1,2,4,8")
    status, found, said = checked(tiny_model, capsys, *more, "actor.numerics=invariant", "actor.numerics_tp=8")
    assert status == 0, said
    assert sum("migrated" in line["path"] for line in found["paths"]) == 12


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_invariant_numbers_of_every_family(
    family: str, tmp_path: File, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    model, content = write_tiny_model(tmp_path / "model"), runnable(family)
    (model / "config.json").write_text(json.dumps(content))
    parts = 1 + (ModelConfig.from_hf(content).num_experts % 2 == 0)
    some = (_rows(1), "prompts in chunks of 24 tokens", "tp 2", "tp 1, then 2, KV migrated", "trainer, packed rows")
    every = {path.name: path for path in paths(CheckOptions(rows=(1, 4), tp=(1, parts)))}
    chosen = [every[name] for name in some if name in every]
    monkeypatch.setattr(command, "paths", lambda options, _stacks: chosen)
    own = ("actor.numerics=invariant", f"actor.numerics_tp={parts}")
    status, found, said = checked(model, capsys, "--dtype", "bfloat16", "--tp", f"1,{parts}", *own)
    assert status == 0, said
    assert [(line["differ"], line["flips"]) for line in found["paths"]] == [(0, 0)] * (len(chosen) - 1) + [(0, None)]
