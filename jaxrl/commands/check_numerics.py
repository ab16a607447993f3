"""`jaxrl check-numerics`: whether tokens and log-probabilities depend on how they are computed, and where first.

Purpose: a response must not depend on its row, its batch, chunks of its prompt, preemption, drafts or the layout, and
the trainer should find the log-probabilities that the rollout has recorded (docs/architecture.md). Rounding decides how
far that holds for a model, a type and a machine. Here the run's own engine draws responses once; then it computes the
same responses on every other path, with these tokens forced (`jaxrl.rollout.forced`), and what differs is counted.

A path is an entry in `paths`: options of the run on top of the reference's, the devices that it takes, and how it is
driven. So each runs what a run with these options runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config import Config
from jaxrl.config.files import load
from jaxrl.mechanisms import table
from jaxrl.mechanisms.speculation.index import DraftIndex
from jaxrl.mechanisms.speculation.session import draft_lengths
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.fit import check_length
from jaxrl.models.loading import RANDOM, config_of, resolve_path
from jaxrl.models.shapes import named_shape
from jaxrl.record.files import to_json
from jaxrl.record.progress import StartupProgress
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.forced import Forced
from jaxrl.rollout.sampling import Draw, sample
from jaxrl.runtime.build import build_executor, refuse_too_large, use_compilation_cache
from jaxrl.runtime.devices import prepare_jax
from jaxrl.runtime.memory import kv_layers_of
from jaxrl.runtime.rules import batcher_config
from jaxrl.runtime.weights import adapted, load_weights
from jaxrl.scheduling.layouts.relayout import How
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import PlanResult, Request, resume
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.scheduling.tokens.stacks import WHOLE, KvStacks
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.memory import memory_of
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import train_shardings
from jaxrl.train.step import Trainer
from jaxrl.types import Prompt, RunFailed, Sample, SampleKey, SamplingParams, TrainBatch

GROUP = 4
"""Responses to a prompt."""

LEAST_TOKENS = 24
"""Of a response: enough for several plans and blocks."""

SHORTEST_PROMPT, LONGEST_PROMPT = 33, 64
"""Tokens: of unlike lengths, and yet for one program."""

BLOCK, STEPS = 8, 4

Row = tuple[np.ndarray, np.ndarray | None]
"""Of a response: the log-probabilities of its tokens, and the tokens that would have been drawn; None: not known."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What is asked for.

    Attributes:
      model: as `model.path`; empty: random weights of `shape`.
      dtype: of rollout and trainer.
      tp: degrees of tensor parallelism to compare, each on as many devices.
      rows: how many rows decode together; the most is the reference's.
      tokens: of all responses together, about.
      overrides: options of the run.
    """

    model: str = ""
    shape: str = ""
    dtype: str = "float32"
    tp: tuple[int, ...] = (1,)
    rows: tuple[int, ...] = (1, 8, 32)
    tokens: int = 1024
    seed: int = 0
    overrides: tuple[str, ...] = ()

    @property
    def most_rows(self) -> int:
        return max(self.rows)

    @property
    def response_length(self) -> int:
        return max(LEAST_TOKENS, self.tokens // self.num_responses)

    @property
    def num_responses(self) -> int:
        """At least two groups, and as many as rows."""
        return max(2, -(-self.most_rows // GROUP)) * GROUP


@dataclass(frozen=True, slots=True)
class Difference:
    """What a path makes otherwise than the reference.

    Attributes:
      path: its name. tokens: compared.
      differ: log-probabilities that are not the same bits.
      flips: tokens that would not be the same; None: the path draws none.
      largest: of all differences; ulps: the same in units in the last place of the type, at the reference's value.
      first: (prompt, sample, token of the response) of the first that differs; None where none does.
    """

    path: str
    tokens: int
    differ: int
    flips: int | None
    largest: float
    ulps: float
    first: tuple[int, int, int] | None


def ulp(values: np.ndarray, dtype: Any) -> np.ndarray:
    """The distance to the next number of a type, at the magnitude of each value."""
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(values.astype(np.float64)), float(info.tiny))))
    return np.exp2(exponent) * float(info.eps)


def compare(
    path: str, keys: Sequence[SampleKey], wanted: Sequence[Row], found: Sequence[Row], dtype: Any
) -> Difference:
    """The responses of a path against the reference's, which has drawn its tokens: `wanted` must have them."""
    differ = flips = tokens = 0
    largest = ulps = 0.0
    first = None
    for key, (values, drawn), (own, others) in zip(keys, wanted, found, strict=True):
        assert drawn is not None, "the reference draws its tokens"
        assert len(own) == len(values), f"{path}: {len(own)} of {len(values)} tokens of {key}"
        values = values.astype(own.dtype)  # the trainer's are float32 in any case
        unlike = own != values
        flipped = np.zeros_like(unlike) if others is None else others != drawn
        off = np.abs(own.astype(np.float64) - values.astype(np.float64))
        off = np.where(np.isfinite(off), off, np.inf)
        tokens, differ, flips = tokens + len(own), differ + int(unlike.sum()), flips + int(flipped.sum())
        type_of = min(jnp.dtype(dtype), jnp.dtype(own.dtype), key=lambda each: jnp.finfo(each).bits)
        largest, ulps = max(largest, float(off.max())), max(ulps, float((off / ulp(values, type_of)).max()))
        if first is None and (unlike | flipped).any():
            first = key.prompt_index, key.sample_index, int(np.argmax(unlike | flipped))
    known = all(others is not None for _, others in found)
    return Difference(path, tokens, differ, flips if known else None, largest, ulps, first)


