"""The parts of a real run from its configuration: devices, model, executor, engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh

from jaxrl.config import Config, ConfigError
from jaxrl.config.options import HostsSection
from jaxrl.data.stops import check_stop_strings, stop_ids, stop_string_check
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.mechanisms.speculation import Speculation, build_proposer, verify_rule
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import check_length, check_vocabulary, checked_path, config_of, resolve_path
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.programs import ExecutorConfig, LayoutSizes
from jaxrl.rollout.sampling import Draw, sample
from jaxrl.rollout.worker_set import WorkerSet
from jaxrl.run.devices import ProcessDevices, prepare_jax, with_types
from jaxrl.run.memory import layout_degrees, layout_sizes, max_tp, memory_plan, memory_problem
from jaxrl.run.weights import adapted, load_weights, refuse_other_model
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import Arrival, LocalWorkers, step_ticks
from jaxrl.schema.devices import sharing_problem
from jaxrl.sharding.compiled import Meet, alone
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.memory import (
    DeviceMemory,
    device_bytes,
    in_bytes,
    memory_of,
    memory_share,
    share_variable,
)
from jaxrl.sharding.mesh import make_mesh, platform_of, submeshes
from jaxrl.training.update_memory import planned_update

if TYPE_CHECKING:
    from jaxrl.rollout.remote import RemoteExecutor, RemoteWorkers
    from jaxrl.scheduling.layouts.latency_profile import Profile

_FLOAT8_FROM = 8.9  # compute capability: Ada and Hopper
_LEAST_SHARE = 0.9  # the rest is for the CUDA context, graphs and libraries, which need less than a tenth of a card


def use_compilation_cache(config: Config) -> None:
    """From here on, compiled programs are kept in `trainer.compilation_cache_dir`. Makes that folder, so it is called
    when nothing is refused any more. Every program is kept, however short compiling it was."""
    if not config.trainer.compilation_cache_dir:
        return
    folder = Path(config.trainer.compilation_cache_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    reset_cache()  # jax looks at the option once, when it compiles for the first time


def share_notes(config: Config, devices: Sequence[Any]) -> list[str]:
    """The warning, given once, that JAX has so little of a GPU that the KV pool is much smaller for it."""
    own, share = device_bytes(devices), memory_share(platform_of(devices[0]))
    if own is None or share is None or share >= _LEAST_SHARE:
        return []
    return [
        f"JAX was given {share:g} of each GPU's memory ({in_bytes(own)} of about {in_bytes(own / share)}), and "
        f"rollout.memory_fraction ({config.rollout.memory_fraction:g}) is of that: for a larger KV pool, set "
        f"{share_variable()}=0.92 in the environment"
    ]


def refuse_too_large(
    config: Config, model: ModelConfig, num_devices: int, memory: DeviceMemory, *, trains: bool = True
) -> None:
    """Raises ConfigError for sizes that need more memory than there is, before any is used; `num_devices`: of the
    run, on all hosts; `trains`: as in `memory_problem`."""
    plan = memory_plan(config, model, num_devices, memory.reported, memory.platform)
    problem = memory_problem(config, model, plan, num_devices, memory.share, trains)
    if problem is not None:
        raise ConfigError(problem)


def refuse_sharing(config: Config, num_devices: int) -> None:
    """Raises ConfigError where rows of tokens cannot be split over the trainer's devices."""
    if problem := sharing_problem(config.actor.context_parallel_size, num_devices, config.hosts.num):
        raise ConfigError(problem)


def with_planned_update(config: Config, model: ModelConfig, num_devices: int, memory: DeviceMemory) -> Config:
    """`config` with `auto` of `actor.remat` and `actor.logprob_chunk_tokens` replaced by what the memory of the
    trainer's devices allows. Raises ConfigError as `refuse_sharing` does."""
    refuse_sharing(config, num_devices)
    return planned_update(config, model, num_devices, memory.reported, memory.platform)


