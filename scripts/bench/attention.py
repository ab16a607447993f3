"""Attention alone, at a model's heads: paged (a decode step's) and packed (a training row's, both passes).

    python scripts/bench.py attention [--shape Qwen2.5-1.5B] [--rows 64] [--contexts 1024 8192] [--dtypes bfloat16]
    python scripts/bench.py attention --what packed --packed 16x1024 1x8192 [--segments 1] [--json]

Paged: one query a row over `context` cached positions in scattered blocks of 16, several pools in turn, so that no
cache holds the keys. Cases: `jaxrl`, what a decode step on a GPU runs (`kernels/decode_pallas.py`), rotary embedding
and the writes of new keys and values included; and attention alone: `paged`, our kernel for any number of queries
(`kernels/paged_pallas.py`); `jnp`, the reference; `jax-N`, JAX's own kernel
(`jax.experimental.pallas.ops.gpu.paged_attention`) with N parts of a context.

Packed: causal rows of `tokens` tokens in `--segments` samples. Cases: `pallas`, our kernels; `tiles`, jnp in tiles;
`cudnn`, `jax.nn.dot_product_attention` by cuDNN, for one sample a row (`xla`, the same by XLA, where there is no GPU).

- forward_s, seconds: of the forward pass, and of forward and backward together.
- FLOP/s: 4 * heads * head_dim per pair of tokens that see each other, 3.5 times that for both passes, whatever is
  computed again; over measured products of that dtype.

A case that does not run here, or not in this dtype or memory, is left out with a word. Kernels are made for GPUs: on
other devices they take part with --quick only, interpreted, which tries this benchmark and measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.engines import BLOCK
from bench.harness import Bench, Case, LeftOut, Values, model_of
from bench.machine import queued_s, random_array
from jaxrl.kernels import packed, reference
from jaxrl.kernels.attention import PackedAttention
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import rope_tables

SPLITS = (1, 4, 16)
BACKWARD = 2.5
"""Products of the backward pass for each of the forward pass, the scores' second computation included."""


def _check(options: argparse.Namespace) -> None:
    if {*options.what} - {"paged", "packed"}:
        raise ValueError(f"--what ({' '.join(options.what)}) must be paged, packed or both")
    for text in options.packed:
        rows, _, tokens = text.partition("x")
        if not (rows.isdecimal() and tokens.isdecimal() and int(rows) and int(tokens)):
            raise ValueError(f"--packed ({text}) must be rows and tokens, such as 16x1024")
        if int(tokens) % options.segments:
            raise ValueError(
                f"--packed ({text}): {tokens} tokens must be a multiple of --segments ({options.segments})"
            )


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    config = model_of(options).config()
    if options.quick and not options.model:
        config = dataclasses.replace(config, head_dim=16)  # the kernels refuse tiny's
    on_gpu = jax.default_backend() == "gpu"
    for dtype in options.dtypes:
        if "paged" in options.what:
            for context in options.contexts:
                for rows in options.rows:
                    yield Paged(config, rows, context, dtype, on_gpu, options.quick).cases()
        if "packed" in options.what:
            for text in options.packed:
                rows, tokens = map(int, text.split("x"))
                yield Packed(config, rows, tokens, options.segments, dtype, on_gpu, options.quick).cases()


def _lazy(make: Callable[[], Callable[[], Values]]) -> Callable[[int], Values]:
    """A case that is built at its first run, which may leave it out."""
    built = cache(make)
    return lambda turn: built()()


@dataclasses.dataclass(slots=True)
class _Point:
    config: ModelConfig
    rows: int
    dtype: str
    on_gpu: bool
    interpret: bool

    def need_kernels(self) -> None:
        if not (self.on_gpu or self.interpret):
            raise LeftOut("the kernel runs on GPUs alone")


# -- paged -------------------------------------------------------------------------------------------------------------


