"""The engine and the attention kernels on a GPU: run with JAX_PLATFORMS=cuda and `-m gpu`.

Float32 with precision="highest"; a first difference between two runs that should agree must be a near-tie in the
sampling race (docs/architecture.md), and the rate of such differences is printed.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels import attention, reference
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.types import SampleKey, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 2000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
    }
)


def requests(num_prompts: int = 4, group_size: int = 4) -> list[Request]:
    rng = np.random.default_rng(0)
    made = []
    for prompt in range(num_prompts):
        ids = tuple(int(x) for x in rng.integers(1, 2000, rng.integers(5, 60)))
        for sample in range(group_size):
            params = SamplingParams(max_tokens=int(rng.integers(10, 100)))
            made.append(Request(len(made), SampleKey(0, prompt, sample), ids, params, share=prompt))
    return made


def run(executor: MeshExecutor, params, wanted: list[Request]):
    executor.sync_weights(params, 0)
    executor.allocate()
    samples = Engine(executor, BatcherConfig(decode_steps=8)).generate(wanted)
    executor.release(weights=True)
    return samples


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_log_probabilities_are_those_of_a_full_forward_pass(dtype):
    with jax.default_matmul_precision("highest"):
        mesh = make_mesh(jax.devices()[:1])
        params = decoder.init(CONFIG, jax.random.key(0))
        sizes = ExecutorConfig(num_slots=16, num_blocks=161, max_length=160, max_prefill_tokens=64, dtype=dtype)
        wanted = requests()
        samples = run(MeshExecutor(CONFIG, Layout(mesh, 1), sizes), params, wanted)

        @jax.jit
        def full(tokens, segments, positions):
            def attend(q, k, v):
                return reference.packed_attention(q, k, v, segments, positions)

            hidden = decoder.forward_scan(params, tokens, positions, attend, CONFIG, dtype=jnp.float32)
            return jax.nn.log_softmax(decoder.logits(params, hidden, CONFIG))

        worst = 0.0
        for request, sample in zip(wanted, samples, strict=True):
            ids = np.zeros((1, 160), np.int32)
            length = len(request.prompt_ids) + len(sample)
            ids[0, :length] = [*request.prompt_ids, *sample.token_ids]
            logprobs = full(ids, (np.arange(160) < length)[None].astype(np.int32), np.arange(160)[None])
            at = np.arange(len(request.prompt_ids), length)
            expected = np.asarray(logprobs)[0, at - 1, sample.token_ids]
            worst = max(worst, float(np.max(np.abs(expected - sample.rollout_logprobs))))
    print(f"{dtype}: largest difference of a log-probability {worst:.2e}")
    assert worst < (2e-3 if dtype == "float32" else 0.2)


def test_tokens_do_not_depend_on_rows_or_preemption():
    """A small pool preempts, a large one does not: only near-ties may differ."""
    with jax.default_matmul_precision("highest"):
        mesh = make_mesh(jax.devices()[:1])
        params = decoder.init(CONFIG, jax.random.key(0))
        wanted = requests()

        def generate(num_slots: int, num_blocks: int):
            sizes = ExecutorConfig(num_slots=num_slots, num_blocks=num_blocks, max_length=160, max_prefill_tokens=64)
            return run(MeshExecutor(CONFIG, Layout(mesh, 1), sizes), params, wanted)

        one, other = generate(16, 161), generate(4, 14)
    same = [np.array_equal(a.token_ids, b.token_ids) for a, b in zip(one, other, strict=True)]
    tokens = sum(len(sample) for sample in one)
    print(f"responses that differ: {same.count(False)} of {len(same)} ({tokens} tokens)")
    assert same.count(False) <= 1 + tokens // 1000


# ---------------------------------------------------------------- attention kernels

WIDE = {"float32": 2e-5, "bfloat16": 2e-2}  # differences of outputs of size one; see tests/kernels/test_paged_pallas.py


def paged_arrays(rows, queries, heads, kv_heads, dim, size, context, dtype):
    """Rows that stand between half the context and its end; row 0 at position 0."""
    rng = np.random.default_rng(0)
    width, keys = -(-context // size), jax.random.split(jax.random.key(0), 3)
    blocks = rows * width + 1
    q = jax.random.normal(keys[0], (rows, queries, heads, dim), dtype)
    k, v = (jax.random.normal(key, (kv_heads, blocks, size, dim), dtype) for key in keys[1:])
    tables = rng.permutation(np.arange(1, blocks)).reshape(rows, width).astype(np.int32)
    first = rng.integers(context // 2, context - queries + 1, (rows, 1))
    first[0] = 0
    return q, k, v, jnp.asarray(tables), jnp.asarray(first + np.arange(queries), jnp.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "queries", "heads", "kv_heads", "dim", "size"),
    [(1, 1, 12, 2, 128, 16), (64, 1, 28, 4, 128, 16), (8, 33, 28, 4, 128, 32), (4, 256, 9, 3, 64, 16)],
)
def test_paged_kernel_is_the_reference(rows, queries, heads, kv_heads, dim, size, dtype):
    """Also with nan in every block that no row may read."""
    q, k, v, tables, positions = arrays = paged_arrays(rows, queries, heads, kv_heads, dim, size, 1024, dtype)
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(jax.jit(reference.paged_attention)(*arrays), np.float32)
    out = np.asarray(jax.jit(attention.paged_attention)(*arrays), np.float32)
    np.testing.assert_allclose(out, expected, rtol=0, atol=WIDE[dtype])
    last = np.asarray(positions.max(1)) // size
    own = {int(block) for row, entry in zip(np.asarray(tables), last, strict=True) for block in row[: entry + 1]}
    others = np.array([block for block in range(k.shape[1]) if block not in own])
    poisoned = [x.at[:, others].set(jnp.nan) for x in (k, v)]
    again = jax.jit(attention.paged_attention)(q, *poisoned, tables, positions)
    np.testing.assert_array_equal(out, np.asarray(again, np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim"), [(1024, 12, 2, 128), (1000, 9, 3, 64)])
def test_packed_kernels_are_the_reference(tokens, heads, kv_heads, dim, dtype):
    """Row 0: a prompt, two responses that continue it, padding. Row 1: one long sample. Values and gradients."""
    segments, positions, prefixes = np.zeros((3, 2, tokens), np.int32)
    n = tokens // 4
    for i, (segment, start, prefix) in enumerate([(1, 0, 1), (2, n, 1), (3, n, 1)]):
        part = (0, slice(i * n, (i + 1) * n))
        segments[part], positions[part], prefixes[part] = segment, start + np.arange(n), prefix
    segments[1], positions[1], prefixes[1] = 1, np.arange(tokens), 1
    keys = jax.random.split(jax.random.key(0), 4)
    of = zip(keys, (heads, kv_heads, kv_heads, heads), strict=True)
    q, k, v, d_out = (jax.random.normal(key, (2, tokens, h, dim), dtype) for key, h in of)

    def run(implementation, q, k, v, d_out):
        def attend(q, k, v):
            packed = attention.choose_packed(implementation, "gpu", attention.Heads(heads, kv_heads, dim, dtype))
            tiles = packed.tile_pairs(segments, positions, prefixes, dtype)
            return packed.attend(q, k, v, segments, positions, prefixes, tiles)

        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    with jax.default_matmul_precision("highest"):
        expected = jax.jit(run, static_argnums=0)("reference", *(x.astype(jnp.float32) for x in (q, k, v, d_out)))
    for got, want in zip(jax.jit(run, static_argnums=0)("pallas", q, k, v, d_out), expected, strict=True):
        worst = float(jnp.abs(got.astype(jnp.float32) - want).max() / jnp.abs(want).max())
        assert worst < (1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 2), (28, 4)])
@pytest.mark.parametrize(("rows", "context"), [(1, 8192), (16, 1024), (64, 1024), (64, 8192)])
def test_decoding_beats_the_reference(rows, context, heads, kv_heads):
    """Prints bandwidth: bytes of the keys and values that rows may see, over the median time of a call."""
    arrays = paged_arrays(rows, 1, heads, kv_heads, 128, 16, context, "bfloat16")
    arrays = (*arrays[:-1], jnp.full_like(arrays[-1], context - 1))

    def median_s(function) -> float:
        """Of one call, out of 20 that follow each other on the device, so that launching them is not timed."""
        chained = jax.jit(lambda q, *x: jax.lax.fori_loop(0, 20, lambda _, q: function(q, *x), q))
        chained(*arrays).block_until_ready()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            chained(*arrays).block_until_ready()
            times.append((time.perf_counter() - start) / 20)
        return float(np.median(times))

    kernel, plain = median_s(attention.paged_attention), median_s(reference.paged_attention)
    read = 2 * rows * context * kv_heads * 128 * 2
    speed = f"{kernel * 1e6:.0f} µs, {read / kernel / 1e12:.2f} TB/s; jnp {plain * 1e6:.0f} µs"
    print(f"{rows} rows of {context} positions, {heads}/{kv_heads} heads: {speed}")
    assert kernel < plain
