"""`jaxrl check-numerics`: whether tokens and log-probabilities depend on how they are computed, and where first.

A response must not depend on its row, its batch, chunks of its prompt, preemption, drafts or the layout. The trainer
should compute the log-probabilities that the rollout recorded (docs/architecture.md). The run's own engine samples
reference responses once. Then every other path computes them with these tokens forced, and the command counts the
differences.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config import Config
from jaxrl.config.files import load
from jaxrl.mechanisms.speculation import verify_rule
from jaxrl.mechanisms.speculation.index import DraftIndex
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import RANDOM, check_length, config_of, resolve_path
from jaxrl.record.files import to_json
from jaxrl.record.progress import StartupProgress
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.sampling import Draw, Forced, sample
from jaxrl.run.build import build_executor, refuse_too_large, use_compilation_cache
from jaxrl.run.devices import prepare_jax
from jaxrl.run.memory import kv_layers_of
from jaxrl.run.weights import adapted, load_weights
from jaxrl.scheduling.layouts.relayout import How
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import PlanResult, Request, resume
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.scheduling.tokens.stacks import WHOLE, KvStacks
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.memory import memory_of
from jaxrl.sharding.mesh import make_mesh
from jaxrl.training.programs import TrainPrograms
from jaxrl.training.trainer import MeshTrainer
from jaxrl.types import Prompt, RunFailed, Sample, SampleKey, SamplingParams, TrainBatch

GROUP = 4  # responses to a prompt
LEAST_TOKENS = 24  # of a response: enough for several plans and blocks
SHORTEST_PROMPT, LONGEST_PROMPT = 33, 64  # tokens: unlike lengths, and yet one program
BLOCK = 8

Row = tuple[np.ndarray, np.ndarray | None]
"""The log-probabilities of a response's tokens, and the tokens that this path would have drawn (None: unknown)."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Options of the command. `model`: as `model.path`; `overrides`: options of the run."""

    model: str = ""
    dtype: str = "float32"
    tp: tuple[int, ...] = (1,)
    rows: tuple[int, ...] = (1, 8, 32)
    tokens: int = 1024  # of all responses together, about
    seed: int = 0
    overrides: tuple[str, ...] = ()

    @property
    def most_rows(self) -> int:
        return max(self.rows)

    @property
    def num_groups(self) -> int:
        return max(2, -(-self.most_rows // GROUP))

    @property
    def response_length(self) -> int:
        return max(LEAST_TOKENS, self.tokens // (self.num_groups * GROUP))


@dataclass(frozen=True, slots=True)
class Difference:
    """How a path's results differ from the reference's. `flips`: tokens that it would have drawn otherwise."""

    path: str
    tokens: int
    differ: int  # log-probabilities with other bits
    flips: int | None  # None: the path draws none
    largest: float
    ulps: float  # the largest in units in the last place of the type, at the reference's value
    first: tuple[int, int, int] | None  # prompt, sample, token of the response


def compare(
    path: str, keys: Sequence[SampleKey], wanted: Sequence[Row], found: Sequence[Row], dtype: Any
) -> Difference:
    ends = np.cumsum([len(values) for values, _ in wanted])
    assert [len(values) for values, _ in found] == [len(values) for values, _ in wanted], path
    own = np.concatenate([values for values, _ in found])
    values = np.concatenate([values for values, _ in wanted]).astype(own.dtype)  # the trainer's are float32 in any case
    unlike, flips = own != values, None
    coarser = min(jnp.dtype(dtype), jnp.dtype(own.dtype), key=lambda each: jnp.finfo(each).bits)
    off = np.abs(own.astype(np.float64) - values.astype(np.float64))
    off = np.where(np.isfinite(off), off, np.inf)
    ulps = off / np.abs(np.spacing(values.astype(coarser)).astype(np.float64))
    wrong = unlike
    if all(drawn is not None for _, drawn in found):
        mine, theirs = (np.concatenate([drawn for _, drawn in rows if drawn is not None]) for rows in (found, wanted))
        flips, wrong = int((mine != theirs).sum()), unlike | (mine != theirs)
    first = None
    if wrong.any():
        place = int(np.argmax(wrong))
        row = int(np.searchsorted(ends, place, side="right"))
        first = keys[row].prompt_index, keys[row].sample_index, place - int(ends[row]) + len(wanted[row][0])
    return Difference(path, len(own), int(unlike.sum()), flips, float(off.max()), float(ulps.max()), first)


class Bench:
    """The model, the requests, and what the reference has drawn for them (`wanted`, and `samples` for the trainer)."""

    def __init__(self, options: CheckOptions) -> None:
        self.options = options
        most_tp = max(options.tp)
        if options.most_rows < 2:
            raise ValueError("--rows (1) must have a number above 1: alone no row is preempted, or shares its prompt")
        self.config = self.configured()
        self.devices = prepare_jax(self.config)[:most_tp]
        if len(self.devices) < most_tp:
            raise ValueError(
                f"--tp ({most_tp}) must be at most the devices there are ({len(self.devices)}); a CPU has more in a "
                f"process with XLA_FLAGS=--xla_force_host_platform_device_count={most_tp}"
            )
        self.model = self._checked_model()
        random, params = np.random.default_rng(options.seed), self.config.rollout.temperature
        params = SamplingParams(temperature=params, max_tokens=options.response_length)
        self.requests: list[Request] = []
        for prompt in range(options.num_groups):
            length = int(random.integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1))
            ids = tuple(random.integers(0, self.model.vocab_size, length).tolist())
            first = len(self.requests)
            self.requests += [Request(first + i, SampleKey(0, prompt, i), ids, params) for i in range(GROUP)]
        self.wanted: list[Row] = []
        self.samples: list[Sample] = []
        self.draw: Draw = sample
        self._weights: tuple[int, Any] = (0, None)
        self._executors: dict[tuple[Any, Layout], MeshExecutor] = {}

    def configured(self, *more: str) -> Config:
        """The run's configuration: what the command needs, the user's own options, and those of a path."""
        asked = self.options
        needed = {
            "model.path": asked.model,
            "model.random_init": str(asked.model.startswith(RANDOM)).lower(),
            "trainer.seed": asked.seed,
            "data.max_prompt_length": LONGEST_PROMPT,
            "data.max_response_length": asked.response_length,
            "data.train_batch_size": asked.num_groups,
            "actor.ppo_mini_batch_size": asked.num_groups,
            "actor.dtype": asked.dtype,
            "actor.param_dtype": "float64" if asked.dtype == "float64" else "float32",
            "rollout.dtype": asked.dtype,
            "rollout.n": GROUP,
            "rollout.max_num_seqs": asked.most_rows,
            "rollout.max_num_batched_tokens": asked.most_rows * LONGEST_PROMPT,
            "rollout.block_size": BLOCK,
            "rollout.decode_steps": 4,
        }
        return load(None, [*(f"{name}={value}" for name, value in needed.items()), *asked.overrides, *more])

    def _checked_model(self) -> ModelConfig:
        asked = self.options
        model = adapted(self.config, config_of(resolve_path(asked.model, "--model", weights=True)))
        length = LONGEST_PROMPT + asked.response_length
        check_length(model, length, f"--tokens ({asked.tokens}) makes {length} tokens", asked.model)
        for tp in sorted({1, *asked.tp}):
            config = self.configured(f"rollout.tensor_model_parallel_size={tp}") if tp > 1 else self.config
            refuse_too_large(config, model, tp, memory_of(self.devices[:tp]))
        if model.scalar_head:
            raise ValueError(f"--model ({asked.model}) is a reward model, which writes nothing")
        return model

    def weights(self, devices: Sequence[Any]) -> Any:
        """The weights in training form, on these devices. A call for other devices drops the previous copy."""
        if self._weights[0] != len(devices):
            self._weights = 0, None
            self._weights = len(devices), load_weights(self.config, self.model, make_mesh(devices))
        return self._weights[1]

    def engine(self, config: Config, devices: Sequence[Any]) -> Engine:
        layout = Layout(make_mesh(devices), config.rollout.tp)
        built = build_executor(config, self.model, layout, draw=self.draw)
        executor = self._executors.setdefault((built.config, layout), built)  # which has compiled its programs
        executor.start_in(layout.tp)  # it may have ended in another one
        executor.sync_weights(self.weights(devices), 0)
        executor.allocate()
        rule = verify_rule(config, executor, None, None)
        return Engine(executor, BatcherConfig(**config.batching, verify_rule=rule))


def _together(engine: Engine, bench: Bench) -> None:
    for request in bench.requests:
        engine.add(request)


def _late(engine: Engine, bench: Bench) -> None:
    for request in reversed(bench.requests):
        engine.add(request)
        engine.step()


def _switched(to: int, by: How, engine: Engine, bench: Bench) -> None:
    _together(engine, bench)
    progress, all_tokens = engine.batcher.progress, len(bench.requests) * bench.options.response_length
    while sum(len(progress(i).tokens) for i in engine.unfinished()) < all_tokens / 3:
        engine.step()
    engine.switch(to, by)


def _resumed(engine: Engine, bench: Bench) -> None:
    _together(engine, bench)
    for _ in range(3):
        engine.step()
    engine.drain()  # a plan in flight would be drawn twice
    live = engine.unfinished()
    for number, kept in zip(live, engine.abort(live), strict=True):
        engine.add(resume(bench.requests[number], kept))


def _sharing(engine: Engine, bench: Bench) -> None:
    for request in bench.requests:
        engine.add(replace(request, share=request.key.prompt_index))


def _drafting(engine: Engine, bench: Bench) -> None:
    """Each may draft from its own response, in which every seventh token is another one and is rejected."""
    for request, drawn in zip(bench.requests, bench.samples, strict=True):
        text = drawn.token_ids.copy()
        text[3::7] = (text[3::7] + 1) % bench.model.vocab_size
        engine.add(replace(request, history=DraftIndex.build([text], [1.0])))


def _speculation(rows: int) -> tuple[str, ...]:
    values = {"enable": "true", "verify_tokens": 4 * rows, "max_batch": rows}
    return tuple(f"rollout.speculation.{name}={value}" for name, value in values.items())


@dataclass(frozen=True, slots=True)
class Path:
    """A way to compute the responses.

    Attributes:
      options: of the run, on top of the reference's.
      drive: gives the reference's requests to the engine; None: the trainer computes the log-probabilities instead.
      happens: counts what the path is about, which must occur.
    """

    name: str
    options: tuple[str, ...] = ()
    num_devices: int = 1
    drive: Callable[[Engine, Bench], None] | None = _together
    happens: Callable[[Counters], int] = lambda counters: counters.steps


def _rows(rows: int) -> str:
    return f"{rows} row{'s' if rows > 1 else ''} at once"


def paths(options: CheckOptions, stacks: KvStacks = WHOLE) -> list[Path]:
    """All that are compared with the reference: one device, the most rows, prompts whole and not shared."""
    rows, length = options.most_rows, LONGEST_PROMPT + options.response_length
    seqs, steps, chunk = "rollout.max_num_seqs", "rollout.decode_steps", "rollout.max_num_batched_tokens"
    if stacks.is_whole:
        # rows must grow, and not all can
        few = f"rollout.num_blocks={max(2, rows // 2) * stacks.most_blocks(length, BLOCK)}"
        again = Path("preempted and prefilled again", (few,), happens=lambda counters: counters.preemptions)
    else:  # behind windows there is always room
        once = options.num_groups * GROUP
        again = Path("aborted and prefilled again", drive=_resumed, happens=lambda counters: counters.admissions - once)
    found = [
        Path("the same again"),
        *(Path(_rows(fewer), (f"{seqs}={fewer}",)) for fewer in options.rows if fewer != rows),
        Path("one more request with each plan, the last first", drive=_late),
        *(Path(f"plans of {n} step{'s' if n > 1 else ''}", (f"{steps}={n}",)) for n in (1, 16)),
        *(Path(f"prompts in chunks of {n} tokens", (f"{chunk}={n}",)) for n in (24, 40)),
        again,
        Path("prompts shared", drive=_sharing, happens=lambda counters: counters.shared_tokens),
        Path(
            "drafts verified",
            _speculation(rows),
            drive=_drafting,
            happens=lambda counters: min(counters.accepted_tokens, counters.proposed_tokens - counters.accepted_tokens),
        ),
    ]
    for tp in options.tp:
        if tp > 1:
            wide = Path(f"tp {tp}", (f"rollout.tensor_model_parallel_size={tp}",), tp)
            found += [Path(f"dp {tp}", num_devices=tp), wide, _switching(1, tp, "recompute")]
    found += [_switching(*pair, "migrate") for pair in permutations(sorted({1, *options.tp}), 2)]
    for name, tokens in (("rows of one response", length), ("packed rows", 4 * length)):
        found.append(Path(f"trainer, {name}", (f"actor.ppo_max_token_len_per_gpu={tokens}",), drive=None))
    return found


def _switching(before: int, after: int, how: How) -> Path:
    low, high = sorted((before, after))
    degrees = ("rollout.layout.planner=true", f"rollout.layout.degrees=[{low},{high}]")
    options = (*degrees, f"rollout.tensor_model_parallel_size={before}")
    carried = {"migrate": "migrated", "recompute": "recomputed"}[how]
    return Path(f"tp {before}, then {after}, KV {carried}", options, high, partial(_switched, after, how))


def reference(bench: Bench) -> None:
    bench.wanted = measured(bench, Path("the reference"))
    if not all(np.isfinite(values).all() for values, _ in bench.wanted):
        raise RunFailed(
            f"{bench.options.model} in {bench.options.dtype} draws tokens with log-probabilities that are not finite"
        )
    for request, (values, tokens) in zip(bench.requests, bench.wanted, strict=True):
        assert tokens is not None
        own = values.astype(np.float32)
        bench.samples.append(Sample(request.key, tokens, own, own, np.zeros(len(tokens), np.int32)))
    given = [
        (request.key, len(request.prompt_ids), drawn.token_ids.tolist())
        for request, drawn in zip(bench.requests, bench.samples, strict=True)
    ]
    bench.draw = Forced(bench.options.seed, given)


def measured(bench: Bench, path: Path) -> list[Row]:
    """A path's results for the responses. The first time, for the reference, the tokens are those drawn."""
    config = bench.configured(*path.options)
    if path.drive is None:
        mesh = make_mesh(bench.devices[:1])
        prompts = [Prompt(0, r.key.prompt_index, r.prompt_ids, "", "check-numerics") for r in bench.requests]
        batch = TrainBatch(prompts, bench.samples, [np.zeros(len(each), np.float32) for each in bench.samples])
        trainer = MeshTrainer(TrainPrograms(config, bench.model, mesh), bench.weights(bench.devices[:1]))
        return [(values, None) for values in trainer.token_logprobs(batch)]
    is_reference = not bench.wanted
    pieces: dict[int, list[tuple[np.ndarray, ...]]] = {request.request_id: [] for request in bench.requests}

    def keep(result: PlanResult) -> None:
        # where tokens are forced, these are the ids of those that would have been drawn
        drawn = result.token_ids if is_reference else result.sampled_logprobs
        for row, request_id in enumerate(result.request_ids.tolist()):
            part = result.part(row)
            pieces[request_id].append((result.rollout_logprobs[part], drawn[part].astype(np.int32)))

    engine = bench.engine(config, bench.devices[: path.num_devices])
    engine.keepers.append(keep)
    path.drive(engine, bench)
    while not engine.is_idle:
        engine.step()
    if not path.happens(engine.counters):
        raise ValueError(f"--tokens ({bench.options.tokens}) is too few for the path {path.name!r}: it did not happen")
    engine.executor.release(weights=True)  # pyright: ignore[reportAttributeAccessIssue]
    return [(np.concatenate(a), np.concatenate(b)) for a, b in (zip(*own, strict=True) for own in pieces.values())]


def check_numerics(options: CheckOptions, say: Callable[[str], None], stage: Callable[[str], None], json: bool) -> None:
    """Compares all paths. Prints a line for each as soon as it is known, or with `json` one object at the end; `stage`
    prints progress. Raises ValueError for a model or options that do not fit, or too few devices or tokens, and
    RunFailed where a path differs."""
    with closing(StartupProgress(stage)) as stages:
        stages.begin("reading the model")
        bench = Bench(options)
        use_compilation_cache(bench.config)
        stages.begin("compiling programs, then drawing the responses")
        reference(bench)
        device = f"{max(options.tp)} × {bench.devices[0].device_kind}"
        if not json:
            drawn = f"{len(bench.requests)} responses of {options.response_length} tokens"
            head = f"{options.model}, {options.dtype}, {device}, jax {jax.__version__}"
            say(f"{head}: {drawn}, against {_rows(options.most_rows)}")
            say(f"{'path':<48} {'tokens':>7} {'differ':>16} {'flips':>6} {'largest':>8} {'ULPs':>8}  first")
        found = []
        keys = [request.key for request in bench.requests]
        for path in paths(options, kv_layers_of(bench.config, bench.model).stacks):
            stages.begin(f"computing them again: {path.name}")
            found.append(compare(path.name, keys, bench.wanted, measured(bench, path), options.dtype))
            gc.collect()
            if not json:
                say(_line(found[-1]))
    if json:
        drawn = {"tokens": sum(map(len, bench.samples)), "device": device, "jax": jax.__version__}
        say(to_json(asdict(options) | drawn | {"paths": [asdict(each) for each in found]}))
    unlike = [each for each in found if each.first is not None]
    if unlike:
        raise RunFailed(f"{len(unlike)} of {len(found)} paths differ from {_rows(options.most_rows)}")


def _line(found: Difference) -> str:
    share = f"{found.differ} ({found.differ / found.tokens:.1%})" if found.differ else "0"
    flips = "-" if found.flips is None else found.flips
    first = "-" if found.first is None else "prompt {}, sample {}, token {}".format(*found.first)
    numbers = f"{found.tokens:>7} {share:>16} {flips:>6} {found.largest:>8.2g} {found.ulps:>8.3g}"
    return f"{found.path:<48} {numbers}  {first}"
