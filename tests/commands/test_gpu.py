"""`actor.numerics=invariant` with the GPU's kernels: no path of `jaxrl check-numerics` has other bits.

`pytest -m gpu --interpret --slow` has the kernels as plain JAX on a CPU, and some of the paths.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from on_gpu import DEPRECATED, INTERPRET
from tiny import write_tiny_model

from jaxrl.cli import main
from jaxrl.commands import check_numerics as command
from jaxrl.runtime import build

SOME = ("1 row at once", "drafts verified", "trainer, packed rows")


@pytest.mark.gpu
@(pytest.mark.slow if INTERPRET else pytest.mark.gpu)
@pytest.mark.filterwarnings(DEPRECATED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_invariant_numbers_are_the_same_bits(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    if INTERPRET:
        monkeypatch.setattr(build, "ExecutorConfig", partial(build.ExecutorConfig, interpret=True))
        monkeypatch.setattr(command, "Trainer", partial(command.Trainer, interpret=True))
        every = command.paths
        monkeypatch.setattr(command, "paths", lambda *how: [path for path in every(*how) if path.name in SOME])
    model = write_tiny_model(tmp_path / "model", head_dim=16)
    words = ("--model", f"random:{model}", "--rows", "1,4", "--tokens", "48", "--dtype", dtype, "--json")
    status = main(["check-numerics", *words, "actor.numerics=invariant"])
    said = capsys.readouterr()
    assert status == 0, said.err
    assert len(json.loads(said.out)["paths"]) == (len(SOME) if INTERPRET else 12)