def read_tokenizer_and_model(config: Config) -> tuple[Tokenizer, ModelConfig]:
    """The tokenizer and the config that `model.path` names, which must fit each other and the run; no weight is
    read. Raises ValueError: a file is damaged, an id is outside the model's vocabulary, prompts and responses are
    longer than the model was made for, or a stop string is none."""
    path = resolve_path(config.model.path)
    folder = str(checked_path(path))
    model = adapted(config, config_of(path))
    tokenizer = Tokenizer.from_path(folder)
    tokenizer.special_tokens_in_content = config.data.special_tokens_in_content
    check_vocabulary(tokenizer, model, folder)
    data = config.data
    asked = (
        f"data.max_prompt_length ({data.max_prompt_length}) + data.max_response_length ({data.max_response_length}) = "
        f"{config.max_model_length} tokens"
    )
    check_length(model, config.max_model_length, asked, folder)
    check_stop_strings(config.rollout.stop, "rollout.stop")
    if model.scalar_head:
        raise ConfigError(f"model.path ({folder}) is a reward model, which writes nothing; it can score (reward.kind)")
    return tokenizer, model


@dataclasses.dataclass(frozen=True, slots=True)
class LoneWorker:
    """One worker on all devices of this host, to draw with a model that is not trained. `config`: the run's, but with
    one worker and without drafts."""

    config: Config
    mesh: Mesh
    tokenizer: Tokenizer
    model: ModelConfig

    @classmethod
    def open(cls, config: Config, say: Callable[[str], None], places: Iterable[Path | None] = ()) -> LoneWorker:
        """Finds the devices, and reads tokenizer and config. Raises ValueError where the model, or a checkpoint of
        `places`, does not fit."""
        rollout = config.rollout.replace(num_devices=0, num_workers=1, hosts_per_worker=1)
        rollout = rollout.replace(speculation=Speculation.Options())
        config = config.replace(rollout=rollout, hosts=HostsSection())
        mesh = make_mesh(prepare_jax(config))
        config = with_types(config, platform_of(mesh.devices.flat[0]), say, command="")
        if config.is_tp_open:
            from jaxrl.run.degree import with_degree

            config = with_degree(config, mesh, say)
        tokenizer, model = read_tokenizer_and_model(config)
        refuse_too_large(config, model, mesh.size, memory_of(mesh.devices.ravel().tolist()), trains=False)
        for place in filter(None, places):
            refuse_other_model(place, config, model, mesh)
        return cls(config, mesh, tokenizer, model)

    def weights(self, place: Path | None) -> Any:
        """The weights of a checkpoint; None: of `model.path`."""
        return load_weights(self.config, self.model, self.mesh, place)

    def executor(self, **options: Any) -> MeshExecutor:
        """`options`: of `build_executor`."""
        return build_executor(self.config, self.model, Layout(self.mesh, self.config.rollout.tp), **options)

    def ready_executor(self, place: Path | None, **options: Any) -> MeshExecutor:
        """One that has the weights of a checkpoint, or of `model.path`."""
        params = self.weights(place)
        use_compilation_cache(self.config)
        executor = self.executor(**options)
        executor.sync_weights(params, 0)
        executor.allocate()
        return executor

    def engine(self, executor: MeshExecutor) -> Engine:
        return build_engine(self.config, executor, self.tokenizer)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return stop_ids(self.tokenizer, self.model.eos_token_ids)


def refuse_float8(config: Config, device: Any) -> None:
    """Raises ConfigError for a GPU that does not convert float8, of which kernels and fused products would be made."""
    rollout, found = config.rollout, getattr(device, "compute_capability", None)
    if "fp8" in (rollout.quantization, rollout.kv_codes) and found is not None and float(found) < _FLOAT8_FROM:
        raise ConfigError(
            f"{rollout.quantized}: float8 needs a GPU of compute capability {_FLOAT8_FROM} or more, and "
            f"{device.device_kind} has {found}: use int8"
        )


def build_executor(
    config: Config,
    model: ModelConfig,
    layout: Layout,
    weights: Callable[[], Any] | None = None,
    *,
    truncate: bool = False,
    top_logprobs: int = 0,
    draw: Draw = sample,
) -> MeshExecutor:
    """The executor of a rollout with one worker. `truncate`: requests may use top-k, top-p and min-p, also where the
    run's do not; `top_logprobs`: the most of the likeliest tokens that a request may ask for."""
    sizes = _executor_config(config, model, layout.mesh, layout.tp, device_bytes(layout.mesh.devices.ravel().tolist()))
    sizes = dataclasses.replace(sizes, truncate=sizes.truncate or truncate, top_logprobs=top_logprobs, draw=draw)
    return MeshExecutor(model, layout, sizes, weights)


