"""The tokens of a round's samples, from the hosts that drew them to all, once: a device all-gather of flat arrays.

Purpose: while a round runs, hosts send each other lengths and no tokens. Of the samples that leave it (trained on, or
carried into a later round) every process needs all tokens: all pack the same batch, and whichever host goes on with a
carried sample has to have it. `TokenExchange.exchange` fills them in.

Source: docs/architecture.md (several processes).

What travels of a token is four words: its id, the version of the weights that drew it, and the bits of its two
log-probabilities. A host lays its own samples' words behind each other, cut into equal parts for its devices; a program
over all devices gathers each part over the hosts, and every process reads the words of the others at offsets that
follow from the lengths, which all know. Parts have a few sizes (powers of two up to a bound), so that there are few
programs; what is larger goes in several turns, and no device ever holds more than `max_bytes` of what has been
gathered. The first words of a host say how many samples and tokens it sends and of which keys, so that processes which
do not agree on what is sent stop, and none trains on another's tokens.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl.runtime.devices import ProcessDevices
from jaxrl.sharding.compiled import Meet, alone
from jaxrl.types import RunFailed, Sample

_FIELDS = (
    ("token_ids", np.int32),
    ("versions", np.int32),
    ("rollout_logprobs", np.float32),
    ("sampled_logprobs", np.float32),
)
_HEADER_WORDS = 3  # samples, tokens, digest of the keys
_LEAST_WORDS = 1 << 10
DEFAULT_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What an exchange has moved.

    Attributes:
      num_samples, num_tokens: of all hosts.
      num_bytes: that this host's devices received from others, padding included.
      turns: runs of a program.
      seconds: from the first word packed to the last one unpacked, on this host; waiting for others counts.
    """

    num_samples: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    turns: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds if self.seconds else 0.0


