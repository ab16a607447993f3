"""The engine on a mesh against a naive loop: one whole forward pass per token, in float64, log-probabilities in numpy.

A token may depend on what is sampled and on nothing else: not on its row, its batch, chunks of its prompt, preemption,
an abort and a new start, nor on the mesh. In float64 that is exact, so tokens are compared for equality.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorder import Recorder
from replay_executor import ReplayExecutor

from jaxrl.kernels import reference
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.rollout.programs import MAX_STOP_IDS, Generated
from jaxrl.rollout.sampling import SamplingState, request_key, sample
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request, resume
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import train_shardings
from jaxrl.types import Sample, SampleKey, SamplingParams

pytestmark = pytest.mark.usefixtures("x64")

VOCABULARY, MAX_LENGTH = 300, 40
STOPS = (7, 8, 9, 10)
SIZES = ExecutorConfig(
    num_slots=8,
    num_blocks=7,  # 48 positions of rows that may want 40 each: preemption
    block_size=8,
    max_length=MAX_LENGTH,
    max_prefill_tokens=16,
    decode_steps=4,
    dtype=jnp.float64,
    truncate=True,
)

SLOW = pytest.mark.slow
WORLDS = [(1, 1, (8, 4)), (8, 2, (9, 3))]


# ---------------------------------------------------------------- the naive side


@functools.cache
def model_of(heads: tuple[int, int]) -> ModelConfig:
    layers = 2 if heads == (8, 4) else 1  # compiling is what these tests spend their time on
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_layers": layers}
    return ModelConfig("llama", num_heads=heads[0], num_kv_heads=heads[1], tie_word_embeddings=True, **sizes)


@functools.cache
def weights_of(heads: tuple[int, int]) -> Any:
    """Random weights, large enough for distributions that are far from flat."""
    params = jax.jit(lambda key: decoder.init(model_of(heads), key, jnp.float64))(jax.random.key(0))
    return jax.tree.map(lambda x: np.asarray(x) * (5 if x.ndim > 1 else 1), params)


@functools.cache
def naive_step(heads: tuple[int, int]) -> Any:
    model, params = model_of(heads), weights_of(heads)

    @jax.jit
    def step(tokens: jax.Array, counts: jax.Array, state: SamplingState) -> tuple[jax.Array, jax.Array]:
        """Of rows that have nothing to do with each other: (logits behind their first tokens, the tokens drawn)."""
        positions = jnp.broadcast_to(jnp.arange(MAX_LENGTH), tokens.shape)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return reference.packed_attention(q, k, v, jnp.ones_like(tokens), positions)

        hidden = decoder.forward_scan(params, tokens, positions, attend, model, dtype=jnp.float64)
        logits = decoder.logits(params, hidden[jnp.arange(len(tokens)), counts - 1], model)
        return logits, sample(logits, counts, state, truncate=True).token

    return step


Naive = tuple[list[int], list[float], list[float]]
NAIVE: dict[tuple, Naive] = {}
MOST_ROWS = 36


def naive(heads: tuple[int, int], asked: Sequence[Request]) -> list[Naive]:
    """(tokens, rollout log-probabilities, sampled log-probabilities) of each response, token by token."""
    of = [(heads, each.prompt_ids, each.params, each.key) for each in asked]
    due = [i for i, key in enumerate(of) if key not in NAIVE]
    if due:
        NAIVE.update(zip((of[i] for i in due), _naive(heads, [asked[i] for i in due]), strict=True))
    return [NAIVE[key] for key in of]


def _naive(heads: tuple[int, int], asked: Sequence[Request]) -> list[Naive]:
    assert len(asked) <= MOST_ROWS
    rows = [*asked, *asked[:1] * (MOST_ROWS - len(asked))]  # one shape for all
    state = SamplingState(
        np.stack([request_key(0, each.key) for each in rows]),
        np.array([each.params.temperature for each in rows], np.float32),
        np.array([each.params.top_k for each in rows], np.int32),
        np.array([each.params.top_p for each in rows], np.float32),
        np.array([each.params.min_p for each in rows], np.float32),
    )
    tokens, counts = np.zeros((MOST_ROWS, MAX_LENGTH), np.int32), np.array([len(each.prompt_ids) for each in rows])
    for row, each in zip(tokens, rows, strict=True):
        row[: len(each.prompt_ids)] = each.prompt_ids
    found: list[Naive] = [([], [], []) for _ in asked]
    live, ended = [*range(len(asked))], set[int]()
    while live:
        logits, drawn = map(np.asarray, naive_step(heads)(tokens, counts, state))
        for i in live:
            token, (before, after) = int(drawn[i]), distributions(logits[i], asked[i].params)
            for values, value in zip(found[i], (token, float(before[token]), float(after[token])), strict=True):
                values.append(value)  # pyright: ignore[reportArgumentType]
            tokens[i, counts[i]] = token
            counts[i] += 1
            params, tokens_of = asked[i].params, found[i][0]
            if len(tokens_of) == params.max_tokens or token in params.stop_token_ids:
                ended.add(i)
        live = [i for i in live if i not in ended]
    return found


def distributions(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities before and after truncation, written from their definitions."""
    greedy = params.temperature == 0
    scaled = logits / (1.0 if greedy else np.float64(np.float32(params.temperature)))
    before = scaled - scaled.max()
    before -= np.log(np.exp(before).sum())
    if greedy:
        return before, np.where(np.arange(len(logits)) == np.argmax(logits), 0.0, -np.inf)
    order = np.argsort(-before)
    probabilities = np.exp(before)
    kept = np.zeros(len(logits), bool)
    ranked = order[: params.top_k] if params.top_k > 0 else order
    mass, total = 0.0, probabilities[ranked].sum()
    for token in ranked:
        if params.top_p < 1 and mass >= np.float64(np.float32(params.top_p)) * total:
            break
        kept[token] = True
        mass += probabilities[token]
    kept &= probabilities >= np.float64(np.float32(params.min_p)) * probabilities.max()
    return before, np.where(kept, before - np.log(probabilities[kept].sum()), -np.inf)


