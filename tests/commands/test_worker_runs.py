"""Whole runs of a tiny model on eight virtual devices, cut into several workers.

In float64 tokens do not depend on where they are drawn, a batch is put together in the order of its prompts, and
training has one mesh: so a run with several workers ends as one with a single worker, to the bit.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
from runs import WIDE, Runs, assert_same_end

from jaxrl.record.metrics import read_metrics

SMALL = ("rollout.n=8", "rollout.max_num_seqs=4", "rollout.num_blocks=9", "rollout.decode_steps=2")  # preempted rows


def finish(runs: Runs, name: str, *overrides: str) -> Path:
    run_dir = runs.folder / name
    runs.finish(run_dir, *WIDE, *SMALL, "trainer.total_training_steps=4", *overrides, devices=8)
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_several_workers_end_as_one(tmp_path: Path, tiny_model: Path, tp: int):
    runs = Runs(tmp_path, tiny_model)
    degree = f"rollout.tensor_model_parallel_size={tp}"
    one = finish(runs, "one", degree)
    with jax.enable_x64(True):
        for num_workers, deal in ((2, "tokens"), (4, "prompts")):
            cut = finish(runs, f"of{num_workers}", degree, f"rollout.num_workers={num_workers}", f"rollout.deal={deal}")
            assert_same_end(cut, one)
            for ours, expected in zip(read_metrics(cut), read_metrics(one), strict=True):
                for name in ("critic/rewards/mean", "response_length/mean", "actor/grad_norm", "actor/pg_loss"):
                    assert ours[name] == expected[name], name
            events = json.loads((cut / "timeline.json").read_text())
            tracks = {event["args"]["name"] for event in events if event.get("name") == "thread_name"}
            assert {f"engine {worker}" for worker in range(num_workers)} <= tracks
    assert sum(line["rollout/preemptions"] for line in read_metrics(one)) > 0
