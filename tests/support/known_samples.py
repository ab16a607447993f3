"""A workload of known samples: the records of each response by identity, and nothing else.

Purpose: to play a recorded round again, sample for sample (docs/architecture.md), and for tests in which every number
is given. `jaxrl.sim.recorded` draws from a run's lengths; this one repeats them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrl.config import SimulatedHistory
from jaxrl.types import SampleKey


@dataclass(frozen=True, slots=True)
class KnownSample:
    """A response: its tokens, its reward, and the seconds of scoring it."""

    length: int
    reward: float = 0.0
    reward_s: float = 0.0


@dataclass(frozen=True, slots=True)
class KnownWorkload:
    """A workload of recorded samples. Raises ValueError when asked about one that is not recorded.

    Attributes:
      samples: by identity.
      prompt_lengths: tokens of each prompt, by index.
      kinds: of each prompt, by index; "known" where it is missing.
    """

    samples: Mapping[SampleKey, KnownSample]
    prompt_lengths: Mapping[int, int]
    kinds: Mapping[int, str] = field(default_factory=dict)

    def length(self, key: SampleKey, step: int = 0) -> int:
        return self._sample(key).length

    def prompt_length(self, prompt_index: int) -> int:
        if prompt_index not in self.prompt_lengths:
            raise ValueError(f"prompt {prompt_index}: no length is recorded; the simulation uses what the run did not")
        return self.prompt_lengths[prompt_index]

    def kind_name(self, prompt_index: int) -> str:
        return self.kinds.get(prompt_index, "known")

    def reward_s(self, key: SampleKey, step: int = 0) -> float:
        return self._sample(key).reward_s

    def reference_time_s(self, prompt_index: int) -> float:
        raise AssertionError("no column of reference times is simulated")

    def reward(self, key: SampleKey, step: int = 0) -> float:
        return self._sample(key).reward

    def history(self, prompt_index: int) -> SimulatedHistory:
        return SimulatedHistory()

    def _sample(self, key: SampleKey) -> KnownSample:
        if key not in self.samples:
            raise ValueError(f"{key}: no length is recorded; the simulation launches what the recorded run did not")
        return self.samples[key]
