"""Latency profiles of this machine: `Profiler` measures one, and `checked_profile` takes one for a run.

It measures decode steps, those that verify proposed tokens, prefills, and changes of layout. Dummy batches run through
an executor's own programs, in the engine's shapes.

Source: PAT §4.2 (offline profiler: dummy batches over TP x batch x context) and §4.3 (costs of a switch).

Departures: rows attend to arbitrary KV in the pool, because its values do not change the time; they are placed at their
positions without a prefill. The proposals do not change the time of a step that verifies (`jaxrl.rollout.verify`), so
there are none. Changes of layout are real, with live tokens and without; the difference is the cost per token. Slow
points are measured once.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.config import Config, ConfigError, flatten
from jaxrl.models.config import ModelConfig
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.scheduling.layouts.kv_plan import LiveBlocks, plan_migration
from jaxrl.scheduling.layouts.latency_profile import (
    Measurement,
    Profile,
    ProfileIdentity,
    ProfilePoint,
    SwitchCost,
    VerifyMeasurement,
)
from jaxrl.scheduling.layouts.relayout import Relayout, ResidentRow, TimeTaken
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.blocks import BlockManager
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import TRASH_BLOCK, Plan, Request, ScheduledRows, Seat
from jaxrl.sharding.mesh import platform_of, submeshes
from jaxrl.types import SampleKey, SamplingParams

POINT_S = 1.5
"""How long a decode point is measured again."""


class Profiler:
    """Runs on an idle executor with weights and a pool, and changes its layout.

    Args:
      repeats: how often a fast point is measured; the median counts.
    """

    def __init__(self, executor: MeshExecutor, repeats: int = 3) -> None:
        self.executor = executor
        self.repeats = repeats
        self._steps = executor.config.decode_steps
        self._engine = Engine(executor, BatcherConfig(decode_steps=self._steps))
        self._plans = 0
        self._ids = 0

    def use(self, tp: int) -> None:
        if self.executor.tp != tp:
            self._engine.switch(tp)

    # -- decode ------------------------------------------------------------------------------------------------------

    def decode(self, point: ProfilePoint) -> Measurement:
        """Seconds per decode step with `batch` rows of `context` tokens in every dp group."""
        seconds = self.mixed(point.tp, [point.context] * point.batch)
        return Measurement(point.tp, point.batch, point.context, seconds)

    def verify(self, point: ProfilePoint) -> VerifyMeasurement:
        width = self.executor.verify_widths(point.tp)[point.batch]
        seconds = self.mixed(point.tp, [point.context] * point.batch, verifies=True)
        return VerifyMeasurement(point.tp, point.batch, point.context, seconds, width)

    def mixed(self, tp: int, contexts: Sequence[int], *, verifies: bool = False) -> float:
        """Seconds per decode step (per step that verifies) with rows of these contexts in every dp group."""
        self.use(tp)
        self._decode_plan(contexts, 1, verifies)  # compiles, if anything is to be compiled
        # plans are as long as the engine's: each gathers windows and writes them back once for all of its steps
        steps = [self._decode_plan(contexts, self._steps, verifies)]
        while len(steps) < self.repeats and sum(steps) * self._steps < POINT_S:
            steps.append(self._decode_plan(contexts, self._steps, verifies))
        return median(steps)

    def _decode_plan(self, contexts: Sequence[int], steps: int, verifies: bool) -> float:
        """Seconds per step of a plan in which rows have these contexts halfway."""
        executor, size = self.executor, self.executor.sizes.block_size
        rows: list[ResidentRow] = []
        tables: list[tuple[int, ...]] = []
        for group in range(executor.sizes.num_groups):
            used = 0
            for slot, context in enumerate(contexts):
                request = self._request(1, executor.config.max_length - 1)
                start = max(min(context - steps // 2, executor.config.max_length - steps) - 1, 0)
                width = -(-(start + 1 + steps) // size)
                rows.append(ResidentRow(request, group, slot, token=1, position=start))
                table, used = self._table(start, width, used)
                tables.append(table)
        executor.put_rows(rows)
        widths = np.array([len(table) for table in tables])
        padded = np.array([table + (TRASH_BLOCK,) * (max(widths) - len(table)) for table in tables], np.int32)
        scheduled = ScheduledRows(
            np.array([row.request.request_id for row in rows]),
            np.array([row.dp_group * executor.sizes.num_slots + row.slot for row in rows]),
            executor.sizes.num_slots,
            is_new=np.zeros(len(rows), bool),
            max_new=np.full(len(rows), steps),
            tables=(padded, widths),
        )
        plan = Plan(self._plans, (), scheduled, num_steps=steps, verifies=verifies)
        self._plans += 1
        began = time.perf_counter()
        result = executor.collect(executor.submit(plan))
        assert result.num_steps == steps, "rows stopped early"
        return (time.perf_counter() - began) / steps

    def _table(self, first: int, width: int, used: int) -> tuple[tuple[int, ...], int]:
        """A table over `width` blocks of each stack for a row whose first query is at `first`, with blocks from `used`
        on, and the next one."""
        executor, table = self.executor, []
        behind = executor.sizes.stacks.behind(first, executor.sizes.block_size)
        for each in range(width):
            for gone in behind:
                table.append(TRASH_BLOCK if each < gone else 1 + used % (executor.sizes.num_blocks - 1))
                used += each >= gone
        return tuple(table), used

    def _request(self, prompt_len: int, max_tokens: int) -> Request:
        self._ids += 1
        params = SamplingParams(max_tokens=max_tokens)
        return Request(self._ids, SampleKey(0, self._ids, 0), (1,) * prompt_len, params)

    # -- prefill -----------------------------------------------------------------------------------------------------

    def prefill(self, point: ProfilePoint) -> Measurement:
        """Seconds until `batch` rows of `context` tokens in every dp group have their caches."""
        self.use(point.tp)
        length = min(point.context, self.executor.config.max_length - 1)
        seconds: list[float] = []
        for _ in range(2):  # the first compiles
            requests = [self._request(length, 1) for _ in range(point.batch * self.executor.sizes.num_groups)]
            began = time.perf_counter()
            self._engine.generate(requests)
            seconds.append(time.perf_counter() - began)
        return Measurement(point.tp, point.batch, point.context, min(seconds))

    # -- changes of layout -------------------------------------------------------------------------------------------

    def switches(self, one: int, other: int) -> tuple[SwitchCost, SwitchCost]:
        """The costs of going from one degree to the other, and back."""
        self.use(one)
        times: dict[tuple[int, bool], list[TimeTaken]] = {}
        tokens: dict[int, int] = {}
        for attempt in range(3):
            for target, filled in ((other, False), (one, False), (other, True), (one, True)):
                source = self.executor.tp
                move = self._move(target, filled)
                if filled:
                    tokens[source] = self._fullest(move)
                taken = self.executor.switch(move)
                move.apply(self._engine.batcher)
                if attempt:  # the first compiles
                    times.setdefault((source, filled), []).append(taken)
        return self._cost(one, other, times, tokens), self._cost(other, one, times, tokens)

    def _cost(
        self, source: int, target: int, times: dict[tuple[int, bool], list[TimeTaken]], tokens: dict[int, int]
    ) -> SwitchCost:
        empty, filled = times[source, False], times[source, True]
        added_s = median(t.state_s for t in filled) - median(t.state_s for t in empty)
        return SwitchCost(
            from_tp=source,
            to_tp=target,
            weights_s=median(t.weights_s for t in empty + filled),
            kv_s_per_token=max(added_s, 0.0) / tokens[source],
            fixed_s=median(t.fixed_s + t.state_s for t in empty),
        )

    def _move(self, target: int, filled: bool) -> Relayout:
        """A change of layout; every dp group of the smaller layout's pools is half full, or empty."""
        executor, size = self.executor, self.executor.sizes.block_size
        before, after = executor.sizes.num_groups, executor.capacity(target)
        groups: list[list[int]] = [[] for _ in range(after.num_groups)]
        live: list[LiveBlocks] = []
        if filled:
            lanes = max(before, after.num_groups)
            room = min((executor.sizes.num_blocks - 1) * before, (after.num_blocks - 1) * after.num_groups) // lanes
            held = max(room // 2 // len(executor.sizes.stacks), 1)
            for lane in range(lanes):
                source, place = lane * before // lanes, lane * after.num_groups // lanes
                table, _ = self._table(0, held, held * len(executor.sizes.stacks) * (lane % (lanes // before)))
                live.append(LiveBlocks(lane, source, table, held * size, held * size))
                groups[place].append(lane)
        kv = plan_migration(live, before, groups, BlockManager.of(after))
        for lane in range(len(live)):
            kv.blocks.free(lane)  # no row lives on: only the blocks move
        seats: dict[int, Seat] = {}
        return Relayout(executor.tp, target, after, kv, (), seats, (), 0)

    def _fullest(self, move: Relayout) -> int:
        counts = [0] * self.executor.sizes.num_groups
        for copy in move.kv.copies:
            counts[copy.source_group] += self.executor.sizes.block_size
        return max(max(counts) // len(self.executor.sizes.stacks), 1)


# ---------------------------------------------------------------- profiles for a run


def identity_of(config: Config, model: ModelConfig, mesh: Mesh) -> ProfileIdentity:
    """The model, machine and versions for which a profile of a worker holds; `mesh` is the worker's."""
    shapes = {name: (weight.shape, weight.dims) for name, weight in flatten(model.base.weights()).items()}
    device = mesh.devices.ravel()[0]
    cores = f" ({os.cpu_count()} cores)" if device.platform == "cpu" else ""
    return ProfileIdentity(
        model=Path(config.model.path.partition(":")[2] or config.model.path).name,
        fingerprint=hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:16],
        device_kind=device.device_kind + cores,
        device_count=mesh.size,
        jax_version=jax.__version__,
        dtype=config.with_types(platform_of(device)).rollout.types,
    )


def load_profile(path: str | Path) -> Profile:
    """Raises ConfigError for a file that is not a table, or of another version."""
    try:
        return Profile.from_json(json.loads(Path(path).expanduser().read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"rollout.layout.profile: {path} does not exist: make it with `jaxrl profile`") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"rollout.layout.profile: {path} cannot be used: {error}") from None


def checked_profile(config: Config, model: ModelConfig, mesh: Mesh) -> Profile:
    """`rollout.layout.profile`, refused with the reason if it is of another model or machine, or made up."""
    path = config.rollout.layout.profile
    profile = load_profile(path)
    if profile.source == "synthetic" and not config.rollout.layout.allow_synthetic:
        raise ConfigError(
            f"rollout.layout.profile: {path} was made up (source: synthetic): decisions that rest on it say nothing of "
            "this machine; rollout.layout.allow_synthetic=true takes it all the same"
        )
    try:
        profile.check(identity_of(config, model, submeshes(mesh, config.workers_per_group)[0]))
    except ValueError as error:
        raise ConfigError(f"rollout.layout.profile: {path}: {error}") from None
    return profile
