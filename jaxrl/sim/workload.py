"""What a simulated run generates: response and prompt lengths, seconds of scoring, rewards, each by identity.

Purpose: the lengths and times of `jaxrl simulate`. Every number is a pure function of (seed, identity): a schedule may
change without changing what is generated, and nothing is kept.

Source: RollPacker §2.2 and Fig. 2 (long-tailed lengths; math, code and judge tasks), §4.3 and Fig. 8 (time-outs of the
sandbox); RhymeRL §3.1 (lengths grow over training) and §6.1 (a prompt's rank by length is stable over epochs); APRIL
§3.2.3 (lengths vary less within a prompt than between prompts).

Model. A response has a standard normal *score* z = sqrt(c) a + sqrt(1 - c) b: a belongs to the prompt, in every epoch
and attempt, b to the response. Its length is the quantile of Phi(z) in a `LengthDistribution`, so the lengths of all
responses have exactly that distribution, and `correlation` c says how much of it the prompt decides.

Departures: the papers' traces are not public, so shapes come from their published quantiles (`jaxrl.sim.calibrate`).
Scores come from a 64-bit counter hash (the finaliser of splitmix64, Steele et al. 2014), not from a generator that has
state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Protocol

import numpy as np

from jaxrl.types import SampleKey

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_NORMAL = NormalDist()
# What a random number is for: the first word of its identity.
_KIND, _PROMPT_SCORE, _RESPONSE_SCORE, _PROMPT_LENGTH, _REWARD_TIME, _REWARD_HANGS, _PASS_RATE, _REWARD = range(8)


def uniform(*identity: int) -> float:
    """A number in (0, 1) that depends on the integers alone (taken modulo 2**64), the same on every machine."""
    state = 0
    for word in identity:
        state = ((state ^ (word & _MASK)) + _GAMMA) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return ((state >> 12) + 0.5) / (1 << 52)


def normal(*identity: int) -> float:
    """A standard normal number that depends on the integers alone."""
    return _NORMAL.inv_cdf(uniform(*identity))


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Response lengths in tokens: a lognormal body, a power-law tail above one of its quantiles, a cap.

    Attributes:
      median: of the body, at step 0.
      sigma: standard deviation of the body's logarithm.
      tail_from: quantile from which the tail takes over; 1: there is none.
      tail_index: survival above that quantile falls as length ** -tail_index.
      cap: the longest response; longer ones are cut there, as `max_tokens` does.
      shortest: no response is shorter.
      growth: all lengths but the cap grow by this share per training step ...
      growth_limit: ... until they are this many times as long.
    """

    median: float
    sigma: float
    cap: int
    tail_from: float = 1.0
    tail_index: float = 2.0
    shortest: int = 1
    growth: float = 0.0
    growth_limit: float = 10.0

    def __post_init__(self) -> None:
        rules = {
            "median": (self.median > 0, "> 0"),
            "sigma": (self.sigma >= 0, ">= 0"),
            "cap": (self.cap >= self.shortest, f">= shortest ({self.shortest})"),
            "tail_from": (0 < self.tail_from <= 1, "a quantile in (0, 1]"),
            "tail_index": (self.tail_index > 0, "> 0"),
            "shortest": (self.shortest >= 1, ">= 1"),
            "growth": (self.growth > -1, "> -1, a share per step"),
            "growth_limit": (self.growth_limit >= 1, ">= 1"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"LengthDistribution.{name} ({getattr(self, name)!r}) must be {rule}")

    def scale(self, step: int) -> float:
        """How many times as long as at step 0."""
        if self.growth == 0 or step <= 0:
            return 1.0
        exponent = step * math.log1p(self.growth)
        return math.exp(min(max(exponent, -math.log(self.growth_limit)), math.log(self.growth_limit)))

    def length_of_score(self, z: float, step: int = 0) -> int:
        """Tokens of the response whose score is `z`."""
        return int(min(max(round(min(self.exact_length(z, step), self.cap)), self.shortest), self.cap))

    def exact_length(self, z: float, step: int = 0) -> float:
        """The same before cap and rounding; infinite where the tail is too far out for a float."""
        return self._body_or_tail(z) * self.scale(step)

    def quantile(self, share: float, step: int = 0) -> int:
        """The length that `share` of the responses do not exceed, from the formula (no draws); 0 < share < 1."""
        if not 0 < share < 1:
            raise ValueError(f"LengthDistribution.quantile: share ({share}) must be in (0, 1)")
        return self.length_of_score(_NORMAL.inv_cdf(share), step)

    def survival(self, tokens: float, step: int = 0) -> float:
        """The share of responses that would be longer than `tokens` were there no cap."""
        exact = tokens / self.scale(step)
        if self.sigma == 0:
            return float(exact < self.median)
        z = math.log(exact / self.median) / self.sigma
        if self.tail_from < 1 and z > _NORMAL.inv_cdf(self.tail_from):
            return (1 - self.tail_from) * (exact / self._tail_start()) ** -self.tail_index
        return _upper(z)

    def _tail_start(self) -> float:
        return self.median * math.exp(self.sigma * _NORMAL.inv_cdf(self.tail_from))

    def _body_or_tail(self, z: float) -> float:
        if self.tail_from < 1 and (above := _upper(z)) < 1 - self.tail_from:
            if above <= 0:
                return math.inf
            log_length = math.log((1 - self.tail_from) / above) / self.tail_index
            return self._tail_start() * math.exp(min(log_length, 700.0))
        return self.median * math.exp(min(self.sigma * z, 700.0))


def _upper(z: float) -> float:
    """The share of a standard normal above z; exact far out, where 1 - cdf is not."""
    return 0.5 * math.erfc(z / math.sqrt(2))


@dataclass(frozen=True, slots=True)
class RewardTime:
    """Seconds of scoring one response: lognormal, plus a part per token, cut at a time-out; some hang until then.

    Attributes:
      median_s: of the lognormal part (the constant part where sigma is 0).
      sigma: standard deviation of its logarithm.
      per_token_s: seconds per response token (a judge model reads the response).
      hang_share: share of responses whose scoring never ends by itself.
      timeout_s: when scoring is cut off.
    """

    median_s: float = 0.0
    sigma: float = 0.0
    per_token_s: float = 0.0
    hang_share: float = 0.0
    timeout_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("median_s", "sigma", "per_token_s", "timeout_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"RewardTime.{name} ({getattr(self, name)!r}) must be >= 0")
        if not 0 <= self.hang_share <= 1:
            raise ValueError(f"RewardTime.hang_share ({self.hang_share!r}) must be a share in [0, 1]")
        if self.hang_share and self.timeout_s == math.inf:
            raise ValueError(f"RewardTime.hang_share ({self.hang_share}) needs a timeout_s: those would never end")

    def seconds(self, z: float, u: float, length: int) -> float:
        """Of a response with score `z` and hang score `u` in (0, 1)."""
        if u < self.hang_share:
            return self.timeout_s
        return min(self.median_s * math.exp(self.sigma * z) + self.per_token_s * length, self.timeout_s)


@dataclass(frozen=True, slots=True)
class TaskKind:
    """One kind of prompts in a mix (math, code, judge).

    Attributes:
      name: what `Prompt.source` may say.
      lengths: of responses.
      prompt_lengths: of prompts; without tail or growth.
      correlation: how much of a response's score its prompt decides: 0 nothing, 1 all.
      reward_time: of scoring.
      weight: share of the prompts, relative to the other kinds'.
      pass_rate: rewards are 1 with a probability of each prompt's own, whose median this is ...
      pass_spread: ... and whose logit has this standard deviation (0 or 1 pass rates make groups without variance).
    """

    name: str
    lengths: LengthDistribution
    prompt_lengths: LengthDistribution = field(default_factory=lambda: LengthDistribution(200.0, 0.5, 1024))
    correlation: float = 0.5
    reward_time: RewardTime = field(default_factory=RewardTime)
    weight: float = 1.0
    pass_rate: float = 0.5
    pass_spread: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.correlation <= 1:
            raise ValueError(f"TaskKind {self.name!r}: correlation ({self.correlation}) must be in [0, 1]")
        if not self.weight > 0:
            raise ValueError(f"TaskKind {self.name!r}: weight ({self.weight}) must be > 0")
        if not 0 < self.pass_rate < 1 or not self.pass_spread >= 0:
            raise ValueError(
                f"TaskKind {self.name!r}: pass_rate ({self.pass_rate}) must be in (0, 1) and pass_spread "
                f"({self.pass_spread}) >= 0"
            )


class Workload(Protocol):
    """What the simulator asks. `step` is the training step in which a response was first launched: one that is resumed
    later keeps it, and with it its length."""

    def length(self, key: SampleKey, step: int = 0) -> int:
        """Response tokens."""
        ...

    def prompt_length(self, prompt_index: int) -> int:
        """Prompt tokens."""
        ...

    def kind_name(self, prompt_index: int) -> str:
        """The kind of a prompt."""
        ...

    def reward_s(self, key: SampleKey, step: int = 0) -> float:
        """Seconds of scoring."""
        ...

    def reward(self, key: SampleKey, step: int = 0) -> float:
        """The verdict."""
        ...


@dataclass(frozen=True, slots=True)
class ModelledWorkload:
    """`Workload` from distributions. A prompt keeps its kind, its length and its part of the score for ever; each
    response of each epoch and attempt draws a part of its own."""

    seed: int
    kinds: tuple[TaskKind, ...]

    def __post_init__(self) -> None:
        names = [kind.name for kind in self.kinds]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"ModelledWorkload.kinds ({names}) must be at least one, with names that differ")

    def kind(self, prompt_index: int) -> TaskKind:
        """The kind of a prompt, drawn by its index with the kinds' weights."""
        if len(self.kinds) == 1:
            return self.kinds[0]
        left = uniform(_KIND, self.seed, prompt_index) * math.fsum(kind.weight for kind in self.kinds)
        for kind in self.kinds:
            left -= kind.weight
            if left < 0:
                return kind
        return self.kinds[-1]

    def kind_name(self, prompt_index: int) -> str:
        return self.kind(prompt_index).name

    def score(self, key: SampleKey) -> float:
        """The response's standard normal score; see the module's docstring."""
        c = self.kind(key.prompt_index).correlation
        prompt = normal(_PROMPT_SCORE, self.seed, key.prompt_index)
        return math.sqrt(c) * prompt + math.sqrt(1 - c) * normal(_RESPONSE_SCORE, self.seed, *_words(key))

    def length(self, key: SampleKey, step: int = 0) -> int:
        return self.kind(key.prompt_index).lengths.length_of_score(self.score(key), step)

    def prompt_length(self, prompt_index: int) -> int:
        lengths = self.kind(prompt_index).prompt_lengths
        return lengths.length_of_score(normal(_PROMPT_LENGTH, self.seed, prompt_index))

    def reward_s(self, key: SampleKey, step: int = 0) -> float:
        return _reward_s(self.seed, self.kind(key.prompt_index).reward_time, key, self.length(key, step))

    def reward(self, key: SampleKey, step: int = 0) -> float:
        kind = self.kind(key.prompt_index)
        return _reward(self.seed, kind.pass_rate, kind.pass_spread, key)


def _words(key: SampleKey) -> tuple[int, int, int, int]:
    return key.epoch, key.prompt_index, key.sample_index, key.attempt


def _reward_s(seed: int, time: RewardTime, key: SampleKey, length: int) -> float:
    z = normal(_REWARD_TIME, seed, *_words(key))
    return time.seconds(z, uniform(_REWARD_HANGS, seed, *_words(key)), length)


def _reward(seed: int, pass_rate: float, spread: float, key: SampleKey) -> float:
    logit = math.log(pass_rate / (1 - pass_rate)) + spread * normal(_PASS_RATE, seed, key.prompt_index)
    return float(uniform(_REWARD, seed, *_words(key)) < 1 / (1 + math.exp(-min(max(logit, -700.0), 700.0))))


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Lengths of drawn batches, in tokens: quantiles over all responses; the rest is the mean over batches.

    `batch_std` is over all responses of a batch, `instance_std` within a prompt (APRIL §3.2.3, Fig. 5).
    """

    p50: float
    p75: float
    p90: float
    p99: float
    mean: float
    batch_max: float
    batch_std: float
    instance_std: float
    capped_share: float


def draw_batches(
    workload: Workload, num_prompts: int, group_size: int, num_batches: int, step: int = 0
) -> Iterator[list[list[int]]]:
    """Response lengths of batches of new prompts: [num_prompts][group_size] each."""
    for batch in range(num_batches):
        first = batch * num_prompts
        yield [
            [workload.length(SampleKey(0, prompt, i), step) for i in range(group_size)]
            for prompt in range(first, first + num_prompts)
        ]


def batch_statistics(batches: Sequence[Sequence[Sequence[int]]], cap: int) -> BatchStatistics:
    """What drawn batches (`draw_batches`) look like; `cap` is the longest response. Groups must be equally large."""
    lengths = np.asarray(batches, float)  # [batches, prompts, group]
    if lengths.ndim != 3 or not lengths.size:
        raise ValueError(f"batch_statistics: batches of shape {lengths.shape} must be [batches][prompts][group_size]")
    p50, p75, p90, p99 = (float(value) for value in np.quantile(lengths, (0.5, 0.75, 0.9, 0.99)))
    return BatchStatistics(
        p50=p50,
        p75=p75,
        p90=p90,
        p99=p99,
        mean=float(lengths.mean()),
        batch_max=float(lengths.max((1, 2)).mean()),
        batch_std=float(lengths.std((1, 2)).mean()),
        instance_std=float(lengths.std(2).mean()),
        capped_share=float((lengths >= cap).mean()),
    )
