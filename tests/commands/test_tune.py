"""`jaxrl tune`: which factors win on which lengths, what it says, what it reads of a run, and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxrl.commands.tune import tune
from jaxrl.config import from_mapping, to_mapping

CONFIG: dict[str, Any] = {
    "model": {"path": "tiny"},
    "data": {"train_batch_size": 8, "max_prompt_length": 64, "max_response_length": 512, "task_size": 100},
    "rollout": {"n": 4, "max_num_seqs": 32, "decode_steps": 8, "dtype": "bfloat16"},
    "actor": {"old_logprobs": "rollout"},
    "trainer": {"total_training_steps": 30},
    "simulate": {"num_devices": 1},
}
SIMULATED = {"platform": "simulated", "kind": "H100 (simulated)", "count": 1}


def heavy(prompt: int, sample: int) -> int:
    """One prompt in eight is long."""
    return 400 + 10 * sample if prompt % 8 == 0 else 20 + prompt % 5 + sample


def tailless(prompt: int, sample: int) -> int:
    return 50 + (prompt == 0)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes the record of a run with lengths by prompt and sample, of 64 prompts."""

    def written(length: Callable[[int, int], int], **sections: dict[str, Any]) -> str:
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        config = {name: section | sections.get(name, {}) for name, section in CONFIG.items()}
        (folder / "config.yaml").write_text(yaml.safe_dump(to_mapping(from_mapping(config))))
        (folder / "run.json").write_text(json.dumps({"devices": SIMULATED}))
        rows = [
            {
                "step": prompt // 2 + 1,
                "prompt": f"prompt {prompt}",
                "response": "y" * length(prompt, sample),
                "reward": float(sample % 2),
                "length": length(prompt, sample),
                "finish_reason": "length" if length(prompt, sample) == 512 else "stop",
                "source": "made_up",
            }
            for prompt in range(64)
            for sample in range(2)
        ]
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        longest = max(row["length"] for row in rows)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "response_length/max": longest}) + "\n")
        return str(folder)

    return written


def search(run_dir: str, *overrides: str, **options: Any) -> tuple[Any, list[str]]:
    said: list[str] = []
    return tune(run_dir, overrides, **{"seeds": 2, "steps": 10, "say": said.append, **options}), said


def test_a_heavy_tail_asks_for_more_and_none_for_least(write: Callable[..., str]):
    """One in eight prompts is twenty times as long as the rest: at 1.1 a short round still waits for some of them. With
    all lengths alike, whatever is launched beyond the batch is work for nothing."""
    room = "rollout.max_num_seqs=128"
    table, _ = search(write(heavy), room, values=(1.05, 1.5), seeds=4, steps=20)
    assert table.best.factors == (1.5, 1.5)
    assert table.pays
    assert table.plain.mean("gen_s") > 1.3 * table.best.mean("gen_s")
    table, said = search(write(tailless), room, values=(1.05, 1.5))
    assert table.best.factors == (1.05, 1.05)
    assert not table.pays
    assert said[-1] == "options: rollout.tail_batching.enable=false"


def test_the_grid_the_seeds_and_the_baseline(write: Callable[..., str]):
    """The run itself had another rule, which the plain baseline must not have."""
    folder = write(heavy, rollout={"over_provisioning": {"enable": True, "prompt_factor": 2.0}})
    table, said = search(folder, steps=20)
    assert [each.factors for each in table.tried] == [(eta, eta) for eta in (1.1, 1.15, 1.3, 1.4)]
    assert [each.launched for each in (table.plain, *table.tried)] == [(8, 4), (9, 5), (10, 5), (11, 6), (12, 6)]
    assert all(len({one.step_s for one in each.trials}) == 2 for each in (table.plain, *table.tried)), "seeds differ"
    assert table.plain.mean("thrown_share") == table.plain.mean("long_share") == table.plain.mean("queue") == 0
    assert all(each.mean("stale_share") == 0 for each in table.tried), "tail batching stays on-policy"
    for each in table.tried:
        prompts = each.launched[0]
        assert each.mean("thrown_share") > 0
        # each short round defers what it launches beyond 8 prompts, and a long round takes 8
        assert each.mean("long_share") == pytest.approx((prompts - 8) / prompts, abs=1e-9)
    assert "  note: left out, since they launch what another value launches: 1.2, 1.25, 1.35" in said
