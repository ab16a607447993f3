"""The questions to a judge about a sample, and the verdict that its responses give.

`JudgeText` is the text side, the same on the run's devices and at an endpoint. On the devices there are two kinds of
judge: a model that writes verdicts (`WrittenVerdicts`), and a reward model with a scalar head (`Scalars`). Special
tokens that a response spells out stay text, so that it can only persuade a judge.

Source: RollPacker §4.3 (LLM-as-a-judge among the rewards). The scalar is read as transformers'
`...ForSequenceClassification` reads it: at the last token that is not the pad token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from jaxrl.config import Config, ConfigError
from jaxrl.config.domains import domains
from jaxrl.mechanisms.judge import SCORE, Judge, fill_template
from jaxrl.rewards.request import ScoreRequest
from jaxrl.types import Sample, SamplingParams

if TYPE_CHECKING:
    from jaxrl.data.tokenizer import Tokenizer

MAX_KEPT_CHARS = 8000
"""The most characters of all of a sample's verdicts that are kept in its info."""
_MAX_READ_CHARS = 1_000_000  # of one verdict: the user's pattern must not meet a text without bounds


class JudgeText:
    """The prompt and the score of `reward.judge`, which must have no `problem`."""

    def __init__(self, judge: Judge.Options):
        self._judge = judge
        self._pattern = re.compile(judge.score_pattern or SCORE)

    def ask(self, request: ScoreRequest) -> list[dict[str, str]]:
        """The chat messages that ask for a verdict on a sample: perhaps a system message, and the user's. Raises
        ConfigError where the template has a field that the prompt's columns do not have."""
        columns = {
            **{"question": request.extra.get("prompt"), **request.extra},
            **{"source": request.source, "response": request.response, "answer": request.answer},
        }
        content = fill_template(self._judge.prompt, lambda name: _value(name, columns))
        return _conversation(self._judge, {"role": "user", "content": content})

    def score(self, text: str) -> float | None:
        """The score of one verdict between 0 and 1; None if it holds none from 0 to max_score."""
        last = None
        for last in self._pattern.finditer(text[-_MAX_READ_CHARS:]):  # noqa: B007  (of the matches, the last)
            pass
        if last is None or last[1] is None:
            return None
        try:
            score = float(last[1])
        except ValueError:
            return None
        high = self._judge.max_score
        if float(last.groupdict().get("of") or high) != high:
            return None  # 4/5 is on another scale
        return score / high if 0 <= score <= high else None

    def read(self, texts: Sequence[str]) -> tuple[float, dict[str, Any]]:
        """(the reward, values to record) of a sample's verdicts: the mean of those that can be read. The values:
        `judge`, the texts, each cut at its front where all are long; `scores`, from 0 to 1, None where a text holds
        none; `unparsed`, how many those are; `error` where no text can be read."""
        scores = [self.score(text) for text in texts]
        parsed = [score for score in scores if score is not None]
        kept = MAX_KEPT_CHARS // max(len(texts), 1)
        info: dict[str, Any] = {
            "judge": [text if len(text) <= kept else "…" + text[1 - kept :] for text in texts],
            "scores": scores,
            "unparsed": len(scores) - len(parsed),
        }
        if not parsed:
            info["error"] = f"none of {len(texts)} verdicts of the judge holds a score (reward.judge.score_pattern)"
            return 0.0, info
        return sum(parsed) / len(parsed), info


def _value(name: str, columns: Mapping[str, Any]) -> str:
    value = columns.get(name)
    if value is None:
        what = "has no value here" if name in columns else "is no column of the data"
        there = ", ".join(sorted(key for key in columns if columns[key] is not None))
        raise ConfigError(
            f"reward.judge.prompt: the field {{{name}}} {what}; there are {there}; for the braces themselves write "
            f"{{{{{name}}}}}"
        )
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _conversation(judge: Judge.Options, *messages: dict[str, str]) -> list[dict[str, str]]:
    system = [{"role": "system", "content": judge.system_prompt}] if judge.system_prompt else []
    return [*system, *messages]


def refuse_fields(config: Config, requests: Iterable[ScoreRequest]) -> None:
    """Raises ConfigError where `reward.judge.prompt` names what no prompt has that a judge is to score."""
    of, refused = domains(config.reward), None
    for request in requests:
        if (of.get(request.source) or of[""]).kind == "judge":
            try:
                JudgeText(config.reward.judge).ask(request)
                return
            except ConfigError as error:
                refused = refused or error
    if refused is not None:
        raise refused


