"""`jaxrl replay`: draws a recorded response again, token by token, offline: without rewards, tools or other responses.

A token's random bits come from the run's seed, the sample's key and the position. Each span of the model's tokens is
drawn behind what is recorded before it, with the weights of its version; an environment's answers are taken from the
record (`jaxrl.record.samples`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from jaxrl.config import Config
from jaxrl.config.files import load_recorded
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.record.run_dir import CONFIG_FILE
from jaxrl.record.samples import RecordedSample, read_sample
from jaxrl.run.build import LoneWorker, use_compilation_cache
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.training.steps import whole_step
from jaxrl.types import ENVIRONMENT, RunFailed, Sample


@dataclass(frozen=True, slots=True)
class ReplayedSpan:
    """A recorded span and what was drawn in its place; an environment's draws nothing."""

    version: int
    start: int  # tokens of the response before it
    recorded: tuple[int, ...]
    drawn: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # of the tokens drawn, from the model's own distribution at the run's temperature


def replay(
    run_dir: str,
    key: str,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = print,
    *,
    each_token: bool = False,
) -> None:
    """Draws a recorded response again, prints it, and says whether each token is the recorded one.

    Raises ValueError where the run has no such sample, or no longer the weights that drew it, and RunFailed where a
    token is another one.
    """
    file = config_file(run_dir)
    recorded = read_sample(run_dir, key)
    config = load_recorded(file, overrides, say)
    versions = sorted({version for version, _ in recorded.spans} - {ENVIRONMENT})
    places = {version: _checkpoint(config, run_dir, version, say) for version in versions}
    spans, tokenizer = _drawn_again(config, recorded, places, say)
    say(f"step {recorded.step}, sample {key}: {sum(len(span.recorded) for span in spans)} tokens")
    for span in spans:
        for line in _lines(span, tokenizer, each_token=each_token):
            say(line)
    for span in spans:
        if span.version != ENVIRONMENT:
            _compare(span, key)
    say(f"each of the {sum(len(span.drawn) for span in spans)} tokens of the model is as it was recorded")


def config_file(run_dir: str) -> Path:
    file = Path(run_dir) / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"{run_dir} is no run: it has no {CONFIG_FILE}")
    return file


def _checkpoint(config: Config, run_dir: str, version: int, say: Callable[[str], None]) -> Path | None:
    """The checkpoint with the weights of a version; None for version 0, which has those of `model.path`."""
    if not version:
        return whole_step(config.trainer.init_from, say=say) if config.trainer.init_from else None
    try:
        return whole_step(run_dir, version, say)
    except FileNotFoundError as error:
        raise ValueError(
            f"the weights after step {version} have drawn tokens of this sample: {error}. trainer.save_freq says after "
            "which steps a run saves, and trainer.max_ckpt_to_keep how many checkpoints it keeps"
        ) from None


def _drawn_again(
    config: Config, recorded: RecordedSample, places: dict[int, Path | None], say: Callable[[str], None]
) -> tuple[list[ReplayedSpan], Tokenizer]:
    worker = LoneWorker.open(config, say, places.values())
    use_compilation_cache(config)
    executor = worker.executor()
    engine = worker.engine(executor)
    starts = [0, *accumulate(len(token_ids) for _, token_ids in recorded.spans)]
    spans = [
        ReplayedSpan(version, start, token_ids)
        for (version, token_ids), start in zip(recorded.spans, starts, strict=False)
    ]
    for version, place in places.items():
        executor.sync_weights(worker.weights(place), version)
        executor.allocate()
        own = [i for i, span in enumerate(spans) if span.version == version]
        samples = engine.generate([_request(worker, recorded, spans[: i + 1]) for i in own])
        for i, sample in zip(own, samples, strict=True):
            start = spans[i].start
            logprobs = tuple(sample.rollout_logprobs[start:].tolist())
            spans[i] = replace(spans[i], drawn=tuple(sample.token_ids[start:].tolist()), logprobs=logprobs)
    return spans, worker.tokenizer


def _request(worker: LoneWorker, recorded: RecordedSample, spans: Sequence[ReplayedSpan]) -> Request:
    """A request that draws the last of some spans again, behind all that is recorded before it."""
    *before, span = spans
    most = span.start + len(span.recorded)
    params = replace(worker.config.sampling(worker.stop_token_ids), max_tokens=most)
    unknown = np.zeros(span.start, np.float32)
    kept = Sample(
        recorded.key,
        np.array([token_id for each in before for token_id in each.recorded], np.int32),
        rollout_logprobs=unknown,
        sampled_logprobs=unknown,
        versions=np.array([each.version for each in before for _ in each.recorded], np.int32),
    )
    return Request(len(before), recorded.key, recorded.prompt_ids, params, kept=kept)


def _lines(span: ReplayedSpan, tokenizer: Tokenizer, *, each_token: bool) -> Iterator[str]:
    text = tokenizer.decode(span.recorded, skip_special_tokens=False)
    count = f"{len(span.recorded)} tokens"
    if span.version == ENVIRONMENT:
        yield f"-- the environment, {count}\n{text}"
        return
    yield f"-- the model, weights after step {span.version}, {count}, mean log-probability {np.mean(span.logprobs):.3f}"
    if not each_token:
        yield text
        return
    for i, (token_id, logprob) in enumerate(zip(span.recorded, span.logprobs, strict=False)):
        piece = tokenizer.decode([token_id], skip_special_tokens=False)
        yield f"{span.start + i:>6}  {token_id:>7}  {logprob:>9.4f}  {piece!r}"


def _compare(span: ReplayedSpan, key: str) -> None:
    for place, (then, now) in enumerate(zip(span.recorded, span.drawn, strict=False), span.start):
        if now != then:
            raise RunFailed(
                f"sample {key}: token {place} was {then}, and now {now} is drawn: the weights, the options of rollout, "
                "the type or the number of devices differ from the run's"
            )
    if len(span.drawn) != len(span.recorded):
        raise RunFailed(f"sample {key}: {len(span.recorded)} tokens were drawn, and now {len(span.drawn)}")
