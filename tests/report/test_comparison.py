"""Runs compared: what the page and the summary say of two and of three, real and simulated."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxrl.cli import main
from jaxrl.config import from_mapping, to_mapping
from jaxrl.record.metrics import MetricsWriter
from jaxrl.report.comparison import write_comparison


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


def test_two_runs(tmp_path: Path):
    a = write_run(tmp_path / "a", rollout={"n": 8})
    b = write_run(tmp_path / "b", gain=0.7, seconds=5.0, rollout={"n": 16}, actor={"optim": {"lr": 1e-5}})
    path, said = write_comparison([a, b], tmp_path / "out" / "page.html")
    assert path == tmp_path / "out" / "page.html"
    text = path.read_text()
    rows = {}
    for row in re.findall(r"<tr>(.*?)(?=<tr>|</table>)", text, re.DOTALL):
        first, *cells = [" ".join(re.sub("<.*?>", " ", each).split()) for each in re.split(r"<t[dh][^>]*>", row)[1:]]
        rows[first] = cells
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
