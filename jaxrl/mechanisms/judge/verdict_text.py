"""The text side of a judge: what it is asked about a sample, and the score that its verdicts hold.

Source: RollPacker §4.3 (LLM-as-a-judge among the rewards). Where the judge runs is not known here: on the run's devices
or at an endpoint, it is asked the same messages and read by the same pattern.

The response stands in a message as it is. A response that speaks to the judge ("give this a 10") can therefore only
persuade it, never change what is asked or how the verdict is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from jaxrl.config import Config, ConfigError
from jaxrl.config.domains import domains
from jaxrl.mechanisms.judge.options import SCORE, JudgeSection, fill_template
from jaxrl.rewards.request import ScoreRequest

MAX_KEPT_CHARS = 8000
"""Of a sample's verdicts, all together, that are kept in its info."""
_MAX_READ_CHARS = 1_000_000  # of one verdict: the user's pattern must not meet a text without bounds


class JudgeText:
    """The prompt and the score of `reward.judge`, which must have no `problem`."""

    def __init__(self, judge: JudgeSection):
        self._judge = judge
        self._pattern = re.compile(judge.score_pattern or SCORE)

    def ask(self, request: ScoreRequest) -> list[dict[str, str]]:
        """The chat messages that ask for a verdict on a sample: perhaps a system message, and the user's.

        A judge that takes fewer tokens is asked with a request whose response was cut.

        Raises:
          ConfigError: the template has a field that the prompt's columns do not have.
        """
        columns = _columns(request)
        content = fill_template(self._judge.prompt, lambda name: self._value(name, columns))
        messages = [{"role": "user", "content": content}]
        if self._judge.system_prompt:
            messages.insert(0, {"role": "system", "content": self._judge.system_prompt})
        return messages

    def score(self, text: str) -> float | None:
        """The score of one verdict between 0 and 1; None if it holds none between min_score and max_score."""
        last = None
        for last in self._pattern.finditer(text[-_MAX_READ_CHARS:]):  # noqa: B007  (of the matches, the last)
            pass
        if last is None or last[1] is None:
            return None
        try:
            score = float(last[1])
        except ValueError:
            return None
        low, high = self._judge.min_score, self._judge.max_score
        if float(last.groupdict().get("of") or high) != high:
            return None  # 4/5 is on another scale
        return (score - low) / (high - low) if isfinite(score) and low <= score <= high else None

    def read(self, texts: Sequence[str]) -> tuple[float, dict[str, Any]]:
        """(the reward, values to record) of a sample's verdicts: the mean of those that can be read.

        The values: `judge`, the texts, each cut at its front where all are long; `scores`, from 0 to 1, None where a
        text holds none; `unparsed`, how many those are. If no text can be read the reward is 0 and `error` says so: the
        sample's verdict then has the status "error".
        """
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

    def _value(self, name: str, columns: Mapping[str, Any]) -> str:
        value = columns.get(name)
        if value is None:
            what = "has no value here" if name in columns else "is no column of the data"
            there = ", ".join(sorted(key for key in columns if columns[key] is not None))
            raise ConfigError(
                f"reward.judge.prompt: the field {{{name}}} {what}; there are {there}; for the braces themselves write "
                f"{{{{{name}}}}}"
            )
        if isinstance(value, str):
            return value
        return json.dumps(value, ensure_ascii=False, default=str)


def _columns(request: ScoreRequest) -> dict[str, Any]:
    """What a template may name; the data's columns give way to the sample's response and its reference answer."""
    columns = {"question": request.extra.get("prompt"), **request.extra}
    return {**columns, "source": request.source, "response": request.response, "answer": request.answer}


def refuse_fields(config: Config, requests: Iterable[ScoreRequest]) -> None:
    """Raises ConfigError where `reward.judge.prompt` names what no prompt has that a judge is to score."""
    of, refused = domains(config.reward), None
    if all(domain.kind != "judge" for domain in of.values()):
        return
    for request in requests:
        if (of.get(request.source) or of[""]).kind == "judge":
            try:
                JudgeText(config.reward.judge).ask(request)
                return
            except ConfigError as error:
                refused = refused or error
    if refused is not None:
        raise refused
