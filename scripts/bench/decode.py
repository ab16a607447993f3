"""Decoding: the engine's tokens a second, and its steps at a context beside what the device can do.

    python scripts/bench.py decode [--rows 1 8 32] [--dtypes float32 bfloat16] [--json]
    python scripts/bench.py decode --at-context 1024 8192 [--rows 1 16 64 256] [--dtypes bfloat16] [--profile]

`engine`: `--new` tokens for each of `--rows` prompts, at temperature 1, without a stop token. The first one comes out
of the prompt's forward pass (prefill), the other new - 1 out of decode steps.

- seconds: everything, prompts included. prefill_s: the same prompts with one new token, measured in the same turn.
- step_s: (seconds - prefill_s) / (new - 1).
- fractions: (bytes of weights + keys and values of live positions) per step / step_s, over the measured copy, bandwidth
  and the data sheet's; operations per step over measured products of that dtype.

`placed`, with `--at-context`: rows are placed at their context, without a prefill, in a pool of random keys and values;
the engine then decodes for some plans, its host one plan ahead of the device. Contexts are those of the middle of the
timed steps. With `--longest` one row of each point stands at more tokens than the others.

- host_per_plan_s: what the host did per plan besides waiting for the device (scheduling, submitting, reading results);
  host_share: of a plan's time. The device works meanwhile, unless the share nears one.
- kernels_per_step_s, gap_share (`--profile`): the sum of the kernels of a plan under JAX's profiler, per step; and the
  rest of the step.
- left out: points whose pool does not fit into the device's memory beside the weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import costs, profiles
from bench.engines import BLOCK, build_executor, build_params, layout_of, random_prompts, requests
from bench.harness import Bench, Case, Values, model_of, say
from jaxrl.rollout.calls import MeshTicket
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.scheduling.layouts.relayout import resident_row
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import PlanResult, Request, Seat, Ticket
from jaxrl.types import Sample, SampleKey, SamplingParams

LEADING = 2
"""Plans that are submitted before the clock starts; the last of them is in flight then, and timed."""


def steps_before(options: argparse.Namespace) -> int:
    """Steps from where rows are placed to the middle of the timed ones. The plan in flight is timed, too."""
    return (LEADING - 1) * options.decode_steps + options.plans * options.decode_steps // 2


def _check(options: argparse.Namespace) -> None:
    options.rows = options.rows or ([1, 16, 64, 256] if options.at_context else [1, 8, 32])
    if options.new < 2:
        raise ValueError(f"--new ({options.new}) must be at least 2: the first token comes from the prompt")
    if not options.at_context:
        if options.longest or options.profile:
            raise ValueError("--longest and --profile need --at-context")
        return
    options.record_as = "decode-at-context"
    if min(options.at_context) <= steps_before(options):
        raise ValueError(f"--at-context ({min(options.at_context)}) must be at least {1 + steps_before(options)}: "
                         f"the middle of {options.plans} plans of {options.decode_steps} steps")  # fmt: skip
    if options.longest and options.longest < max(options.at_context):
        raise ValueError(f"--longest ({options.longest}) must be at least --at-context, or 0")


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    config = model_of(options).config()
    for dtype in options.dtypes:
        params = build_params(model_of(options), config, layout_of(options).mesh, dtype, options.seed)
        for context in options.at_context or [0]:
            for rows in options.rows:
                if not context:
                    yield [_engine_case(options, params, rows, dtype)]
                    continue
                facts = {"case": "placed", "rows": rows, "context": context, "dtype": dtype}
                placed = Placed(options, params, rows, context, dtype)
                case = Case(facts, placed, placed.figures)
                yield [case]
                if "executor" in vars(placed):
                    case.extra |= {"profile": placed.profile()} if options.profile else {}
                    placed.executor.release(weights=True)


def _bandwidth(options: argparse.Namespace, dtype: str, step_s: float, positions: float, ceilings: Any) -> dict:
    """Figures of decode steps that read all weights, and the keys and values of this many positions."""
    config, size = model_of(options).config(), jnp.dtype(dtype).itemsize
    weights, kv = costs.weight_bytes(config, size), positions * costs.kv_bytes_per_token(config, size)
    found = {"weight_bytes": weights, "kv_bytes": kv, "bytes_per_step": weights + kv}
    return found | ceilings.of_bytes((weights + kv) / step_s)


# -- uniform rows ------------------------------------------------------------------------------------------------------


def _engine_case(options: argparse.Namespace, params: Any, rows: int, dtype: str) -> Case:
    """No row decodes before all prompts are there: a plan that lacks prefill budget has no decode."""
    slots = -(-rows // layout_of(options).dp)
    how = {"max_length": options.prompt + options.new, "dtype": dtype, "is_invariant": options.numerics == "invariant"}
    tokens = min(slots * options.prompt, options.prefill_tokens)
    executor = build_executor(options, params, num_slots=slots, max_prefill_tokens=tokens, **how)
    engine, prompts = Engine(executor, BatcherConfig(decode_steps=options.decode_steps)), random_prompts(options, rows)

    def timed(length: int) -> float:
        began = time.perf_counter()
        samples = engine.generate(requests(prompts, length))
        seconds = time.perf_counter() - began
        assert all(len(sample) == length for sample in samples)
        return seconds

    def run(turn: int) -> Values:
        prefill_s, seconds = timed(1), timed(options.new)
        return {"seconds": seconds, "prefill_s": prefill_s, "step_s": (seconds - prefill_s) / (options.new - 1)}

    def figures(average: Values, ceilings: Any, runs: Any) -> dict:
        context = options.prompt + options.new / 2  # the step that draws token i reads prompt + i positions
        found = {"tokens_per_s": rows * options.new / average["seconds"]}
        found["decode_tokens_per_s"] = rows / average["step_s"]
        found |= _bandwidth(options, dtype, average["step_s"], rows * context, ceilings)
        flops = costs.decode_flops(model_of(options).config(), rows, context) / average["step_s"]
        return found | {"flops_fraction": flops / ceilings.products(dtype)}

    return Case({"case": "engine", "rows": rows, "dtype": dtype}, run, figures)


# -- rows at a context -------------------------------------------------------------------------------------------------


class TimedExecutor:
    """Passes everything on, and adds up the seconds in which the host did nothing but wait for a plan's values."""

    def __init__(self, inner: MeshExecutor) -> None:
        self._inner, self.waited_s = inner, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def collect(self, ticket: Ticket) -> PlanResult:
        assert isinstance(ticket, MeshTicket)
        began = time.perf_counter()
        jax.block_until_ready(([call.generated for call in ticket.calls], ticket.steps))
        self.waited_s += time.perf_counter() - began
        return self._inner.collect(ticket)


