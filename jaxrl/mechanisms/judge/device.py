"""A judge on the rollout's devices: its sizes, how it is loaded, and the turns of its engine.

Its engine is like the actor's, over an executor whose weights are streamed (`jaxrl.models.streaming`). Its layout is
one tensor-parallel group of all of the rollout's devices: each streams its own share of a layer, and the host keeps one
copy of the model. `judge_memory` decides its sizes before anything is allocated; the actor's KV pool takes what it
leaves.

Source: RollPacker §4.3 (a judge beside the actor on the same devices, layers streamed from the host; the number of
offloaded layers follows from memory and input lengths).

A turn is one plan, which the host waits for. The host also sees the end of the actor's plan before the turn, so that
neither's seconds count as the other's (layouts learn from the actor's). The judge depends on no clock.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.config import Config, ConfigError
from jaxrl.data.stops import stop_ids
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.mechanisms.judge import Judge, judge_kind
from jaxrl.mechanisms.judge.verdicts import Reading, Scalars, WrittenVerdicts
from jaxrl.models.config import ModelConfig
from jaxrl.models.kv_layers import kv_layers
from jaxrl.models.loading import check_length, check_vocabulary, checked_path, config_of, load_layerwise, resolve_path
from jaxrl.models.streaming import STREAMED
from jaxrl.models.weights import Weight, leaves
from jaxrl.rewards.reward_pool import RewardPool
from jaxrl.rewards.scorers import Scored, ScoreRequest, describe
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.host_weights import HostWeights
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.mechanism import RolloutMemory
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.schema.limits import BYTES
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.memory import host_bytes, in_bytes
from jaxrl.sharding.mesh import platform_of
from jaxrl.sharding.rules import TENSOR_DIMS, padded_config
from jaxrl.training.update_memory import splits
from jaxrl.types import Prompt, Sample, SampleKey

if TYPE_CHECKING:
    from jaxrl.run.run import Run

_LOGITS_COPIES = 2  # float32 arrays of [rows, vocabulary] while a step samples
_BUFFERS = 2  # streamed layers that are on the devices at a time: one computes while the other's copy is under way
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class JudgeMemory:
    """A judge's sizes. Bytes are per device."""

    resident_layers: int  # whose matrices stay on the devices
    num_layers: int
    num_blocks: int  # of its KV pool, the reserved one included
    layer_bytes: int  # the matrices of one
    parts: dict[str, int]  # that it adds to the rollout, by name
    host_bytes: int  # its weights in the host's memory, for each device


def rollout_memory(config: Config, num_devices: int) -> RolloutMemory:
    """The memory of the model that `reward.judge.model` names; reads its config. Raises as `judge_memory`."""
    judge, option = config.reward.judge, "reward.judge.model"
    sizes = judge_memory(config, config_of(resolve_path(judge.model, option), option), num_devices)
    return RolloutMemory(
        "the judge",
        sizes.parts,
        f"reward.judge.max_memory_gib ({judge.max_memory_gib:g}), max_num_seqs or max_prompt_tokens",
        stays=True,  # it continues with all devices
        line=f"judge: {sizes.resident_layers} of {sizes.num_layers} layers stay, the others are streamed; "
        f"{in_bytes(sizes.host_bytes)} of the host's memory per device",
    )


def judge_length(config: Config) -> int:
    judge = config.reward.judge
    return judge.max_prompt_tokens + (1 if judge_kind(config.reward) == "model" else judge.max_tokens)


