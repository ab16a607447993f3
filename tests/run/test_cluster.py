"""Runs on several hosts, which are actors on this machine: they end as a run in one process, whatever dies."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import time
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from runs import PATIENCE_S, STOPS, WIDE, Runs, assert_same_end, end, num_steps, wait_for_steps
from talking_runs import TALK
from tiny import write_tiny_model

from jaxrl.config import ConfigError
from jaxrl.config.options import HostsSection
from jaxrl.models import decoder
from jaxrl.models.loading import config_of
from jaxrl.models.safetensors import export_hf
from jaxrl.processes.process_tree import descendants
from jaxrl.run.cluster import bundle_of, open_cluster

slow = pytest.mark.slow
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
HOSTS = ("hosts.num=2", "hosts.devices_per_host=1")
WORKERS = ("rollout.num_workers=2",)
SMALL = (
    *WIDE,
    STOPS,
    *("data.max_prompt_length=20", "data.max_response_length=12", "actor.ppo_max_token_len_per_gpu=32"),
    *("rollout.block_size=32", "rollout.num_blocks=9", "trainer.total_training_steps=4", "trainer.save_freq=1"),
)
RULES = {
    "tail batching": (
        *("rollout.tail_batching.enable=true", "algorithm.filter_groups.enable=true"),
        *("trainer.total_training_steps=2", "trainer.save_freq=0"),  # the one that is always tried: a quick one
    ),
    "over-provisioning": ("rollout.over_provisioning.enable=true", "rollout.order=logical"),
    "partial rollout": ("rollout.partial_rollout.enable=true",),
    "one step off, adapters": ("trainer.one_step_off=true", "model.lora_rank=4"),
    "drafts": ("rollout.speculation.enable=true", "rollout.temperature=0.06"),
    "critic": ("algorithm.adv_estimator=gae", "critic.optim.lr=0.01"),
    "teacher": ("algorithm.adv_estimator=none", "algorithm.teacher.path=FOLDER/teacher"),
    "experts": ("model.path=FOLDER/experts",),
    "int8": ("rollout.quantization=int8", "rollout.kv_cache_dtype=int8"),
    "planner": ("rollout.layout.planner=true", "rollout.max_num_seqs=4"),
    "turns": (
        *("environment={kind: native, path: FOLDER/talk.py, name: Talk, num_workers: 1}", "rollout.stop=[]"),
        *("reward={kind: environment, path: ''}", "data.max_response_length=40", "rollout.num_blocks=30"),
        "actor.ppo_max_token_len_per_gpu=64",
    ),
    "a file that filters groups": ("algorithm.filter_groups={enable: true, path: FOLDER/varied.py, name: varied}",),
}
VARIED = """
def varied(data_source, rewards, infos, responses, extra_info):
    return len(set(responses)) > 1
