"""`rollout.tensor_model_parallel_size=auto`, replaced by a degree before anything is built.

A run that began with a degree keeps it: config.yaml holds the number. `jaxrl.sim.configured.with_degree` does the same
for modelled devices.

Source: RollPacker §4.2; `jaxrl.scheduling.layouts.batch_state.fastest_degree` has the choice and its departures.
"""

from __future__ import annotations

from collections.abc import Callable

from jax.sharding import Mesh

from jaxrl.config import Config, ConfigError
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import config_of, resolve_path
from jaxrl.run.memory import kv_layers_of, plan_num_blocks
from jaxrl.scheduling.layouts.batch_state import GroupCapacity, fastest_degree
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import NEW_PROFILE, Profile
from jaxrl.sharding.memory import DeviceMemory, memory_of

OPTION = "rollout.tensor_model_parallel_size"


def with_degree(
    config: Config,
    mesh: Mesh,
    say: Callable[[str], None] = print,
    earlier: Config | None = None,
    memory: DeviceMemory | None = None,
) -> Config:
    """`config`, whose degree is auto and whose types are known, with a number, said and explained. Raises ConfigError
    where no profile of this model and machine has a possible degree. `mesh`: of the rollout, on this host; `earlier`:
    the configuration of the run's start before; `memory`: the least of all hosts, by default that of the mesh."""
    kept = config.with_tp_of(earlier, mesh.size // config.workers_per_group)
    if not kept.is_tp_open:
        say(f"{OPTION}: auto stays {kept.rollout.tp}, as this run began")
        return kept
    from jaxrl.rollout.profiler import checked_profile

    _require_profile(config)
    model = config_of(resolve_path(config.model.path))
    memory = memory or memory_of(mesh.devices.ravel().tolist())
    config, said = choose(config, model, mesh.size, memory.reported, checked_profile(config, model, mesh))
    say(said)
    return config


def planned_degree(
    config: Config, model: ModelConfig, num_devices: int, memory_bytes: int | None
) -> tuple[Config, str]:
    """`with_degree` for devices that need not be here: the profile's number of devices is checked, not the machine.
    Returns the configuration, and a message (empty if the degree is given)."""
    if not config.is_tp_open:
        return config, ""
    from jaxrl.rollout.profiler import load_profile

    _require_profile(config)
    profile = load_profile(config.rollout.layout.profile)
    of_worker = num_devices // config.workers_per_group
    if profile.identity.device_count != of_worker:
        raise ConfigError(
            f"{OPTION} is auto, and rollout.layout.profile ({config.rollout.layout.profile}) is of "
            f"{profile.identity.device_count} devices: the rollout has {of_worker}"
            + (" in each worker" if config.num_workers > 1 else "")
        )
    return choose(config, model, num_devices, memory_bytes, profile)


def _require_profile(config: Config) -> None:
    if not config.rollout.layout.profile:
        raise ConfigError(
            f"rollout.layout.profile is missing: {OPTION}=auto needs a file of `jaxrl profile --config ... --out "
            "profile.json`, from which it takes the fastest degree"
        )


def choose(
    config: Config, model: ModelConfig, num_devices: int, memory_bytes: int | None, profile: Profile
) -> tuple[Config, str]:
    """The configuration with the profile's fastest degree for its batch and lengths, and a sentence about it."""
    rollout, data = config.rollout, config.data
    possible: dict[int, GroupCapacity] = {}
    refused: ValueError | None = None
    of_worker = num_devices // config.workers_per_group
    for degree in rollout.layout.possible_on(of_worker):
        if degree not in profile.degrees:
            continue
        try:
            blocks = plan_num_blocks(config.with_tp(degree), model, num_devices, memory_bytes)
        except ValueError as error:
            refused = error  # weights and one request do not fit: a larger degree may do
            continue
        stacks = kv_layers_of(config, model).stacks
        tokens = stacks.num_tokens(blocks - 1, rollout.block_size)
        possible[degree] = GroupCapacity(tokens, rollout.max_num_seqs)
    if refused is not None and not possible:
        raise ConfigError(str(refused)) from refused
    if not possible:
        raise ConfigError(
            f"{OPTION} is auto, and rollout.layout.profile ({rollout.layout.profile}) holds tp "
            f"{', '.join(map(str, profile.degrees))}, none of which {of_worker} devices and "
            f"rollout.layout.degrees allow: {NEW_PROFILE}"
        )
    predictor = LatencyPredictor(profile, rollout.layout)
    rows = -(-data.train_batch_size * rollout.n // config.num_workers)  # of the worker with the most
    chosen = fastest_degree(predictor, possible, rows, data.max_prompt_length, data.max_response_length)
    batch = "a batch" if config.num_workers == 1 else "a worker's part"
    return config.with_tp(chosen.degree), (
        f"{OPTION}: auto is {chosen.degree} by {rollout.layout.profile} ({batch} of {rows} longest samples decodes in "
        f"{chosen})"
    )
