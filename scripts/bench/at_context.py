"""Decode steps of rows that stand at a context already (`bench_decode.py --at-context`).

The real engine and executor decode. What would lead there is left out: requests are seated in the batcher as a change
of layout seats them, the rows' state is put on the device, and the pool holds random keys and values.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.rollout.calls import MeshTicket
from jaxrl.scheduling.layouts.relayout import resident_row
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Executor, PlanResult, Request, Seat, Ticket
from jaxrl.types import Sample, SampleKey, SamplingParams

from . import costs, profiles
from .ceilings import Ceilings
from .decode_cases import BLOCK, Setting, build_executor
from .measure import Summary, Values, say

LEADING = 2
"""Plans that are submitted before the clock starts; the last of them is in flight then, and timed."""
_ROOM = 0.97
"""Of a device's memory that weights, pool and logits may take together."""


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for a context that the timed steps would begin before."""
    least = 1 + _steps_before(options)
    for context in options.at_context:
        if context < least:
            raise ValueError(
                f"--at-context ({context}) must be at least {least}: the middle of {options.plans} plans of "
                f"{options.decode_steps} steps, after one that is not timed"
            )
        if options.longest and options.longest < context:
            raise ValueError(f"--longest ({options.longest}) must be at least --at-context ({context}), or 0")


def _contexts(options: argparse.Namespace, rows: int, context: int) -> list[int]:
    """Of each row, in the middle of the timed steps."""
    return [options.longest or context, *[context] * (rows - 1)]


def _steps_before(options: argparse.Namespace) -> int:
    """Steps from where rows are placed to the middle of the timed ones. The plan in flight is timed, too."""
    return (LEADING - 1) * options.decode_steps + options.plans * options.decode_steps // 2


class TimedExecutor:
    """Passes everything on, and adds up the seconds in which the host did nothing but wait for a plan's values."""

    def __init__(self, inner: Executor) -> None:
        self.num_groups, self.num_slots, self.num_blocks = inner.num_groups, inner.num_slots, inner.num_blocks
        self.block_size, self.max_prefill_tokens = inner.block_size, inner.max_prefill_tokens
        self.stacks = inner.stacks
        self.check, self.submit = inner.check, inner.submit
        self.inner, self.waited_s = inner, 0.0

    def collect(self, ticket: Ticket) -> PlanResult:
        assert isinstance(ticket, MeshTicket)
        began = time.perf_counter()
        jax.block_until_ready(([call.generated for call in ticket.calls], ticket.steps))
        self.waited_s += time.perf_counter() - began
        return self.inner.collect(ticket)


