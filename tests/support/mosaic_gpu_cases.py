"""What JAX's interpreter of Mosaic GPU makes of `paged_mosaic_gpu`: cases of a test, run in a process of their own.

    python tests/support/mosaic_gpu_cases.py CASE...

Each line printed is the JSON of a case's name and of what is wrong with it, which is empty if nothing is: an error, or
races that the interpreter finds between asynchronous copies and other uses of shared memory (`wgmma` alone it takes for
synchronous). Its callbacks come out of compiled code: on few cores one might wait for ever, and whoever starts this
process gives it a limit of time.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl.kernels import paged_mosaic_gpu, reference
from jaxrl.kernels.reference import PLAIN, Codes, Rule
from jaxrl.sharding.narrow_weights import narrowed

TOLERANCE = 2e-2  # see tests/kernels/test_paged_pallas.py


def arrays_of(heads: int, kv_heads: int, dim: int, size: int, queries: int, width: int, rows: int = 3) -> list[Any]:
    """Random arrays; row 0 stands at position 0, row 1 at the table's end, the others' queries anywhere."""
    rng = np.random.default_rng(0)
    blocks = rows * width + 1
    q = rng.normal(size=(rows, queries, heads, dim)).astype(jnp.bfloat16)
    k, v = rng.normal(size=(2, kv_heads, blocks, size, dim)).astype(jnp.bfloat16)
    tables = rng.permutation(np.arange(1, blocks)).reshape(rows, width).astype(np.int32)
    positions = rng.integers(0, width * size, (rows, queries)).astype(np.int32)
    positions[0] = 0
    positions[1] = width * size - queries + np.arange(queries)
    return [q, k, v, tables, positions]


def run(*arrays: Any, **how: Any) -> np.ndarray:
    return np.asarray(paged_mosaic_gpu.paged_attention(*arrays, **how, interpret=True), np.float32)


def expect(arrays: Any, rule: Rule = PLAIN, sinks: Any = None, piece: int = 0) -> None:
    found = run(*arrays, rule=rule, sinks_H=sinks, piece=piece)
    oracle = jax.jit(reference.paged_attention, static_argnums=5)
    expected = np.asarray(oracle(*jax.tree.map(jnp.asarray, arrays), rule, sinks), np.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def codes(kind: Any, piece: int) -> None:
    q, *pools, tables, positions = arrays_of(6, 2, 64, 16, 2, 9)
    made = [narrowed(kind, jnp.asarray(pool), -1) for pool in pools]
    expect([q, *(Codes(codes, scales[..., None]) for codes, scales in made), tables, positions], piece=piece)


def blind(piece: int) -> None:
    """nan in every block but those from a window's first position to a row's latest query changes no bit. A query
    before the sequence sees nothing and gets zeros; a row of them reads nothing."""
    q, k, v, tables, positions = arrays_of(6, 2, 64, 16, 2, 9, rows=4)
    tables[2, :2] = tables[1, :2]  # rows may share blocks
    positions[1] -= 20
    positions[3] = -1
    seen = [(max(0, row.min() - 69) // 16, row.max() // 16 + 1) for row in positions]
    own = {int(b) for row, (low, high) in zip(tables, seen, strict=True) for b in row[low:high]}
    others = np.array([block for block in range(k.shape[1]) if block not in own])
    assert len(others) > 8
    clean = run(q, k, v, tables, positions, rule=Rule(70), piece=piece)
    k[:, others] = v[:, others] = np.nan
    np.testing.assert_array_equal(run(q, k, v, tables, positions, rule=Rule(70), piece=piece), clean)
    assert np.isfinite(clean).all()
    assert (clean[3] == 0).all()
    positions[2, 0] = -1
    out = run(q, k, v, tables, positions, rule=Rule(70), piece=piece)
    assert (out[2, 0] == 0).all()
    assert np.abs(out[2, 1] - clean[2, 1]).max() == 0


def rows_by_themselves() -> None:
    """The same bits for a row among others of other lengths, in another order, and in a narrower table."""
    q, k, v, tables, positions = arrays_of(6, 2, 64, 16, 2, 14, rows=4)
    positions[:] = np.array([[98, 99], [62, 63], [26, 27], [218, 219]])
    found = run(q, k, v, tables, positions, piece=64)
    for order, width in (([3, 2, 0, 1], 14), ([0, 2], 7)):
        out = run(q[order], k, v, tables[order, :width], positions[order], piece=64)
        np.testing.assert_array_equal(out, found[order])


SINKS = np.random.default_rng(1).normal(size=6).astype(np.float32)
CASES: dict[str, Callable[[], None]] = {
    # verification in pieces of a step, a row of one of them, a row of three, blocks of half a step
    "pieces": lambda: expect(arrays_of(6, 2, 64, 32, 4, 6), piece=64),
    # 9 and 3 heads, which no tile of 8 rows divides; tables that no step divides
    "decode": lambda: expect(arrays_of(9, 3, 64, 16, 1, 5)),
    "wide_heads": lambda: expect(arrays_of(12, 2, 128, 8, 4, 9)),
    "window_and_sinks": lambda: expect(arrays_of(6, 2, 64, 16, 3, 11), Rule(70), SINKS, piece=64),
    "sinks_of_one_piece": lambda: expect(arrays_of(6, 2, 64, 16, 2, 5), sinks=SINKS),
    # 80 queries of a head: two tiles, the second of which is not full; blocks of two steps
    "prefill": lambda: expect(arrays_of(4, 2, 64, 128, 40, 2, rows=2), Rule(100), piece=128),
    "int8": lambda: codes("int8", 64),
    "fp8": lambda: codes("fp8", 0),
    "blind_in_one_piece": lambda: blind(1024),
    "blind_in_pieces": lambda: blind(64),
    "rows_by_themselves": rows_by_themselves,
}


def main(names: list[str]) -> None:
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # a callback must not wait for what waits for it
    interpreter: Any = vars(plgpu)["InterpretGPUParams"]
    vars(plgpu)["InterpretGPUParams"] = functools.partial(interpreter, detect_races=True)
    for name in names:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):  # the interpreter prints a race
                CASES[name]()
            error = ""
        except Exception:  # whatever it is, the test shows it
            error = traceback.format_exc()
        print(json.dumps([name, said.getvalue() + error]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
