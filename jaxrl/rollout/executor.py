"""The executor that runs the engine's plans on a mesh.

`submit` turns a plan into program calls over padded shape buckets and returns at once; `collect` waits for the values
of a plan. `warm_up` compiles every shape ahead; a configured persistent compilation cache of jax keeps them. A shape
that is first needed later is compiled then and counted (`recompiles`).

Prefill chunks of one plan run in ascending order of their start, in one call per run of equal length buckets. A chunk
may read blocks that another chunk of the plan writes (a prompt's shared blocks). It then starts later in its sequence
than that chunk. Inside a call all chunks write a layer's keys and values before any reads them. So both orders are
safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrl.models.config import ModelConfig
from jaxrl.rollout import kv_cache
from jaxrl.rollout.calls import Call, MeshTicket, kept_tokens, places_in, prefill_calls, result_of
from jaxrl.rollout.layout_programs import ExecutorConfig, LayoutPrograms, bucket
from jaxrl.rollout.programs import MAX_STOP_IDS, RowState, fill_row, host_rows
from jaxrl.scheduling.tokens.plan import (
    TRASH_BLOCK,
    Capacity,
    Plan,
    PlanResult,
    PrefillChunk,
    Request,
    ScheduledRows,
    Ticket,
)
from jaxrl.sharding import reshard
from jaxrl.sharding.compiled import CompileAhead, CompiledPrograms
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import platform_of
from jaxrl.sharding.rules import Form, rollout_shardings, to_rollout, train_shardings

if TYPE_CHECKING:
    from jaxrl.mechanisms.speculation.proposer import DeviceIndexes
    from jaxrl.scheduling.layouts.kv_plan import KvPlan, Lanes
    from jaxrl.scheduling.layouts.relayout import Relayout, ResidentRow, SwitchFailed, TimeTaken


@dataclass(slots=True)
class PlanTimer:
    """The seconds that plans take on the devices, as the host sees them.

    Plans queue, so one begins when it is submitted or when the one before has ended, and has ended when its values are
    there. Where the host looks later (another model has had the devices behind a plan), it ended when the devices were
    last seen quiet. `ended_s`: when the last plan was known to have ended.
    """

    clock: Callable[[], float] = time.perf_counter
    ended_s: float = 0.0
    _submitted_s: float = 0.0
    _quiet_s: float = 0.0

    def submits(self) -> float:
        self._submitted_s = self.clock()
        return self._submitted_s

    def seen_quiet(self) -> None:
        """The first such moment after a plan counts."""
        if self._quiet_s <= self._submitted_s:
            self._quiet_s = self.clock()

    def took(self, submitted_s: float) -> float:
        """The seconds of the plan that was submitted then, whose values are there."""
        now_s = self.clock()
        ended_s = self._quiet_s if submitted_s < self._quiet_s else now_s
        began_s, self.ended_s = max(submitted_s, self.ended_s), ended_s
        return max(ended_s - began_s, 0.0)


def check_params(config: ExecutorConfig, request: Request) -> None:
    params, name = request.params, f"request {request.request_id} ({request.key})"
    if len(params.stop_token_ids) > MAX_STOP_IDS:
        raise ValueError(
            f"{name}: SamplingParams.stop_token_ids has {len(params.stop_token_ids)} ids; a row holds {MAX_STOP_IDS}"
        )
    if params.truncates and not config.truncate:
        raise ValueError(
            f"{name}: top_k={params.top_k}, top_p={params.top_p}, min_p={params.min_p} need an engine built with "
            "truncate=True (its programs sort the vocabulary)"
        )
    if params.top_logprobs > config.top_logprobs:
        raise ValueError(
            f"{name}: top_logprobs={params.top_logprobs} needs an engine built with as many ({config.top_logprobs})"
        )
    length = len(request.prompt_ids) + params.max_tokens
    if length > config.max_length:
        raise ValueError(
            f"{name}: prompt ({len(request.prompt_ids)}) + max_tokens ({params.max_tokens}) must be at most "
            f"max_length ({config.max_length}), for which the block tables are built"
        )
    refused = request.history and config.proposer and config.proposer.refusal(request.history)
    if refused:
        raise ValueError(f"{name}: its history has no room on the devices: {refused}")


class MeshExecutor:
    """Implements `jaxrl.scheduling.tokens.plan.Executor` for one model on one mesh, in one layout at a time.

    Call `sync_weights` and `allocate` before the first plan. `release` frees the KV pool for the update phase.
    `weights` returns the trainer's weights of the version last synchronised, to go back after a switch that failed
    halfway.

    Attributes:
      is_spread: whether other processes have a part of its devices. They run the same plans; rows and what a plan
        returns are replicated on every device.
      way_back: takes the weights of `policy_version` again, in the layout in use; None: there is no source of them.
    """

    def __init__(
        self, model: ModelConfig, layout: Layout, config: ExecutorConfig, weights: Callable[[], Any] | None = None
    ) -> None:
        self.platform = platform = platform_of(layout.mesh.devices.flat[0])
        if config.is_invariant:
            from jaxrl.models.numerics import merging_exactly

            model = merging_exactly(model, platform, interpret=config.interpret)
        self.model = model
        self.config = config
        self.policy_version = 0
        self._mesh = layout.mesh
        self.is_spread = len({device.process_index for device in layout.mesh.devices.flat}) > 1
        self.way_back: Callable[[], None] | None = None
        if weights is not None:
            self.way_back = lambda: self.sync_weights(weights(), self.policy_version)
        self._layouts: dict[int, LayoutPrograms] = {}
        self._timer = PlanTimer()
        self._params: Any = None
        self._pool: kv_cache.Pool | None = None
        self._state: RowState | None = None
        self._histories: DeviceIndexes | None = None
        self._use(self._programs_at(layout.tp))

    def _use(self, programs: LayoutPrograms) -> None:
        """Makes this the layout of all further plans."""
        self._drop_histories()
        self._now = programs
        self.layout = programs.layout
        self.sizes = programs.capacity

    def _drop_histories(self) -> None:
        if self._histories is not None:
            self._histories.delete()
        self._histories = None

    def _programs_at(self, tp: int) -> LayoutPrograms:
        if tp not in self._layouts:
            self._layouts[tp] = LayoutPrograms(self.model, Layout(self._mesh, tp), self.config)
        return self._layouts[tp]

    @property
    def cache_shape(self) -> kv_cache.CacheShape:
        return self._now.cache_shape

    @property
    def recompiles(self) -> int:
        return sum(layout.recompiles for layout in self._layouts.values())

    # -- memory phases ---------------------------------------------------------------------------------------------

    def sync_weights(self, train_params: Any, policy_version: int) -> None:
        """Takes over the trainer's weights: cast, padded and resharded to this layout."""
        self.drop_weights()
        self.take_weights(self.rollout_form(train_params, self.layout), self.layout, policy_version)

    def rollout_form(self, train_params: Any, layout: Layout) -> Any:
        """The trainer's weights in the form of this executor's, in a layout of any mesh. Those on other devices are
        sent over first, in chunks."""
        mesh = layout.mesh
        if jax.tree.leaves(train_params)[0].sharding.device_set != set(mesh.devices.flat):
            train_params = reshard.reshard(train_params, train_shardings(self.model, mesh), keep=True)
        return to_rollout(train_params, self.model, layout, self.config.dtype, self.config.max_tp, **self.form)

    def drop_weights(self) -> None:
        """To be called before new ones are made: two copies never exist at once."""
        self._params = None

    def take_weights(self, params: Any, layout: Layout, policy_version: int) -> None:
        """Takes over weights in rollout form, in a layout of this executor's mesh."""
        if layout != self.layout:
            params = reshard.reshard(params, self._shardings(self.layout))
        self._params = params
        self.policy_version = policy_version

    def copied_weights(self, layout: Layout) -> Any:
        return reshard.reshard(self._params, self._shardings(layout), keep=True)

    @property
    def form(self) -> Form:
        return self._now.programs.form

    @property
    def has_weights(self) -> bool:
        return self._params is not None

    @property
    def has_pool(self) -> bool:
        return self._pool is not None

    def allocate(self, pool: kv_cache.Pool | None = None) -> None:
        """Allocates the KV pool if there is none, or takes over one of `cache_shape`; row state is blank."""
        if self._histories is not None:
            self._histories.forget()
        if pool is not None or self._pool is None:
            self._pool = kv_cache.allocate(self.layout, self.cache_shape) if pool is None else pool
        self.put_rows(())

    def release(self, *, weights: bool = False) -> None:
        """Every request must have ended or been aborted."""
        self._drop_histories()
        for array in jax.tree.leaves((self._pool, self._state)):
            array.delete()
        self._pool = self._state = None
        if weights:
            self._params = None

    def wait_quiet(self) -> None:
        jax.block_until_ready((self._params, self._pool, self._state))
        self._timer.seen_quiet()

    def start_in(self, tp: int) -> None:
        """Chooses the layout of a rollout phase, while there are no weights and no pool: nothing has to move."""
        if self._params is not None or self._pool is not None:
            raise RuntimeError(f"start_in({tp}): there are weights or a KV pool: use switch, or release(weights=True)")
        self._use(self._programs_at(tp))

    def put_rows(self, rows: Iterable[ResidentRow]) -> None:
        """Row state with these rows decoding, and all others blank; places for histories if there are none."""
        proposer = self.config.proposer
        if proposer is not None and self._histories is None:
            self._histories = proposer.on_devices(self._now.blank_histories())
        state = host_rows(self.sizes.num_groups, self.sizes.num_slots, proposer)
        for row in rows:
            at = (row.dp_group, row.slot)
            self._fill(state, at, row.request, row.response)
            state.token[at], state.position[at], state.active[at] = row.token, row.position, True
        sharding = self._now.programs.rows_sharding

        def put(x: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

        if self.is_spread:  # device_put would compare the values over all processes
            self._state = jax.tree.map(put, state)
        else:
            self._state = jax.device_put(state, jax.tree.map(lambda _: sharding, state))

    # -- other layouts -----------------------------------------------------------------------------------------------

    @property
    def tp(self) -> int:
        return self.layout.tp

    def capacity(self, tp: int) -> Capacity:
        """Raises ValueError if this mesh or these weights cannot have the degree."""
        return self._programs_at(tp).capacity

    def row_sizes(self, tp: int) -> tuple[int, ...]:
        """The row counts, ascending, of a dp group's decode programs at a degree."""
        return self._programs_at(tp).row_buckets

    def verify_widths(self, tp: int) -> dict[int, int]:
        """Proposed tokens that a step verifies in each row, by the row counts for which there are such programs."""
        programs = self._programs_at(tp)
        return {rows: width for rows in programs.row_buckets if (width := programs.verify_width(rows))}

    def programs_of(self, degrees: Iterable[int]) -> list[LayoutPrograms]:
        return [self._programs_at(tp) for tp in degrees]

    def switch(self, move: Relayout) -> TimeTaken:
        """Carries out `Engine.switch`; nothing may be in flight.

        Weights are resharded in place. KV migrates, or a new pool is allocated if everything is recomputed. If tp
        grows, weights go first, because they shrink while the pool grows; if tp falls, KV goes first. Everything is
        checked and compiled before anything moves. Raises SwitchFailed for what fails after that.
        """
        from jaxrl.scheduling.layouts.relayout import TimeTaken
        from jaxrl.sharding import kv_migration

        if self._params is None or self._pool is None:
            raise RuntimeError("the executor has no weights or no KV pool: call sync_weights and allocate first")
        began = time.perf_counter()
        target = self._programs_at(move.to_tp)
        lanes = move.kv.lanes()
        reshard.precompile(self._params, self._shardings(target.layout))
        if lanes.is_any:
            num_blocks = target.cache_shape.num_blocks
            kv_migration.precompile(self.layout, target.layout, self._pool, num_blocks, lanes.sizes)
        jax.block_until_ready((self._params, self._pool, self._state))
        ready = time.perf_counter()
        self._drop_histories()  # another layout has other places; histories come again with the plans that name them
        steps = [self._move_weights, lambda to: self._move_pool(to, lanes)]
        if move.to_tp < move.from_tp:
            steps.reverse()
        seconds: list[float] = []
        try:
            for step in steps:
                step_began = time.perf_counter()
                jax.block_until_ready(step(target))  # XLA:CPU can hang on two collectives at once
                seconds.append(time.perf_counter() - step_began)
            if move.to_tp < move.from_tp:
                seconds.reverse()
            self._use(target)
            self.put_rows(move.rows)
            jax.block_until_ready(self._state)
        except Exception as error:
            raise self._back_to(self._programs_at(move.from_tp), error) from error
        self._timer.ended_s = time.perf_counter()
        fixed_s = self._timer.ended_s - ready - sum(seconds) + (ready - began)
        return TimeTaken(weights_s=seconds[0], state_s=seconds[1], fixed_s=fixed_s)

    def accept_migration(self, source: Any, kv: KvPlan, rows: Sequence[ResidentRow]) -> None:
        """Takes KV from an executor on other devices, by `device_put`, and lets `rows` (all of its rows from now on)
        decode. Raises SwitchFailed if it fails after its own pool was touched, which is empty then."""
        from jaxrl.scheduling.layouts.relayout import SwitchFailed
        from jaxrl.sharding import kv_migration

        assert isinstance(source, MeshExecutor), "KV comes from a mesh"
        lanes = kv.lanes()
        if kv.copies:
            assert source._pool is not None
            assert self._pool is not None
            jax.block_until_ready((source._pool, self._pool, self._state))
            pool, self._pool = self._pool, None
            layouts = (source.layout, self.layout)
            try:
                self._pool = kv_migration.migrate_across(source._pool, *layouts, lanes, pool)
                jax.block_until_ready(self._pool)
            except Exception as error:
                self.allocate()
                raise SwitchFailed(f"the migration failed ({type(error).__name__}: {error})", is_usable=True) from error
        self.put_rows(rows)

    def _shardings(self, layout: Layout) -> Any:
        return rollout_shardings(self.model, layout, self.config.max_tp, **self.form)

    def _move_weights(self, target: LayoutPrograms) -> Any:
        params, self._params = self._params, None
        self._params = reshard.reshard(params, self._shardings(target.layout))
        return self._params

    def _move_pool(self, target: LayoutPrograms, lanes: Lanes) -> Any:
        pool, self._pool = self._pool, None
        assert pool is not None
        if lanes.is_any:
            from jaxrl.sharding import kv_migration

            num_blocks = target.cache_shape.num_blocks
            self._pool = kv_migration.migrate(pool, self.layout, target.layout, lanes, num_blocks)
        else:
            for array in jax.tree.leaves(pool):
                array.delete()
            self._pool = kv_cache.allocate(target.layout, target.cache_shape)
        return self._pool

    def _back_to(self, programs: LayoutPrograms, error: Exception) -> SwitchFailed:
        """After a failure halfway: takes the weights anew in the old layout, with an empty pool, if it can."""
        from jaxrl.scheduling.layouts.relayout import SwitchFailed

        self._params = self._pool = self._state = None  # of weights, never a mixture
        self._use(programs)
        what = f"the switch from tp {programs.layout.tp} failed halfway ({type(error).__name__}: {error})"
        if self.way_back is None:
            return SwitchFailed(f"{what}; the executor has no source of weights to go back with", is_usable=False)
        try:
            self.way_back()
            self.allocate()
        except Exception as again:
            self._params = self._pool = self._state = None
            return SwitchFailed(f"{what}, and so did the way back ({type(again).__name__}: {again})", is_usable=False)
        return SwitchFailed(f"{what}; its requests will be recomputed", is_usable=True)

    # -- the seam ----------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        check_params(self.config, request)

    def submit(self, plan: Plan) -> MeshTicket:
        """Dispatches the plan's programs; no value is read."""
        if self._params is None or self._pool is None:
            raise RuntimeError("the executor has no weights or no KV pool: call sync_weights and allocate first")
        ticket = MeshTicket(plan.index, plan.rows, self.policy_version, submitted_s=self._timer.submits())
        for chunks, length in prefill_calls(plan.prefill, self._now):
            ticket.calls.append(self._submit_prefill(chunks, length, plan))
        if plan.num_decoding:
            self._submit_decode(plan, ticket)
        for call in ticket.calls:
            for array in jax.tree.leaves(call.generated):
                array.copy_to_host_async()
        return ticket

    def collect(self, ticket: Ticket) -> PlanResult:
        assert isinstance(ticket, MeshTicket), "a ticket of another executor"
        result = result_of(ticket)  # waits
        return replace(result, duration_s=self._timer.took(ticket.submitted_s))

    # -- prefill -----------------------------------------------------------------------------------------------------

    def _submit_prefill(self, chunks: list[PrefillChunk], length: int, plan: Plan) -> Call:
        groups = np.array([chunk.dp_group for chunk in chunks])
        places = places_in(groups)
        rows = bucket(int(places.max()) + 1, self._now.prefill_rows(length))
        stacks = len(self.sizes.stacks)
        width = bucket(max(len(chunk.block_table) for chunk in chunks) // stacks, self._now.prefill_widths)
        shape = (self.sizes.num_groups, rows)
        tokens = np.zeros((*shape, length), np.int32)
        start, lengths = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        slots = np.full(shape, self.sizes.num_slots, np.int32)
        tables = np.full((*shape, width * stacks), TRASH_BLOCK, np.int32)
        state = host_rows(*shape, self.config.proposer)
        for at, chunk in zip(zip(groups.tolist(), places.tolist(), strict=True), chunks, strict=True):
            tokens[at][: len(chunk.tokens)] = chunk.tokens
            start[at], lengths[at] = chunk.start, len(chunk.tokens)
            tables[at][: len(chunk.block_table)] = chunk.block_table
            if chunk.is_last:
                slots[at] = chunk.slot
                self._fill(state, at, chunk.request, kept_tokens(chunk))
        program = self._now.program(("prefill_top" if plan.tells_top else "prefill", rows, length, width))
        self._pool, self._state, generated = program(
            self._params, self._pool, self._state, tokens, start, lengths, self._now.split(tables), slots, state
        )
        is_last = np.array([chunk.is_last for chunk in chunks])
        seats = groups * self.sizes.num_slots + np.array([chunk.slot for chunk in chunks])
        own = np.searchsorted(plan.rows.seats, seats[is_last])
        return Call(own, groups[is_last], places[is_last], generated)

    def _fill(self, state: RowState, at: tuple[int, int], request: Request, response: Sequence[int]) -> None:
        limit = len(request.prompt_ids) + request.params.max_tokens
        fill_row(state, at, self.config.seed, request.key, request.params, limit)
        if state.recent is not None:
            last = response[-state.recent.shape[-1] :]
            state.recent[at][state.recent.shape[-1] - len(last) :] = last

    # -- decode ------------------------------------------------------------------------------------------------------

    def _submit_decode(self, plan: Plan, ticket: MeshTicket) -> None:
        scheduled, groups = plan.rows, plan.rows.dp_groups
        at = groups, places_in(groups)
        block_tables, widths = scheduled.tables
        by_group: list[list[Any]] = [[] for _ in range(self.sizes.num_groups)]
        for group, table, held in zip(groups.tolist(), block_tables, widths.tolist(), strict=True):
            by_group[group].append(table[:held])
        program_shape = self._now.decode_shape(by_group, plan.verifies, plan.tells_top)
        kind, rows, num_tiles, width = program_shape
        shape = (self.sizes.num_groups, rows)
        tables = np.full((*shape, width * len(self.sizes.stacks)), TRASH_BLOCK, np.int32)
        tables[..., : block_tables.shape[1]][at] = block_tables
        slots = np.full(shape, self.sizes.num_slots, np.int32)
        fresh, max_new = np.zeros(shape, np.bool_), np.zeros(shape, np.int32)
        slots[at], fresh[at], max_new[at] = scheduled.slots, scheduled.is_new, scheduled.max_new
        tiles = self._now.list_tiles(by_group, rows, num_tiles) if self._now.programs.gathered else None
        program, arguments = self._now.program(program_shape), [self._now.split(tables), slots, fresh]
        if kind == "verify":
            histories, history_places = self._histories_of(scheduled, at, shape)
            arguments = [histories, *arguments, history_places, max_new]
        limits = np.int32(plan.num_steps), np.int32(min(plan.leave_after, 1 << 30))
        self._pool, self._state, generated, ticket.steps = program(
            self._params, self._pool, self._state, *arguments, *limits, tiles
        )
        ticket.calls.append(Call(np.arange(len(scheduled)), *at, generated))

    def _histories_of(
        self, scheduled: ScheduledRows, at: tuple[np.ndarray, np.ndarray], shape: tuple[int, int]
    ) -> tuple[Any, np.ndarray]:
        """The histories on the devices, after adding the histories of the rows at `at`; and each row's place, [dp,
        rows]."""
        assert self._histories is not None, "an executor with a pool has places"
        histories = scheduled.histories or ()
        own = [row for row, history in enumerate(histories) if history is not None]
        write = self._now.program(self._now.upload_shape)
        places = np.full(shape, self._histories.num_places, np.int32)
        found = self._histories.place([(int(at[0][row]), histories[row]) for row in own], write)
        places[at[0][own], at[1][own]] = found
        return self._histories.arrays, places

    # -- compilation -------------------------------------------------------------------------------------------------

    def shapes(self) -> list[tuple[str, int, int, int]]:
        return self._now.shapes()

    def warm_up(
        self, progress: Callable[[str], None] = lambda state: None, first: Sequence[CompiledPrograms] = ()
    ) -> int:
        """Compiles the programs of `first` and every shape of this layout; returns how many. `progress`: called with
        `CompileAhead.state`."""
        with closing(CompileAhead([*first, self._now])) as ahead:
            return ahead.wait(progress)
