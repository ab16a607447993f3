#!/usr/bin/env python3
"""Attention alone, at a model's heads: paged (a decode step's) and packed (a training row's, both passes).

    python scripts/bench_attention.py [--shape Qwen2.5-1.5B] [--rows 64] [--contexts 1024 8192] [--dtypes bfloat16]
    python scripts/bench_attention.py --what packed --packed 16x1024 1x8192 [--segments 1] [--json]
    python scripts/bench_attention.py --what packed --tiles 128x64x8x3 64x64x4x3    # which tiles are the fastest?

Paged: one query a row over `context` cached positions in scattered blocks of 16, several pools in turn, so that no
cache holds the keys. Cases: `jaxrl`, what a decode step on a GPU runs (`kernels/decode_pallas.py`), rotary embedding
and the writes of new keys and values included; and attention alone: `paged`, our kernel for any number of queries
(`kernels/paged_pallas.py`); `mosaic`, the same on Mosaic GPU; `jnp`, the reference; `jax-N`, JAX's own kernel
(`jax.experimental.pallas.ops.gpu.paged_attention`) with N parts of a context.

- of copy: bytes of keys and values / seconds / measured copy.

Packed: causal rows of `tokens` tokens in `--segments` samples. Cases: `pallas`, our kernels; `tiles`, jnp in tiles;
`cudnn`, `jax.nn.dot_product_attention` by cuDNN, for one sample a row (`xla`, the same by XLA, where there is no GPU).
With `--tiles` our kernels alone, and again with Q queries and K keys in a tile, W warps and S stages in one of the
three: `forward-QxKxWxS`, `queries-QxKxWxS` (its gradients of queries), `keys-QxKxWxS` (of keys and values).

- forward, both: seconds of the forward pass, and of forward and backward together.
- FLOP/s: 4 * heads * head_dim per pair of tokens that see each other, 3.5 times that for both passes, whatever is
  computed again; of products: over measured products of that dtype.

A case that does not run here, or not in this dtype or memory, is left out with a word. Kernels are made for GPUs: on
other devices they take part with --quick only, interpreted, which tries this benchmark and measures nothing.
Data are random, calls are queued and waited for once.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench import records
from bench.ceilings import Ceilings, measure_ceilings, queued_s, random_array
from bench.frame import Benchmark, Record, Session
from bench.measure import DISTURBED, Bench, Summary, Values, say

from jaxrl.kernels import packed, reference
from jaxrl.kernels.attention import PackedAttention
from jaxrl.kernels.packed_pallas import PackedTileSizes, choose_tiles, packed_attention, tile_lists
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import rope_tables

BLOCK = 16
QUICK = {"rows": [2], "contexts": [64], "packed": ["1x64"], "repetitions": 2, "dtypes": ["float32"]}
ENOUGH_BYTES = 1 << 30
SPLITS = (1, 4, 16)
BACKWARD = 2.5
"""Products of the backward pass for each of the forward pass, the scores' second computation included."""


class LeftOut(Exception):
    """A case cannot run here; says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where and how cases run.

    Attributes:
      config: the model's heads.
      on_gpu: whether the devices are GPUs.
      interpret: run kernels as plain JAX.
    """

    config: ModelConfig
    on_gpu: bool
    interpret: bool

    def need_kernels(self) -> None:
        """Raises `LeftOut` where no Pallas kernel for GPUs can run."""
        if not (self.on_gpu or self.interpret):
            raise LeftOut("the kernel runs on GPUs alone")


def _options(made: argparse.ArgumentParser) -> None:
    both = ["paged", "packed"]
    made.add_argument("--what", nargs="+", choices=both, default=both, help="which attention (both)")
    made.add_argument("--rows", type=int, nargs="+", default=[64], help="paged: rows (64)")
    made.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192], help="paged: tokens of a row (1k, 8k)")
    made.add_argument(
        "--packed", nargs="+", default=["16x1024", "1x8192"], metavar="ROWSxTOKENS", help="(16x1024 1x8192)"
    )
    made.add_argument("--segments", type=int, default=1, help="packed: samples of a row (1)")
    made.add_argument("--tiles", nargs="+", default=[], metavar="QxKxWxS", help="packed: our kernels with these tiles")


