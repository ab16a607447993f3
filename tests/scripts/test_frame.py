"""The frame of the benchmarks, tried with one that does nothing: options, header, record, promises, refusals; and what
each script refuses."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.ceilings import Ceilings
from bench.frame import Benchmark, Record, Session
from bench.measure import Summary

ROOT = Path(__file__).resolve().parents[2]
DEVICE = {"platform": "gpu", "kind": "A Card", "count": 1}
BENCHES = sorted(file.stem for file in (ROOT / "scripts").glob("bench_*.py") if file.stem != "bench_sandbox")


def ceilings(rates: list[float]) -> Ceilings:
    rate = rates.pop(0)
    return Ceilings(rate, rate, {"float32": rate})


def measure(options: argparse.Namespace, session: Session) -> Record:
    rates = [3.0, 5.0]
    with session.on(DEVICE, lambda: ceilings(rates), packages=("numpy",)):
        session.bench.interleave({"a": lambda: {"seconds": float(options.rows)}}, options.repetitions)
    return session.record({"cases": [session.summaries()["a"].medians]}, model=options.shape)


def add_rows(made: argparse.ArgumentParser) -> None:
    made.add_argument("--rows", type=int, default=8)


def check(options: argparse.Namespace) -> None:
    if options.rows % 2:
        raise ValueError(f"--rows ({options.rows}) must be even")


def broken(record: Record) -> list[str]:
    return ["it took too long"] if record["results"]["cases"][0]["seconds"] > 100 else []


MADE_UP = Benchmark("made-up", "Does nothing.", measure, add_rows, {"rows": 2}, ("rows",), check, broken)


def test_a_record_has_what_ran_where_and_when(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert MADE_UP.main(["--rows", "4", "--repetitions", "3", f"--json={tmp_path}"]) == 0
    (file,) = tmp_path.iterdir()
    assert file.name == "made-up-1x-a-card.jsonl"
    record = json.loads(file.read_text())
    assert (record["bench"], record["model"], record["device"]) == ("made-up", "SmolLM2-135M", DEVICE)
    assert (record["kept"], record["dropped"]) == (3, 0)
    assert record["ceilings"]["copy_bytes_per_s"] == 5, "the best of before and after"
    assert record["results"] == {"cases": [{"seconds": 4.0}]}
    assert {"date", "command", "commit", "dirty"} <= record.keys()
    assert "numpy" in record["versions"]
    out = capsys.readouterr().out
    for line in ("made-up: ", "device    1 x A Card (gpu)", "ceilings  copy", "runs: 3", "appended to made-up-1x"):
        assert line in out


def test_a_trial_has_defaults_of_its_own_and_what_is_given_wins():
    assert [MADE_UP.parsed(["--quick"]).rows, MADE_UP.parsed(["--quick", "--rows", "6"]).rows] == [2, 6]
    shapes = [MADE_UP.parsed(words).shape for words in (["--quick"], [], ["--model", "x"])]
    assert shapes == ["tiny", "SmolLM2-135M", ""]


def test_a_broken_promise_is_a_status_and_the_figures_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert MADE_UP.main(["--rows", "102", f"--json={tmp_path}"]) == 1
    assert capsys.readouterr().err == "bench_made_up: it took too long\n"
    assert list(tmp_path.iterdir())


def test_without_ceilings_or_runs_a_record_says_nothing_of_them(capsys: pytest.CaptureFixture[str]):
    session = Session("x", "x.py")
    with session.on(DEVICE | {"platform": "cpu", "cores": 2}, name="y", is_timed=False):
        assert session.bench.gauge is None
    record = session.record([1], more=2)
    assert (record["bench"], record["results"], record["more"]) == ("y", [1], 2)
    assert not {"ceilings", "kept"} & record.keys()
    assert "runs:" not in capsys.readouterr().out


def test_the_gauge_ends_with_what_fails():
    session = Session("x", "x.py")

    def fail() -> None:
        with session.on(DEVICE | {"platform": "cpu"}):
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        fail()
    gauge = session.bench.gauge
    assert gauge is not None
    with pytest.raises(RuntimeError, match="shutdown"):
        gauge()


def test_a_disturbed_case_is_marked():
    summary = Summary({}, 0, 2, True)
    assert (summary.judged, summary.mark) == ({"kept": 0, "dropped": 2, "disturbed": True}, "  DISTURBED")
    assert Summary({}, 1, 0, False).mark == ""


# ---------------------------------------------------------------- the scripts

REFUSED: list[tuple[str, str, str]] = [
    ("accuracy", "--out /tmp/x --seeds 0", r"--seeds \(0\) must be at least 1"),
    ("accuracy", "--out /tmp/x --start-loss -1", r"--start-loss \(-1.0\) must be above 0"),
    ("attention", "--contexts 0", r"--contexts \(0\) must be at least 1"),
    ("attention", "--packed 0x64", r"--packed \(0x64\) must be rows and tokens"),
    ("attention", "--packed 16", r"--packed \(16\) must be rows and tokens, such as 16x1024"),
    ("attention", "--segments 3", r"1024 tokens must be a multiple of --segments \(3\)"),
    ("ceilings", "--rows -1", r"--rows \(-1\) must be at least 1"),
    ("decode", "--at-context 64", r"--at-context \(64\) must be at least 81: the middle of 8 plans"),
    ("decode", "--model no/such/folder", r"no/such/folder"),
    ("decode", "--new 1", r"--new \(1\) must be at least 2"),
    ("decode", "--prefill-tokens 0", r"--prefill-tokens \(0\) must be at least 1"),
    ("decode", "--longest 9", r"--longest needs --at-context"),
    ("decode", "--at-context 128 --longest 99", r"--longest \(99\) must be at least --at-context \(128\), or 0"),
    ("decode", "--profile", r"--profile needs --at-context"),
    ("decode", "--rows 8 0", r"--rows \(0\) must be at least 1"),
    ("decode", "--shape SmolLM3", r"--shape \(SmolLM3\) must be one of tiny, SmolLM2-135M"),
    ("host_scale", "--hosts 3 --rows 5", r"must be a multiple of 16 responses"),
    ("host_scale", "--rows 0", r"--rows \(0\) must be at least 1"),
    ("host_scale", "--spreads -0.1", r"--spreads \(-0.1\) must be at least 0"),
    ("judge", "--quick --resident 9", r"--resident \(9\) must be at most the model's layers \(2\)"),
    ("memory", "--run-dir /tmp/x --every 0 x", r"--every \(0\) must be at least 1"),
    ("option", "--config x --skip 40 a.b 1", r"--skip \(40\) must be at least 0 and below --steps \(40\)"),
    ("rules", "--tp 0", r"--tp \(0\) must be at least 1"),
    ("serving", "--model x --clients 0", r"--clients \(0\) must be at least 1"),
    ("speculation", "--width 0", r"--width \(0\) must be at least 1"),
    ("step", "--repetitions 0", r"--repetitions \(0\) must be at least 1"),
    ("step", "--samples 1", r"--samples \(1\) must be at least 2"),
    ("stream", "--devices 3", r"--devices \(3\) is settled: two"),
    ("stream", "--dtypes bfloat16", r"--dtypes \(bfloat16\) must be float32"),
    ("stream", "--hidden 100", r"--hidden \(100\) must be a multiple of 64, the width of a head"),
    ("stream", "--samples 1", r"--samples \(1\) must be at least 2: GRPO compares a prompt's responses"),
    ("stream", "--shape Qwen2.5-7B", r"--model and --shape are of no use here"),
    ("sync", "--tp 0", r"--tp \(0\) must be at least 1"),
    ("train", "--attention none", r"actor.attention must be one of .*, found 'none'"),
    ("train", "--chunk 0", r"actor.logprob_chunk_tokens.*0"),
    ("train", "--chunk few", r"actor.logprob_chunk_tokens .*'few'"),
    ("train", "--microbatches 0", r"--microbatches \(0\) must be at least 1"),
    ("train", "--response 192", r"--response \(192\) must be below --tokens \(192\)"),
]


def test_nonsense_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]):
    for name, words, sentence in REFUSED:
        script: Any = importlib.import_module(f"bench_{name}")
        assert script.main(words.split()) == 2, words
        error = capsys.readouterr().err
        assert error.startswith(f"bench_{name}: "), error
        assert error.count("\n") == 1, error
        assert re.search(sentence, error), error


def test_every_script_says_what_it_is_called_and_how(capsys: pytest.CaptureFixture[str]):
    for name in BENCHES:
        script: Any = importlib.import_module(name)
        with pytest.raises(SystemExit):
            script.main(["--help"])
        text = capsys.readouterr().out
        assert f"python scripts/{name}.py" in text, name
        assert "--json" in text, name
        assert f"bench_{script.BENCHMARK.name.replace('-', '_')}" == name


def test_a_script_runs_as_a_process():
    """With its own folder on the path, and the exit status of its `main`."""
    words = [sys.executable, str(ROOT / "scripts" / "bench_option.py"), "--config", "x", "--skip", "9", "--steps", "9"]
    done = subprocess.run([*words, "a.b", "1"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "bench_option: --skip (9) must be at least 0 and below --steps (9)\n")


def test_the_page_of_benchmarks_has_each_with_options_that_it_knows():
    text = (ROOT / "docs" / "benchmarks" / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python scripts/(bench_\w+)\.py(.*?)(?:#.*)?$", text, re.MULTILINE)
    assert {name for name, _ in commands} == {*BENCHES, "bench_sandbox"}
    commands += [(name, words) for name, words in re.findall(r"`(bench_\w+)\.py( [^`]*)`", text)]
    for name, words in commands:
        if name != "bench_sandbox":
            script: Any = importlib.import_module(name)
            known = {option for action in script.parser()._actions for option in action.option_strings}
            assert set(re.findall(r"(?<!\S)\[?(--[\w-]+)", words)) <= known, (name, words)
