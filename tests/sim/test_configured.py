"""What a simulation is made of, from its options: devices, sizes, costs and their sources, the workload; and what it
cannot be."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from keyword_options import with_options
from simulate_options import TRAINING, config

from jaxrl.config import Config, ConfigError
from jaxrl.config.options import HostsSection
from jaxrl.models.shapes import SHAPES
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile, ProfileIdentity
from jaxrl.sim.configured import (
    cost_model,
    machine,
    machine_sizes,
    model_sizes,
    num_devices_of,
    with_degree,
    with_simulated_hosts,
    workload_of,
)
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.hardware import HARDWARE
from jaxrl.types import SampleKey

AUTO = {"rollout__tensor_model_parallel_size": "auto"}


def training(**options: Any) -> Config:
    """With options of any section, as `section__option`."""
    return with_options(yaml.safe_load(TRAINING), options)


def written(folder: Path, profile: Profile) -> str:
    (folder / "profile.json").write_text(json.dumps(profile.to_json()))
    return str(folder / "profile.json")


def test_how_many_hosts_and_devices():
    assert num_devices_of(with_simulated_hosts(config(num_hosts=4))) == 32, "eight of each"
    assert num_devices_of(with_simulated_hosts(config(num_hosts=4, num_devices=8))) == 8
    real = config().replace(hosts=HostsSection(num=2, max_restarts=9, devices_per_host=4))
    made = with_simulated_hosts(real)
    assert (made.hosts.num, made.hosts.max_restarts, num_devices_of(made)) == (2, 3, 8)
    assert with_simulated_hosts(real.replace(simulate=config(num_hosts=1).simulate)).hosts.num == 1
    with pytest.raises(
        ConfigError, match=r"^rollout.hosts_per_worker \(2\): a worker that spans hosts cannot be simulated"
    ):
        with_simulated_hosts(real.replace(rollout=real.rollout.replace(hosts_per_worker=2)))


# ---------------------------------------------------------------- the machine and its costs


def test_devices_and_blocks():
    plain = config()
    assert num_devices_of(plain) == 8
    assert num_devices_of(training(trainer__num_devices=4)) == 4
    cost, _ = cost_model(plain)
    sizes = machine_sizes(plain, cost, model_sizes(plain))
    assert (sizes.num_groups, sizes.num_slots, sizes.block_size) == (4, 8, 16)
    assert sizes.num_blocks == 8 * 10 + 1, "a tiny model: all rows at their longest, and the reserved block"


@pytest.mark.parametrize(("model", "tokens", "is_full"), [("tiny", 96, False), ("Qwen2.5-7B", 800_000, True)])
def test_a_worker_has_its_share_of_the_devices_and_the_same_pools(model: str, tokens: int, is_full: bool):
    """Training state is split over all devices, however many workers they are cut into."""
    long = {"data__max_response_length": tokens, "actor__ppo_max_token_len_per_gpu": 2 * tokens}
    one, two, three = (training(model__path=model, rollout__num_workers=n, **long) for n in (1, 2, 3))
    cost, _ = cost_model(one)
    whole, half = (machine_sizes(each, cost, model_sizes(each)) for each in (one, two))
    assert half == replace(whole, num_groups=whole.num_groups // 2)
    assert (whole.num_blocks < 8 * (64 + tokens) // 16) == is_full, "the memory sets the pool"
    with pytest.raises(ConfigError, match=r"rollout\.num_workers \(3\) must cut simulate\.num_devices \(8\)"):
        machine_sizes(three, cost, model_sizes(three))


def test_model_sizes_from_a_name_or_a_folder(tiny_model: Path):
    named = model_sizes(config(model="Qwen2.5-7B"))
    assert named == SHAPES["Qwen2.5-7B"]
    assert model_sizes(config(model="Qwen2.5-14B")).num_layers == 48
    for path in (tiny_model, f"random:{tiny_model}", tiny_model / "config.json"):
        found = model_sizes(config(model=str(path)))
        assert (found.vocab_size, found.hidden_size) == (260, 32)
    with pytest.raises(ConfigError, match=r"simulate\.model \(Qwen9-1T\) must be a folder .* Qwen2\.5-32B"):
        model_sizes(config(model="Qwen9-1T"))
    with pytest.raises(ConfigError, match=r"model\.path .*set simulate\.model where"):
        model_sizes(training(model__path="package:some.gguf"))


def test_cost_models_and_their_sources(tmp_path: Path):
    cost, source = cost_model(config(hardware="h800"))
    model = model_sizes(config())
    assert cost == CostModel(model, HARDWARE["H800"], kv_head_bytes=2 * model.head_dim)
    assert source == "roofline of H800 data sheet peaks, default efficiency factors"
    assert isinstance(cost, CostModel)
    assert cost.number_bytes == 2
    for options, bytes_of in (
        ({"rollout__dtype": "float32"}, (4, 0, 4 * model.head_dim)),
        ({"rollout__quantization": "fp8"}, (2, 1, 2 * model.head_dim)),
        ({"rollout__kv_cache_dtype": "int8"}, (2, 0, model.head_dim + 4)),
    ):
        found, _ = cost_model(training(**options))
        assert (found.number_bytes, found.layer_bytes, found.kv_head_bytes) == bytes_of

    identity = ProfileIdentity("tiny", "f", "cpu", 2, "0", "bfloat16")
    points = tuple(Measurement(2, batch, context, batch * 1e-3) for batch in (1, 8) for context in (1, 800))
    profile = Profile(identity, points, points, source="synthetic")
    file = written(tmp_path, profile)
    cost, source = cost_model(config(profile=file))
    assert source.startswith(f"synthetic table {file} (tiny on cpu) for decode and prefill; the rest: roofline of H100")
    assert cost.decode_step_s(2, 8, 100) == pytest.approx(8e-3)
    assert with_degree(training(**AUTO, simulate__profile=file))[0].rollout.tp == 2, "the table has no other"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"simulate__num_hosts": 3, "simulate__num_devices": 8}, "(8) must be a multiple of simulate.num_hosts (3)"),
        ({"simulate__num_hosts": 2, "rollout__num_workers": 3}, "rollout.num_workers (3) "),
        ({"simulate__profile": "gone"}, "simulate.profile (gone) must be a file of `jaxrl profile`, and there is no"),
        ({"simulate__profile": __file__}, f"simulate.profile: {__file__} is not a latency profile ("),
        ({"simulate__hardware": "Z80"}, "simulate.hardware: hardware 'Z80' must be one of A40, "),
        (AUTO | {"model__path": "Qwen2.5-72B"}, "rollout.memory_fraction (0.85) leaves 0 KV blocks beside weights and"),
    ],
)
def test_what_cannot_be_simulated(options: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        machine(with_degree(with_simulated_hosts(training(**options)))[0])


# ---------------------------------------------------------------- the workload


def test_scoring_that_hangs_needs_a_limit():
    hangs = {"tasks": {"a": {"scoring": {"hang_share": 1.0}}}}
    workload, _ = workload_of(training(simulate=hangs, reward__timeout_s=3.0))
    assert workload.reward_s(SampleKey(0, 0, 0)) == 3.0
    with pytest.raises(ConfigError, match=r"simulate\.tasks\.a\.scoring\.hang_share \(1\.0\) needs reward\.timeout_s"):
        workload_of(training(simulate=hangs, reward__timeout_s=0.0))