class Placed:
    """The engine with rows at a context; a call places them anew."""

    def __init__(self, options: argparse.Namespace, params: Any, rows: int, context: int, dtype: str) -> None:
        self._options, self._params, self._dtype = options, params, dtype
        self._contexts = [options.longest or context, *[context] * (rows - 1)]
        self._starts = [each - steps_before(options) for each in self._contexts]
        self._steps, self._ids = (LEADING + options.plans) * options.decode_steps, 0

    @cached_property
    def executor(self) -> MeshExecutor:
        """Made at the first run: a pool that does not fit leaves the case out."""
        rooms = [-(-(start + self._steps + 2) // BLOCK) for start in self._starts]
        groups = layout_of(self._options).dp
        return build_executor(
            self._options,
            self._params,
            is_filled=True,
            num_slots=-(-len(self._starts) // groups),
            max_length=max(self._starts) + self._steps + 2,
            num_blocks=1 + max(sum(rooms[group::groups]) for group in range(groups)),
            max_prefill_tokens=BLOCK,
            dtype=self._dtype,
            is_invariant=self._options.numerics == "invariant",
        )

    @cached_property
    def _timed(self) -> Any:
        return TimedExecutor(self.executor)

    @cached_property
    def _engine(self) -> Engine:
        return Engine(self._timed, BatcherConfig(decode_steps=self._options.decode_steps))

    def __call__(self, turn: int) -> Values:
        plans = self._options.plans
        self._place()
        for _ in range(LEADING):
            self._engine.step()
        before, waited, began = self._engine.counters.steps, self._timed.waited_s, time.perf_counter()
        for _ in range(plans):
            assert not self._engine.step(), "a row ended"
        seconds = time.perf_counter() - began
        steps = self._engine.counters.steps - before
        assert steps == plans * self._options.decode_steps, "a plan ended early"
        host_s = seconds - (self._timed.waited_s - waited)
        self._end()
        values = {"seconds": seconds, "step_s": seconds / steps, "plan_s": seconds / plans}
        return values | {"host_per_plan_s": host_s / plans, "host_share": host_s / seconds}

    def profile(self) -> dict[str, Any]:
        """Kernels of one plan, in the middle."""

        def one() -> None:
            self._engine.step()
            self._engine.drain()

        self._place()
        for _ in range(1 + self._options.plans // 2):
            one()
        self._profile = profiles.during(one)
        self._end()
        say(profiles.table(self._profile, self._profiled_steps))
        return self._profile

    _profile: dict[str, Any] | None = None

    @property
    def _profiled_steps(self) -> int:
        return 1 if self._profile is None or self._profile["of_a_loop"] else self._options.decode_steps

    def figures(self, average: Values, ceilings: Any, runs: Any) -> dict:
        step_s = average["step_s"]
        found = {"tokens_per_s": len(self._starts) / step_s}
        found |= _bandwidth(self._options, self._dtype, step_s, sum(self._contexts), ceilings)
        if self._profile is not None:
            kernels_s = self._profile["kernels_s"] / self._profiled_steps
            found |= {"kernels_per_step_s": kernels_s, "gap_share": (step_s - kernels_s) / step_s}
            found["launches_per_step"] = self._profile["launches"] / self._profiled_steps
        return found

    def _place(self) -> None:
        """Seats requests with blocks that take turns, as in a pool whose rows have grown together."""
        batcher, groups = self._engine.batcher, self.executor.sizes.num_groups
        draw, vocab = np.random.default_rng(self._options.seed), model_of(self._options).config().vocab_size
        seats: dict[int, Seat] = {}
        for row, start in enumerate(self._starts):
            self._ids += 1
            tokens = draw.integers(vocab, size=start + 1).tolist()
            key, zero = SampleKey(0, row, 0), np.zeros(1, np.float32)
            kept = Sample(key, np.array(tokens[-1:], np.int32), zero, zero, np.zeros(1, np.int32))
            params = SamplingParams(max_tokens=self._steps + 1)
            self._engine.add(Request(self._ids, key, tuple(tokens[:-1]), params, kept=kept))
            batcher.blocks.allocate(self._ids, row % groups, 1)
            seats[self._ids] = Seat(row % groups, row // groups, start, decodes=True)
        for end in range(BLOCK, max(self._starts) + BLOCK, BLOCK):
            for request_id in (each for each, seat in seats.items() if end < seat.num_written + BLOCK):
                batcher.blocks.extend(request_id, end)
        batcher.seat(seats)
        self.executor.put_rows([resident_row(batcher.progress(each), seat) for each, seat in seats.items()])

    def _end(self) -> None:
        self._engine.abort(self._engine.unfinished())
        self._engine.drain()


OPTIONS = {
    "tp": (1, "tensor parallelism of the engine"),
    "rows": (int, "prompts decoded at once (1 8 32; --at-context: 1 16 64 256)"),
    "prompt": (64, "tokens of a prompt"),
    "new": (128, "tokens drawn for each prompt"),
    "decode_steps": (16, "the engine's decode steps per plan"),
    "prefill_tokens": (8192, "the most prompt tokens in a plan"),
    "numerics": ("fast", "actor.numerics: fast or invariant"),
    "at_context": (int, "instead: steps of rows with so many tokens each, placed there without a prefill"),
    "longest": (0, "--at-context: one of the rows stands there instead"),
    "plans": (8, "--at-context: timed plans of a repetition"),
    "profile": (False, "--at-context: a plan more under JAX's profiler: kernels by group"),
}
QUICK = {"rows": [2], "prompt": 16, "new": 48, "decode_steps": 4, "plans": 2}
BENCH = Bench(__doc__, cases, OPTIONS, QUICK, has_ceilings=True, check=_check)
