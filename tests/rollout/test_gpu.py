"""The engine on a GPU: run with JAX_PLATFORMS=cuda and `-m gpu`.

Float32 as the programs make it, in full precision; a first difference between two runs that should agree must be a
near-tie in the sampling race (docs/architecture.md), and the rate of such differences is printed. Two runs of the same
programs must agree bit for bit.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_gpu import DEPRECATED, INTERPRET, LLAMA, LONGEST, MODELS, executor, sized, weights

from jaxrl.config import from_mapping
from jaxrl.kernels import reference
from jaxrl.mechanisms.speculation.index import DraftIndex
from jaxrl.mechanisms.speculation.proposer import Drafting
from jaxrl.mechanisms.speculation.rule import DraftConfig, DraftRule
from jaxrl.models import decoder
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.narrow_weights import inputs, narrowed
from jaxrl.training.programs import TrainPrograms
from jaxrl.training.trainer import MeshTrainer
from jaxrl.types import Prompt, SampleKey, SamplingParams, TrainBatch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings(DEPRECATED)]
LIMITS = {"float32": (1e-4, 1e-5), "bfloat16": (0.2, 0.02)}  # of a log-probability's error: worst, mean


def requests(num_prompts: int = sized(4, 2), group_size: int = sized(4, 2)) -> list[Request]:
    rng = np.random.default_rng(0)
    made = []
    for prompt in range(num_prompts):
        ids = tuple(int(x) for x in rng.integers(1, LLAMA.vocab_size, rng.integers(5, 60)))
        for sample in range(group_size):
            params = SamplingParams(max_tokens=int(rng.integers(10, sized(100, 24))))
            made.append(Request(len(made), SampleKey(0, prompt, sample), ids, params, share=prompt))
    return made


def generate(model, params, dtype, slots=16, blocks=161, attention="auto", **codes):
    made = executor(model, slots, blocks, dtype, attention, **codes)
    made.sync_weights(params, 0)
    made.allocate()
    samples = Engine(made, BatcherConfig(decode_steps=8)).generate(requests())
    made.release(weights=True)
    return samples


def draft(model, params, dtype, drawn, changed=0.1, slots=16, blocks=161, attention="auto"):
    """The same requests again, with the responses of before as their histories, a share of the tokens changed."""
    rng, drafting = np.random.default_rng(3), Drafting(1, LONGEST, 4 * slots)
    made = executor(model, slots, blocks, dtype, attention, drafting)
    made.sync_weights(params, 0)
    made.allocate()
    asked = []
    for request, sample in zip(requests(), drawn, strict=True):
        other = rng.integers(0, model.vocab_size, len(sample))
        text = np.where(rng.random(len(sample)) < changed, other, sample.token_ids)
        asked.append(dataclasses.replace(request, history=DraftIndex.build([text], [1.0])))
    rule = partial(DraftRule, DraftConfig(drafting.window, drafting.verify_tokens))
    engine = Engine(made, BatcherConfig(decode_steps=8, verify_rule=rule))
    samples = engine.generate(asked)
    made.release(weights=True)
    return samples, engine.counters


def full_logprobs(model, params, samples):
    """Of every drawn token, by a forward pass over the whole sequence in float32."""

    @jax.jit
    def full(tokens, segments, positions):
        def attend(q, k, v):
            return reference.packed_attention(q, k, v, reference.MaskInputs(segments, positions, segments))

        hidden = decoder.forward_scan(params, tokens, positions, attend, model, dtype=jnp.float32)
        return jax.nn.log_softmax(decoder.logits(params, hidden, model))

    for request, sample in zip(requests(), samples, strict=True):
        ids, length = np.zeros((1, LONGEST), np.int32), len(request.prompt_ids) + len(sample)
        ids[0, :length] = [*request.prompt_ids, *sample.token_ids]
        at = np.arange(LONGEST)[None]
        logprobs = full(ids, (at < length).astype(np.int32), at)
        drawn = np.arange(len(request.prompt_ids), length)
        yield np.asarray(logprobs)[0, drawn - 1, sample.token_ids]


def unlike(some, others):
    """Responses that differ, and a word about it; near-ties may: one in a thousand tokens, and one."""
    differ = sum(not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(some, others, strict=True))
    tokens = sum(len(sample) for sample in some)
    print(f"responses that differ: {differ} of {len(some)} ({tokens} tokens)")
    return differ - 1 - tokens // 1000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_engine_log_probabilities_are_those_of_a_full_forward_pass(name, dtype):
    model, (worst, mean) = MODELS[name], LIMITS[dtype]
    params = weights(model)
    samples = generate(model, params, dtype)
    rounded = jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), params)
    with jax.default_matmul_precision("highest"):
        expected = full_logprobs(model, rounded, samples)
        off = np.concatenate([np.abs(a - b.rollout_logprobs) for a, b in zip(expected, samples, strict=True)])
    print(f"{name} {dtype}: differences of log-probabilities: worst {off.max():.2e}, mean {off.mean():.2e}")
    assert off.max() < worst
    assert off.mean() < mean


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_codes_of_weights_and_of_keys_and_values(kind):
    """Of weights: the numbers that codes stand for. Of keys and values as well: no more than so few bits change."""

    def coded(weight, array):
        if not (axes := inputs(weight)):
            return array
        each = [narrowed(kind, layer, axes) for layer in array]
        return jnp.stack([codes.astype(jnp.float32) * jnp.expand_dims(scales, axes) for codes, scales in each])

    params, table = weights(LLAMA), LLAMA.weights()["layers"]
    whole = params | {"layers": {name: coded(table[name], array) for name, array in params["layers"].items()}}
    for more, (worst, mean) in (({}, LIMITS["float32"]), ({"kv_codes": kind}, (0.05, 0.01))):
        samples = generate(LLAMA, params, "float32", quantization=kind, **more)
        with jax.default_matmul_precision("highest"):
            expected = full_logprobs(LLAMA, whole, samples)
            off = np.concatenate([np.abs(a - b.rollout_logprobs) for a, b in zip(expected, samples, strict=True)])
        print(f"{kind} {more}: differences of log-probabilities: worst {off.max():.2e}, mean {off.mean():.2e}")
        assert off.max() < worst
        assert (1e-4 if more else 0) < off.mean() < mean


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_run_draws_the_same_bits(dtype):
    params = weights(LLAMA)
    one, other = (generate(LLAMA, params, dtype) for _ in range(2))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.rollout_logprobs, b.rollout_logprobs)


def test_tokens_do_not_depend_on_rows_or_preemption():
    """A small pool preempts, a large one does not: only near-ties may differ."""
    params = weights(LLAMA)
    one, other = generate(LLAMA, params, "float32"), generate(LLAMA, params, "float32", slots=4, blocks=14)
    assert unlike(one, other) <= 0


@pytest.mark.parametrize("name", MODELS)
def test_drafts_change_no_token(name):
    """Several queries a row in the kernels of a verify step, one in those of a decode step: only near-ties differ."""
    params = weights(MODELS[name])
    plain = generate(MODELS[name], params, "float32")
    drawn, counters = draft(MODELS[name], params, "float32", plain)
    assert unlike(plain, drawn) <= 0
    for a, b in zip(plain, drawn, strict=True):
        if np.array_equal(a.token_ids, b.token_ids):
            np.testing.assert_allclose(a.rollout_logprobs, b.rollout_logprobs, rtol=0, atol=2e-4)
    steps = sum(len(sample) - 1 for sample in drawn)
    print(f"{steps} tokens in {counters.busy_row_steps} row-steps, {counters.accepted_tokens} drafted and accepted")
    assert counters.accepted_tokens == steps - counters.busy_row_steps > steps / 4


def test_rollout_and_trainer_share_a_device():
    """Generate, train, and generate again with the new weights: each time the trainer, which has its own form of the
    weights, finds the log-probabilities that the rollout recorded. The pool is given back between."""
    config = from_mapping(
        {
            "model": {"path": "unused"},
            "data": {"max_prompt_length": 60, "max_response_length": 100},
            "actor": {
                "dtype": "float32",
                "attention": "pallas",
                "old_logprobs": "rollout",
                "ppo_max_token_len_per_gpu": 512,
                "optim": {"lr": 1e-2},
            },
        }
    )
    rollout, wanted = executor(LLAMA, 16, 161, "float32"), requests()
    prompts = [Prompt(0, request.key.prompt_index, request.prompt_ids, "", "test") for request in wanted]
    with jax.default_matmul_precision("highest"):
        programs = TrainPrograms(config, LLAMA, make_mesh(jax.devices()[:1]), interpret=INTERPRET)
        trainer = MeshTrainer(programs, weights(LLAMA))
        drawn = []
        for version in range(2):
            rollout.sync_weights(trainer.params, version)
            rollout.allocate()
            drawn.append(Engine(rollout, BatcherConfig(decode_steps=8)).generate(wanted))
            rollout.release(weights=True)
            signs = [np.full(len(sample), (-1.0) ** i, np.float32) for i, sample in enumerate(drawn[-1])]
            batch = TrainBatch(prompts, drawn[-1], signs)
            for found, sample in zip(trainer.token_logprobs(batch), drawn[-1], strict=True):
                np.testing.assert_allclose(found, sample.rollout_logprobs, rtol=0, atol=2e-4)
            trainer.accumulate(batch)
            trainer.apply()
    assert any(not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(*drawn, strict=True))