class TokenExchange:
    """Sends what this host's samples consist of to all hosts, and gets theirs.

    Every process calls `exchange` at the same place with the same samples in the same order.

    Args:
      devices: of this process, and of all. With one process there is nothing to exchange.
      max_bytes: that a device holds at most of what a turn has gathered.
      meet: where all hosts meet once they have compiled a program. dispatched: called with each program that is run.
    """

    def __init__(
        self,
        devices: ProcessDevices,
        max_bytes: int = DEFAULT_MAX_BYTES,
        meet: Meet = alone,
        dispatched: Callable[[str], None] = alone,
    ) -> None:
        self._devices, self._meet, self._dispatched = devices, meet, dispatched
        self._programs: dict[int, Callable[[jax.Array], jax.Array]] = {}
        most = max_bytes // 4 // devices.num_processes
        self._most_words = max(1 << (most.bit_length() - 1), _LEAST_WORDS)
        grid = np.asarray(devices.devices, dtype=object).reshape(devices.num_processes, -1)
        mesh = Mesh(grid, ("hosts", "local"), axis_types=(AxisType.Auto,) * 2)
        self._own = NamedSharding(mesh, PartitionSpec("hosts", "local"))
        self._gathered = NamedSharding(mesh, PartitionSpec(None, "local"))

    @property
    def num_programs(self) -> int:
        """Compiled so far."""
        return len(self._programs)

    def exchange(self, samples: Sequence[Sample], owners: Sequence[int]) -> Exchanged:
        """Replaces the arrays of the samples of other hosts by those that these have drawn.

        Args:
          samples: with their right lengths; of other hosts, without content.
          owners: the process that has each.

        Raises:
          RunFailed: another process sends other samples than it should.
        """
        num_hosts, own = self._devices.num_processes, self._devices.process
        if num_hosts == 1 or not samples:
            return Exchanged()
        began = time.perf_counter()
        of_hosts: list[list[Sample]] = [[] for _ in range(num_hosts)]
        for sample, owner in zip(samples, owners, strict=True):
            of_hosts[owner].append(sample)
        longest = max(_num_words(each) for each in of_hosts)
        found = np.empty((num_hosts, longest), np.int32)
        sizes = self._turns(-(-longest // len(self._devices.local_devices)))
        mine, received, start = _packed(of_hosts[own]), 0, 0
        for size in sizes:
            count = size * len(self._devices.local_devices)
            gathered = self._gather(mine[start : start + count], size)
            found[:, start : start + count] = gathered[:, : longest - start]
            received += (num_hosts - 1) * count * 4
            start += count
        for process, theirs in enumerate(of_hosts):
            if process != own:
                _unpack(found[process], theirs, process)
        seconds = time.perf_counter() - began
        return Exchanged(len(samples), sum(map(len, samples)), received, len(sizes), seconds)

    def _turns(self, words: int) -> list[int]:
        """The sizes of the parts in which so many words of each device are sent."""
        full, left = divmod(words, self._most_words)
        size = _LEAST_WORDS
        while size < left:
            size *= 2
        return [self._most_words] * full + ([size] if left else [])

    def _gather(self, words: np.ndarray, size: int) -> np.ndarray:
        """[hosts, local devices * size]: the words of every host, of which these are this one's."""
        num_hosts, num_local = self._devices.num_processes, len(self._devices.local_devices)
        part = np.zeros((1, num_local * size), np.int32)
        part[0, : len(words)] = words
        shape = (num_hosts, num_local * size)
        # the callback is asked for this process's parts alone; device_put would compare the values over all hosts
        sent = jax.make_array_from_callback(shape, self._own, lambda at: part[:, _columns(at)])
        gathered = self._program(size)(sent)
        found = np.empty(shape, np.int32)
        for shard in gathered.addressable_shards:
            found[shard.index] = np.asarray(shard.data)
        return found

    def _program(self, size: int) -> Callable[[jax.Array], jax.Array]:
        if size not in self._programs:
            shape = (self._devices.num_processes, len(self._devices.local_devices) * size)
            words = jax.ShapeDtypeStruct(shape, np.int32, sharding=self._own)
            self._programs[size] = jax.jit(lambda x: x, out_shardings=self._gathered).lower(words).compile()
            self._meet(f"tokens {size}")
        self._dispatched(f"tokens {size}")
        return self._programs[size]


def _columns(at: tuple[slice, ...] | None) -> slice:
    assert at is not None, "the words of a device"
    return at[1]


def _num_words(samples: Sequence[Sample]) -> int:
    return _HEADER_WORDS + len(_FIELDS) * sum(map(len, samples))


def _header(samples: Sequence[Sample]) -> np.ndarray:
    keys = [(s.key.epoch, s.key.prompt_index, s.key.sample_index, s.key.attempt, len(s)) for s in samples]
    digest = zlib.crc32(np.asarray(keys, np.int64).tobytes())
    return np.asarray([len(samples), sum(map(len, samples)), digest], np.uint32).view(np.int32)


def _packed(samples: Sequence[Sample]) -> np.ndarray:
    """int32 [W]: a header, then each field of all samples."""
    parts = [_header(samples)]
    for name, dtype in _FIELDS:
        values = [np.zeros(0, dtype), *(np.asarray(getattr(sample, name), dtype) for sample in samples)]
        parts.append(np.concatenate(values).view(np.int32))
    return np.concatenate(parts)


def _unpack(words: np.ndarray, samples: Sequence[Sample], process: int) -> None:
    """Fills samples with the words of the process that has them. Each gets arrays of its own."""
    if not np.array_equal(words[:_HEADER_WORDS], _header(samples)):
        sent = words[:_HEADER_WORDS].view(np.uint32)
        raise RunFailed(
            f"host {process} sends {sent[0]} samples of {sent[1]} tokens where {len(samples)} of "
            f"{sum(map(len, samples))} were awaited, or others than these: the hosts do not handle the same events. "
            "Run again to go on from the last checkpoint"
        )
    total = sum(map(len, samples))
    for number, (name, dtype) in enumerate(_FIELDS):
        at = _HEADER_WORDS + number * total
        for sample in samples:
            setattr(sample, name, words[at : at + len(sample)].view(dtype).copy())
            at += len(sample)
