"""The section on rewards: what it shows of a run with domains, and of one without."""

import json
from pathlib import Path
from typing import Any

from jaxrl.record.metrics import MetricsWriter
from jaxrl.report.page import write_report


def line(step: int) -> dict[str, float]:
    """A step of a run in which programs and a judge are the slow ones."""
    slow = step % 10 == 0
    found = {"reward/num_scored": 64.0, "reward/timeouts": 2.0 * slow, "reward/crashes": 0.0, "reward/errors": 1.0}
    found |= {"reward/retries": float(slow), "reward/hidden_s": 18.0, "timing_s/reward": 2.0 + 4 * slow}
    for name, count, p50_s in (("gsm8k", 32, 0.02), ("kodcode", 24, 1.4), ("essays", 8, 4.5)):
        found |= {f"reward/{name}/num_scored": float(count), f"reward/{name}/timeouts": 2.0 * (slow and count == 24)}
        found |= {f"reward/{name}/crashes": 0.0, f"reward/{name}/errors": float(count == 8)}
        longest = p50_s * (12 if slow else 5)
        found |= {f"reward/{name}/p50_s": p50_s, f"reward/{name}/p95_s": p50_s * 3, f"reward/{name}/max_s": longest}
    found |= {"reward/own/mean": 0.3 + step / 100, "reward/part/format/mean": min(1.0, 0.2 + step / 30)}
    found |= {"reward/part/length/mean": -0.3, "reward/code/cut_off": 3.0}
    found |= {"reward/timeouts/case": 2.0, "reward/timeouts/case_max": 1.0, "reward/timeouts/sample": 2.0 * slow}
    found |= {"reward/timeouts/endpoint": 0.0}
    return found | {"reward/code/anchor_s/median": 1.0 + step / 40, "reward/code/anchor_s/max": 3 + step / 15}


def sample(step: int, reward: Any, **more: Any) -> dict[str, Any]:
    head = {"step": step, "prompt": "?", "response": f"r{step}", "answer": "4", "reward": reward, "length": 9}
    return head | {"finish_reason": "stop", "source": "gsm8k"} | more


def made(folder: Path, steps: int = 40) -> Path:
    with MetricsWriter(folder) as writer:
        for step in range(1, steps + 1):
            writer.write(step, line(step))
    parts = {"own_reward": 1.0, "parts": {"format": 0.0, "length": -0.25}, "overlong_reward": -0.5}
    rows = [sample(step, step / 10, **parts) for step in range(1, 9)]
    rows.append(sample(9, 0.0, error="no score within reward.domains.kodcode.timeout_s (4 s)"))
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_run_with_domains(tmp_path: Path):
    text = write_report(made(tmp_path)).read_text()
    for title in (
        *("Scoring of gsm8k", "Scoring of kodcode", "Scoring of essays", "Scoring hidden under the rollout"),
        *("Rewards that failed", "Time-outs by kind", "Longest correct test case", "Parts of the reward"),
    ):
        assert f"<h3>{title} <small>" in text
    for label in ("time-outs", "errors", "scored again", "test cases cut off", "scorer", "format", "length"):
        assert f">{label}</li>" in text
    of_kinds = text.partition("<h3>Time-outs by kind <small>")[2].partition("</figure>")[0]
    for label in ("test cases, adaptive limit", "test cases, largest limit", "samples"):
        assert f">{label}</li>" in of_kinds
    assert "requests to the endpoint" not in text, "there were none"
    assert ">crashes</li>" not in text, "there were none"
    row = text.partition("<td>kodcode</td>")[2].partition("</tr>")[0]
    assert row == "<td>960</td><td>1.4 s</td><td>4.2 s</td><td>16.8 s</td><td>8</td><td>0</td><td>0</td>"
    assert "<p class=sub>scorer 1</p><p class=sub>format 0</p><p class=sub>length -0.25</p>" in text
    assert "no score within reward.domains.kodcode.timeout_<wbr>s (4 s)" in text
