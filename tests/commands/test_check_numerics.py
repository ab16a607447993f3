"""`jaxrl check-numerics`: what it counts, that it finds what differs, and that each path is one."""

from __future__ import annotations

import json
from pathlib import Path as File

import numpy as np
import pytest

from jaxrl.cli import main
from jaxrl.commands import check_numerics as command
from jaxrl.commands.check_numerics import CheckOptions, Path, compare, paths, ulp
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


def test_a_token_that_flips_is_a_difference_of_its_own():
    wanted = rows([[-1.0], [-2.0]], [[5], [6]])
    found = compare("some", KEYS, wanted, rows([[-1.0], [-2.0]], [[5], [7]]), "float32")
    assert (found.differ, found.flips, found.first) == (0, 1, (4, 1, 0))


def test_what_is_no_number_differs():
    wanted = rows([[-1.0], [-2.0]], [[5], [6]])
    found = compare("some", KEYS, wanted, rows([[-1.0], [float("nan")]], [[5], [6]]), "float32")
    assert (found.differ, found.largest) == (1, float("inf"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_unit_in_the_last_place(dtype: str):
    values = np.array([1.0, 1.5, 2.0, 0.3, -7.9], dtype)
    assert ulp(values, dtype).tolist() == np.abs(np.spacing(values)).tolist()


def checked(tiny_model: File, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict, str]:
    status = main(["check-numerics", "--model", f"random:{tiny_model}", *SMALL, "--json", *words])
    said = capsys.readouterr()
    return status, json.loads(said.out), said.err


def test_the_same_again_is_the_same_and_another_type_is_not(
    tiny_model: File, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Tokens that are forced change nothing, and a path that must differ is seen to."""
    again = Path("the same again")
    monkeypatch.setattr(command, "paths", lambda options: [again])
    status, found, _ = checked(tiny_model, capsys)
    assert status == 0
    (line,) = found["paths"]
    assert (line["tokens"], line["differ"], line["flips"], line["first"]) == (8 * 24, 0, 0, None)

    other = Path("bfloat16", ("rollout.dtype=bfloat16",))
    trainer = next(path for path in paths(CheckOptions(rows=(4,))) if path.drive is None)
    monkeypatch.setattr(command, "paths", lambda options: [other, trainer])
    status, found, said = checked(tiny_model, capsys)
    assert status == 1
    assert "of 2 paths differ from 4 rows at once" in said
    unlike, trained = found["paths"]
    assert unlike["differ"] > unlike["tokens"] / 2
    assert unlike["ulps"] > 100
    assert 0 < unlike["largest"] < 0.1
    assert trained["flips"] is None
    assert trained["largest"] < 1e-5


@pytest.mark.slow
def test_all_paths_are_float32_noise(tiny_model: File, capsys: pytest.CaptureFixture[str]):
    status, found, _ = checked(tiny_model, capsys, "--tp", "1,2")
    assert status == 1
    assert [each["path"] for each in found["paths"]] == [
        each.name for each in paths(CheckOptions(rows=(1, 4), tp=(1, 2)))
    ]
    assert found["paths"][0]["differ"] == 0
    for each in found["paths"]:
        assert each["largest"] < 1e-5, each
        assert each["tokens"] == found["tokens"]


def test_a_degree_needs_its_devices(tiny_model: File, capsys: pytest.CaptureFixture[str]):
    assert main(["check-numerics", "--model", f"random:{tiny_model}", "--tp", "1,16"]) == 2
    assert "--tp (16) must be at most the devices there are (8); a CPU has more in a process with XLA_FLAGS=" in (
        capsys.readouterr().err
    )