class Paged(_Point):
    """Several layers' keys and values, [K, N, P, D] each, and the rows that read them."""

    def __init__(self, config: ModelConfig, rows: int, context: int, dtype: str, on_gpu: bool, quick: bool) -> None:
        super().__init__(config, rows, dtype, on_gpu, quick and not on_gpu)
        self.facts = {"what": "paged", "rows": rows, "context": context, "dtype": dtype}
        self.bytes = 2 * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize * rows * context
        self.count, width = 2 if quick else max(2, min(12, (1 << 30) // self.bytes)), -(-context // BLOCK)
        shape = (config.num_kv_heads, rows * width + 1, BLOCK, config.head_dim)
        self.keys, self.values = ([random_array(shape, dtype, 2 * i + j) for i in range(self.count)] for j in (0, 1))
        self.q = random_array((rows, 1, config.num_heads, config.head_dim), dtype, 2 * self.count)
        blocks = np.random.default_rng(0).permutation(rows * width) + 1
        self.tables = jnp.asarray(blocks.reshape(rows, width), jnp.int32)
        self.positions = jnp.full((rows, 1), context - 1, jnp.int32)

    def cases(self) -> list[Case]:
        made: dict[str, Callable[[], Any]] = {"jaxrl": self._decode_step, "paged": self._paged}
        made["jnp"] = lambda: self._of(reference.paged_attention)
        for splits in SPLITS:
            made[f"jax-{splits}"] = lambda splits=splits: self._jax(splits)

        def timed(make: Callable[[], Any]) -> Callable[[], Values]:
            call = make()
            return lambda: {"seconds": queued_s(call) / self.count}

        return [
            Case({"case": name} | self.facts, _lazy(lambda make=make: timed(make)), self._figures)
            for name, make in made.items()
        ]

    def _figures(self, average: Values, ceilings: Any, runs: Any) -> dict:
        return ceilings.of_bytes(self.bytes / average["seconds"])

    def _of(self, one: Callable[..., jax.Array]) -> Callable[[], Any]:
        run = jax.jit(lambda q, ks, vs, t, p: [one(q, k, v, t, p) for k, v in zip(ks, vs, strict=True)])
        return lambda: run(self.q, self.keys, self.values, self.tables, self.positions)

    def _paged(self) -> Callable[[], Any]:
        self.need_kernels()
        from jaxrl.kernels import paged_pallas  # not every JAX has what it is made of

        return self._of(lambda *arrays: paged_pallas.paged_attention(*arrays, interpret=self.interpret))

    def _decode_step(self) -> Callable[[], Any]:
        """Attention of one token of every row in each layer, from the layer's product on; the pools are replaced."""
        self.need_kernels()
        from jaxrl.kernels import decode_pallas

        config = self.config
        slab = (config.num_kv_heads, config.num_heads // config.num_kv_heads + 2, config.head_dim)
        qkv = random_array((1, self.rows, *slab), "float32", 1)
        bias = random_array(slab, self.dtype, 2) if config.qkv_bias else None
        ones = jnp.ones((config.head_dim,), self.dtype)
        norms = decode_pallas.HeadNorms(ones, ones) if config.qk_norm else None
        at = self.positions[:, 0]
        how = {"eps": config.rms_norm_eps, "interpret": self.interpret}

        def step(keys: Any, values: Any, qkv: jax.Array, tables: jax.Array, at: jax.Array) -> Any:
            cos, sin = rope_tables(at, config, jnp.float32)
            layers = [
                decode_pallas.decode_attention(qkv, bias, norms, cos, sin, k, v, tables, at, **how)
                for k, v in zip(keys, values, strict=True)
            ]
            return [[layer[i] for layer in layers] for i in range(3)]

        run = jax.jit(step, donate_argnums=(0, 1))

        def call() -> Any:
            outs, self.keys, self.values = run(self.keys, self.values, qkv, self.tables, at)
            return outs

        return call

    def _jax(self, splits: int) -> Callable[[], Any]:
        """JAX's kernel, whose splits must divide the table, and whose steps take up to eight blocks."""
        self.need_kernels()
        width = self.tables.shape[1]
        if width % splits:
            raise LeftOut(f"{width} blocks are no multiple of {splits}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
        step = next(blocks for blocks in (8, 4, 2, 1) if width // splits % blocks == 0)
        how = {"pages_per_compute_block": step, "k_splits": splits, "interpret": self.interpret}
        scale = self.config.head_dim**-0.5
        return self._of(lambda q, k, v, t, p: paged_attention(q[:, 0] * scale, k, v, t, p[:, 0] + 1, **how)[:, None])


# -- packed ------------------------------------------------------------------------------------------------------------


class Packed(_Point):
    """Rows of equal samples."""

    def __init__(
        self, config: ModelConfig, rows: int, tokens: int, segments: int, dtype: str, on_gpu: bool, quick: bool
    ) -> None:
        super().__init__(config, rows, dtype, on_gpu, quick and not on_gpu)
        self.facts = {"what": "packed", "rows": rows, "tokens": tokens, "segments": segments, "dtype": dtype}
        each = tokens // segments
        self.flops = 4 * config.num_heads * config.head_dim * rows * segments * each * each / 2
        ids = jnp.asarray(np.tile(np.arange(tokens) // each + 1, (rows, 1)), jnp.int32)
        positions = jnp.asarray(np.tile(np.arange(tokens) % each, (rows, 1)), jnp.int32)
        self.mask = reference.MaskInputs(ids, positions, ids)
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads, config.num_heads)
        self.arrays = [random_array((rows, tokens, h, config.head_dim), dtype, i) for i, h in enumerate(heads)]

    def cases(self) -> list[Case]:
        rival = "cudnn" if self.on_gpu else "xla"
        made: dict[str, Callable[[], Any]] = {
            "pallas": lambda: self._ours("pallas"),
            "tiles": lambda: self._ours("tiles"),
        }
        made[rival] = lambda: self._rival(rival)
        return [
            Case({"case": name} | self.facts, _lazy(lambda make=make: self._timed(make())), self._figures)
            for name, make in made.items()
        ]

    def _figures(self, average: Values, ceilings: Any, runs: Any) -> dict:
        rate = (1 + BACKWARD) * self.flops / average["seconds"]
        found = {"forward_flops_per_s": self.flops / average["forward_s"], "flops_per_s": rate}
        return found | {"flops_fraction": rate / ceilings.products(self.dtype)}

    def _timed(self, attend: Callable[..., jax.Array]) -> Callable[[], Values]:
        def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
            out, pull = jax.vjp(attend, q, k, v)
            return out, pull(d_out)

        forward, whole = jax.jit(attend), jax.jit(both)
        return lambda: {
            "forward_s": queued_s(lambda: forward(*self.arrays[:3])),
            "seconds": queued_s(lambda: whole(*self.arrays)),
        }

    def _ours(self, implementation: Any) -> Callable[..., jax.Array]:
        """An implementation of `actor.attention`. What layers share is worked out beforehand."""
        if implementation == "pallas":
            self.need_kernels()
        chosen = PackedAttention(implementation, packed.tiling(jax.default_backend()), self.interpret)
        tiles = chosen.tile_pairs(self.mask, jnp.dtype(self.dtype))
        return lambda q, k, v: chosen.attend(q, k, v, self.mask, tiles)

    def _rival(self, name: Any) -> Callable[..., jax.Array]:
        if self.facts["segments"] > 1:
            raise LeftOut("it takes one sample a row")
        if name == "cudnn" and self.dtype == "float32":
            raise LeftOut("cuDNN's kernels take 16 bits")
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=name)


OPTIONS = {
    "what": (["paged", "packed"], "which attention"),
    "rows": ([64], "paged: rows"),
    "contexts": ([1024, 8192], "paged: tokens of a row"),
    "packed": (["16x1024", "1x8192"], "packed: rows x tokens"),
    "segments": (1, "packed: samples of a row"),
}
QUICK = {"rows": [2], "contexts": [64], "packed": ["1x64"]}
BENCH = Bench(__doc__, cases, OPTIONS, QUICK, has_ceilings=True, check=_check)
