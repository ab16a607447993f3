"""The data of a simulated run: response and prompt lengths, seconds of scoring and rewards, each by identity.

Every number is a pure function of (seed, identity), so a change of schedule does not change what is generated.

Source: RollPacker §2.2 and Fig. 2 (long-tailed lengths, by kind of task), §4.3 and Fig. 8 (time-outs of the sandbox);
RhymeRL §3.1 (lengths grow over training) and §6.1 (a prompt's rank by length is stable over epochs); APRIL §3.2.3
(lengths vary less within a prompt than between prompts).

Model: a response has a standard normal *score* z = sqrt(c) a + sqrt(1 - c) b. Here a belongs to the prompt (in every
epoch and attempt) and b to the response. Its length is the quantile of Phi(z) in the distribution that
`SimulatedLengths` describes, so the lengths of all responses have exactly that distribution. `correlation` c says how
much of the length the prompt decides.

Departures: the papers' traces are not public, so shapes come from their published quantiles (`scripts/papers`). Scores
come from a 64-bit counter hash (the finaliser of splitmix64, Steele et al. 2014), not from a generator with state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from jaxrl.config import SimulatedHistory, SimulatedLengths, SimulatedScoring, SimulatedTask
from jaxrl.types import SampleKey

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_NORMAL = NormalDist()
# What a random number is for: the first word of its identity.
_TASK, _PROMPT_SCORE, _RESPONSE_SCORE, _PROMPT_LENGTH, _REWARD_TIME, _REWARD_HANGS, _PASS_RATE, _REWARD = range(8)
_OUTLIER = 8
_GROWTH_LIMIT = 10.0  # times the lengths of the first step


def word(*identity: int) -> int:
    """64 bits that depend on the integers alone (taken modulo 2**64), the same on every machine."""
    state = 0
    for each in identity:
        state = ((state ^ (each & _MASK)) + _GAMMA) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def uniform(*identity: int) -> float:
    return ((word(*identity) >> 12) + 0.5) / (1 << 52)


def normal(*identity: int) -> float:
    return _NORMAL.inv_cdf(uniform(*identity))


def correlated(share: float, prompt: float, own: float) -> float:
    """A standard normal number, of which the prompt's decides `share` and the response's own the rest."""
    return math.sqrt(share) * prompt + math.sqrt(1 - share) * own


def exact_length(lengths: SimulatedLengths, z: float, step: int = 0) -> float:
    """Tokens of the response with score `z`, before limit and rounding; infinite if the tail is too far out for a
    float."""
    if lengths.tail_from < 1 and (above := share_above(z)) < 1 - lengths.tail_from:
        if above <= 0:
            return math.inf
        log_length = math.log((1 - lengths.tail_from) / above) / lengths.tail_index
        tokens = tail_start(lengths) * math.exp(min(log_length, 700.0))
    else:
        tokens = lengths.median * math.exp(min(lengths.sigma * z, 700.0))
    if lengths.growth == 0 or step <= 0:
        return tokens
    exponent, limit = step * math.log1p(lengths.growth), math.log(_GROWTH_LIMIT)
    return tokens * math.exp(min(max(exponent, -limit), limit))


def length_of_score(lengths: SimulatedLengths, longest: int, z: float, step: int = 0) -> int:
    """The same in whole tokens; responses above `longest` are cut there, as `max_tokens` does."""
    return int(min(max(round(min(exact_length(lengths, z, step), longest)), 1), longest))


def tail_start(lengths: SimulatedLengths) -> float:
    """Tokens at which the power law takes over from the lognormal body."""
    return lengths.median * math.exp(lengths.sigma * _NORMAL.inv_cdf(lengths.tail_from))


def share_above(z: float) -> float:
    """The share of a standard normal above z; exact far out, where 1 - cdf is not."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def scoring_s(scoring: SimulatedScoring, timeout_s: float, z: float, u: float, length: int) -> float:
    """Seconds of scoring a response of `length` tokens with score `z` and hang score `u` in (0, 1)."""
    if u < scoring.hang_share:
        return timeout_s
    return min(scoring.median_s * math.exp(scoring.sigma * z) + scoring.per_token_s * length, timeout_s)


@dataclass(frozen=True, slots=True)
class ModelledWorkload:
    """Lengths and times from distributions. A prompt keeps its task, length and part of the score for ever; each
    response of each epoch and attempt draws its own part. `step`: the training step in which a response was first
    launched; one that is resumed keeps it, and so its length.

    Attributes:
      tasks: what prompts there are; a prompt's task is drawn by its index with the tasks' weights.
      max_response_length, max_prompt_length: tokens at which lengths are cut.
      timeout_s: the longest time limit of scoring among the tasks.
    """

    seed: int
    tasks: tuple[SimulatedTask, ...]
    max_response_length: int
    max_prompt_length: int = 1024
    timeout_s: float = math.inf

    def task(self, prompt_index: int) -> SimulatedTask:
        if len(self.tasks) == 1:
            return self.tasks[0]
        left = uniform(_TASK, self.seed, prompt_index) * math.fsum(task.weight for task in self.tasks)
        for task in self.tasks:
            left -= task.weight
            if left < 0:
                return task
        return self.tasks[-1]

    def kind_name(self, prompt_index: int) -> str:
        return self.task(prompt_index).name

    def history(self, prompt_index: int) -> SimulatedHistory:
        return self.task(prompt_index).history

    def score(self, key: SampleKey) -> float:
        """The response's standard normal score; see the module's docstring."""
        task, own = self.task(key.prompt_index), normal(_RESPONSE_SCORE, self.seed, *words(key))
        if task.outlier_share and uniform(_OUTLIER, self.seed, *words(key)) < task.outlier_share:
            return own
        return correlated(task.correlation, normal(_PROMPT_SCORE, self.seed, key.prompt_index), own)

    def length(self, key: SampleKey, step: int = 0) -> int:
        lengths = self.task(key.prompt_index).response
        return length_of_score(lengths, self.max_response_length, self.score(key), step)

    def prompt_length(self, prompt_index: int) -> int:
        task = self.task(prompt_index)
        lengths = SimulatedLengths(median=task.prompt_median, sigma=task.prompt_sigma)
        return length_of_score(lengths, self.max_prompt_length, normal(_PROMPT_LENGTH, self.seed, prompt_index))

    def reward_s(self, key: SampleKey, step: int = 0) -> float:
        scoring, length = self.task(key.prompt_index).scoring, self.length(key, step)
        z, u = normal(_REWARD_TIME, self.seed, *words(key)), uniform(_REWARD_HANGS, self.seed, *words(key))
        return scoring_s(scoring, self.timeout_s, z, u, length)

    def reference_time_s(self, prompt_index: int) -> float:
        return self.task(prompt_index).scoring.median_s

    def reward(self, key: SampleKey, step: int = 0) -> float:
        task = self.task(key.prompt_index)
        logit = math.log(task.pass_rate / (1 - task.pass_rate))
        logit += task.pass_spread * normal(_PASS_RATE, self.seed, key.prompt_index)
        passes = 1 / (1 + math.exp(-min(max(logit, -700.0), 700.0)))
        return float(uniform(_REWARD, self.seed, *words(key)) < passes)


def words(key: SampleKey) -> tuple[int, int, int, int]:
    return key.epoch, key.prompt_index, key.sample_index, key.attempt
