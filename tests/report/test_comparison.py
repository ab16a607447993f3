"""Runs compared: what the page and the summary say of two and of three, real and simulated."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jaxrl.cli import main
from jaxrl.config import from_mapping, to_mapping
from jaxrl.record.metrics import MetricsWriter
from jaxrl.report.comparison import differing, names_of, write_comparison
from jaxrl.report.figures import figures_of, summed
from jaxrl.report.runs import read_run


def write_run(folder: Path, steps: int = 20, gain: float = 0.5, seconds: float = 10.0, **options: Any) -> Path:
    """A run with a reward that rises by `gain`, steps of `seconds`, and these options of the configuration."""
    simulated = options.pop("simulated", False)
    folder.mkdir(parents=True)
    with MetricsWriter(folder) as writer:
        for step in range(1, steps + 1):
            line = {"critic/rewards/mean": 0.1 + gain * step / steps, "response_length/mean": 100.0}
            line |= {"timing_s/gen": seconds * 0.6, "timing_s/update_actor": seconds * 0.3, "timing_s/step": seconds}
            line |= {"reward/errors": 1.0, "reward/timeouts": 2.0, "actor/grad_norm": 0.5}
            line |= {"val/reward": 0.2 + gain * step / steps} if step % 10 == 0 else {}
            writer.write(step, line | ({"simulated": 1} if simulated else {}))
    options = {"model": {"path": "some"}, "data": {"task": "leg_counting"}} | options
    record = {"config": to_mapping(from_mapping(options)), "commit": "abc"}
    record["devices"] = {"platform": "simulated" if simulated else "gpu", "kind": "H100", "count": 8}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


class _Text(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not {"src", "href", "onclick"} & {name for name, _ in attrs}
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.in_cell:
            self.rows[-1][-1] += data + " "


def test_two_runs(tmp_path: Path):
    a = write_run(tmp_path / "a", rollout={"n": 8})
    b = write_run(tmp_path / "b", gain=0.7, seconds=5.0, rollout={"n": 16}, actor={"optim": {"lr": 1e-5}})
    path, said = write_comparison([a, b], tmp_path / "out" / "page.html")
    assert path == tmp_path / "out" / "page.html"
    text = path.read_text()
    page = _Text(text)
    assert "script" not in page.tags
    rows = {" ".join(row[0].split()): [" ".join(cell.split()) for cell in row[1:]] for row in page.rows if row}
    assert rows["seconds per step, median"] == ["10", "5 ×0.5"]
    assert rows["all steps together"] == ["3m20s", "1m40s ×0.5"]
    assert rows["reward, last tenth of the steps"] == ["0.587", "0.782 +0.195"]
    assert rows["held-out reward, first"] == ["0.45", "0.55 +0.1"]
    assert rows["rewards that failed, sum"] == ["60", "60"]
    assert rows["rollout.n"] == ["8", "16"]
    assert rows["actor.optim.lr"] == ["1e-06", "1e-05"]
    assert "data.seed" not in rows, "equal"
    figure = text[text.index("<h3>Reward ") :].partition("</figure>")[0]
    assert re.findall(r"<li class='(c\d)'>(\w)", figure) == [("c1", "A"), ("c2", "B")]
    assert figure.count("<polyline") == 2
    for line in ("A  a", "B  b", "2 options differ:", "  rollout.n  A 8  B 16"):
        assert line in said.splitlines()
    assert "simulated" not in said + text
    assert max(map(len, said.splitlines())) <= 80


def test_a_simulated_run_is_called_so(tmp_path: Path):
    runs = [write_run(tmp_path / name, steps, simulated=name == "b") for name, steps in (("a", 20), ("b", 30))]
    path, said = write_comparison(runs, tmp_path / "page.html")
    text = html.unescape(path.read_text())
    for words in ("B b (simulated)", "Seconds of b are simulated", "not to be compared with those that were measured"):
        assert words in text
    assert "B  b (simulated)" in said
    assert "Seconds of b are simulated" in said
    assert "different numbers of steps (a 20, b (simulated) 30)" in " ".join(said.split())
    assert "reward, last tenth of the first 20 steps" in said


def test_the_reward_of_steps_that_all_runs_have(tmp_path: Path):
    runs = [read_run(write_run(tmp_path / name, steps)) for name, steps in (("a", 20), ("b", 40))]
    (figure,) = [each for each in figures_of(runs) if each.name == "reward, last tenth of the first 20 steps"]
    assert figure.values == pytest.approx((0.5875, 0.34375))


def test_three_runs_and_what_one_lacks(tmp_path: Path):
    runs = [write_run(tmp_path / name) for name in "abc"]
    (runs[2] / "metrics.jsonl").write_text('{"step": 1, "time": 0, "actor/entropy": 0.5}\n')
    (runs[2] / "run.json").unlink()
    path, said = write_comparison(runs, tmp_path / "page.html")
    text = path.read_text()
    assert "3 runs" in text
    assert "c: run.json is missing" in text
    figure = text[text.index("<h3>Entropy") :].partition("</figure>")[0]
    assert re.findall(r"<li class='(c\d)'>(\w)", figure) == [("c3", "C")]
    (line,) = [line for line in said.splitlines() if line.startswith("gradient norm")]
    assert line.split()[-3:] == ["0.5", "0.5", "–"]


def test_names_tell_the_runs_apart(tmp_path: Path):
    folders = [write_run(tmp_path / each) for each in ("x/run", "y/run")]
    assert names_of([read_run(folder) for folder in folders]) == list(map(str, folders))
    assert names_of([read_run(folders[0])]) == ["run"]


def test_runs_without_anything_in_common(tmp_path: Path):
    a = write_run(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text("{}")
    path, said = write_comparison([a, tmp_path / "b"], tmp_path / "page.html")
    assert "no step" not in said
    assert "metrics.jsonl is missing" in path.read_text()
    runs = [read_run(tmp_path / name) for name in "ab"]
    assert figures_of(runs)[0].values == (20, None)
    assert differing(runs)["rollout.n"] == ["8", "–"]


@pytest.mark.parametrize(
    ("how", "value"),
    [("first", 1.0), ("last", 20.0), ("mean", 10.5), ("median", 10.5), ("sum", 210), ("end", 20)],
)
def test_one_number_of_a_series(how: Any, value: float):
    points = [(float(i), float(i)) for i in range(1, 21)]
    tenth = {"first": 1.5, "last": 19.5}
    assert summed(points, how) == tenth.get(how, value)
    assert summed([], how) is None
    assert summed([(1.0, float("nan"))], how) is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    a, b = (str(write_run(tmp_path / name)) for name in "ab")
    monkeypatch.chdir(tmp_path)
    assert main(["report", a, b]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "comparison.html"
    assert (tmp_path / "comparison.html").exists()
    assert not (tmp_path / "a" / "report.html").exists()
    assert main(["report", a, "--out", "one.html", b]) == 0
    assert (tmp_path / "one.html").read_text() == (tmp_path / "comparison.html").read_text()


@pytest.mark.parametrize(
    ("runs", "out", "words"),
    [
        (["a", "nowhere"], "page.html", "nowhere is not a run"),
        (["a"] * 9, "page.html", "at most 8 runs can be compared on one page, found 9"),
        (["a", "b"], "a/metrics.jsonl", "would replace a file of the run"),
    ],
)
def test_what_is_refused(runs: list[str], out: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in "ab":
        write_run(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words):
        write_comparison(runs, out)
    assert not (tmp_path / "page.html").exists()
