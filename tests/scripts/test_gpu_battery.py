"""The GPU battery: its frame with parts of a few lines, its page, and (slow) all of it with tiny shapes on a CPU."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_battery
import numpy as np
import pytest
from ended import have_ended
from gpu import cards, check, figures, page, parts
from gpu.cards import CARDS
from gpu.figures import Bar, Figure
from gpu.frame import Battery, Part, read

from jaxrl.models.shapes import named_shape
from jaxrl.types import Sample, SampleKey

ROOT = Path(__file__).resolve().parents[2]
HEAD = {"schema": 1, "date": "2026-11-23T01:00:00+0000", "commit": "c0ffee", "dirty": False, "versions": {"jax": "1"}}
CARD = {"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "count": 1}
ONE_RECORD = "open(sys.argv[1] + '/x-1x-y.jsonl', 'a').write('{\"bench\": \"x\", \"results\": {}}\\n')"


def part(name: str, program: str = ONE_RECORD, seconds: float = 20) -> Part:
    return Part(name, seconds, (sys.executable, "-c", f"import os, subprocess, sys, time; {program}", "{folder}"))


def battery(out: Path, *found: Part, **options: Any) -> Battery:
    head = lambda command: HEAD | {"bench": "part", "device": CARD, "command": command}  # noqa: E731
    return Battery(found, out, head, dict(os.environ), say=lambda _: None, **options)


def run(out: Path, *found: Part, seconds: float = 60, again: tuple[str, ...] = ()) -> dict[str, str]:
    one = battery(out, *found)
    one.run(one.waiting(again=again), seconds)
    return one.statuses()


def ended(pids: Path) -> bool:
    named = list(map(int, pids.read_text().split()))
    return bool(named) and have_ended(named)


# -- the frame ---------------------------------------------------------------------------------------------------------


def test_a_part_that_fails_leaves_its_log_and_stops_no_other(tmp_path: Path):
    broken = part("broken", f"{ONE_RECORD}; print('before'); raise SystemExit('what was wrong')")
    assert run(tmp_path, broken, part("good")) == {"broken": "failed", "good": "passed"}
    assert "before\nwhat was wrong" in (tmp_path / "log.txt").read_text()
    found = read(tmp_path)
    # of what is broken also what it had measured before
    expected = [(name, bench) for name in ("broken", "good") for bench in ("x", "part")]
    assert [(each["part"], each["bench"]) for each in found] == expected
    ended = found[1]
    assert (ended["exit_status"], ended["device"], ended["commit"]) == (1, CARD, "c0ffee")
    assert str(tmp_path) not in json.dumps(found), "records hold no path of the machine"


def test_the_next_call_goes_on(tmp_path: Path):
    ran = tmp_path / "ran"
    note = f"open('{ran}', 'a').write"
    one, two = part("one", f"{note}('one ')"), part("two", f"{note}('two '); sys.exit(1)")
    three = part("three", f"{note}('three ')")
    run(tmp_path, one, two)
    run(tmp_path, one, two, three)  # what is new comes before what failed, and what passed is left out
    run(tmp_path, one, two, three, again=("one",))
    assert ran.read_text().split() == ["one", "two", "three", "two", "one", "two"]
    assert [each.name for each in battery(tmp_path, one, two, three).waiting(only=("one", "three"))] == []
    with pytest.raises(ValueError, match=r"part \(four\) must be one of one, two, three"):
        battery(tmp_path, one, two, three).waiting(only=("four",))


STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); child = subprocess.Popen(['sleep', '300']); "
    "open(sys.argv[2], 'w').write(f'{os.getpid()} {child.pid} '); time.sleep(300)"
)


def stubborn(pids: Path, seconds: float) -> Part:
    """A part with a child; neither ends by itself, and the part not by SIGTERM."""
    made = part("stubborn", STUBBORN, seconds)
    return Part(made.name, made.seconds, (*made.command, str(pids)))


@pytest.mark.parametrize(("seconds", "minutes_s", "status"), [(0.6, 60, "over its limit"), (1.4, 1.5, "cut off")])
def test_a_limit_ends_the_whole_group(tmp_path: Path, seconds: float, minutes_s: float, status: str):
    pids = tmp_path / "pids"
    one = battery(tmp_path, stubborn(pids, seconds), part("after", seconds=1.4), grace_s=0.1, reserve_s=0)
    one.run(one.parts, minutes_s)
    assert one.statuses()["stubborn"] == status
    assert ended(pids)
    if status == "cut off":
        assert [each.name for each in one.waiting()] == ["stubborn", "after"], "it comes as if it had never run"
    else:
        assert one.statuses()["after"] == "passed"


def test_what_does_not_fit_any_more_is_left_and_a_shorter_part_still_runs(tmp_path: Path):
    long, short = part("long", seconds=100), part("short", seconds=5)
    assert run(tmp_path, long, short, seconds=30) == {"short": "passed"}


def test_what_a_part_leaves_behind_ends_with_it(tmp_path: Path):
    pids = tmp_path / "pids"
    orphan = part("orphan", f"open('{pids}', 'w').write(str(subprocess.Popen(['sleep', '300']).pid))")
    assert run(tmp_path, orphan) == {"orphan": "passed"}
    assert ended(pids)


def test_a_signal_to_the_battery_ends_its_part_and_is_noted(tmp_path: Path):
    pids, out = tmp_path / "pids", tmp_path / "out"
    program = (
        "import os, sys; from pathlib import Path; from gpu.frame import *; end_on_sigterm();"
        f"one = Part('stubborn', 100, (sys.executable, '-c', sys.argv[2], 'folder', sys.argv[1]));"
        f"head = lambda command: {{'bench': 'part', 'command': command}};"
        f"Battery([one], Path({str(out)!r}), head, dict(os.environ), grace_s=0.1).run([one], 1000)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(pids), f"import os, subprocess, sys, time; {STUBBORN}"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "scripts")},
    )
    until = time.monotonic() + 60
    while not (pids.exists() and pids.read_text().endswith(" ")):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert ended(pids)
    assert [each["status"] for each in read(out)] == ["cut off"]


def test_a_record_that_was_cut_off_in_writing_is_none(tmp_path: Path):
    run(tmp_path, part("good"))
    file = tmp_path / "records.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"bench": "part", "par')
    assert run(tmp_path, part("good")) == {"good": "passed"}
    assert file.read_text() == whole
    file.write_text("no record\n" + whole)
    with pytest.raises(ValueError, match=r"line 1: must be one JSON object"):
        read(tmp_path)


# -- figures and pages -------------------------------------------------------------------------------------------------


def record(part: str, *cases: dict[str, Any], device: dict[str, Any] = CARD, **rest: Any) -> dict[str, Any]:
    head = HEAD | {"bench": "b", "part": part, "device": device}
    return head | {"results": {"cases": list(cases)}, "ceilings": {"copy_bytes_per_s": 3e12}} | rest


SHARE = Figure("p", "share", "f", "%", {"rows": 64}, expected=lambda card: card.copy / 4e12, bar=Bar(">=", 0.75))
EXACT = Figure("p", "error", "e", bar=Bar("<=", 1e-4), everywhere=True)
RATE = Figure("q", "rate", "copy_bytes_per_s", "TB/s", among="ceilings")


def line(text: str, start: str) -> str:
    (found,) = [each for each in text.splitlines() if each.strip().startswith(start)]
    return " ".join(found.split())


def test_the_page_has_each_figure_beside_what_was_expected_and_its_bar():
    profile = {
        "kernels_s": 0.004,
        "launches": 7,
        "groups": {"products": {"seconds": 0.003, "launches": 3}, "attention": {"seconds": 0.001, "launches": 4}},
        "top": [{"name": "gemm", "seconds": 0.002, "launches": 2}],
    }
    found = [
        record("p", {"rows": 64, "f": 0.9}, {"rows": 16, "f": 0.1}),
        record("p", {"rows": 64, "f": 0.7, "profile": profile}, {"e": 2e-4}),  # the newest counts
        record("q"),
        HEAD | {"bench": "part", "part": "p", "status": "passed", "seconds": 3.2, "device": CARD},
    ]
    text = page.results([SHARE, EXACT, RATE], found)
    assert line(text, "share") == "share 70 % expected 75.4 % bar at least 75 % MISSED"
    assert line(text, "error") == "error 0.0002 bar at most 0.0001 MISSED"
    assert line(text, "rate") == "rate 3 TB/s"
    assert line(text, "bars MISSED") == "bars MISSED: 2"
    assert line(text, "p (") == "p (passed, 3 s, 2026-11-23T01:00:00+0000)"
    assert line(text, "q (") == "q (not run)"
    assert line(text, "kernels of p") == "kernels of p, 64: 4.000 ms in 7 launches"
    assert line(text, "products") == "products 3.000 ms 75.0% 3 launches"
    assert "1 x NVIDIA H100 80GB HBM3 (gpu)" in text


def test_bars_on_speed_are_for_gpus_and_a_missing_value_meets_none():
    processor = CARD | {"platform": "cpu", "kind": "a processor"}
    text = page.results([SHARE, EXACT], [record("p", {"rows": 64, "f": 0.1}, {"e": 1e300}, device=processor)])
    assert line(text, "share") == "share 10 %"
    assert line(text, "error") == "error 1e+300 bar at most 0.0001 MISSED"
    assert page.verdict(SHARE, None, is_gpu=True) == page.NOT_MEASURED
    assert page.verdict(SHARE, float("nan"), is_gpu=True) == page.MISSED
    assert [Bar("+-", 0.1).is_met(value) for value in (-0.2, -0.1, 0.1, 0.2)] == [False, True, True, False]


def test_what_is_expected_stands_in_the_docs():
    file = ROOT / "docs" / "benchmarks" / "expected-gpu.md"
    text = page.expected_page()
    assert file.read_text(encoding="utf-8") == text, "python scripts/gpu_battery.py --expected > it"
    assert max(map(len, text.splitlines())) <= 120


def test_what_a_long_row_costs_stands_in_the_docs():
    text, card = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8"), CARDS["H100"]
    for name, rows, before, now in ((parts.SMALL, 64, 16, 1), (parts.SMALL, 256, 32, 2), (parts.LARGE, 64, 32, 2),
                                    (parts.LARGE, 256, 32, 2)):  # fmt: skip
        one, mixed = [1024] * rows, [1024] * (rows - 1) + [32768]
        costs = ((one, 0), (mixed, 1024 * before), (mixed, 1024 * now), (mixed, 0))
        plain, old, new, same = (1e3 * cards.mixed_decode_seconds(card, named_shape(name), *each) for each in costs)
        assert new == same
        assert f"| {name} | {rows} | {plain:.2f} | {before}k | {old:.2f} | {now}k | {new:.2f} |" in text


def test_every_figure_has_its_part_and_an_expectation():
    found = figures.figures()
    names = [each.name for each in parts.parts()]
    assert len(set(names)) == len(names)
    assert {each.name for each in parts.trial_parts()} <= set(names)
    assert {figure.part for figure in found} == set(names), "no part without a figure, no figure without its part"
    assert len({(figure.part, figure.text) for figure in found}) == len(found)
    for figure in found:
        assert figure.expected or figure.where.get("case") == "torch" or figure.text == "tests that passed", figure
        assert not figure.expected or figure.how, figure
        assert page.expectation(figure, CARDS["H100"]) != "0 ms"


def test_the_benchmarks_know_the_options_that_parts_give_them():
    benches = [each.command[1:] for each in (*parts.parts(), *parts.trial_parts()) if each.command[1] != "-m"]
    assert benches
    for script, *words in benches:
        importlib.import_module(Path(script).stem).parser().parse_args(words)


def test_what_cannot_be_done_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert gpu_battery.main(["--list"]) == 2
    assert gpu_battery.main(["--out", str(tmp_path), "--only", "nothing"]) == 2
    assert gpu_battery.main(["--out", str(tmp_path), "--minutes", "0"]) == 2
    sentences = capsys.readouterr().err.splitlines()
    assert len(sentences) == 3
    assert all(sentence.startswith("gpu_battery: ") for sentence in sentences)
    assert gpu_battery.main(["--out", str(tmp_path), "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(parts.parts())


def test_a_folder_has_results_of_one_device_and_none_of_a_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A trial has parts of the same names, and shares are of what the same device measured."""
    monkeypatch.setattr(gpu_battery, "_device", lambda _: {"kind": "NVIDIA H200", "platform": "gpu", "count": 1})
    earlier = {"bench": "part", "part": "sync", "status": "passed", "device": CARD, "trial": False}
    for wrong, said in (
        ({}, f"holds results of {CARD['kind']}, and this is a run on NVIDIA H200"),
        ({"device": {"kind": "NVIDIA H200"}, "trial": True}, "holds a trial on NVIDIA H200"),
    ):
        (tmp_path / "records.jsonl").write_text(json.dumps(earlier | wrong) + "\n")
        assert gpu_battery.main(["--out", str(tmp_path), "--only", "sync"]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_all_of_it_on_a_cpu_with_tiny_shapes(tmp_path: Path):
    """Every part runs, the page finds every key that a CPU can have, and the bars that hold everywhere are met."""
    command = [sys.executable, str(ROOT / "scripts" / "gpu_battery.py"), "--quick", "--out", str(tmp_path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith((tmp_path / "summary.txt").read_text())
    assert "\n" + page.TRIAL + "\n" in done.stdout
    found = read(tmp_path)
    assert {each["part"]: each["status"] for each in found if each["bench"] == "part"} == {
        each.name: "passed" for each in parts.trial_parts()
    }
    for each in found:
        assert {"date", "device", "commit", "versions", "command"} <= each.keys()
    unknown = {(figure.part, figure.key) for figure in figures.trial_figures() if figure.value(found) is None}
    assert unknown <= NEEDS_A_GPU
    assert "bars MISSED: 0" in done.stdout
    assert "bars not measured: 0" in done.stdout


def test_what_the_check_counts():
    """Bars on these are the page's matter; the trial has the whole check."""
    key, versions = SampleKey(0, 0, 0), np.zeros(2, np.int32)
    samples = [
        Sample(key, np.array(tokens), np.array(values), np.array(values), versions)
        for tokens, values in (([1, 2], [-1.0, -2.0]), ([1, 3], [-1.0, -2.0]), ([1, 2], [-1.0, -2.5]))
    ]
    same, drawn, rounded = samples
    assert check._unlike([same, same, same], [same, drawn, rounded]) == 1
    assert check._unlike([same, same, same], [same, drawn, rounded], values=True) == 2
    exact = {"a": np.array([3.0, 0.0]), "b": np.array([4.0])}
    assert check.relative(exact, exact) == 0
    assert check.relative(exact | {"b": np.array([4.5])}, exact) == pytest.approx(0.1)
    assert check.relative(exact | {"b": np.array([np.nan])}, exact) == check.size(np.inf) == check.WRONG


NEEDS_A_GPU = {("train", "mfu_datasheet"), ("attention", "speed"), ("attention", "both")}
"""Figures without a value on a CPU: it has no datasheet, not JAX's own kernel and no cuDNN."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "chosen"),
    [("kernels", "not on_mosaic_gpu"), ("train", "float32 or embedding"), ("rollout", "share_a_device")],
)
def test_tests_marked_gpu_pass_with_their_kernels_as_plain_jax(folder: str, chosen: str):
    """Nothing but the device is missing; the others of the rollout take minutes (`-m gpu --interpret`)."""
    file = ROOT / "tests" / folder / "test_gpu.py"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--interpret", str(file), "-k", chosen]
    command += ["-p", "no:cacheprovider"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
