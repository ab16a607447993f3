"""What each value of an option costs, at a size that takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import bench_option
import pytest

ROOT = Path(__file__).resolve().parents[2]

SMALL = (
    "data.train_batch_size=4",
    "data.max_response_length=256",
    "rollout.n=2",
    "rollout.max_num_seqs=8",
    "rollout.block_size=32",
    "simulate.num_devices=2",
    "simulate.tasks.simulated.response.median=50",
)


def test_a_line_per_value_with_means_and_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = str(ROOT / "configs" / "partial_rollout.yaml")
    arguments = [f"--json={tmp_path}", "--config", config, "--steps", "8", "--skip", "2", "--seeds", "2"]
    arguments += ["--baseline", "rollout.partial_rollout.enable=false", "--with", *SMALL]
    assert bench_option.main([*arguments, "--", "rollout.partial_rollout.max_staleness", "0", "1", "-1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in (line.split("|") for line in lines)}
    assert list(rows) == ["(baseline)", "0", "1", "-1"]
    assert "must be >= 1" in rows["0"][0]
    numbers = {
        name: [float(cell.split(" ")[0].rstrip("%")) for cell in row] for name, row in rows.items() if name != "0"
    }
    thrown, stale = bench_option.COLUMNS.index("thrown"), bench_option.COLUMNS.index("stale")
    assert numbers["(baseline)"][thrown] == numbers["-1"][thrown] == 0 < numbers["1"][thrown]
    assert numbers["(baseline)"][stale] == 0 < numbers["1"][stale] < 100
    assert 0 < numbers["-1"][0] < numbers["(baseline)"][0], "seconds per step"
    assert any(not cell.endswith("± 0.00") for cell in rows["-1"]), "two seeds differ"
    (file,) = tmp_path.iterdir()
    recorded = json.loads(file.read_text())["results"]
    assert list(recorded) == ["(baseline)", "1", "-1"], "what is refused has no figures"
    for runs in recorded.values():
        assert [run["prompts"] > 0 and run["CPU s"] > 0 for run in runs] == [True, True]