# ---------------------------------------------------------------- the engine's side


@functools.cache
def executor_of(num_devices: int, tp: int, heads: tuple[int, int], **options: Any) -> MeshExecutor:
    mesh = make_mesh(jax.devices()[:num_devices])
    return MeshExecutor(model_of(heads), Layout(mesh, tp), replace(SIZES, max_tp=tp, **options))


def start(num_devices: int, tp: int, heads: tuple[int, int], **options: Any) -> tuple[Engine, Recorder]:
    executor = executor_of(num_devices, tp, heads, **options)
    executor.sync_weights(placed(executor, weights_of(heads)), 0)
    executor.allocate()
    recorder = Recorder(executor)
    return Engine(recorder, BatcherConfig(decode_steps=SIZES.decode_steps)), recorder


def placed(executor: MeshExecutor, params: Any) -> Any:
    return jax.device_put(params, train_shardings(executor.model, executor.layout.mesh))


def requests(num_prompts: int = 6, n: int = 3) -> list[Request]:
    """Groups with prompts of 2 to 23 tokens (a plan prefills 16), every kind of sampling, limits of 1 to 16 tokens."""
    rng = np.random.default_rng(0)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8, "temperature": 1.3},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ]
    made: list[Request] = []
    for p in range(num_prompts):
        prompt = tuple(rng.integers(1, VOCABULARY, (23, 3, 17, 9, 2, 16)[p % 6]).tolist())
        for s in range(n):
            limit = int(rng.integers(1, 17)) if s else 16
            params = SamplingParams(max_tokens=limit, stop_token_ids=STOPS, **kinds[len(made) % len(kinds)])
            made.append(Request(len(made), SampleKey(0, p, s), prompt, params, share=p))
    return made


