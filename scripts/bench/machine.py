"""The machine's best rates, measured in the same run: bytes copied and read per second, products per second.

- *Copy*: bytes read and bytes written per second, from one array into another that is there already.
- *Read*: the best rate at which an array much larger than the caches is read: by a maximum of rows and by a
  matrix-vector product in XLA, and on CPUs also by one numpy dot product per core.
- *Bandwidth*: the higher of the two. On CPUs that is the read: a copy also fetches what it overwrites.
- *FLOP/s* of a dtype: the best rate of a square matrix product in that dtype or a wider one (work in bfloat16 may
  always be done in float32). `float32` is what a program gets that names no precision, on GPUs TF32; `float32_full` is
  full precision.

Data are random, because products of ones draw less power and let a card clock higher. Many calls are queued and waited
for once, so that no dispatch is in the figure. Everything is the best of several tries, before and after the timed
runs: a ceiling that a disturbance lowered would flatter. One accelerator is measured, and multiplied by their number;
all virtual devices of a CPU share its cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.harness import num_cores
from jaxrl.sim.hardware import A40, A100, H100, H200, H800, MI300X, Hardware

ENOUGH_S = 2.0
"""After so long no further try is made."""
_RUNGS = ("float32_full", "float32", "bfloat16")
"""From wide to narrow: what one reaches, the next may use."""
DATASHEETS = {
    "NVIDIA A40": A40,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA H800": H800,
    "NVIDIA H200": H200,
    "AMD Instinct MI300X": MI300X,
}
"""By the device's kind as jax names it. (Other cards of a name, such as the H100 PCIe, differ.)"""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of all devices of the run together.

    Attributes:
      copy: bytes read plus bytes written per second.
      read: bytes read per second.
      flops: by `float32_full`, `float32` and `bfloat16`, floating-point operations per second (a multiplication and an
        addition count two).
      nominal: the data sheet of one device, if it is known.
      devices: how many.
    """

    copy: float
    read: float
    flops: dict[str, float]
    nominal: Hardware | None = None
    devices: int = 1

    def products(self, dtype: str) -> float:
        """The best rate of what jaxrl's programs of a dtype do: they multiply float32 in full precision."""
        return self.flops["float32_full" if dtype == "float32" else dtype]

    def best(self, other: Ceilings) -> Ceilings:
        """The higher value of each; both are of the same devices."""
        flops = {name: max(self.flops[name], other.flops[name]) for name in self.flops}
        return Ceilings(max(self.copy, other.copy), max(self.read, other.read), flops, self.nominal, self.devices)

    def of_bytes(self, rate: float) -> dict[str, float | None]:
        """Bytes per second over the copy, the higher bandwidth, and the data sheet's (None: it is not known)."""
        sheet = None if self.nominal is None else rate / (self.nominal.memory_bytes_per_s * self.devices)
        fractions = {"copy_fraction": rate / self.copy, "bandwidth_fraction": rate / max(self.copy, self.read)}
        return {"bytes_per_s": rate, **fractions, "datasheet_fraction": sheet}

    def record(self) -> dict[str, Any]:
        """For JSON."""
        found: dict[str, Any] = {
            "bandwidth_bytes_per_s": max(self.copy, self.read),
            "copy_bytes_per_s": self.copy,
            "read_bytes_per_s": self.read,
            "flops_per_s": self.flops,
            "datasheet": None,
        }
        if self.nominal is not None:
            found["datasheet"] = {
                "name": self.nominal.name,
                "bandwidth_bytes_per_s": self.nominal.memory_bytes_per_s * self.devices,
                "flops_per_s": {"bfloat16": self.nominal.flops_per_s * self.devices},
            }
        return found


def queued_s(call: Callable[[], Any], tries: int = 3, at_least_s: float = 0.2) -> float:
    """Seconds of one call among many that are queued and waited for once; the best of several tries.

    Args:
      call: dispatches work and returns its arrays; called once beforehand, which compiles it.
      at_least_s: how long the calls of one try take together, unless that were more than 50.
    """
    jax.block_until_ready(call())
    began = time.perf_counter()
    jax.block_until_ready(call())
    count = int(min(50, max(1.0, at_least_s / (time.perf_counter() - began))))
    found: list[float] = []
    while len(found) < tries and sum(found) * count < ENOUGH_S:
        began = time.perf_counter()
        for _ in range(count - 1):
            call()
        jax.block_until_ready(call())
        found.append((time.perf_counter() - began) / count)
    return min(found)


def random_array(shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
    """Numbers of a normal distribution on jax's default device. They repeat after 2^22, which saves time; arrays of
    different seeds begin at different ones."""
    drawn = np.roll(_drawn(), 977 * seed)[: prod(shape)]
    return jnp.resize(jnp.asarray(drawn).astype(dtype), shape)


@lru_cache(maxsize=1)
def _drawn() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(1 << 22, np.float32)


def measure(num_devices: int = 1, quick: bool = False) -> Ceilings:
    """Measures on the first device of jax's default backend; takes a few seconds (`quick`: smaller arrays)."""
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    num_bytes, side = (32 << 20, 512) if quick else (512 << 20, 2048) if on_cpu else (2 << 30, 8192)
    times = 1 if on_cpu else num_devices

    def timed(call: Callable[[], Any]) -> float:
        return queued_s(call, 2, 0.02) if quick else queued_s(call, 5)

    with jax.default_device(device):
        flops: dict[str, float] = {}
        for name in _RUNGS:
            a, b = (random_array((side, side), name.removesuffix("_full"), i) for i in range(2))
            precision = "highest" if name.endswith("_full") else None
            product = jax.jit(lambda x, y, precision=precision: jnp.matmul(x, y, precision=precision))
            rate = times * 2.0 * side**3 / timed(lambda product=product, a=a, b=b: product(a, b))
            flops[name] = max(rate, *flops.values(), 0.0)
        copy, read = _copy(num_bytes, timed) * times, _read(num_bytes, on_cpu, timed) * times
    return Ceilings(copy, read, flops, DATASHEETS.get(device.device_kind), times)


def _copy(num_bytes: int, timed: Callable[[Callable[[], Any]], float]) -> float:
    """Bytes read and written per second. The target exists beforehand: new memory of a CPU costs more than the copy."""
    # the sign that turns keeps XLA from returning the source itself
    write = jax.jit(lambda source, target: -source, donate_argnums=1, keep_unused=True)
    arrays = [random_array((num_bytes // 4,), "float32", i) for i in range(2)]

    def turn() -> jax.Array:
        source, target = arrays
        arrays[:] = write(source, target), source
        return arrays[0]

    return 2 * num_bytes / timed(turn)


def _read(num_bytes: int, on_cpu: bool, timed: Callable[[Callable[[], Any]], float]) -> float:
    matrix = random_array((num_bytes // (4 * 4096), 4096), "float32", 0)
    vector = random_array((4096,), "float32", 1)
    product, largest = jax.jit(jnp.matmul), jax.jit(lambda x: jnp.max(x, axis=1))
    seconds = [timed(lambda: product(matrix, vector)), timed(lambda: largest(matrix))]
    if on_cpu:
        parts = np.array_split(np.asarray(matrix).reshape(-1), num_cores())
        with ThreadPoolExecutor(len(parts)) as pool:
            seconds.append(timed(lambda: list(pool.map(lambda part: np.dot(part, part), parts))))
    matrix.delete()
    return num_bytes / min(seconds)
