"""The report page: what it shows of a run, of one with pieces missing, and that nothing of a run's text is run."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jaxrl.cli import main
from jaxrl.config import from_mapping, to_mapping
from jaxrl.mechanisms import page_parts
from jaxrl.record.metrics import MetricsWriter
from jaxrl.record.timeline import Timeline
from jaxrl.report.drawings import histogram_card, prompts_card
from jaxrl.report.page import write_report

STEPS = 40


def fake_run(folder: Path, steps: int = STEPS) -> Path:
    """A run whose reward rises and whose phases take their time; one gradient is not finite."""
    config = from_mapping(
        {
            "model": {"path": "models/SmolLM2-135M-Instruct"},
            "data": {"task": "basic_arithmetic", "train_batch_size": 16, "max_response_length": 512},
            "actor": {"optim": {"lr": 1e-5}},
            "trainer": {"total_training_steps": 150, "experiment_name": "smollm2-arithmetic"},
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    with MetricsWriter(folder) as writer:
        for step in range(1, steps + 1):
            line = {"timing_s/gen": 8.0, "timing_s/reward": 0.5, "timing_s/update_actor": 4.0, "timing_s/step": 13.0}
            line |= {"critic/rewards/mean": step / steps, "critic/rewards/max": 1.0, "critic/rewards/min": 0.0}
            line |= {"response_length/mean": 100.0 + step, "response_length/max": 512.0, "response_length/p95": 300.0}
            line |= {"actor/grad_norm": math.nan if step == 3 else 0.4, "actor/skipped_updates": float(step == 3)}
            line |= {"actor/entropy": 1 - step / 100, "rollout/bubble_ratio": 0.3, "perf/throughput": 900.0}
            writer.write(step, line | ({"val/reward": step / 50} if step % 10 == 0 else {}))
    rows = [sample(step, reward) for step in (1, steps) for reward in (0.0, 1.0)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    devices = {"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "count": 8}
    record = {"config": to_mapping(config), "commit": "0123456789abcdef", "devices": devices, "versions": {"jax": "1"}}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "config.yaml").write_text("model: {path: m}\n")
    return folder


def sample(step: int, reward: float) -> dict[str, Any]:
    text = {
        "prompt": "What is 47 + 38?",
        "response": f"{85 * reward} 日本語 & <script>alert(1)</script>",
        "answer": "85",
    }
    return {"step": step, **text, "reward": reward, "length": 98, "finish_reason": "stop", "source": "sums"}


class Checker(HTMLParser):
    """Every element that is opened is closed, and nothing is fetched or run."""

    VOID = frozenset(["input", "meta", "polyline", "polygon", "wbr"])

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.num_scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.num_scripts += tag == "script"
        assert not {"src", "href", "onclick"} & {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    assert checker.num_scripts <= 1, "that of the samples"
    assert "NaN" not in text
    return text


def page_of(folder: Path, *lines: dict[str, float], **options: Any) -> str:
    """The page of a run whose steps have these metrics."""
    with MetricsWriter(folder) as writer:
        for step, line in enumerate(lines, 1):
            writer.write(step, line)
    return check(write_report(folder, **options))


def test_a_whole_run(tmp_path: Path):
    text = check(write_report(fake_run(tmp_path / "run"), parts=page_parts()))
    for words in (
        *("smollm2-arithmetic", "40 of 150", "8 × NVIDIA H100 80GB HBM3", "actor.optim.lr", "best 0.8 at step 40"),
        *("<h3>Reward ", "<h3>Entropy ", "&lt;script&gt;alert(1)&lt;/script&gt;"),
    ):
        assert words in text, words
    assert text.count("<svg") > 5
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "pages" / "a.html")]) == 0
    assert (tmp_path / "pages" / "a.html").exists()


def test_the_parts_of_mechanisms(tmp_path: Path):
    """A run's own alone: its rounds by kind, and its drafts."""
    line = {"timing_s/gen": 2.0, "timing_s/step": 3.0, "rollout/long_round": 0.0, "rollout/spec/accept_rate": 0.5}
    line |= {"rollout/spec/drafted_share": 0.25, "rollout/queue_length": 3.0, "training/epoch": 1.0}
    with_parts = page_of(tmp_path, line, line | {"rollout/long_round": 1.0}, parts=page_parts())
    assert "Drafts from history" in with_parts
    assert "Drafts from history" not in page_of(tmp_path / "plain", {"timing_s/step": 1.0}, parts=page_parts())