def check(heads: tuple[int, int], asked: Sequence[Request], samples: Sequence[Sample]) -> None:
    for request, one, expected in zip(asked, samples, naive(heads, asked), strict=True):
        tokens, rollout, sampled = expected
        assert one.token_ids.tolist() == tokens, request
        np.testing.assert_allclose(one.rollout_logprobs, rollout, rtol=0, atol=1e-5)
        np.testing.assert_allclose(one.sampled_logprobs, sampled, rtol=0, atol=1e-5)
        assert one.finish_reason == ("stop" if tokens[-1] in STOPS else "length")


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize(("num_devices", "tp", "heads"), [*WORLDS, pytest.param(4, 4, (14, 2), marks=SLOW)])
def test_tokens_and_logprobs_are_those_of_the_naive_loop(num_devices: int, tp: int, heads: tuple[int, int]):
    engine, recorder = start(num_devices, tp, heads)
    asked = requests(6 * max(1, num_devices // tp // 2))
    samples = engine.generate(asked)
    check(heads, asked, samples)
    for request, (_, rollout, sampled) in zip(asked, naive(heads, asked), strict=True):
        np.testing.assert_allclose(recorder.logprobs(request.request_id, 0), rollout, rtol=0, atol=1e-9)
        np.testing.assert_allclose(recorder.logprobs(request.request_id, 1), sampled, rtol=0, atol=1e-9)
    assert engine.counters.preemptions > 0, "the pool was to be too small"
    assert engine.counters.shared_tokens > 0, "samples of a prompt were to share its blocks"
    assert len({len(one) for one in samples}) > 4, "lengths were to be mixed"
    assert {one.finish_reason for one in samples} == {"stop", "length"}


def test_the_form_of_the_programs_on_other_devices_draws_the_same_tokens():
    """The other tests run what a CPU runs: features first, decode over gathered windows."""
    heads = (14, 2)
    engine, recorder = start(4, 4, heads, features_first=False, fused_projections=False, gathered=False)
    programs = recorder.inner._now.programs
    assert (programs.features_first, programs.fused_projections) == (False, False)
    asked = requests()
    samples = engine.generate(asked)
    check(heads, asked, samples)
    assert engine.counters.preemptions > 0, "the pool was to be too small"


def test_an_abort_and_a_new_start_change_no_token():
    num_devices, tp, heads = WORLDS[1]
    engine, _ = start(num_devices, tp, heads)
    asked = requests()
    finished: dict[SampleKey, Sample] = {}
    for request in asked:
        engine.add(request)
    while engine.counters.plans < 5 or not any(engine.batcher.progress(i).tokens for i in engine.unfinished()[::2]):
        finished |= {one.sample.key: one.sample for one in [*engine.step(), *engine.step(), *engine.drain()]}
    by_id = {request.request_id: request for request in asked}
    some = engine.unfinished()[::2]
    kept = engine.abort(some)
    assert any(len(one) for one in kept), "some were to have tokens"
    for request_id, one in zip(some, kept, strict=True):
        engine.add(replace(resume(by_id[request_id], one), request_id=1000 + request_id))
    while not engine.is_idle:
        finished |= {one.sample.key: one.sample for one in engine.step()}
    check(heads, asked, [finished[request.key] for request in asked])


def test_every_token_carries_the_version_of_its_weights():
    num_devices, tp, heads = WORLDS[0]
    engine, recorder = start(num_devices, tp, heads)
    asked = requests()
    for request in asked:
        engine.add(request)
    finished: dict[SampleKey, Sample] = {}
    for _ in range(3):
        finished |= {one.sample.key: one.sample for one in engine.step()}
    finished |= {one.sample.key: one.sample for one in engine.drain()}
    before = {
        engine.batcher.progress(i).request.key: len(engine.batcher.progress(i).tokens) for i in engine.unfinished()
    }
    before |= {key: len(one) for key, one in finished.items()}
    recorder.inner.sync_weights(placed(recorder.inner, weights_of(heads)), 1)  # equal weights: equal tokens
    while not engine.is_idle:
        finished |= {one.sample.key: one.sample for one in engine.step()}
    check(heads, asked, [finished[request.key] for request in asked])
    for key, one in finished.items():
        assert one.versions.tolist() == [0] * before[key] + [1] * (len(one) - before[key])
    assert any(len(set(one.versions.tolist())) == 2 for one in finished.values())


def test_weights_that_change_change_the_tokens():
    heads = (8, 4)
    engine, recorder = start(1, 1, heads)
    asked = [replace(r, params=replace(r.params, temperature=0.0)) for r in requests(3, 1)]
    first = engine.generate(asked)
    other = jax.tree.map(lambda x: -x if x.ndim > 1 else x, weights_of(heads))
    recorder.inner.sync_weights(placed(recorder.inner, other), 1)
    second = engine.generate(asked)
    assert [one.token_ids.tolist() for one in first] != [one.token_ids.tolist() for one in second]
    recorder.inner.sync_weights(placed(recorder.inner, weights_of(heads)), 2)
    check(heads, asked, engine.generate(asked))


def test_nothing_is_compiled_after_warm_up():
    engine, recorder = start(1, 1, (8, 4))
    executor = recorder.inner
    assert executor.warm_up() == len(executor.shapes())
    engine.generate(requests())
    assert executor.recompiles == 0
    for shape in executor.shapes():
        if shape[0] == "decode":
            executor._now._compiled.pop(shape)
    engine.generate(requests(1, 1))
    assert executor.recompiles > 0


def test_memory_phases():
    heads = (8, 4)
    engine, recorder = start(1, 1, heads)
    executor, asked = recorder.inner, requests(2, 2)
    check(heads, asked, engine.generate(asked))
    arrays = jax.tree.leaves((executor._pool, executor._state))
    executor.release(weights=True)
    assert all(array.is_deleted() for array in arrays)
    engine.add(asked[0])
    with pytest.raises(RuntimeError, match="no weights or no KV pool"):
        engine.step()
    engine, recorder = start(1, 1, heads)  # the same executor, with weights and pool anew
    assert recorder.inner is executor
    check(heads, asked, engine.generate(asked))


def test_requests_that_cannot_run_are_refused_before_they_wait():
    executor = MeshExecutor(model_of((8, 4)), Layout(make_mesh(jax.devices()[:1]), 1), replace(SIZES, truncate=False))
    engine = Engine(executor, BatcherConfig(decode_steps=4))
    request = requests()[1]

    def refused(words: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=words):
            engine.add(replace(request, params=replace(request.params, **changes)))
        assert engine.is_idle

    refused("need an engine built with truncate=True", top_p=0.5)
    refused(f"has {MAX_STOP_IDS + 1} ids; a row holds {MAX_STOP_IDS}", stop_token_ids=tuple(range(MAX_STOP_IDS + 1)))
    refused(r"must be at most max_length \(40\)", max_tokens=30)
    engine.add(request)


class _Value:
    """Stands for a device array that is never read."""

    def copy_to_host_async(self) -> None: ...


@pytest.mark.parametrize(
    ("groups", "tp", "sizes"),
    [
        (4, 2, {"num_slots": 5, "num_blocks": 23, "block_size": 4, "max_length": 70, "max_prefill_tokens": 24}),
        (1, 1, {"num_slots": 32, "num_blocks": 200, "block_size": 16, "max_length": 384, "max_prefill_tokens": 512}),
    ],
)
def test_no_plan_needs_a_shape_that_warm_up_leaves_out(groups: int, tp: int, sizes: dict[str, int]):
    """Real plans, with fillers for tokens: only the shapes of the programs are looked at, nothing is compiled."""
    layout = Layout(make_mesh(jax.devices()[: groups * tp]), tp)
    mesh = MeshExecutor(model_of((8, 4)), layout, ExecutorConfig(**sizes, decode_steps=8, max_tp=tp))
    asked_for: set[tuple] = set()

    def record(kind: str, rows: int, length: int, width: int) -> Any:
        asked_for.add((kind, rows, length, width))
        generated = Generated(*[_Value()] * 5)
        return lambda *_: (1, 1, generated, 1) if kind == "decode" else (1, 1, generated)

    mesh._now.program = lambda shape: record(*shape)  # pyright: ignore[reportAttributeAccessIssue]
    mesh._params = mesh._pool = mesh._state = 1  # pyright: ignore[reportAttributeAccessIssue]
    rng = np.random.default_rng(3)
    asked: list[Request] = []
    for p in range(40):
        prompt = tuple(rng.integers(1, 99, rng.integers(1, sizes["max_length"] * 3 // 4)).tolist())
        room = sizes["max_length"] - len(prompt)
        asked += [
            Request(len(asked) + i, SampleKey(0, p, i), prompt, SamplingParams(max_tokens=room), share=p)
            for i in range(4)
        ]
    lengths = {request.key: int(rng.integers(1, request.params.max_tokens + 1)) for request in asked}

    class Both(ReplayExecutor):
        def submit(self, plan: Any) -> Any:
            mesh.submit(plan)
            return super().submit(plan)

    replay = Both(
        lengths, groups, sizes["num_slots"], sizes["num_blocks"], sizes["block_size"], sizes["max_prefill_tokens"]
    )
    engine = Engine(replay, BatcherConfig(decode_steps=8, max_model_len=sizes["max_length"]))
    engine.generate(asked)
    assert asked_for <= set(mesh.shapes())
    assert {"prefill", "decode"} == {kind for kind, *_ in asked_for}
