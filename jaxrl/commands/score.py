"""`jaxrl score`: scores given responses with a run's reward and without a model, to try a reward before a run.

The pool is that of a run. Responses are read, scored and written as a stream: only as many are in flight as keep the
workers busy.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from jaxrl.config import Config, ConfigError
from jaxrl.config.domains import domains
from jaxrl.data.files import data_files
from jaxrl.data.responses import read_responses
from jaxrl.mechanisms.judge.endpoint import join_endpoint
from jaxrl.record.files import to_json, writing_whole
from jaxrl.record.metrics import RIGHT
from jaxrl.record.run_dir import inputs_of, refuse_overwriting
from jaxrl.rewards.domains import build_scorer, refuse_tests
from jaxrl.rewards.request import ScoreRequest
from jaxrl.rewards.reward_pool import RewardPool, build_pool
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, RunFailed, Sample, SampleKey

_AHEAD = 64  # responses under way for each worker, so that a slow one holds none of the others up


@dataclass(slots=True)
class Scores:
    count: int = 0
    right: int = 0
    total: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)  # by status: responses with reward 0, as scoring failed
    error: str = ""  # why the last of them failed

    def add(self, verdict: Verdict) -> None:
        self.count += 1
        self.total += verdict.reward
        self.right += verdict.reward >= RIGHT
        if verdict.status != "ok":
            self.failed[verdict.status] += 1
            self.error = verdict.failure

    def summary(self) -> str:
        parts = [
            f"{self.count} responses",
            f"mean reward {self.total / max(self.count, 1):.4g}",
            f"{self.right} with a reward of {RIGHT:g} or more",
        ]
        names = {"error": "errors", "timeout": "timeouts", "crash": "crashes"}
        parts += [f"{number} {names[status]}" for status, number in sorted(self.failed.items())]
        return ", ".join(parts) + (f" (the last one: {self.error})" if self.failed else "")


def score(
    config: Config,
    responses: str,
    out: str,
    *,
    inputs: Sequence[str] = (),
    progress: Callable[[int], None] = lambda count: None,
) -> Scores:
    """Scores each response of a file (a problem's own columns, and `response`), and writes a JSON line for each, in the
    file's order: `row` (from 1), `source`, `reward`, `status`, `info`, `duration_s`. `inputs`: more files
    that are read, which `out` must not replace.

    Raises ValueError for what a user can mend (an option, or a row of the file with its line), and RunFailed where
    scoring failed for every response; the file is written all the same.
    """
    refuse_overwriting(out, "--out", [responses, *inputs, *inputs_of(config)])
    (path,) = data_files([responses], "--responses")
    of = domains(config.reward)
    on_devices = next((domain for domain in of.values() if domain.place == "devices"), None)
    if on_devices is not None:
        raise ConfigError(
            f"{on_devices.option}.kind is {on_devices.kind}, with a model on the devices, and score has none: use "
            "eval, or a model at an endpoint"
        )

    def needs_answer(source: str) -> bool:
        return (of.get(source) or of[""]).kind in ("math", "auto", "task")

    needs_length = any(part.kind == "length" for part in config.reward.parts.values())
    rows = read_responses(path, config.data, needs_answer, needs_length=needs_length)
    scores = Scores()
    places: dict[int, str] = {}  # of the rows under way: file and line
    # with `auto`, a scorer that looks where each row is from: rows are no problems of `data.task`, but for those with a
    # column `entry`
    is_task = any(domain.kind == "task" for domain in of.values())
    scorer = build_scorer(config if is_task else config.replace(data=config.data.replace(val_files=[responses])))

    def where(key: SampleKey) -> str:
        return places[key.prompt_index]

    def placed() -> Iterator[tuple[Prompt, Sample]]:
        for place, prompt, sample in rows:
            refuse_tests(config, place, ScoreRequest.of(prompt, sample))
            places[prompt.index] = place
            yield prompt, sample

    with closing(build_pool(config, scorer, where=where)) as pool:
        join_endpoint(config, pool)
        pool.warm()
        with writing_whole(out) as file:
            said_s = time.monotonic()
            for prompt, verdict in _in_order(pool, placed(), _AHEAD * config.reward.num_workers):
                line: dict[str, Any] = {
                    "row": prompt.index + 1,
                    "source": prompt.source,
                    "reward": verdict.reward,
                    "status": verdict.status,
                    "info": dict(verdict.info),
                    "duration_s": round(verdict.duration_s, 6),
                }
                file.write(to_json(line, default=str).encode() + b"\n")
                del places[prompt.index]
                scores.add(verdict)
                if time.monotonic() - said_s > 0.2:
                    progress(scores.count)
                    said_s = time.monotonic()
    progress(scores.count)
    if sum(scores.failed.values()) == scores.count:
        raise RunFailed(f"no response could be scored: {scores.summary()}")
    return scores


def _in_order(pool: RewardPool, rows: Iterator[tuple[Prompt, Sample]], most: int) -> Iterator[tuple[Prompt, Verdict]]:
    """Each prompt with the verdict on its response, in the order of the rows; at most `most` are in flight."""
    under_way: dict[int, Prompt] = {}
    came: dict[int, Verdict] = {}
    first, more = 0, True
    while more or under_way:
        while more and len(under_way) < most:
            row = next(rows, None)
            if row is None:
                more = False
            else:
                under_way[row[0].index] = row[0]
                pool.submit(*row)
        came |= {verdict.key.prompt_index: verdict for verdict in pool.wait()}
        while first in came:
            yield under_way.pop(first), came.pop(first)
            first += 1
