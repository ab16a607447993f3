"""The machine's best rates, measured in the same run: bytes copied and read per second, products per second.

- *Copy*: bytes read and bytes written per second, from one array into another that is there already.
- *Read*: the best rate at which an array much larger than the caches is read: by a sum of rows and by a matrix-vector
  product in XLA, and on CPUs also by one numpy dot product per core.
- *Bandwidth*: the higher of the two. On CPUs that is the read: a copy also fetches what it overwrites.
- *FLOP/s* of a dtype: the best rate of a square matrix product in that dtype or a wider one (work in bfloat16 may
  always be done in float32). `float32` is what a program gets that names no precision, on GPUs TF32; `float32_full` is
  full precision.

Data are random, because products of ones draw less power and let a card clock higher. Many calls are queued and waited
for once, so that no dispatch is in the figure. Everything is the best of several tries, before and after the timed
runs: a ceiling that a disturbance lowered would flatter.

Beside them stand the data sheet's rates of known devices (`jaxrl.sim.hardware`). One accelerator is measured, and
multiplied by their number; all virtual devices of a CPU share its cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from jaxrl.sim.hardware import A40, A100, H100, H200, H800, MI300X, Hardware

from .measure import num_cores

TRIES = 5
QUEUED_S = 0.2
"""How long the calls take that are queued together; one call is enough if it takes longer."""
MOST_QUEUED = 50
ENOUGH_S = 2.0
"""After so long no further try is made."""
_PERIOD = 1 << 22
_RUNGS = ("float32_full", "float32", "bfloat16")
"""From wide to narrow: what one reaches, the next may use."""
_KINDS = {
    "NVIDIA A40": A40,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA H800": H800,
    "NVIDIA H200": H200,
    "AMD Instinct MI300X": MI300X,
}


def datasheet(kind: str) -> Hardware | None:
    """The data sheet of a device as jax names it, or None. (Other cards of a name, such as the H100 PCIe, differ.)"""
    return _KINDS.get(kind)


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

    @property
    def bandwidth(self) -> float:
        """Bytes per second, of the faster way."""
        return max(self.copy, self.read)

    def products(self, dtype: str) -> float:
        """The best rate of what jaxrl's programs of a dtype do: they multiply float32 in full precision."""
        return self.flops["float32_full" if dtype == "float32" else dtype]

    def best(self, other: Ceilings) -> Ceilings:
        """The higher value of each; both are of the same devices."""
        names = {*self.flops, *other.flops}
        flops = {name: max(self.flops.get(name, 0.0), other.flops.get(name, 0.0)) for name in sorted(names)}
        return Ceilings(max(self.copy, other.copy), max(self.read, other.read), flops, self.nominal, self.devices)

    def of_datasheet(self, *, bytes_per_s: float = 0.0, flops_per_s: float = 0.0, dtype: str = "bfloat16") -> Any:
        """One of the two rates over the data sheet's; None where that is not known (FLOP/s: bfloat16 alone is)."""
        if self.nominal is None or (flops_per_s and dtype != "bfloat16"):
            return None
        if flops_per_s:
            return flops_per_s / (self.nominal.flops_per_s * self.devices)
        return bytes_per_s / (self.nominal.memory_bytes_per_s * self.devices)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        sheet = None
        if self.nominal is not None:
            sheet = {
                "name": self.nominal.name,
                "bandwidth_bytes_per_s": self.nominal.memory_bytes_per_s * self.devices,
                "flops_per_s": {"bfloat16": self.nominal.flops_per_s * self.devices},
            }
        return {
            "bandwidth_bytes_per_s": self.bandwidth,
            "copy_bytes_per_s": self.copy,
            "read_bytes_per_s": self.read,
            "flops_per_s": self.flops,
            "datasheet": sheet,
        }

    def table(self) -> list[tuple[str, float, str, float | None]]:
        """(what, measured, unit, share of the data sheet's rate) of every rate."""
        rates: list[tuple[str, float, str, float | None]] = [
            ("copy", self.copy / 1e9, "GB/s", self.of_datasheet(bytes_per_s=self.copy)),
            ("read", self.read / 1e9, "GB/s", self.of_datasheet(bytes_per_s=self.read)),
        ]
        for name, value in self.flops.items():
            rates.append((name, value / 1e9, "GFLOP/s", self.of_datasheet(flops_per_s=value, dtype=name)))
        return rates

    def __str__(self) -> str:
        products = ", ".join(f"{value / 1e9:.1f} GFLOP/s {name}" for name, value in self.flops.items())
        return f"copy {self.copy / 1e9:.1f} GB/s, read {self.read / 1e9:.1f} GB/s, {products}"


