"""The machine's best rates, measured in the same run: bytes read per second, products per second.

*Bandwidth* is the best rate at which an array much larger than the caches is read: by a matrix-vector product in XLA,
and on CPUs also by one numpy dot product per core, whichever is faster. *FLOP/s* of a dtype is the best rate of a
square matrix product in that dtype or a wider one (work in bfloat16 may always be done in float32). Both are the best
of several tries, before and after the timed runs: a ceiling that a disturbance lowered would flatter.

One accelerator is measured, and multiplied by their number; all virtual devices of a CPU share its cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .measure import num_cores

TRIES = 5
_NARROWER = {"float32": ("bfloat16",), "bfloat16": ()}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of all devices of the run together.

    Attributes:
      bandwidth: bytes per second.
      flops: per dtype, floating-point operations per second (a multiplication and an addition count two).
    """

    bandwidth: float
    flops: dict[str, float]

    def best(self, other: Ceilings) -> Ceilings:
        """The higher value of each."""
        names = {*self.flops, *other.flops}
        flops = {name: max(self.flops.get(name, 0.0), other.flops.get(name, 0.0)) for name in sorted(names)}
        return Ceilings(max(self.bandwidth, other.bandwidth), flops)

    def record(self) -> dict[str, Any]:
        return {"bandwidth_bytes_per_s": self.bandwidth, "flops_per_s": self.flops}

    def __str__(self) -> str:
        products = ", ".join(f"{value / 1e9:.1f} GFLOP/s {name}" for name, value in self.flops.items())
        return f"{self.bandwidth / 1e9:.1f} GB/s, {products}"


def measure_ceilings(num_devices: int = 1, quick: bool = False) -> Ceilings:
    """Measures on the first device of jax's default backend; takes a few seconds (`quick`: smaller arrays)."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    num_bytes, side = (512 << 20, 2048) if on_cpu else (2 << 30, 8192)
    if quick:
        num_bytes, side = 32 << 20, 512
    times = 1 if on_cpu else num_devices
    flops: dict[str, float] = {}
    product = jax.jit(jnp.matmul)
    for name in _NARROWER:
        square = jax.device_put(jnp.ones((side, side), name), device)
        rate = _best_rate(lambda x=square: product(x, x).block_until_ready(), 2.0 * side**3) * times
        for covered in (name, *_NARROWER[name]):
            flops[covered] = max(rate, flops.get(covered, 0.0))
    bandwidth = _bandwidth(device, num_bytes, on_cpu) * times
    return Ceilings(bandwidth, flops)


def _bandwidth(device: Any, num_bytes: int, on_cpu: bool) -> float:
    import jax
    import jax.numpy as jnp
    import numpy as np

    width = 4096
    matrix = jax.device_put(jnp.ones((num_bytes // (4 * width), width), jnp.float32), device)
    vector = jax.device_put(jnp.ones((width,), jnp.float32), device)
    product = jax.jit(jnp.matmul)
    rate = _best_rate(lambda: product(matrix, vector).block_until_ready(), num_bytes)
    matrix.delete()
    if not on_cpu:
        return rate
    parts = np.array_split(np.ones(num_bytes // 4, np.float32), num_cores())
    with ThreadPoolExecutor(len(parts)) as pool:
        return max(rate, _best_rate(lambda: list(pool.map(lambda part: np.dot(part, part), parts)), num_bytes))


def _best_rate(run: Callable[[], Any], amount: float) -> float:
    run()
    seconds = []
    for _ in range(TRIES):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return amount / min(seconds)
