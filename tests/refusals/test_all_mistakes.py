"""Independent mistakes of one command line are answered together, and nothing is said that only follows from one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxrl.cli import main

SIZE = "rollout.n must be at least 1, found 0 (command line: rollout.n=0)"
NAME = "unknown option rolout"
MODEL = "gone: there is no such file or folder; model.path must be"
CASES = {
    "train --config gone.yaml --bogus rollout.n=0": ["train: unknown option '--bogus'", "gone.yaml: no such", SIZE],
    "train --confg x.yaml rollout.n=0": ["train: unknown option '--confg': did you mean --config?", SIZE],
    "train": ["model.path is missing", "trainer.run_dir is missing", "data.train_files is missing"],
    "train rolout.n=4 rollout.n=0 model.path=gone trainer.run_dir=r data.train_files=[gone.jsonl] reward.kind=custom "
    "reward.path=gone.py actor.use_kl_loss=true algorithm.use_kl_in_reward=true": [
        *(SIZE, NAME, "algorithm.use_kl_in_reward and actor.use_kl_loss exclude", "reward.path: no such file: "),
        *("gone.jsonl: no such file; data.train_files", MODEL),
    ],
    "train --bogus model.path=gone trainer.run_dir=r data.train_files=[rows.jsonl] data.answer_key=a rollout.n=1": [
        *("train: unknown option '--bogus'", "rollout.n (1) must be at least 2", "rows.jsonl, line 1: no column 'a'"),
        MODEL,
    ],
    "train trainer.run_dir=r rollout.n=0 data.train_files=[[]] model.path=gone": [
        *("data.train_files[0] must be text", SIZE, MODEL),
    ],
    "sft --lr 3 data.train_files=[gone.jsonl] model.path=gone trainer.run_dir=r": [
        "sft: unknown option '--lr'",
        "gone.jsonl: no such file; data.train_files",
        MODEL,
    ],
    "dpo dpo.beta=-1 data.train_files=[gone.jsonl] model.path=gone trainer.run_dir=r": [
        *("dpo.beta must be above 0", "gone.jsonl: no such file; data.train_files", MODEL),
    ],
    "eval --ot=x rollout.n=0 model.path=gone data.val_files=[gone.jsonl] --checkpoint gone": [
        *("eval: unknown option '--ot'", SIZE, "gone.jsonl: no such file; data.val_files", "no checkpoint in ", MODEL),
    ],
    "simulate --bogus rollout.n=0 model.path=gone simulate.run_dir=r simulate.recorded_run=gone": [
        *("simulate: unknown option", SIZE, "gone/samples.jsonl: no such file", "model.path (gone) must be a folder"),
    ],
    "score reward.kind=mth --out rows.jsonl/x --responses gone.jsonl": [
        *("score: --out (rows.jsonl/x) cannot be written", "reward.kind must be one of", "gone.jsonl: no such file"),
    ],
    "profile --repeats 0 --bogus --config gone.yaml rollout.n=0": [
        *("profile: --repeats must be", "profile: unknown option", "gone.yaml: no such config file", SIZE),
    ],
    "explain-config --devices -1 --bogus --config gone.yaml rollout.n=0": [
        *("explain-config: --devices must be", "explain-config: unknown", "gone.yaml: no such config file", SIZE),
    ],
    "generate --model gone --max-tokens 0 --bogus x": [
        *("generate: --max-tokens must be", "generate: unknown option '--bogus'", MODEL),
    ],
    "serve gone --port 99999 --bogus rollout.n=0 --api-key-file gone": [
        *("serve: --port must be", "serve: unknown option", SIZE, MODEL, "gone: no such file"),
    ],
    "export gone rows.jsonl --dtype int8 --bogus": [
        *("export: --dtype must be one of", "export: unknown option", "gone: neither a run nor a model"),
    ],
    "tune --run gone --seeds 0 --bogus rolout.n=4": [
        *("tune: --seeds must be", "tune: unknown option", NAME, "gone is not a run directory"),
    ],
    "replay gone --sample 1 --bogus rolout.n=4": ["replay: unknown option '--bogus'", NAME, "gone is no run"],
    "report gone --bogus --out rows.jsonl/x": [
        *("report: --out (rows.jsonl/x) cannot be written", "report: unknown option", "gone is not a run"),
    ],
    "options actr --bogus": ["options: unknown option '--bogus'", "options: there is no section and no option 'actr'"],
    "port --from verl gone.yaml --devices 0 --bogus": [
        *("port: --devices must be", "port: unknown option '--bogus'", "port: no such file: gone.yaml"),
    ],
    "check-numerics --model gone --rows 0 --tp 99": ["check-numerics: --rows", "check-numerics: --tp must be", MODEL],
    "explain-layout --model gone --tp 0 --bogus": [
        *("explain-layout: --tp", "explain-layout: unknown option", "gone: there is no such file or folder; --model"),
    ],
}
"""A command line, and how each line of the answer begins."""


@pytest.mark.parametrize("line", CASES)
def test_all_mistakes(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1 + 1", "answer": "2"}) + "\n")
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    said = capsys.readouterr().err.splitlines()
    assert [each[: len(f"jaxrl: {start}")] for each, start in zip(said, CASES[line], strict=False)] == [
        f"jaxrl: {start}" for start in CASES[line]
    ], said
    assert len(said) == len(CASES[line]), said
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
