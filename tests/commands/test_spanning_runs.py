"""Whole runs of a tiny model whose rollout workers span processes: in float64 they end as one process with a worker on
as many devices, to the bit."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from host_runs import RULES, SMALL, HostRun, assert_same_run, lines
from runs import WIDE, Runs, end, num_steps, wait_for_steps
from tiny import write_tiny_model
from worlds import free_port

ALONE = Path(__file__).parents[1] / "support" / "one_synchronized.py"
SPANNING = (
    *SMALL,
    *("data.max_prompt_length=40", "actor.ppo_max_token_len_per_gpu=64", "rollout.num_blocks=17"),
    *("rollout.warmup=true", "trainer.total_training_steps=3", "trainer.save_freq=1"),
)
EXPERTS = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 16},
    **{"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
}
OTHERS: dict[str, tuple[str, ...]] = {
    "over-provisioning": ("rollout.over_provisioning.enable=true",),
    "drafts": (
        *("rollout.speculation={enable: true, verify_tokens: 64}", "rollout.temperature=0.06"),
        *("actor.optim.lr=0.002", "trainer.total_training_steps=6"),
    ),
    "narrow": ("rollout.quantization=int8", "rollout.kv_cache_dtype=int8"),
    "experts, judged": ("model.path=EXPERTS", "data.val_files=[HELD]", "trainer.test_freq=1"),
    "invariant": ("actor.numerics=invariant", "actor.numerics_tp=2"),
}


def spanning(num: int, per_host: int, each: int) -> tuple[str, ...]:
    """`num` processes of so many devices, `each` of them with a worker."""
    hosts = ("hosts.launcher=local", f"hosts.num={num}", f"hosts.devices_per_host={per_host}")
    return (*hosts, f"rollout.hosts_per_worker={each}", f"rollout.tensor_model_parallel_size={each * per_host}")


def alone(num_workers: int, tp: int) -> tuple[str, ...]:
    placed = f"rollout.num_workers={num_workers}", f"rollout.tensor_model_parallel_size={tp}"
    return (f"hosts.coordinator=127.0.0.1:{free_port()}", *placed)


def one(runs: Runs, run_dir: Path, num_workers: int, tp: int, overrides: Sequence[str]) -> Path:
    """A run of one process with as many workers on as many devices."""
    placed, program = alone(num_workers, tp), ("-m", "jaxrl", "train")
    if num_workers == 1:
        program = (str(ALONE), "train")
    with runs.start(run_dir, *WIDE, *overrides, *placed, devices=num_workers * tp, program=program) as process:
        end(process)
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "num", "per_host", "each"),
    [
        *((rule, 2, 1, 2) for rule in RULES | OTHERS),
        ("partial rollout", 2, 2, 2),
        ("tail batching and dynamic sampling", 4, 1, 2),
        ("partial rollout", 4, 1, 2),
    ],
)
def test_processes_end_as_one(tmp_path: Path, tiny_model: Path, rule: str, num: int, per_host: int, each: int):
    experts = write_tiny_model(tmp_path / "experts", **EXPERTS)
    files = {"EXPERTS": str(experts), "HELD": str(tmp_path / "held.jsonl")}
    (tmp_path / "held.jsonl").write_text('{"question": "yz", "answer": "1"}\n{"question": "zy", "answer": "2"}\n')
    own = (re.sub("EXPERTS|HELD", lambda found: files[found[0]], option) for option in (RULES | OTHERS)[rule])
    runs, options = Runs(tmp_path, tiny_model), (*SPANNING, *own)
    runs.finish(tmp_path / "several", *WIDE, *options, *spanning(num, per_host, each))
    assert_same_run(
        tmp_path / "several", one(runs, tmp_path / "one", num // each, each * per_host, options), "rollout/spec/build"
    )
    if rule == "drafts":
        assert any(float(str(line["rollout/spec/accept_rate"])) > 0 for line in lines(tmp_path / "one/metrics.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_is_started_again_and_the_run_ends_as_an_unbroken_one(
    tmp_path: Path, tiny_model: Path, killed: int
):
    runs, options = Runs(tmp_path, tiny_model), (*SPANNING, *RULES["partial rollout"], *spanning(2, 1, 2))
    with HostRun(runs, tmp_path / "killed", *options) as run:
        run.start("trainer.total_training_steps=4")
        run.until(lambda: (run.saved or 0) >= 1)
        run.until_at(killed, "gen of step")
        pid = run.pid_of("process", killed)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        run.end()
    assert len(json.loads((tmp_path / "killed" / "run.json").read_text())["starts"]) == 2
    runs.finish(tmp_path / "unbroken", *WIDE, *options, "trainer.total_training_steps=4")
    assert_same_run(tmp_path / "killed", tmp_path / "unbroken")


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_hosts(tmp_path: Path, tiny_model: Path):
    """From a worker that spans two processes to one in one process, and back; each but the last is stopped."""
    runs, run_dir, cache = Runs(tmp_path, tiny_model), tmp_path / "moved", tmp_path / "cache"
    steps = "trainer.total_training_steps=10"
    options = (*SPANNING, *RULES["partial rollout"], f"trainer.compilation_cache_dir={cache}", steps)
    legs = (spanning(2, 1, 2), alone(1, 2), spanning(2, 1, 2))
    for leg, placed in enumerate(legs):
        program = (str(ALONE), "train") if leg == 1 else ("-m", "jaxrl", "train")
        with runs.start(run_dir, *WIDE, *options, *placed, devices=2, program=program) as process:
            if leg < 2:
                wait_for_steps(process, run_dir, num_steps(run_dir) + 1)
                process.send_signal(signal.SIGTERM)
            said = end(process)
        assert (f"resuming {run_dir}" in said) == (leg > 0), said
        assert (num_steps(run_dir) < 10) == (leg < 2)
    assert_same_run(run_dir, one(runs, tmp_path / "one", 1, 2, options))