class Bench:
    """The model, the requests, and what the reference has drawn for them."""

    def __init__(self, options: CheckOptions) -> None:
        self.options = options
        if options.most_rows < 2:
            raise ValueError("--rows (1) must have a number above 1: alone no row is preempted, or shares its prompt")
        self.config = self.configured()
        self.devices = prepare_jax(self.config)[: max(options.tp)]
        if len(self.devices) < max(options.tp):
            raise ValueError(
                f"--tp ({max(options.tp)}) must be at most the devices there are ({len(self.devices)}); a CPU has more "
                f"in a process with XLA_FLAGS=--xla_force_host_platform_device_count={max(options.tp)}"
            )
        self.model = self._model()
        self.requests = self._requests()
        self.wanted: list[Row] = []
        self.forced: Forced | None = None
        self._weights: tuple[int, Any] = (0, None)
        self._executors: dict[tuple[Any, Layout], MeshExecutor] = {}

    def configured(self, *more: str) -> Config:
        """The run's configuration: what is asked for, the user's own options, and those of a path."""
        asked = self.options
        own = [
            f"model.path={asked.model or 'none'}",
            f"model.random_init={'true' if asked.model.startswith(RANDOM) else 'false'}",
            f"trainer.seed={asked.seed}",
            f"data.max_prompt_length={LONGEST_PROMPT}",
            f"data.max_response_length={asked.response_length}",
            f"rollout.dtype={asked.dtype}",
            f"actor.dtype={asked.dtype}",
            f"actor.param_dtype={'float64' if asked.dtype == 'float64' else 'float32'}",
            f"rollout.max_num_seqs={asked.most_rows}",
            f"rollout.max_num_batched_tokens={asked.most_rows * LONGEST_PROMPT}",
            f"rollout.block_size={BLOCK}",
            f"rollout.decode_steps={STEPS}",
            f"rollout.n={GROUP}",
            f"data.train_batch_size={asked.num_responses // GROUP}",
            f"actor.ppo_mini_batch_size={asked.num_responses // GROUP}",
        ]
        return load(None, [*own, *asked.overrides, *more])

    def _model(self) -> ModelConfig:
        if self.options.shape:
            model = named_shape(self.options.shape)
        else:
            path = resolve_path(self.options.model, "--model", weights=True)
            model = adapted(self.config, config_of(path))
        length = LONGEST_PROMPT + self.options.response_length
        check_length(model, length, f"--tokens ({self.options.tokens}) makes {length} tokens", self.name)
        refuse_too_large(self.config, model, 1, memory_of(self.devices[:1]))
        for tp in sorted({*self.options.tp} - {1}):
            wide = self.configured(f"rollout.tensor_model_parallel_size={tp}")
            refuse_too_large(wide, model, tp, memory_of(self.devices[:tp]))
        if model.scalar_head:
            raise ValueError(f"--model ({self.options.model}) is a reward model, which writes nothing")
        return model

    @property
    def name(self) -> str:
        return self.options.shape or self.options.model

    def _requests(self) -> list[Request]:
        random = np.random.default_rng(self.options.seed)
        params = SamplingParams(temperature=self.config.rollout.temperature, max_tokens=self.options.response_length)
        made: list[Request] = []
        for prompt in range(self.options.num_responses // GROUP):
            length = int(random.integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1))
            ids = tuple(random.integers(0, self.model.vocab_size, length).tolist())
            made += [Request(len(made) + i, SampleKey(0, prompt, i), ids, params) for i in range(GROUP)]
        return made

    def weights(self, devices: Sequence[Any]) -> Any:
        """In training form, on these devices; those of the last call are gone if they lay on others."""
        if self._weights[0] != len(devices):
            self._weights = 0, None
            mesh = make_mesh(devices)
            if self.options.shape:
                made = partial(decoder.init, self.model, dtype=self.config.actor.param_dtype)
                params = jax.jit(made, out_shardings=train_shardings(self.model, mesh))(
                    jax.random.key(self.options.seed)
                )
            else:
                params = load_weights(self.config, self.model, mesh)
            self._weights = len(devices), params
        return self._weights[1]

    def engine(self, config: Config, devices: Sequence[Any], draw: Draw) -> Engine:
        layout = Layout(make_mesh(devices), config.rollout.tp)
        built = build_executor(config, self.model, layout, draw=draw)
        executor = self._executors.setdefault((built.config, layout), built)  # which has compiled its programs
        executor.start_in(layout.tp)  # it may have ended in another one
        executor.sync_weights(self.weights(devices), 0)
        executor.allocate()
        return Engine(executor, batcher_config(config, table.verify_rule(config, executor, None, None)))

    def sample(self, number: int) -> Sample:
        """What the reference has drawn for a request."""
        logprobs, tokens = self.wanted[number]
        assert tokens is not None, "the reference draws"
        own = logprobs.astype(np.float32)
        return Sample(self.requests[number].key, tokens, own, own, np.zeros(len(tokens), np.int32))


