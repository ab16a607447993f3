"""The data that flows through a run: Prompt -> Sample -> Group -> TrainBatch.

Everything here is plain Python and numpy, so scheduling, rewards and the simulator can use it without jax or an
accelerator. Arrays of a sample are ragged by nature; padding and packing happen only in `jaxrl.training.packing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class RunFailed(Exception):
    """A run cannot continue, though its configuration is right: one sentence with the cause and what to do. The command
    line prints it and ends with status 1; a ValueError (a mistake in what the user gave) ends with 2."""


class HostLost(RunFailed):
    """A host has died or does not answer: its run can begin again from the newest checkpoint."""


class StreamFailed(Exception):
    """Gradients could not be computed beside the rollout: the devices' own words. The trainer has not moved."""


FinishReason = Literal["stop", "length", "abort"]
"""`stop`: a stop token or stop string; `length`: the token limit; `abort`: ended by the scheduler, unfinished."""


ENVIRONMENT = -1
"""Policy version of environment (observation) tokens."""


@dataclass(frozen=True, slots=True, order=True)
class SampleKey:
    """Identity of one response. Every random bit of a sampled token derives from (run seed, this key, position).

    `prompt_index` is the position in the data set (not in the shuffled order), `attempt` counts the relaunches of the
    same prompt that sample new tokens.
    """

    epoch: int
    prompt_index: int
    sample_index: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, tokenised.

    Attributes:
      epoch: the pass over the data set that it belongs to.
      index: its position in the data set, stable over epochs.
      text: the rendered prompt, as shown to people.
      source: the data set's or task's name; a reward may depend on it.
      answer: the reference answer, if there is one.
      extra: other data that the reward needs (a reasoning-gym entry, test cases). Must survive pickling.
      question: the last user message before templates, as a model that scores reads it; empty: there is only `text`.
    """

    epoch: int
    index: int
    token_ids: tuple[int, ...]
    text: str
    source: str
    answer: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    question: str = ""

    @property
    def key(self) -> tuple[int, int]:
        """(epoch, index): each such pair leaves the system exactly once."""
        return (self.epoch, self.index)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample a response; by default from the model's own distribution.

    Attributes:
      temperature: 0 is greedy.
      top_k: keep the k likeliest tokens; 0 or -1 keeps all.
      top_p: keep the smallest set of likeliest tokens with a total probability of at least top_p.
      min_p: drop tokens less likely than min_p times the likeliest.
      max_tokens: the longest response, in tokens, the stop token included.
      stop_token_ids: the response ends with (and includes) the first of these.
      stop_strings: the response ends with the token that completes the first of these.
      seed: replaces the run's seed for this request.
      top_logprobs: the number of likeliest tokens to report at each position, by their `rollout_logprobs`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never drawn, for which programs sort the vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def __post_init__(self) -> None:
        rules = (
            ("temperature", ">= 0", self.temperature >= 0),
            ("top_k", ">= 1, or 0 or -1 to keep all tokens", self.top_k >= -1),
            ("top_p", "in (0, 1]", 0 < self.top_p <= 1),
            ("min_p", "in [0, 1)", 0 <= self.min_p < 1),
            ("max_tokens", ">= 1", self.max_tokens >= 1),
            ("top_logprobs", ">= 0", self.top_logprobs >= 0),
            ("stop_strings", "a tuple of strings", not isinstance(self.stop_strings, str)),
            ("stop_strings", "non-empty strings", all(self.stop_strings)),
        )
        for name, rule, holds in rules:
            if not holds:
                raise ValueError(f"SamplingParams.{name} ({getattr(self, name)!r}) must be {rule}")


class TopTokens(NamedTuple):
    """The likeliest tokens of each place of a response, the likeliest first: int32 [T, K], and float32 [T, K], as
    `Sample.rollout_logprobs`."""

    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the model, and what its environment made of it.

    Attributes:
      end: tokens of the response up to the end of the turn; the answer follows.
      messages: the answer, each with `role` and `content`; none: the trajectory ended with this turn.
      seconds: until the answer.
    """

    end: int
    text: str
    messages: tuple[Mapping[str, Any], ...] = ()
    reward: float = 0.0
    seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Episode:
    """A response's trajectory in its environment.

    Attributes:
      turns: those that were answered; of a finished trajectory, all.
      state: of the environment after them, pickled; None: it has not begun.
      awaits: the response ends with a turn that has no answer yet.
      stop: why the trajectory is finished; empty: it is not.
    """

    turns: tuple[Turn, ...] = ()
    state: bytes | None = None
    awaits: bool = False
    stop: str = ""
    error: str = ""

    @property
    def failed(self) -> Literal["", "error", "timeout", "crash"]:
        """How its environment has failed, if it has: none of its rewards counts then."""
        return self.stop if self.stop in ("error", "timeout", "crash") else ""

    @property
    def was_answered(self) -> bool:
        """A response that was cut in its first turn shows no sign of its environment."""
        return any(turn.seconds for turn in self.turns)


