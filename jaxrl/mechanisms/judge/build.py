"""The judge of a real run from its configuration: model, tokenizer, weights in the host's memory, engine, pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.config import Config, ConfigError
from jaxrl.data.stops import stop_ids
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.mechanisms.judge import judge_kind
from jaxrl.mechanisms.judge.memory import JudgeMemory, judge_length, judge_memory
from jaxrl.mechanisms.judge.pool import JudgePool
from jaxrl.mechanisms.judge.verdicts import Reading, Scalars, WrittenVerdicts
from jaxrl.models.config import ModelConfig
from jaxrl.models.fit import check_length, check_vocabulary
from jaxrl.models.loading import checked_path, config_of, load_layerwise, resolve_path
from jaxrl.rewards.router import RewardRouter
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.host_weights import HostWeights
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.sharding.compiled import CompiledPrograms
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.memory import host_bytes, in_bytes
from jaxrl.sharding.mesh import platform_of

if TYPE_CHECKING:
    from jaxrl.runtime.run import Run


class JudgeMachine:
    """Implements `jaxrl.mechanisms.judge.pool.Machine`.

    Args:
      quiet: waits until nothing else is running on these devices.
      alone: whether no program of the judge may run beside one of the actor.
    """

    def __init__(self, executor: MeshExecutor, weights: HostWeights, quiet: Callable[[], None], *, alone: bool) -> None:
        self._executor, self._weights, self._quiet, self._alone = executor, weights, quiet, alone

    @property
    def programs(self) -> Sequence[CompiledPrograms]:
        return self._executor.programs_of([self._executor.tp])

    @property
    def recompiles(self) -> int:
        return self._executor.recompiles

    @property
    def runs_alone(self) -> bool:
        return self._alone or not self._executor.has_weights

    def wait_for_actor(self) -> None:
        self._quiet()

    def enter(self) -> None:
        if not self._executor.has_weights:
            self._weights.enter()
            self._executor.allocate()

    def release(self) -> None:
        self._executor.release(weights=True)


def read_judge(config: Config) -> tuple[Tokenizer, ModelConfig]:
    """The tokenizer and the config of `reward.judge.model`, which must fit each other, the kind of reward, the lengths
    and the adapters; no weight is read.

    Raises:
      ValueError: they do not, or a file is damaged.
    """
    judge, kind = config.reward.judge, judge_kind(config.reward)
    path = resolve_path(judge.model, "reward.judge.model")
    folder, model = str(checked_path(path, "reward.judge.model")), config_of(path)
    if model.scalar_head != (kind == "model"):
        found = "a reward model with a scalar head" if model.scalar_head else "a language model"
        right = "reward.kind=model" if model.scalar_head else "reward.kind=judge"
        raise ConfigError(f"reward.judge.model ({judge.model}) is {found}, which needs {right}, found {kind}")
    if judge.lora_adapter_path:
        from jaxrl.models.peft import read_lora

        read_lora(Path(judge.lora_adapter_path).expanduser(), model)
    tokenizer = Tokenizer.from_path(folder)
    tokenizer.check_template_arguments(judge.apply_chat_template_kwargs)
    check_vocabulary(tokenizer, model, folder)
    more = "" if kind == "model" else f" + reward.judge.max_tokens ({judge.max_tokens})"
    length = judge_length(config)
    check_length(
        model, length, f"reward.judge.max_prompt_tokens ({judge.max_prompt_tokens}){more} = {length} tokens", folder
    )
    return tokenizer, model


def build_pool(run: Run, mesh: Mesh) -> JudgePool:
    """Loads a judge's weights into the host's memory, layer by layer through the devices of a rollout, and joins it to
    the run's reward pool.

    Before its programs begin it waits for the actor's, and for gradients on freed devices; on a CPU also before they
    are dispatched, because XLA:CPU can hang on two collectives at once.

    Raises:
      ValueError: as `read_judge` and `judge_memory`, or the host has not the memory.
    """
    config, pool = run.config, run.scoring
    run.beat("loading the judge")
    judge, seed = config.reward.judge, config.trainer.seed
    tokenizer, model = read_judge(config)
    plan = judge_memory(config, model, mesh.size)
    _refuse_host(plan, mesh)
    executor = MeshExecutor(model, Layout(mesh, mesh.size), _sizes(config, plan, mesh.size))
    # what adapters are added to is read in at least float32, as the actor's is: it becomes the judge's type once
    adapters, dtype = judge.lora_adapter_path, jnp.dtype(judge.dtype)
    dtype = jnp.promote_types(dtype, jnp.float32) if adapters else dtype
    _, outer, layers = load_layerwise(resolve_path(judge.model, "reward.judge.model", weights=True), mesh, dtype)
    if adapters:
        from jaxrl.models.peft import merged_layers

        layers = merged_layers(Path(adapters).expanduser(), model, mesh, layers, dtype)
    reading: Reading
    if model.scalar_head:
        reading = Scalars(judge, tokenizer, model.pad_token_id)
    else:
        reading = WrittenVerdicts(judge, tokenizer, stop_ids(tokenizer, model.eos_token_ids), seed)
    engine = Engine(executor, BatcherConfig(config.rollout.decode_steps, max_model_len=judge_length(config)))
    collectives = mesh.size > 1 and platform_of(mesh.devices.flat[0]) == "cpu"
    machine = JudgeMachine(executor, HostWeights(executor, outer, layers), run.machine.wait_quiet, alone=collectives)
    scoring = JudgePool(reading, engine, machine, judge)
    assert isinstance(pool, RewardRouter), "a judge scores beside others"
    pool.join("devices", scoring)
    run.machine.add_programs(machine.programs, of_update=False)
    return scoring


def _sizes(config: Config, plan: JudgeMemory, tp: int) -> ExecutorConfig:
    judge, rollout = config.reward.judge, config.rollout
    return ExecutorConfig(
        num_slots=judge.max_num_seqs,
        num_blocks=plan.num_blocks,
        block_size=rollout.block_size,
        max_length=judge_length(config),
        max_prefill_tokens=rollout.max_num_batched_tokens,
        decode_steps=rollout.decode_steps,
        attention=rollout.attention,
        dtype=judge.dtype,
        seed=config.trainer.seed,
        max_tp=tp,
        resident_layers=plan.resident_layers,
    )


def _refuse_host(plan: JudgeMemory, mesh: Mesh) -> None:
    """Of the devices of this process, each keeps its share of the weights in the host's memory."""
    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    needed, there = plan.host_bytes * len(here), host_bytes()
    if needed > there:
        raise ConfigError(
            f"reward.judge.model needs {in_bytes(needed)} of the host's memory, which has {in_bytes(there)}: use a "
            "smaller judge, or reward.judge.dtype=bfloat16"
        )