def build_workers(
    config: Config,
    model: ModelConfig,
    mesh: Mesh,
    weights: Callable[[], Any] | None = None,
    place: ProcessDevices | None = None,
    meet: Meet = alone,
) -> WorkerSet:
    """The executors of this host's workers, one for each of the submeshes into which they cut `mesh`, which is the
    rollout's on this host or its group of hosts.

    Args:
      weights: as in `MeshExecutor`. Read only where a single worker has all of the trainer's devices: several have each
        other, and the one of a host cannot have a global program run for itself alone.
      place: among several hosts, with the trainer's devices.
    """
    rollout, parts = config.rollout, submeshes(mesh, config.workers_per_group)
    is_alone = place is None or place.num_processes == 1
    reported = device_bytes(mesh.devices.ravel().tolist()) if place is None else place.memory.reported
    sizes = _executor_config(config, model, mesh, rollout.tp, reported)
    source = weights if len(parts) == 1 and is_alone else None
    executors = [MeshExecutor(model, Layout(part, rollout.tp), sizes, source) for part in parts]
    if place is None or is_alone:
        return WorkerSet(mesh, executors, meet=meet)
    return WorkerSet(mesh, executors, place.mesh, meet, place.rollout_mesh() if rollout.num_devices else None)


def _executor_config(
    config: Config, model: ModelConfig, mesh: Mesh, tp: int, memory_bytes: int | None
) -> ExecutorConfig:
    """Sizes of each worker, its pools sized by `layout_sizes`; `mesh`: of the rollout, on this host."""
    config = config.with_types(platform := platform_of(mesh.devices.flat[0]))
    rollout, val = config.rollout, config.rollout.val_kwargs
    refuse_float8(config, mesh.devices.flat[0])
    sizes = layout_sizes(config, model, mesh.size, memory_bytes)
    truncates = [rollout.top_k > 0, rollout.top_p < 1, rollout.min_p > 0, val.top_k > 0, val.top_p < 1]
    return ExecutorConfig(
        num_slots=sizes[tp][0],
        num_blocks=sizes[tp][1],
        block_size=rollout.block_size,
        max_length=config.max_model_length,
        max_prefill_tokens=rollout.max_num_batched_tokens,
        decode_steps=rollout.decode_steps,
        attention=rollout.attention,
        is_invariant=config.actor.numerics == "invariant",
        dtype=rollout.dtype,
        quantization=rollout.quantization,
        kv_codes=rollout.kv_codes,
        seed=config.trainer.seed,
        truncate=any(truncates),
        proposer=build_proposer(config, platform),
        max_tp=max_tp(config, mesh.size),
        layouts=tuple(LayoutSizes(tp, *own) for tp, own in sizes.items()),
    )


def build_engine(
    config: Config,
    executor: MeshExecutor | RemoteExecutor,
    tokenizer: Tokenizer,
    profile: Profile | None = None,
    sizes: Mapping[int, Sequence[int]] | None = None,
) -> Engine:
    """The engine of `config.rollout` over an executor; `profile`, `sizes` (of `row_sizes`): where a rule reads them."""
    rule = verify_rule(config, executor, profile, sizes)
    return Engine(executor, BatcherConfig(**config.batching, verify_rule=rule), stop_check=stop_string_check(tokenizer))


def build_engines(
    config: Config,
    workers: WorkerSet | RemoteWorkers,
    tokenizer: Tokenizer,
    profile: Profile | None,
    arrival: Arrival | None,
) -> LocalWorkers:
    """The engines of all workers as one. Raises ConfigError for a profile of other steps than those of these workers.

    `profile` says which plans verify; and where layouts switch, logical time is what it predicts, because workers in
    different layouts do not keep one pace. None: nothing reads it.
    """
    sizes = row_sizes(config, workers)
    engines = [build_engine(config, executor, tokenizer, profile, sizes) for executor in workers.executors]
    ticks = step_ticks
    if profile is not None and config.rollout.layout.switch:
        from jaxrl.scheduling.layouts.latency import LatencyPredictor
        from jaxrl.scheduling.layouts.plan_cost import plan_ticks

        ticks = plan_ticks(LatencyPredictor(profile, config.rollout.layout, sizes), engines)
    return LocalWorkers(engines, config.rollout.deal, ticks, arrival)


def row_sizes(config: Config, workers: WorkerSet | RemoteWorkers) -> dict[int, tuple[int, ...]]:
    """The row counts of a worker's decode programs, by the degrees that its rounds may use."""
    first = workers.executors[0]
    return {tp: first.row_sizes(tp) for tp in layout_degrees(config, workers.num_devices)}