class PlacedCase:
    """The engine with rows at a context; a call places them anew."""

    def __init__(self, setting: Setting, params: Any, rows: int, context: int, dtype: str) -> None:
        options = setting.options
        self._setting, self._rows, self.context = setting, rows, context
        self._steps = (LEADING + options.plans) * options.decode_steps
        # tokens of the rows that have their keys and values
        self._starts = [each - _steps_before(options) for each in _contexts(options, rows, context)]
        rooms = [-(-(start + self._steps + 2) // BLOCK) for start in self._starts]
        groups = setting.layout.dp
        self.executor = build_executor(
            setting,
            params,
            dtype,
            slots=-(-rows // setting.layout.dp),
            length=max(self._starts) + self._steps + 2,
            num_blocks=1 + max(sum(rooms[group::groups]) for group in range(groups)),
            prefill_tokens=BLOCK,
            is_filled=True,
            numerics=options.numerics,
        )
        self._timed = TimedExecutor(self.executor)
        self._engine = Engine(self._timed, BatcherConfig(decode_steps=options.decode_steps))
        self._ids = 0

    def __call__(self) -> Values:
        plans = self._setting.options.plans
        self._place()
        for _ in range(LEADING):
            self._engine.step()
        before, waited, began = self._engine.counters.steps, self._timed.waited_s, time.perf_counter()
        for _ in range(plans):
            assert not self._engine.step(), "a row ended"
        seconds = time.perf_counter() - began
        steps = self._engine.counters.steps - before
        assert steps == plans * self._setting.options.decode_steps, "a plan ended early"
        values = {"seconds": seconds, "step_s": seconds / steps, "plan_s": seconds / plans}
        values["host_per_plan_s"] = (seconds - (self._timed.waited_s - waited)) / plans
        self._end()
        return values

    def profile(self) -> dict[str, Any]:
        """Kernels of one plan, in the middle."""

        def one() -> None:
            self._engine.step()
            self._engine.drain()

        self._place()
        for _ in range(1 + self._setting.options.plans // 2):
            one()
        found = profiles.during(one)
        self._end()
        return found

    def _place(self) -> None:
        """Seats requests with blocks that take turns, as in a pool whose rows have grown together."""
        batcher, groups = self._engine.batcher, self.executor.num_groups
        draw = np.random.default_rng(self._setting.options.seed)
        vocab = self._setting.config.vocab_size
        seats: dict[int, Seat] = {}
        for row, start in enumerate(self._starts):
            self._ids += 1
            tokens = draw.integers(vocab, size=start + 1).tolist()
            params = SamplingParams(max_tokens=self._steps + 1)
            key = SampleKey(0, row, 0)
            zero = np.zeros(1, np.float32)
            kept = Sample(key, np.array(tokens[-1:], np.int32), zero, zero, np.zeros(1, np.int32))
            self._engine.add(Request(self._ids, key, tuple(tokens[:-1]), params, kept=kept))
            group = row % groups
            batcher.blocks.allocate(self._ids, group, 1)
            seats[self._ids] = Seat(group, row // groups, start, decodes=True)
        for end in range(BLOCK, max(self._starts) + BLOCK, BLOCK):
            for request_id in (each for each, seat in seats.items() if end < seat.num_written + BLOCK):
                batcher.blocks.extend(request_id, end)
        batcher.seat(seats)
        rows = [resident_row(batcher.progress(request_id), seat) for request_id, seat in seats.items()]
        self.executor.put_rows(rows)

    def _end(self) -> None:
        self._engine.abort(self._engine.unfinished())
        self._engine.drain()

    def close(self) -> None:
        self.executor.release(weights=True)


def measure(setting: Setting) -> dict[str, Any]:
    """Runs all points of every dtype; returns profiles by label, and the points that were left out."""
    options = setting.options
    found: dict[str, Any] = {"profiles": {}, "left_out": []}
    for dtype in options.dtypes:
        params = setting.params(dtype)
        for context in options.at_context:
            for rows in options.rows:
                point = {"rows": rows, "context": context, "dtype": dtype}
                if reason := _misfit(setting, **point):
                    say(f"{rows} rows at {context}, {dtype}: left out: {reason}")
                    found["left_out"].append(point | {"reason": reason})
                    continue
                say(f"{rows} rows at {context}, {dtype}: compiling")
                case = PlacedCase(setting, params, rows, context, dtype)
                label = f"{rows} {context} {dtype}"
                setting.bench.interleave({label: case}, options.repetitions, warm_up=1)
                if options.profile:
                    found["profiles"][label] = case.profile()
                case.close()
    return found


def _misfit(setting: Setting, rows: int, context: int, dtype: str) -> str | None:
    """Why a point does not fit into a device's memory, if it is known and it does not."""
    stats = setting.layout.mesh.devices.flat[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    config, size, devices = setting.config, jnp.dtype(dtype).itemsize, setting.layout.mesh.size
    options = setting.options
    tokens = sum(_contexts(options, rows, context)) + rows * options.plans * options.decode_steps
    pool = tokens * costs.kv_bytes_per_token(config, size) // devices
    weights = costs.weight_bytes(config, size) // setting.layout.tp
    logits = 2 * 4 * -(-rows // setting.layout.dp) * config.vocab_size // setting.layout.tp
    needed, limit = stats["bytes_in_use"] + weights + pool + logits, stats["bytes_limit"]
    if needed <= _ROOM * limit:
        return None
    return (
        f"{needed / 1e9:.1f} GB are needed, {pool / 1e9:.1f} of them for the pool, and a device has {limit / 1e9:.1f}"
    )


def results(
    setting: Setting, summaries: Mapping[str, Summary], found: Mapping[str, Any], ceilings: Ceilings
) -> dict[str, Any]:
    """Prints and returns the figures."""
    cases = []
    print(f"{'rows':>5}{'context':>8} {'dtype':<9}{'step ms':>9}{'tokens/s':>10}{'GB/step':>9}{'of copy':>9}", end="")
    print(f"{'of read':>9}{'of sheet':>9}{'host ms/plan':>13}{'share':>7}{'kernels ms':>11}{'gap':>7}{'launches':>9}")
    for label, summary in summaries.items():
        rows, context, dtype = label.split()
        profile = found["profiles"].get(label)
        case = _figures(setting, int(rows), int(context), dtype, summary, profile, ceilings)
        cases.append(case)
        print(
            f"{rows:>5}{context:>8} {dtype:<9}{case['step_s'] * 1e3:>9.3f}{case['tokens_per_s']:>10.1f}"
            f"{case['bytes_per_step'] / 1e9:>9.3f}{case['copy_fraction']:>9.1%}"
            f"{case['bytes_per_s'] / ceilings.read:>9.1%}{_percent(case['datasheet_fraction']):>9}"
            f"{case['host_per_plan_s'] * 1e3:>13.3f}{case['host_share']:>7.1%}"
            + (f"{case['kernels_per_step_s'] * 1e3:>11.3f}" if profile else f"{'-':>11}")
            + f"{_percent(case['gap_share']):>7}"
            + (f"{case['launches_per_step']:>9.1f}" if profile else f"{'-':>9}")
            + summary.mark
        )
    for label, profile in found["profiles"].items():
        rows, context, dtype = label.split()
        print(f"{rows} rows at {context}, {dtype}, per step:")
        print(profiles.table(profile, _profiled_steps(profile, setting)))
    return {
        "decode_steps": setting.options.decode_steps,
        "longest": setting.options.longest,
        "plans": setting.options.plans,
        "cases": cases,
        "left_out": found["left_out"],
    }


def _profiled_steps(profile: Mapping[str, Any], setting: Setting) -> int:
    """Steps that a plan's profile shows."""
    return 1 if profile["of_a_loop"] else setting.options.decode_steps


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _figures(
    setting: Setting,
    rows: int,
    context: int,
    dtype: str,
    summary: Summary,
    profile: Mapping[str, Any] | None,
    ceilings: Ceilings,
) -> dict[str, Any]:
    config, size = setting.config, jnp.dtype(dtype).itemsize
    medians: dict[str, float] = summary.medians
    step_s = medians["step_s"]
    cached = sum(_contexts(setting.options, rows, context))
    weights, kv = costs.weight_bytes(config, size), cached * costs.kv_bytes_per_token(config, size)
    rate = (weights + kv) / step_s
    kernels_s = launches = None
    if profile is not None:
        steps = _profiled_steps(profile, setting)
        kernels_s, launches = profile["kernels_s"] / steps, profile["launches"] / steps
    return {
        "case": "placed",
        "rows": rows,
        "context": context,
        "dtype": dtype,
        **medians,
        "tokens": round(medians["seconds"] / step_s) * rows,
        "tokens_per_s": rows / step_s,
        "weight_bytes": weights,
        "kv_bytes": kv,
        "bytes_per_step": weights + kv,
        "bytes_per_s": rate,
        "copy_fraction": rate / ceilings.copy,
        "bandwidth_fraction": rate / ceilings.bandwidth,
        "datasheet_fraction": ceilings.of_datasheet(bytes_per_s=rate),
        "host_share": medians["host_per_plan_s"] / medians["plan_s"],
        "kernels_per_step_s": kernels_s,
        "gap_share": None if kernels_s is None else (step_s - kernels_s) / step_s,
        "launches_per_step": launches,
        "profile": profile,
        **summary.judged,
    }