_CUT = " [...] "
_SEED = 0x6A75646765
"""Added to the run's seed: a judge that is the actor's own model draws other numbers than the actor did."""


class Reading:
    """How one kind of judge reads a sample, and how its responses, of which there are `num_samples`, become a reward.
    `writes`: whether a response of the judge follows what it reads."""

    num_samples = 1
    params = SamplingParams(temperature=0.0, max_tokens=1)
    writes: ClassVar[bool]

    def __init__(self, judge: Judge.Options, tokenizer: Tokenizer) -> None:
        self._judge, self._tokenizer = judge, tokenizer

    def ids(self, request: ScoreRequest) -> tuple[int, ...]:
        """The tokens that the judge reads, at most `max_prompt_tokens`: of a longer response the middle is cut out, and
        its beginning and its end, where the answer is, stay. Raises ValueError where it is too long without one."""
        tokenizer, most = self._tokenizer, self._judge.max_prompt_tokens
        request = replace(request, response=tokenizer.as_text(request.response))
        ids = self._ids(request)
        whole = tokenizer.encode(request.response) if len(ids) > most else []
        kept = len(whole)
        while len(ids) > most:
            if kept <= 0:
                raise ValueError(
                    f"reward.judge.max_prompt_tokens ({most}) must hold what the judge reads besides the response, "
                    f"which is {len(ids)} tokens long"
                )
            kept = max(kept - max(len(ids) - most, 1), 0)
            head = kept // 2
            tail = whole[len(whole) - (kept - head) :] if kept else []
            cut = tokenizer.decode(whole[:head]) + _CUT + tokenizer.decode(tail) if kept else ""
            ids = self._ids(replace(request, response=tokenizer.as_text(cut)))
        return tuple(ids)

    def reward(self, samples: Sequence[Sample]) -> tuple[float, dict[str, Any]]:
        """(reward, values to record) of the judge's responses; an `error` among the values where they hold none."""
        raise NotImplementedError

    def _messages(self, request: ScoreRequest) -> list[dict[str, str]]:
        raise NotImplementedError

    def _ids(self, request: ScoreRequest) -> list[int]:
        """By the chat template, or as plain text where the model has none."""
        tokenizer, messages = self._tokenizer, self._messages(request)
        if not tokenizer.chat_templates:
            return tokenizer.encode("\n\n".join(message["content"] for message in messages), add_special_tokens=True)
        variables = dict[str, Any](self._judge.apply_chat_template_kwargs)
        return tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=self.writes, **variables))


class WrittenVerdicts(Reading):
    """A model that writes its verdicts (reward.kind=judge)."""

    writes = True

    def __init__(
        self, judge: Judge.Options, tokenizer: Tokenizer, stop_token_ids: tuple[int, ...], seed: int = 0
    ) -> None:
        super().__init__(judge, tokenizer)
        self._text, self.num_samples = JudgeText(judge), judge.num_samples
        self.params = SamplingParams(
            temperature=judge.temperature, max_tokens=judge.max_tokens, stop_token_ids=stop_token_ids, seed=seed + _SEED
        )

    def _messages(self, request: ScoreRequest) -> list[dict[str, str]]:
        return self._text.ask(request)

    def reward(self, samples: Sequence[Sample]) -> tuple[float, dict[str, Any]]:
        return self._text.read([self._tokenizer.decode(sample.token_ids.tolist()) for sample in samples])


class Scalars(Reading):
    """A reward model (reward.kind=model): it reads question and response as a conversation; its number is the reward.
    `pad_id`: tokens at a text's end that are not read; None: all are."""

    writes = False

    def __init__(self, judge: Judge.Options, tokenizer: Tokenizer, pad_id: int | None = None) -> None:
        super().__init__(judge, tokenizer)
        self._pad_id = pad_id

    def _messages(self, request: ScoreRequest) -> list[dict[str, str]]:
        question = {"role": "user", "content": str(request.extra.get("question", ""))}
        return _conversation(self._judge, question, {"role": "assistant", "content": request.response})

    def _ids(self, request: ScoreRequest) -> list[int]:
        ids = super()._ids(request)
        while len(ids) > 1 and ids[-1] == self._pad_id:
            ids.pop()
        return ids

    def reward(self, samples: Sequence[Sample]) -> tuple[float, dict[str, Any]]:
        (sample,) = samples  # a reward model's number takes the place of a token's log-probability
        return float(sample.sampled_logprobs[0]), {}
