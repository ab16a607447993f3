"""What a judge on the run's devices reads, as token ids, and what its responses come to.

Two kinds: a model that writes verdicts (`WrittenVerdicts`, over `jaxrl.mechanisms.judge.verdict_text`), and a reward
model with a scalar head (`Scalars`), which reads the question and the response as a conversation and writes nothing.

A text that is too long loses the middle of its response: its beginning and its end, where the answer is, stay. Special
tokens that a response spells out stay text, so that it cannot end its own turn and write the judge's.

Source: RollPacker §4.3. The scalar is read as transformers' `...ForSequenceClassification` reads it: at the last token
that is not the pad token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.mechanisms.judge.options import JudgeSection
from jaxrl.mechanisms.judge.verdict_text import JudgeText
from jaxrl.rewards.request import ScoreRequest
from jaxrl.types import Sample, SampleKey, SamplingParams

_CUT = " [...] "
_SEED = 0x6A75646765
"""Added to the run's seed: a judge that is the actor's own model draws other numbers than the actor did."""


class Reading(Protocol):
    """One kind of judge.

    Attributes:
      num_samples: responses of the judge to each sample.
      params: how they are drawn.
    """

    num_samples: int
    params: SamplingParams

    def ids(self, request: ScoreRequest) -> tuple[int, ...]:
        """What the judge reads of a sample. Raises ValueError if that cannot be made."""
        ...

    def reward(self, samples: Sequence[Sample]) -> tuple[float, dict[str, Any]]:
        """(reward, values to record) of its responses; an `error` among the values if there is no verdict in them."""
        ...


class WrittenVerdicts:
    """A model that writes its verdicts (reward.kind=judge).

    Args:
      stop_token_ids: of the judge's model.
      seed: the run's.
    """

    def __init__(
        self, judge: JudgeSection, tokenizer: Tokenizer, stop_token_ids: tuple[int, ...], seed: int = 0
    ) -> None:
        self._text, self._tokenizer, self._most = JudgeText(judge), tokenizer, judge.max_prompt_tokens
        self._variables = judge.apply_chat_template_kwargs
        self.num_samples = judge.num_samples
        self.params = SamplingParams(
            temperature=judge.temperature,
            max_tokens=judge.max_tokens,
            stop_token_ids=stop_token_ids,
            seed=seed + _SEED,
        )

    def ids(self, request: ScoreRequest) -> tuple[int, ...]:
        return fitting_ids(request, self._ids, self._tokenizer, self._most)

    def _ids(self, request: ScoreRequest) -> list[int]:
        return conversation_ids(self._tokenizer, self._text.ask(request), self._variables, asks=True)

    def reward(self, samples: Sequence[Sample]) -> tuple[float, dict[str, Any]]:
        return self._text.read([self._tokenizer.decode(sample.token_ids.tolist()) for sample in samples])


class Scalars:
    """A reward model (reward.kind=model); its number is the reward.

    Args:
      pad_id: tokens at a text's end that are not read; None: all are.
    """

    num_samples = 1
    params = SamplingParams(temperature=0.0, max_tokens=1)

    def __init__(self, judge: JudgeSection, tokenizer: Tokenizer, pad_id: int | None = None) -> None:
        self._judge, self._tokenizer, self._pad_id = judge, tokenizer, pad_id

    def ids(self, request: ScoreRequest) -> tuple[int, ...]:
        return fitting_ids(request, self._ids, self._tokenizer, self._judge.max_prompt_tokens)

    def _ids(self, request: ScoreRequest) -> list[int]:
        messages = [
            {"role": "user", "content": str(request.extra.get("question", ""))},
            {"role": "assistant", "content": request.response},
        ]
        if self._judge.system_prompt:
            messages.insert(0, {"role": "system", "content": self._judge.system_prompt})
        ids = conversation_ids(self._tokenizer, messages, self._judge.apply_chat_template_kwargs, asks=False)
        while len(ids) > 1 and ids[-1] == self._pad_id:
            ids.pop()
        return ids

    def reward(self, samples: Sequence[Sample]) -> tuple[float, dict[str, Any]]:
        (sample,) = samples  # a reward model's number stands where a token's log-probability does
        return float(sample.sampled_logprobs[0]), {}


def conversation_ids(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any], *, asks: bool
) -> list[int]:
    """A conversation's token ids, by the chat template, or as plain text where a model has none.

    Args:
      variables: for the template.
      asks: whether the model's answer is to follow.
    """
    if not tokenizer.chat_templates:
        return tokenizer.encode("\n\n".join(message["content"] for message in messages), add_special_tokens=True)
    return tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=asks, **variables))


def fitting_ids(request: ScoreRequest, ids_of: Any, tokenizer: Tokenizer, most: int) -> tuple[int, ...]:
    """What `ids_of` makes of a request, with the middle of the response cut out until that is at most `most` ids.

    Raises:
      ValueError: even without a response it is longer.
    """
    request = replace(request, response=tokenizer.as_text(request.response))
    ids = ids_of(request)
    whole = tokenizer.encode(request.response) if len(ids) > most else []
    kept = len(whole)
    while len(ids) > most:
        if kept <= 0:
            raise ValueError(
                f"reward.judge.max_prompt_tokens ({most}) must hold what the judge reads besides the response, which "
                f"is {len(ids)} tokens long"
            )
        kept = max(kept - max(len(ids) - most, 1), 0)
        head = kept // 2
        tail = whole[len(whole) - (kept - head) :] if kept else []
        cut = tokenizer.decode(whole[:head]) + _CUT + tokenizer.decode(tail) if kept else ""
        ids = ids_of(replace(request, response=tokenizer.as_text(cut)))
    return tuple(ids)


def verdict_key(key: SampleKey, number: int, num_samples: int) -> SampleKey:
    """The key of a sample's verdict number `number`, of `num_samples`: all that its tokens depend on."""
    return replace(key, sample_index=key.sample_index * num_samples + number)