"""
EXPERTS = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 16},
    **{"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
}


@pytest.mark.parametrize(
    ("num", "each", "nodes", "on_cpu", "expected"),
    [
        (2, 0, [{"CPU": 8}, {"CPU": 4}], False, {"CPU": 1}),
        (2, 0, [{"CPU": 8, "GPU": 8}, {"CPU": 8, "GPU": 4}], False, {"CPU": 1, "GPU": 4}),
        (2, 0, [{"CPU": 8, "GPU": 8}], False, {"CPU": 1, "GPU": 4}),  # to try two hosts on one machine
        (2, 0, [{"CPU": 8, "GPU": 8}] * 2, True, {"CPU": 1}),
        (4, 0, [{"CPU": 2}, *[{"CPU": 96, "TPU": 4}] * 4], False, {"CPU": 1, "TPU": 4}),  # a head without chips
    ],
)
def test_what_an_actor_takes_of_a_node(
    num: int, each: int, nodes: list[dict[str, float]], on_cpu: bool, expected: dict[str, float]
):
    assert bundle_of(HostsSection(num=num, devices_per_host=each), nodes, on_cpu=on_cpu) == expected


def test_a_cluster_that_is_not_there_is_refused():
    with closing(socket.create_server(("127.0.0.1", 0))) as listens:
        address = f"127.0.0.1:{listens.getsockname()[1]}"
    with (
        pytest.raises(
            ConfigError, match=rf"^hosts\.address \({address}\): nothing answers there \(connection refused\)$"
        ),
        open_cluster(HostsSection(num=2, address=address), lambda doing: None),
    ):
        pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Runs:
    made = Runs(tmp_path_factory.mktemp("cluster"), tiny_model)
    made.config["trainer"]["compilation_cache_dir"] = str(made.folder / "cache")
    (made.folder / "talk.py").write_text(TALK.replace("* self.scale", "* 0").replace("number % 41 == 0", "False"))
    (made.folder / "varied.py").write_text(VARIED)
    for name, more in (("teacher", {}), ("experts", EXPERTS)):
        place = write_tiny_model(made.folder / name, **more)
        model = config_of(place)
        export_hf(decoder.init(model, jax.random.key(7), jnp.float32), model, place, dtype=jnp.float32)
    return made


@needs_ray
@pytest.mark.parametrize(
    "rule", ["tail batching", *(pytest.param(rule, marks=slow) for rule in RULES if rule != "tail batching")]
)
def test_actors_end_as_one_process_with_as_many_workers(rule: str, runs: Runs):
    """To the bit."""
    options = [each.replace("FOLDER", str(runs.folder)) for each in (*SMALL, *RULES[rule])]
    one, two = (runs.folder / f"{place} {rule}" for place in ("one", "two"))
    runs.here(one, *options, *WORKERS, devices=2)
    runs.finish(two, *options, *HOSTS)
    assert_same_end(two, one)


@slow
@needs_ray
@pytest.mark.parametrize("rule", ["partial rollout", "int8"])
def test_a_worker_that_spans_hosts_ends_as_one_on_as_many_devices(rule: str, runs: Runs):
    options = (*SMALL, *RULES[rule], "rollout.warmup=true", "rollout.tensor_model_parallel_size=2")
    one, spanning = (runs.folder / f"{name} {rule}" for name in ("one wide", "spanning"))
    runs.finish(one, *options, devices=2)
    runs.finish(spanning, *options, *HOSTS, "rollout.hosts_per_worker=2")
    assert_same_end(spanning, one)


@slow
@needs_ray
@pytest.mark.parametrize("legs", [((1, 2), (2, 1), (1, 2)), ((2, 2), (4, 1), (2, 2))])
def test_a_run_resumes_on_another_number_of_hosts(legs: tuple[tuple[int, int], ...], runs: Runs):
    """With as many workers, and tokens that are carried. On four devices one process adds up in another order."""
    count = legs[0][0] * legs[0][1]
    moved, whole = (runs.folder / f"{name} {count}" for name in ("moved", "unmoved"))
    carrying = "rollout.partial_rollout={enable: true, at_end: leave}"
    options = (*SMALL, carrying, f"rollout.num_workers={count}")
    for leg, (num, each) in enumerate(legs, 1):
        placed = (f"hosts.num={num}", f"hosts.devices_per_host={each}") if num > 1 else ()
        runs.finish(moved, *options, *placed, f"trainer.total_training_steps={2 * leg}", devices=count)
    assert num_steps(moved) == 6
    placed = (f"hosts.num={count}", "hosts.devices_per_host=1", "trainer.total_training_steps=6")
    runs.finish(whole, *options, *placed)
    assert_same_end(moved, whole)


@slow
@needs_ray
def test_devices_of_the_rollouts_own(runs: Runs):
    """Of each host one device rolls out and one learns."""
    one, two = (runs.folder / name for name in ("own one", "own two"))
    ranked = ("trainer.one_step_off=true", "rollout.ranking_groups.enable=true")
    options = (*SMALL, *ranked, "trainer.total_training_steps=6")
    runs.finish(one, *options, "rollout.num_devices=2", *WORKERS, devices=4)
    runs.finish(two, *options, "rollout.num_devices=1", *WORKERS, "hosts.num=2", "hosts.devices_per_host=2")
    assert_same_end(two, one, but="ranking")


@slow
@needs_ray
def test_the_order_of_arrival_is_repeated_after_a_kill(runs: Runs):
    """The killed run's last step is played again in the order that the journal has, so its metrics come out alike."""
    options = (*SMALL, *RULES["partial rollout"], "rollout.order=arrival", "trainer.save_freq=3")
    broken, copied = runs.folder / "arrived", runs.folder / "arrived twice"
    with runs.start(broken, *options, *HOSTS, "trainer.total_training_steps=50") as process:
        wait_for_steps(process, broken, 5)
        process.kill()
        process.wait(PATIENCE_S)
    done = num_steps(broken)
    shutil.copytree(broken, copied)
    last = f"trainer.total_training_steps={done}"
    runs.finish(broken, *options, *HOSTS, last)
    runs.finish(copied, *options, *WORKERS, last, devices=2)
    assert_same_end(copied, broken)


@slow
@needs_ray
def test_a_controller_that_is_asked_to_end_saves_and_leaves_nothing(runs: Runs):
    """tests/faults/test_host_losses.py kills it."""
    ended, undisturbed = runs.folder / "ended", runs.folder / "undisturbed"
    runs.finish(undisturbed, *SMALL, *HOSTS)
    with runs.start(ended, *SMALL, *HOSTS) as process:
        wait_for_steps(process, ended, 2)
        below = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        end(process)
        until_s = time.monotonic() + PATIENCE_S
        while any(Path(f"/proc/{pid}").exists() for pid in below):
            assert time.monotonic() < until_s
            time.sleep(0.1)
    runs.finish(ended, *SMALL, *HOSTS)
    assert_same_end(ended, undisturbed)