# ------------------------------------------------------------------ how a path is driven

Drive = Callable[[Engine, Sequence[Request]], object]


def _together(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.add(request)
    _to_the_end(engine)


def _late(engine: Engine, requests: Sequence[Request]) -> None:
    """The last first, and one more with each plan."""
    for request in reversed(requests):
        engine.add(request)
        engine.step()
    _to_the_end(engine)


def _switched(to: int, by: How, engine: Engine, requests: Sequence[Request]) -> None:
    """In the middle of the batch."""
    for request in requests:
        engine.add(request)
    progress = engine.batcher.progress
    while sum(len(progress(i).tokens) for i in engine.unfinished()) < len(requests) * requests[0].params.max_tokens / 3:
        engine.step()
    engine.switch(to, by)
    _to_the_end(engine)


def _resumed(engine: Engine, requests: Sequence[Request]) -> None:
    """Aborted in the middle, each with what it has so far, and added again."""
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    engine.drain()  # what is still under way would be drawn twice
    live = engine.unfinished()
    for number, kept in zip(live, engine.abort(live), strict=True):
        engine.add(resume(requests[number], kept))
    _to_the_end(engine)


def _to_the_end(engine: Engine) -> None:
    while not engine.is_idle:
        engine.step()


def _as_asked(bench: Bench, requests: Sequence[Request]) -> list[Request]:
    return list(requests)


def _sharing(bench: Bench, requests: Sequence[Request]) -> list[Request]:
    return [replace(request, share=request.key.prompt_index) for request in requests]


def _with_drafts(bench: Bench, requests: Sequence[Request]) -> list[Request]:
    """Each may draft from its own response, in which every seventh token is another one and is rejected."""
    lengths = draft_lengths(bench.configured(*_drafting(bench.options.most_rows)).rollout.speculation)
    made = []
    for i, request in enumerate(requests):
        text = bench.sample(i).token_ids.copy()
        text[3::7] = (text[3::7] + 1) % bench.model.vocab_size
        made.append(replace(request, history=DraftIndex.build([text], [1.0], lengths)))
    return made


def _drafting(rows: int) -> tuple[str, ...]:
    spec = "rollout.speculation"
    width = (f"{spec}.verify_tokens={4 * rows}", f"{spec}.max_batch={rows}", f"{spec}.max_window=4")
    return (f"{spec}.enable=true", f"{spec}.min_prefix=1", f"{spec}.max_prefix=3", *width)


# ------------------------------------------------------------------ the paths


@dataclass(frozen=True, slots=True)
class Path:
    """A way to compute responses.

    Attributes:
      options: of the run, on top of the reference's. num_devices: that it takes.
      drive: runs the engine to its end; None: the trainer computes the log-probabilities again.
      asked: makes the requests of the reference's. happens: what the path is about, counted: more than 0.
    """

    name: str
    options: tuple[str, ...] = ()
    num_devices: int = 1
    drive: Drive | None = _together
    asked: Callable[[Bench, Sequence[Request]], list[Request]] = _as_asked
    happens: Callable[[Counters], int] = field(default=lambda counters: counters.steps)


def paths(options: CheckOptions, stacks: KvStacks = WHOLE) -> list[Path]:
    """All that are compared with the reference: one device, the most rows, prompts whole and not shared. `stacks`: of
    the model's layers."""
    longest = stacks.most_blocks(LONGEST_PROMPT + options.response_length, BLOCK)
    few = f"rollout.num_blocks={max(2, options.most_rows // 2) * longest}"  # rows must grow, and not all can
    if stacks.is_whole:
        again = Path("preempted and prefilled again", (few,), happens=lambda counters: counters.preemptions)
    else:  # behind windows there is always room
        once = options.num_responses
        again = Path("aborted and prefilled again", drive=_resumed, happens=lambda counters: counters.admissions - once)
    found = [
        Path("the same again"),
        *(Path(_rows(rows), (f"rollout.max_num_seqs={rows}",)) for rows in options.rows if rows != options.most_rows),
        Path("one more request with each plan, the last first", drive=_late),
        *(Path(f"plans of {n} step{'s' if n > 1 else ''}", (f"rollout.decode_steps={n}",)) for n in (1, 16)),
        *(Path(f"prompts in chunks of {n} tokens", (f"rollout.max_num_batched_tokens={n}",)) for n in (24, 40)),
        again,
        Path("prompts shared", asked=_sharing, happens=lambda counters: counters.shared_tokens),
        Path(
            "drafts verified",
            _drafting(options.most_rows),
            asked=_with_drafts,
            happens=lambda counters: min(counters.accepted_tokens, counters.proposed_tokens - counters.accepted_tokens),
        ),
    ]
    for tp in options.tp:
        if tp > 1:
            found += [
                Path(f"dp {tp}", num_devices=tp),
                Path(f"tp {tp}", (f"rollout.tensor_model_parallel_size={tp}",), tp),
                _switching(1, tp, "recompute"),
            ]
    found += [_switching(*pair, "migrate") for pair in permutations(sorted({1, *options.tp}), 2)]
    length = LONGEST_PROMPT + options.response_length
    for name, tokens in (("rows of one response", length), ("packed rows", 4 * length)):
        shares = f"actor.share_prompts={'true' if tokens > length else 'false'}"
        found.append(Path(f"trainer, {name}", (f"actor.ppo_max_token_len_per_gpu={tokens}", shares), drive=None))
    return found


def _switching(before: int, after: int, how: How) -> Path:
    low, high = sorted((before, after))
    options = (
        *("rollout.layout.planner=true", f"rollout.layout.degrees=[{low},{high}]"),
        f"rollout.tensor_model_parallel_size={before}",
    )
    carried = {"migrate": "migrated", "recompute": "recomputed"}[how]
    return Path(f"tp {before}, then {after}, KV {carried}", options, high, partial(_switched, after, how))


def _rows(rows: int) -> str:
    return f"{rows} row{'s' if rows > 1 else ''} at once"


def measured(bench: Bench, path: Path) -> list[Row]:
    """What a path computes of the reference's responses."""
    config, devices = bench.configured(*path.options), bench.devices[: path.num_devices]
    if path.drive is None:
        return _of_trainer(bench, config)
    assert bench.forced is not None, "the reference is drawn"
    return _of_engine(bench, bench.engine(config, devices, bench.forced), path)


def reference(bench: Bench) -> None:
    """Draws the responses."""
    bench.wanted = _of_engine(bench, bench.engine(bench.config, bench.devices[:1], sample), Path("the reference"))
    if not all(np.isfinite(values).all() for values, _ in bench.wanted):
        raise RunFailed(
            f"{bench.name} in {bench.options.dtype} draws tokens with log-probabilities that are not finite"
        )
    responses = [(r.key, len(r.prompt_ids), bench.sample(i).token_ids.tolist()) for i, r in enumerate(bench.requests)]
    bench.forced = Forced(bench.options.seed, responses)


def _of_engine(bench: Bench, engine: Engine, path: Path) -> list[Row]:
    """Runs requests by an engine; its executor is released. The reference's tokens are its own, a path's are what
    would have been drawn."""
    assert path.drive is not None
    pieces: dict[int, list[tuple[np.ndarray, ...]]] = {request.request_id: [] for request in bench.requests}

    def keep(result: PlanResult) -> None:
        drawn = result.sampled_logprobs if bench.wanted else result.token_ids
        for row, request_id in enumerate(result.request_ids.tolist()):
            part = result.part(row)
            pieces[request_id].append((result.rollout_logprobs[part], drawn[part].astype(np.int32)))

    engine.keepers.append(keep)
    path.drive(engine, path.asked(bench, bench.requests))
    if not path.happens(engine.counters):
        raise ValueError(f"--tokens ({bench.options.tokens}) is too few for the path {path.name!r}: it did not happen")
    engine.executor.release(weights=True)  # pyright: ignore[reportAttributeAccessIssue]
    return [(np.concatenate(a), np.concatenate(b)) for a, b in (zip(*own, strict=True) for own in pieces.values())]


def _of_trainer(bench: Bench, config: Config) -> list[Row]:
    samples = [bench.sample(i) for i in range(len(bench.requests))]
    prompts = [Prompt(0, r.key.prompt_index, r.prompt_ids, "", "check-numerics") for r in bench.requests]
    trainer = Trainer(config, bench.model, bench.weights(bench.devices[:1]), make_mesh(bench.devices[:1]))
    batch = TrainBatch(prompts, samples, [np.zeros(len(sample), np.float32) for sample in samples])
    return [(values, None) for values in trainer.token_logprobs(batch)]


# ------------------------------------------------------------------ the command


def check_numerics(options: CheckOptions, say: Callable[[str], None], stage: Callable[[str], None], json: bool) -> None:
    """Compares all paths and shows a line for each as soon as it is known; with `json` an object in the end.

    Args:
      say: shows a line of the result. stage: a line of progress.

    Raises:
      ValueError: a model or options that do not go, or too few devices or tokens.
      RunFailed: a path differs.
    """
    with closing(StartupProgress(stage)) as stages:
        stages.begin("reading the model")
        bench = Bench(options)
        use_compilation_cache(bench.config)
        stages.begin("compiling programs, then drawing the responses")
        reference(bench)
        head = _head(bench)
        if not json:
            say(f"{head['model']}, {options.dtype}, {head['device']}, jax {head['jax']}: {_said(bench)}\n{_TITLE}")
        found = []
        for path in paths(options, kv_layers_of(bench.config, bench.model).stacks):
            stages.begin(f"computing them again: {path.name}")
            rows = measured(bench, path)
            keys = [request.key for request in bench.requests]
            found.append(compare(path.name, keys, bench.wanted, rows, options.dtype))
            del rows
            gc.collect()
            if not json:
                say(_line(found[-1]))
    if json:
        say(to_json(head | {"paths": [asdict(each) for each in found]}))
    unlike = [each for each in found if each.first is not None]
    if unlike:
        raise RunFailed(f"{len(unlike)} of {len(found)} paths differ from {_rows(options.most_rows)}")


def _head(bench: Bench) -> dict[str, Any]:
    asked = asdict(bench.options) | {"model": bench.name, "tokens": sum(len(values) for values, _ in bench.wanted)}
    device = bench.devices[0]
    return asked | {"device": f"{max(bench.options.tp)} × {device.device_kind}", "jax": jax.__version__}


def _said(bench: Bench) -> str:
    return (
        f"{bench.options.num_responses} responses of {bench.options.response_length} tokens, against "
        f"{_rows(bench.options.most_rows)}"
    )


_TITLE = f"{'path':<48} {'tokens':>7} {'differ':>16} {'flips':>6} {'largest':>8} {'ULPs':>8}  first"


def _line(found: Difference) -> str:
    share = f"{found.differ} ({found.differ / found.tokens:.1%})" if found.differ else "0"
    flips = "-" if found.flips is None else found.flips
    first = "-"
    if found.first is not None:
        prompt, sample, token = found.first
        first = f"prompt {prompt}, sample {sample}, token {token}"
    numbers = f"{found.tokens:>7} {share:>16} {flips:>6} {found.largest:>8.2g} {found.ulps:>8.3g}"
    return f"{found.path:<48} {numbers}  {first}"