def queued_s(call: Callable[[], Any], tries: int = TRIES, at_least_s: float = QUEUED_S) -> float:
    """Seconds of one call among many that are queued and waited for once; the best of several tries.

    Args:
      call: dispatches work and returns its arrays; called once beforehand, which compiles it.
      at_least_s: how long the calls of one try take together, unless that were more than `MOST_QUEUED`.
    """
    import jax

    jax.block_until_ready(call())
    began = time.perf_counter()
    jax.block_until_ready(call())
    count = int(min(MOST_QUEUED, max(1.0, at_least_s / (time.perf_counter() - began))))
    found = []
    while len(found) < tries and sum(found) * count < ENOUGH_S:
        began = time.perf_counter()
        for _ in range(count - 1):
            call()
        jax.block_until_ready(call())
        found.append((time.perf_counter() - began) / count)
    return min(found)


def random_array(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Numbers of a normal distribution on jax's default device. They repeat after `_PERIOD`, which saves time; arrays
    of different seeds begin at different ones."""
    import jax.numpy as jnp
    import numpy as np

    drawn = np.roll(_drawn(), 977 * seed)[: prod(shape)]
    return jnp.resize(jnp.asarray(drawn).astype(dtype), shape)


@lru_cache(maxsize=1)
def _drawn() -> Any:
    import numpy as np

    return np.random.default_rng(0).standard_normal(_PERIOD, np.float32)


def measure_ceilings(num_devices: int = 1, quick: bool = False) -> Ceilings:
    """Measures on the first device of jax's default backend; takes a few seconds (`quick`: smaller arrays)."""
    import jax

    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    num_bytes, side = (512 << 20, 2048) if on_cpu else (2 << 30, 8192)
    if quick:
        num_bytes, side = 32 << 20, 512
    times = 1 if on_cpu else num_devices
    tries, at_least_s = (2, 0.02) if quick else (TRIES, QUEUED_S)
    with jax.default_device(device):
        flops: dict[str, float] = {}
        for name, reached in zip(_RUNGS, _products(side, tries, at_least_s), strict=True):
            flops[name] = max(reached * times, *flops.values(), 0.0)
        copy = _copy(num_bytes, tries, at_least_s) * times
        read = _read(num_bytes, on_cpu, tries, at_least_s) * times
    return Ceilings(copy, read, flops, datasheet(device.device_kind), times)


def _products(side: int, tries: int, at_least_s: float) -> list[float]:
    """Operations per second of square products, by `_RUNGS`."""
    import jax
    import jax.numpy as jnp

    rates = []
    for name in _RUNGS:
        dtype = name.removesuffix("_full")
        a, b = (random_array((side, side), dtype, i) for i in range(2))
        precision = "highest" if name.endswith("_full") else None
        product = jax.jit(lambda x, y, precision=precision: jnp.matmul(x, y, precision=precision))
        rates.append(2.0 * side**3 / queued_s(lambda p=product, a=a, b=b: p(a, b), tries, at_least_s))
    return rates


def _copy(num_bytes: int, tries: int, at_least_s: float) -> float:
    """Bytes read and written per second. The target exists beforehand: new memory of a CPU costs more than the copy."""
    import jax

    # the sign that turns keeps XLA from returning the source itself
    write = jax.jit(lambda source, target: -source, donate_argnums=1, keep_unused=True)
    arrays = [random_array((num_bytes // 4,), "float32", i) for i in range(2)]

    def turn() -> Any:
        source, target = arrays
        arrays[:] = write(source, target), source
        return arrays[0]

    return 2 * num_bytes / queued_s(turn, tries, at_least_s)


def _read(num_bytes: int, on_cpu: bool, tries: int, at_least_s: float) -> float:
    import jax
    import jax.numpy as jnp
    import numpy as np

    width = 4096
    matrix = random_array((num_bytes // (4 * width), width), "float32", 0)
    vector = random_array((width,), "float32", 1)
    product, largest = jax.jit(jnp.matmul), jax.jit(lambda x: jnp.max(x, axis=1))
    seconds = [queued_s(lambda: product(matrix, vector), tries, at_least_s)]
    seconds.append(queued_s(lambda: largest(matrix), tries, at_least_s))
    if on_cpu:
        parts = np.array_split(np.asarray(matrix).reshape(-1), num_cores())
        with ThreadPoolExecutor(len(parts)) as pool:
            seconds.append(queued_s(lambda: list(pool.map(lambda part: np.dot(part, part), parts)), tries, at_least_s))
    matrix.delete()
    return num_bytes / min(seconds)