def judge_memory(config: Config, model: ModelConfig, num_devices: int) -> JudgeMemory:
    """The judge's sizes on each of `num_devices` devices. Raises ValueError if reward.judge.max_memory_gib is too small
    for one verdict, or for the requested resident layers."""
    judge, size = config.reward.judge, BYTES[config.reward.judge.dtype]
    padded = padded_config(model, num_devices)
    layers = padded.weights()["layers"]
    matrices = sum(_bytes(weight, num_devices, size) for name, weight in layers.items() if name in STREAMED)
    whole = sum(_bytes(weight, num_devices, size) for weight in leaves(padded.weights()))
    layer, always = matrices // model.num_layers, whole - matrices
    rollout = config.rollout
    kv = kv_layers(model, judge_length(config), rollout.max_num_batched_tokens, rollout.decode_steps)
    heads = padded.num_kv_heads // splits(padded.num_kv_heads, num_devices)
    block = 2 * rollout.block_size * padded.head_dim * heads * size * kv.size  # of all layers of a stack
    each = kv.stacks.most_blocks(judge_length(config), rollout.block_size)
    blocks = judge.max_num_seqs * each + 1
    budget = int(judge.max_memory_gib * _GIB) or max(whole // 2, always + _BUFFERS * layer) + blocks * block
    resident = max(judge.resident_layers, 0)

    def held(count: int, num_blocks: int) -> int:
        return always + layer * (count + min(_BUFFERS, model.num_layers - count)) + num_blocks * block

    if resident > model.num_layers:
        raise ValueError(
            f"reward.judge.resident_layers ({resident}) must be at most the judge's layers ({model.num_layers})"
        )
    least = held(resident, each + 1)
    if judge.max_memory_gib and least > budget:
        raise ValueError(
            f"reward.judge.max_memory_gib ({judge.max_memory_gib:g}, {budget} bytes) must be at least {least} bytes: "
            f"{always + resident * layer} of weights that stay on the devices, {least - always - resident * layer} of "
            f"buffers and of KV for one verdict of {judge_length(config)} tokens; raise it, or lower "
            "reward.judge.max_prompt_tokens or resident_layers"
        )
    if judge.max_memory_gib:
        blocks = min(blocks, (budget - held(resident, 0)) // block)
    if judge.resident_layers < 0:
        resident = max(count for count in range(model.num_layers + 1) if held(count, blocks) <= budget)
    buffers = layer * min(_BUFFERS, model.num_layers - resident)
    logits = 0 if model.scalar_head else _LOGITS_COPIES * 4 * judge.max_num_seqs * padded.vocab_size // num_devices
    return JudgeMemory(
        resident,
        model.num_layers,
        blocks,
        layer,
        {
            "judge: weights that stay": always + resident * layer,
            "judge: buffers of two layers": buffers,
            "judge: KV pool": blocks * block,
            "judge: logits": logits,
        },
        whole,
    )


def _bytes(weight: Weight, num_devices: int, size: int) -> int:
    """The bytes of one device's part of a weight in rollout form; norms have at least float32."""
    dims = zip(weight.dims, weight.shape, strict=True)
    shards = [splits(length, num_devices) for dim, length in dims if dim in TENSOR_DIMS]
    return math.prod(weight.shape) // math.prod(shards) * (max(size, 4) if weight.is_norm else size)


class JudgeMachine:
    """The judge's weights and programs. `quiet`: waits until nothing else runs on these devices: the actor's plans, and
    gradients on freed devices; `alone`: whether no program of the judge may run beside one of the actor."""

    def __init__(self, executor: MeshExecutor, weights: HostWeights, quiet: Callable[[], None], *, alone: bool) -> None:
        self._executor, self._weights, self._alone = executor, weights, alone
        self.wait_for_actor = quiet

    @property
    def recompiles(self) -> int:
        return self._executor.recompiles

    @property
    def runs_alone(self) -> bool:
        """Whether the actor must be idle when the judge's programs begin, or its weights arrive."""
        return self._alone or not self._executor.has_weights

    def enter(self) -> None:
        if not self._executor.has_weights:
            self._weights.enter()
            self._executor.allocate()

    def release(self) -> None:
        self._executor.release(weights=True)


@dataclass(slots=True)
class _Judged:
    """A sample that waits for its verdicts."""

    future: Future[Scored]
    requests: list[int]
    began_s: float
    came: dict[int, Sample] = field(default_factory=dict)


class DeviceJudge:
    """Implements `jaxrl.rewards.reward_pool.ScoringPlace`. `engine`: over the judge's executor; `clock`: counts
    seconds."""

    def __init__(
        self,
        reading: Reading,
        engine: Engine,
        machine: JudgeMachine,
        options: Judge.Options,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.machine = engine, machine
        self._reading, self._options, self._clock = reading, options, clock
        self._ids = itertools.count()
        self._judged: dict[SampleKey, _Judged] = {}
        self._sample_of: dict[int, SampleKey] = {}
        self._turns = self._gap_turns = self._unparsed = self._written = 0
        self._seconds, self._tokens, self._recompiles = 0.0, 0, 0

    # -- where samples are scored --------------------------------------------------------------------------------------

    def warm(self) -> None:
        """Nothing is left to wait for: the weights are there, and programs are compiled with the rollout's."""

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> Future[Scored]:
        assert sample.key not in self._judged, f"{sample.key} is being judged"
        del limits_s  # of test cases
        future: Future[Scored] = Future()
        try:
            ids = self._reading.ids(ScoreRequest.of(prompt, sample))
        except ValueError as error:
            future.set_result(("error", 0.0, {"error": describe(error)}, 0.0))
            return future
        judged = self._judged[sample.key] = _Judged(future, [], self._clock())
        count = self._reading.num_samples
        for number in range(count):  # all that the tokens of a verdict depend on is its key
            key = replace(sample.key, sample_index=sample.key.sample_index * count + number)
            request = Request(next(self._ids), key, ids, self._reading.params, share=sample.key)
            self.engine.add(request)
            self._sample_of[request.request_id] = sample.key
            judged.requests.append(request.request_id)
        future.add_done_callback(lambda ended: self._abort(sample.key) if ended.cancelled() else None)
        return future

    def _abort(self, key: SampleKey) -> None:
        judged = self._judged.pop(key)
        self.engine.abort([each for each in judged.requests if each not in judged.came])
        for each in judged.requests:
            del self._sample_of[each]

    def step(self) -> bool:
        """Runs a plan."""
        if self._judged:
            self._run_plan()
            return True
        return False

    def take_metrics(self) -> dict[str, float]:
        """`reward/judge/{turns,gap_turns,tokens,seconds,unparsed,recompiles}` : plans, those beside a rollout,
        tokens that the judge read and wrote, seconds of its plans, verdicts without a score, programs compiled after
        the warm-up."""
        tokens, recompiles = self._written + self.engine.counters.prefill_tokens, self.machine.recompiles
        measured = {
            "reward/judge/turns": float(self._turns),
            "reward/judge/gap_turns": float(self._gap_turns),
            "reward/judge/tokens": float(tokens - self._tokens),
            "reward/judge/seconds": self._seconds,
            "reward/judge/unparsed": float(self._unparsed),
            "reward/judge/recompiles": float(recompiles - self._recompiles),
        }
        self._turns = self._gap_turns = self._unparsed = 0
        self._seconds, self._tokens, self._recompiles = 0.0, tokens, recompiles
        return measured

    def close(self) -> None:
        for judged in [*self._judged.values()]:
            judged.future.cancel()
        self.release()

    # -- turns ---------------------------------------------------------------------------------------------------------

    def turn(self, busy_rows: int, num_rows: int) -> bool:
        """Takes a turn if there is something to judge and few enough rows are busy; returns whether it did.
        `busy_rows`: as in `jaxrl.scheduling.mechanism.DeviceUser`; `num_rows`: of the rollout."""
        if not self._judged or busy_rows > self._options.busy_share * num_rows:
            return False
        self._run_plan()
        self._gap_turns += busy_rows > 0
        return True

    def release(self) -> None:
        """Frees the devices of the judge; nothing may be judged."""
        assert not self._judged, "the judge's memory is freed while samples wait for it"
        self.engine.drain()
        self.machine.release()

    def _run_plan(self) -> None:
        began_s = self._clock()
        if self.machine.runs_alone:
            began_s += self._wait_for_actor()
        self.machine.enter()
        self.engine.submit()
        began_s += self._wait_for_actor()
        for finished in self.engine.drain():
            self._ended(finished.request_id, finished.sample)
        self._turns += 1
        self._seconds += self._clock() - began_s

    def _wait_for_actor(self) -> float:
        """Waits for the actor's plan before the turn's; the seconds, which are none of the judge's."""
        began_s = self._clock()
        self.machine.wait_for_actor()
        return self._clock() - began_s

    def _ended(self, request_id: int, sample: Sample) -> None:
        key = self._sample_of[request_id]
        judged = self._judged[key]
        judged.came[request_id] = sample
        self._written += len(sample)
        if len(judged.came) < len(judged.requests):
            return
        del self._judged[key]
        for each in judged.requests:
            del self._sample_of[each]
        reward, info = self._reading.reward([judged.came[each] for each in judged.requests])
        self._unparsed += int(info.get("unparsed", 0))
        seconds = self._clock() - judged.began_s
        judged.future.set_result(("error" if "error" in info else "ok", reward, info, seconds))


def read_judge(config: Config) -> tuple[Tokenizer, ModelConfig]:
    """The tokenizer and the config of `reward.judge.model`, which must fit each other, the kind of reward and the
    lengths; no weight is read. Raises ValueError where they do not, or a file is damaged."""
    judge, kind = config.reward.judge, judge_kind(config.reward)
    path = resolve_path(judge.model, "reward.judge.model")
    folder, model = str(checked_path(path, "reward.judge.model")), config_of(path)
    if model.scalar_head != (kind == "model"):
        found = "a reward model with a scalar head" if model.scalar_head else "a language model"
        right = "reward.kind=model" if model.scalar_head else "reward.kind=judge"
        raise ConfigError(f"reward.judge.model ({judge.model}) is {found}, which needs {right}, found {kind}")
    tokenizer = Tokenizer.from_path(folder)
    tokenizer.check_template_arguments(judge.apply_chat_template_kwargs)
    check_vocabulary(tokenizer, model, folder)
    more = "" if kind == "model" else f" + reward.judge.max_tokens ({judge.max_tokens})"
    length = judge_length(config)
    check_length(
        model, length, f"reward.judge.max_prompt_tokens ({judge.max_prompt_tokens}){more} = {length} tokens", folder
    )
    return tokenizer, model


def build_judge(run: Run, mesh: Mesh) -> DeviceJudge:
    """Loads a judge's weights into the host's memory, layer by layer through the devices of a rollout, and joins it to
    the run's reward pool. Raises ValueError as `read_judge` and `judge_memory`, or where the host lacks the memory."""
    config, pool = run.config, run.scoring
    run.beat("loading the judge")
    judge, seed = config.reward.judge, config.trainer.seed
    tokenizer, model = read_judge(config)
    plan = judge_memory(config, model, mesh.size)
    # of the devices of this process, each keeps its share of the weights in the host's memory
    num_local = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    if (needed := plan.host_bytes * num_local) > (there := host_bytes()):
        raise ConfigError(
            f"reward.judge.model needs {in_bytes(needed)} of the host's memory, which has {in_bytes(there)}: use a "
            "smaller judge, or reward.judge.dtype=bfloat16"
        )
    rollout = config.rollout
    sizes = ExecutorConfig(
        num_slots=judge.max_num_seqs,
        num_blocks=plan.num_blocks,
        block_size=rollout.block_size,
        max_length=judge_length(config),
        max_prefill_tokens=rollout.max_num_batched_tokens,
        decode_steps=rollout.decode_steps,
        attention=rollout.attention,
        dtype=judge.dtype,
        seed=seed,
        max_tp=mesh.size,
        resident_layers=plan.resident_layers,
    )
    executor = MeshExecutor(model, Layout(mesh, mesh.size), sizes)
    path = resolve_path(judge.model, "reward.judge.model", weights=True)
    _, outer, layers = load_layerwise(path, mesh, jnp.dtype(judge.dtype))
    if model.scalar_head:
        reading = Scalars(judge, tokenizer, model.pad_token_id)
    else:
        reading = WrittenVerdicts(judge, tokenizer, stop_ids(tokenizer, model.eos_token_ids), seed)
    engine = Engine(executor, BatcherConfig(config.rollout.decode_steps, max_model_len=judge_length(config)))
    # XLA:CPU can hang on two collectives at once
    collectives = mesh.size > 1 and platform_of(mesh.devices.flat[0]) == "cpu"
    machine = JudgeMachine(executor, HostWeights(executor, outer, layers), run.machine.wait_quiet, alone=collectives)
    scoring = DeviceJudge(reading, engine, machine, judge)
    assert isinstance(pool, RewardPool), "a judge scores for a real run"
    pool.join("devices", scoring)
    run.machine.add_programs(executor.programs_of([executor.tp]), of_update=False)
    return scoring