def test_the_rows_of_the_last_round_are_drawn(tmp_path: Path):
    (tmp_path / "run.json").write_text("{}")
    now = [0.0]
    with Timeline(tmp_path / "timeline.json", clock=lambda: now[0]) as timeline, timeline.phase("step", step=2):
        timeline.row("0.0", 0, "0.2.0", 0.0, 1.0, end="abort")
        timeline.row("0.1", 1, "0.2.1", 0.0, 2.0, end="stop", tokens=7)
        now[0] = 4.0
    figure = check(write_report(tmp_path)).partition("<h3>Rows in step 2 ")[2].partition("</figure>")[0]
    assert re.findall(r"<title>(.*?)</title>", figure) == [
        "row 0.0: 0.2.0, 0 to 1 s, aborted",
        "row 0.1: 0.2.1, 0 to 2 s, ended, 7 tokens",
    ]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"metrics.jsonl": ""}, "no step has been finished|samples.jsonl is missing"),
        ({"run.json": "{"}, "run.json could not be read"),
        ({"run.json": "{}", "config.yaml": "a: [\n"}, "config.yaml could not be read"),
        ({"run.json": '{"config": 3, "versions": [], "devices": null}'}, "does not hold the configuration"),
        ({"samples.jsonl": '{"step": 1}\n{"ste'}, "data-step=1 "),
        ({"metrics.jsonl": "nonsense\n"}, "metrics.jsonl, line 1: damaged"),
    ],
)
def test_missing_pieces_are_said(tmp_path: Path, files: dict[str, str], said: str):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    text = check(write_report(tmp_path))
    for part in said.split("|"):
        assert part in text


def test_a_damaged_run_is_said_where_the_command_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """And not on the page alone: its numbers are gone."""
    whole, run = fake_run(tmp_path / "whole", 3), fake_run(tmp_path / "run", 3)
    assert main(["report", str(whole)]) == 0
    assert capsys.readouterr().err == ""
    (run / "config.yaml").write_bytes(bytes(range(128, 256)))
    (run / "metrics.jsonl").unlink()
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"jaxrl: {run}: metrics.jsonl is missing"
    assert said[1].startswith(f"jaxrl: {run}: config.yaml could not be read: ")


def test_a_run_whose_rewards_failed_says_so_at_its_head(tmp_path: Path):
    line = {"step": 1, "time": 0, "reward/num_scored": 100.0, "reward/errors": 100.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    batch = {"step": 1, "groups": [0.0], "limit": 8, "lengths": [1] * 32, "errors": [["ZeroDivisionError: <no>", 100]]}
    (tmp_path / "batches.jsonl").write_text(json.dumps(batch) + "\n")
    assert (
        "<b>100 of 100 rewards failed</b> and count as 0: 100 errors. Most often: "
        "<code>ZeroDivisionError: &lt;no&gt;</code>"
    ) in check(write_report(tmp_path))


def test_the_numbers_behind_the_drawings_of_batches():
    """The histogram of lengths compares the last steps with the first; the best prompts are above."""

    def batch(step: int, groups: list[float], lengths: dict[int, int]) -> dict[str, Any]:
        return {"step": step, "groups": groups, "limit": 320, "lengths": [lengths.get(i, 0) for i in range(32)]}

    text = histogram_card([batch(step, [0.0], {0: 4} if step <= 10 else {31: 3, 10: 1}) for step in range(1, 21)])
    assert re.findall(r"<title>(.*?)</title>", text) == [
        "last steps, 100 to 110 tokens: 25.0%",
        "last steps, 310 to 320 tokens: 75.0%",
    ]
    batches = [batch(1, [1.0, 0.0], {}), batch(2, [0.5, 0.25], {})]
    assert prompts_card(batches) == "", "none of an older run"
    for each, prompts in zip(batches, ([(0, 7), (0, 2)], [(1, 2), (1, 7)]), strict=True):
        each["prompts"] = prompts
    text = prompts_card(batches)
    assert re.findall("<title>(.*?)</title>", text) == ["prompt 7: 1, 0.25", "prompt 2: 0, 0.5"]
    assert re.findall(r"<rect class='c3 heat(\d)'", text) == ["7", "2", "0", "4"]
    assert prompts_card(batches[:1]) == "", "no prompt came twice"
