"""`jaxrl profile`: what it measures, that it goes on where it was, and tables that it does not touch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxrl.cli import main
from jaxrl.rollout.profiler import load_profile

SIZES = ["data.max_prompt_length=32", "data.max_response_length=16", "trainer.num_devices=1", "rollout.max_num_seqs=1"]


def test_a_table_goes_on_and_is_of_one_setting(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "p.json"

    def measured(status: int, *more: str) -> str:
        words = ["--out", str(file), "--repeats", "1", f"model.path=random:{tiny_model}", *SIZES, *more]
        assert main(["profile", *words]) == status
        return "".join(capsys.readouterr())

    assert "p.json: 4 decode points, 4 prefills, 0 switches\n" in measured(0)
    whole = load_profile(file)
    assert [(each.tp, each.batch, each.context) for each in whole.decode] == [(1, 1, n) for n in (8, 16, 32, 48)]
    told = json.loads(file.read_text())
    del told["decode"][1], told["prefill"][2:]
    file.write_text(json.dumps(told))
    assert "p.json: 4 decode points, 4 prefills" in measured(0)
    again = load_profile(file)
    assert [each.context for each in again.decode if each not in whole.decode] == [16], "what is there is not repeated"
    assert [each.context for each in again.prefill if each not in whole.prefill] == [32, 48]
    for options, said in (
        (["rollout.dtype=bfloat16"], "p.json is there, and "),
        (["rollout.max_num_seqs=2"], "for other numbers of rows (rollout.max_num_seqs)"),
        (["--max-batch", "2"], "--max-batch (2) must be from 1 to 1, for which the rollout is built"),
    ):
        assert said in measured(2, *options)