@dataclass(slots=True)
class Sample:
    """One response to a prompt, finished or not, of one turn or of several with an environment's answers in between.

    All tokens after the prompt are in it, in order: they are appended, and never tokenised again. The first and the
    last token of a finished sample are the model's, and its versions never fall.

    Attributes:
      token_ids: int32 [T], the response only.
      rollout_logprobs: float32 [T], log-probability of each token under the temperature-scaled distribution before any
        truncation: what training can recompute, and what ratios, mismatch and KL use (at temperature 0: under
        temperature 1).
      sampled_logprobs: float32 [T], log-probability under the distribution that was sampled (temperature, top-k, top-p,
        min-p; 0 when greedy).
      versions: int32 [T], the `policy_version` (number of weight syncs) that produced each token; `ENVIRONMENT` where
        an environment has: such a token has no log-probability (0), and is never learnt from.
      finish_reason: None while it is unfinished.
      reward: the scorer's verdict, and in `reward_info` what it adds; None until scored.
      failure: why it could not be scored, and has a reward of zero; empty: it was scored.
      top: the likeliest tokens, where they were asked for (`SamplingParams.top_logprobs`).
    """

    key: SampleKey
    token_ids: np.ndarray
    rollout_logprobs: np.ndarray
    sampled_logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason | None = None
    text: str = ""
    reward: float | None = None
    reward_info: Mapping[str, Any] = field(default_factory=dict)
    top: TopTokens | None = None
    episode: Episode | None = None
    failure: str = ""

    @classmethod
    def empty(cls, key: SampleKey) -> Sample:
        import numpy as np

        nothing_f = np.zeros((0,), np.float32)
        nothing_i = np.zeros((0,), np.int32)
        return cls(key, nothing_i, nothing_f, nothing_f, nothing_i)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def has_ended(self) -> bool:
        return self.finish_reason in ("stop", "length")

    @property
    def drawn(self) -> np.ndarray:
        """bool [T]: the model's tokens; the others are an environment's."""
        return self.versions != ENVIRONMENT

    @property
    def num_drawn(self) -> int:
        return int(self.drawn.sum())


@dataclass(slots=True)
class Group:
    """A prompt and its samples, in the order of `sample_index`: the unit of group-relative advantages."""

    prompt: Prompt
    samples: list[Sample]


def check_schema(what: str, state: Mapping[str, Any], schema: int) -> None:
    """Raises ValueError for a part of a checkpoint, or of a journal, that another version has written."""
    if (found := state.get("schema")) != schema:
        raise ValueError(f"{what}: state of schema {found}; this version reads schema {schema}")


@dataclass(slots=True)
class TrainBatch:
    """The data of one training step: groups flattened to samples, in an order that no clock decides. Lists are per
    sample, and float32 [T_i] where nothing else is said; None where a run has no such thing.

    Attributes:
      prompts: one per sample (a group's prompt repeated).
      samples: in the order of their groups.
      old_logprobs: under the policy before this step's first update; None: the recorded `rollout_logprobs` are used.
      ref_logprobs, teacher_logprobs: under the reference model, and under a teacher.
      teacher_ids, teacher_top_logprobs: int32 [T_i, K], the tokens that the teacher finds likeliest, and float32 [T_i,
        K + 1], what it thinks of those and of all others together (`algorithm.teacher.top_k`).
      loss_masks: 1 at tokens to learn from; None: all. An environment's tokens are 0.
      values, returns: what the critic expects from each token on, before this step's updates, and what it is to expect.
    """

    prompts: list[Prompt]
    samples: list[Sample]
    advantages: list[np.ndarray]
    old_logprobs: list[np.ndarray] | None = None
    ref_logprobs: list[np.ndarray] | None = None
    loss_masks: list[np.ndarray] | None = None
    values: list[np.ndarray] | None = None
    returns: list[np.ndarray] | None = None
    teacher_logprobs: list[np.ndarray] | None = None
    teacher_ids: list[np.ndarray] | None = None
    teacher_top_logprobs: list[np.ndarray] | None = None

    @classmethod
    def of(cls, groups: Sequence[Group]) -> TrainBatch:
        """All samples of `groups`, in their order; the advantages are zeros until they are known."""
        import numpy as np

        samples = [sample for group in groups for sample in group.samples]
        return cls(
            prompts=[group.prompt for group in groups for _ in group.samples],
            samples=samples,
            advantages=[np.zeros(len(sample), np.float32) for sample in samples],
        )

    def __len__(self) -> int:
        return len(self.samples)

    def select(self, indices: list[int]) -> TrainBatch:
        def pick(values: list[Any] | None) -> Any:
            return None if values is None else [values[i] for i in indices]

        return TrainBatch(**{each.name: pick(getattr(self, each.name)) for each in fields(self)})