def _check(options: argparse.Namespace) -> None:
    options.packed = [_size(text, options.segments) for text in options.packed]
    options.tiles = [_tile_sizes(text) for text in options.tiles]


def _size(text: str, segments: int) -> tuple[int, int]:
    """(rows, tokens) of "16x1024"."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--packed ({text}) must be rows and tokens, such as 16x1024")
    rows, tokens = map(int, parts)
    if tokens % segments:
        raise ValueError(f"--packed ({text}): {tokens} tokens must be a multiple of --segments ({segments})")
    return rows, tokens


def _tile_sizes(text: str) -> PackedTileSizes:
    parts = text.split("x")
    if len(parts) != 4 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--tiles ({text}) must be queries, keys, warps and stages, such as 128x64x8x3")
    return PackedTileSizes(*map(int, parts))


def _measure(options: argparse.Namespace, session: Session) -> Record:
    model = records.model_of(options)
    devices = records.prepare_devices(options.devices)
    on_gpu = devices[0].platform == "gpu"
    config = model.config()
    if options.quick and not options.model:
        config = dataclasses.replace(config, head_dim=16)  # the kernels refuse tiny's
    place = Place(config, on_gpu, options.quick and not on_gpu)
    sizes: dict[str, dict[str, Any]] = {}
    left_out: list[dict[str, Any]] = []
    with session.on(records.describe_devices(devices), partial(measure_ceilings, 1, options.quick)):
        for dtype in options.dtypes:
            for point in _points(options):
                _point(session.bench, place, point | {"dtype": dtype}, options, sizes, left_out)
    cases = _cases(place, session.summaries(), sizes, session.ceilings)
    results = {"cases": cases, "ratios": _ratios(cases), "left_out": left_out}
    return session.record(results, model=model.name, devices=len(devices))


def _points(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if "paged" in options.what:
        for context in options.contexts:
            for rows in options.rows:
                yield {"what": "paged", "rows": rows, "context": context}
    if "packed" in options.what:
        for rows, tokens in options.packed:
            yield {"what": "packed", "rows": rows, "tokens": tokens, "segments": options.segments}


def _point(
    bench: Bench,
    place: Place,
    point: dict[str, Any],
    options: argparse.Namespace,
    sizes: dict[str, dict[str, Any]],
    left_out: list[dict[str, Any]],
) -> None:
    """Measures all cases of a point in turns; what cannot run is added to `left_out`."""
    if point["what"] == "paged":
        makers = paged_cases(place, point, QUICK_POOLS if options.quick else None)
    else:
        makers = packed_cases(place, point, options.tiles)
    where = " ".join(str(value) for value in point.values())
    cases: dict[str, Callable[[], Values]] = {}
    for name, make in makers.items():
        try:
            case = make()
            case()  # compiles
        except LeftOut as reason:
            say(f"{where}: {name} is left out: {reason}")
            left_out.append(point | {"case": name, "reason": str(reason)})
        except jax.errors.JaxRuntimeError as error:
            asked = name.startswith(KERNELS)  # tiles may need more of the device than it has
            if "RESOURCE_EXHAUSTED" not in str(error) and not asked:
                raise
            reason = str(error).splitlines()[0] if asked else "out of memory"
            say(f"{where}: {name} is left out: {reason}")
            left_out.append(point | {"case": name, "reason": reason})
        else:
            cases[f"{where} {name}"] = case
            sizes[f"{where} {name}"] = {"case": name} | point
    if cases:
        bench.interleave(cases, options.repetitions)


# -- paged -------------------------------------------------------------------------------------------------------------

QUICK_POOLS = 2
Paged = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def _kv_bytes(config: ModelConfig, point: dict[str, Any]) -> int:
    """Keys and values that a call sees."""
    each = 2 * config.num_kv_heads * config.head_dim * jnp.dtype(point["dtype"]).itemsize
    return point["rows"] * point["context"] * each


class Pools:
    """Several layers' keys and values, [K, N, P, D] each, and the rows that read them."""

    def __init__(self, config: ModelConfig, point: dict[str, Any], count: int) -> None:
        rows, context, dtype = point["rows"], point["context"], point["dtype"]
        width = -(-context // BLOCK)
        shape = (config.num_kv_heads, rows * width + 1, BLOCK, config.head_dim)
        self.keys, self.values = ([random_array(shape, dtype, 2 * i + j) for i in range(count)] for j in (0, 1))
        self.q = random_array((rows, 1, config.num_heads, config.head_dim), dtype, 2 * count)
        blocks = np.random.default_rng(0).permutation(rows * width) + 1
        self.tables = jnp.asarray(blocks.reshape(rows, width), jnp.int32)
        self.positions = jnp.full((rows, 1), context - 1, jnp.int32)


def paged_cases(
    place: Place, point: dict[str, Any], num_pools: int | None
) -> dict[str, Callable[[], Callable[[], Values]]]:
    """By name, what makes a case: a function of no arguments that times one call."""
    config = place.config
    count = num_pools or int(max(2, min(12, ENOUGH_BYTES // _kv_bytes(config, point))))
    pools = Pools(config, point, count)

    def case(one: Paged) -> Callable[[], Values]:
        run = jax.jit(lambda q, ks, vs, t, p: [one(q, k, v, t, p) for k, v in zip(ks, vs, strict=True)])

        def call() -> Any:
            return run(pools.q, pools.keys, pools.values, pools.tables, pools.positions)

        return lambda: {"seconds": queued_s(call, tries=3) / count}

    def decode_case() -> Callable[[], Values]:
        call = _decode_step(place, pools)
        return lambda: {"seconds": queued_s(call, tries=3) / count}

    made: dict[str, Callable[[], Callable[[], Values]]] = {
        "jaxrl": decode_case,
        "paged": lambda: case(_ours(place)),
        "mosaic": lambda: case(_mosaic(place, point["dtype"])),
        "jnp": lambda: case(reference.paged_attention),
    }
    width = pools.tables.shape[1]
    for splits in SPLITS:
        made[f"jax-{splits}"] = lambda splits=splits: case(_jax_paged(place, width, splits))
    return made


def _decode_step(place: Place, pools: Pools) -> Callable[[], list[jax.Array]]:
    """Attention of one token of every row in each layer, from the layer's product on; the pools are replaced."""
    place.need_kernels()
    from jaxrl.kernels import decode_pallas

    config, dtype, rows = place.config, pools.q.dtype, pools.q.shape[0]
    slab = (config.num_kv_heads, config.num_heads // config.num_kv_heads + 2, config.head_dim)
    qkv = random_array((1, rows, *slab), "float32", 1)
    bias = random_array(slab, dtype, 2) if config.qkv_bias else None
    ones = jnp.ones((config.head_dim,), dtype)
    norms = decode_pallas.HeadNorms(ones, ones) if config.qk_norm else None
    at = pools.positions[:, 0]

    def step(keys: list[jax.Array], values: list[jax.Array], qkv: jax.Array, tables: jax.Array, at: jax.Array) -> Any:
        cos, sin = rope_tables(at, config, jnp.float32)
        layers = []
        for k, v in zip(keys, values, strict=True):
            how = {"eps": config.rms_norm_eps, "interpret": place.interpret}
            layers.append(decode_pallas.decode_attention(qkv, bias, norms, cos, sin, k, v, tables, at, **how))
        return [[layer[i] for layer in layers] for i in range(3)]

    run = jax.jit(step, donate_argnums=(0, 1))

    def call() -> list[jax.Array]:
        outs, pools.keys, pools.values = run(pools.keys, pools.values, qkv, pools.tables, at)
        return outs

    return call


def _ours(place: Place) -> Paged:
    place.need_kernels()
    from jaxrl.kernels import paged_pallas

    return lambda *arrays: paged_pallas.paged_attention(*arrays, interpret=place.interpret)


def _mosaic(place: Place, dtype: str) -> Paged:
    if not place.on_gpu:
        raise LeftOut("the kernel runs on GPUs alone: JAX's interpreter of it is for tests")
    if dtype != "bfloat16":
        raise LeftOut("the kernel takes bfloat16 alone")
    from jaxrl.kernels import paged_mosaic_gpu

    return paged_mosaic_gpu.paged_attention


def _jax_paged(place: Place, width: int, splits: int) -> Paged:
    """JAX's kernel, whose splits must divide the table, and whose steps take up to eight blocks."""
    place.need_kernels()
    if width % splits:
        raise LeftOut(f"{width} blocks are no multiple of {splits}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    except ImportError as error:
        raise LeftOut(f"this JAX has no such kernel ({error})") from error
    step = next(blocks for blocks in (8, 4, 2, 1) if width // splits % blocks == 0)
    scale = place.config.head_dim**-0.5

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array, positions: jax.Array) -> jax.Array:
        how = {"pages_per_compute_block": step, "k_splits": splits, "interpret": place.interpret}
        return paged_attention(q[:, 0] * scale, k, v, tables, positions[:, 0] + 1, **how)[:, None]

    return attend


# -- packed ------------------------------------------------------------------------------------------------------------

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
KERNELS = ("forward", "queries", "keys")
"""As `choose_tiles` orders them."""


def _forward_flops(config: ModelConfig, point: dict[str, Any]) -> float:
    each = point["tokens"] // point["segments"]
    pairs = point["rows"] * point["segments"] * each * each / 2
    return 4 * config.num_heads * config.head_dim * pairs


def packed_cases(
    place: Place, point: dict[str, Any], tiles: Sequence[PackedTileSizes] = ()
) -> dict[str, Callable[[], Callable[[], Values]]]:
    """As `paged_cases`."""
    config, rows, tokens, dtype = place.config, point["rows"], point["tokens"], point["dtype"]
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads, config.num_heads)
    q, k, v, d_out = (random_array((rows, tokens, h, config.head_dim), dtype, i) for i, h in enumerate(heads))

    def case(one: Attend) -> Callable[[], Values]:
        def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
            out, pull = jax.vjp(one, q, k, v)
            return out, pull(d_out)

        forward, whole = jax.jit(one), jax.jit(both)
        return lambda: {
            "forward_s": queued_s(lambda: forward(q, k, v), tries=3),
            "seconds": queued_s(lambda: whole(q, k, v, d_out), tries=3),
        }

    chosen = {"pallas": lambda: case(_packed(place, "pallas", point))}
    if tiles:
        return chosen | {
            f"{kernel}-{_name(each)}": lambda i=i, each=each: case(_with_tiles(place, point, i, each))
            for each in tiles
            for i, kernel in enumerate(KERNELS)
        }
    rival = "cudnn" if place.on_gpu else "xla"
    return chosen | {
        "tiles": lambda: case(_packed(place, "tiles", point)),
        rival: lambda: case(_rival(rival, dtype, point["segments"])),
    }


def _packed(place: Place, implementation: Any, point: dict[str, Any]) -> Attend:
    """An implementation of `actor.attention` over rows of equal samples. What layers share is worked out beforehand."""
    if implementation == "pallas":
        place.need_kernels()
    platform = jax.default_backend()
    chosen = PackedAttention(implementation, packed.tiling(platform), place.interpret)
    ids, positions = _integers(point)
    mask = reference.MaskInputs(ids, positions, ids)
    tiles = chosen.tile_pairs(mask, jnp.dtype(point["dtype"]))
    return lambda q, k, v: chosen.attend(q, k, v, mask, tiles)


def _with_tiles(place: Place, point: dict[str, Any], kernel: int, sizes: PackedTileSizes) -> Attend:
    """Our kernels, one of the three with these tiles."""
    place.need_kernels()
    ids, positions = _integers(point)
    forward, queries, keys = (sizes if i == kernel else own for i, own in enumerate(choose_tiles(point["dtype"])))
    tiles = (forward, queries, keys)
    mask = reference.MaskInputs(ids, positions, ids)
    how = {"tiles": tiles, "lists": tile_lists(mask, tiles), "interpret": place.interpret}
    return lambda q, k, v: packed_attention(q, k, v, mask, **how)


def _integers(point: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Segments and positions of rows of equal samples."""
    rows, tokens = point["rows"], point["tokens"]
    each = tokens // point["segments"]
    ids = jnp.asarray(np.tile(np.arange(tokens) // each + 1, (rows, 1)), jnp.int32)
    return ids, jnp.asarray(np.tile(np.arange(tokens) % each, (rows, 1)), jnp.int32)


def _name(tiles: PackedTileSizes) -> str:
    return "x".join(map(str, dataclasses.astuple(tiles)))


def _rival(name: Any, dtype: str, segments: int) -> Attend:
    """`jax.nn.dot_product_attention`."""
    if segments > 1:
        raise LeftOut("it takes one sample a row")
    if name == "cudnn" and dtype == "float32":
        raise LeftOut("cuDNN's kernels take 16 bits")
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=name)


# -- figures -----------------------------------------------------------------------------------------------------------


def _cases(
    place: Place, summaries: dict[str, Summary], sizes: dict[str, dict[str, Any]], ceilings: Ceilings
) -> list[dict[str, Any]]:
    cases = []
    for label, summary in summaries.items():
        size, seconds = sizes[label], summary.medians["seconds"]
        if size["what"] == "paged":
            rate = _kv_bytes(place.config, size) / seconds
            figures = {"seconds": seconds, "bytes_per_s": rate, "copy_fraction": rate / ceilings.copy}
            words = f"{seconds * 1e6:>10.1f} us{rate / 1e9:>10.1f} GB/s{figures['copy_fraction']:>8.1%} of copy"
        else:
            figures = _packed_figures(place.config, size, summary.medians, ceilings)
            words = f"forward {figures['forward_s'] * 1e3:>9.3f} ms, both {seconds * 1e3:>9.3f} ms"
            words += f"{figures['flops_per_s'] / 1e9:>11.1f} GFLOP/s{figures['flops_fraction']:>8.1%} of products"
        say(f"{label:<44}{words}{summary.mark}")
        cases.append(size | figures | summary.judged)
    return cases


def _packed_figures(
    config: ModelConfig, size: dict[str, Any], medians: dict[str, float], ceilings: Ceilings
) -> dict[str, Any]:
    forward = _forward_flops(config, size)
    rate = (1 + BACKWARD) * forward / medians["seconds"]
    return {
        "seconds": medians["seconds"],
        "forward_s": medians["forward_s"],
        "forward_flops_per_s": forward / medians["forward_s"],
        "flops_per_s": rate,
        "flops_fraction": rate / ceilings.products(size["dtype"]),
    }


def _ratios(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours over theirs, in speed."""
    ratios: list[dict[str, Any]] = []
    named = {(c["what"], c["rows"], c.get("context", c.get("tokens")), c["dtype"], c["case"]): c for c in cases}
    for (what, rows, length, dtype, name), theirs in named.items():
        ours = named.get((what, rows, length, dtype, "jaxrl" if what == "paged" else "pallas"))
        if ours is None or ours is theirs:
            continue
        ratio = {"what": what, "ratio": f"{ours['case']} / {name}", "rows": rows, "dtype": dtype}
        ratio["context" if what == "paged" else "tokens"] = length
        if what == "paged":
            ratio["speed"] = theirs["seconds"] / ours["seconds"]
        else:
            ratio["forward"] = theirs["forward_s"] / ours["forward_s"]
            ratio["both"] = theirs["seconds"] / ours["seconds"]
        ratio["disturbed"] = ours["disturbed"] or theirs["disturbed"]
        ratios.append(ratio)
        speeds = ", ".join(f"{key} {ratio[key]:.3f}" for key in ("speed", "forward", "both") if key in ratio)
        mark = DISTURBED if ratio["disturbed"] else ""
        say(f"{what}, {rows} x {length}, {dtype}: {ratio['ratio']} {speeds}{mark}")
    return ratios


BENCHMARK = Benchmark("attention", __doc__, _measure, _options, QUICK, ("rows", "contexts", "segments"), _check)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
