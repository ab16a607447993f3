"""`jaxrl replay`: a response of a run, drawn again from its record, token by token.

Purpose: a trajectory that looks wrong is looked at alone, offline: no reward, no tool and no other response is needed.
The random bits of a token are those of the run's seed, the sample's key and the position, so with the same weights each
token is drawn as it was. What an environment has answered is taken from the record (`jaxrl.record.samples`).

Each span of the model's tokens is drawn behind what is recorded before it, with the weights of its version: those of
the checkpoint after as many steps, or those with which the run began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxrl.config import Config
from jaxrl.config.files import load
from jaxrl.data.stops import stop_ids
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.record.run_dir import CONFIG_FILE
from jaxrl.record.samples import RecordedSample, read_sample
from jaxrl.runtime.build import (
    build_engine,
    build_executor,
    on_one_worker,
    read_tokenizer_and_model,
    refuse_too_large,
    use_compilation_cache,
)
from jaxrl.runtime.degree import with_degree
from jaxrl.runtime.devices import prepare_jax
from jaxrl.runtime.weights import load_weights, refuse_other_model
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.memory import memory_of
from jaxrl.sharding.mesh import make_mesh
from jaxrl.train.steps import whole_step
from jaxrl.types import ENVIRONMENT, RunFailed, Sample, SamplingParams


@dataclass(frozen=True, slots=True)
class _Span:
    """A span, and what came of drawing it again.

    Attributes:
      version: as in `jaxrl.record.samples.RecordedSample`. start: tokens of the response before it.
      logprobs: of each token, from the model's own distribution at the run's temperature; none for an environment's.
      other: where another token was drawn, the place in the span, and that token.
    """

    version: int
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    other: tuple[int, int] | None = None


def replay(
    run_dir: str,
    key: str,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = print,
    *,
    each_token: bool = False,
) -> None:
    """Draws a recorded response again, shows it, and says whether each token is the recorded one.

    Args:
      key: of the sample, as `samples.jsonl` and the report have it.
      overrides: options on top of the run's own.
      say: shows a line.
      each_token: with a line for each token.

    Raises:
      ValueError: the run has no such sample, or not the weights that drew it any more.
      RunFailed: a token is another one.
    """
    file = Path(run_dir) / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"{run_dir} is no run: it has no {CONFIG_FILE}")
    recorded = read_sample(run_dir, key)
    config = load(file, overrides, say)
    places = {version: _weights(config, run_dir, version, say) for version in _versions(recorded)}
    spans, tokenizer = _drawn(on_one_worker(config), recorded, places, say)
    say(f"step {recorded.step}, sample {key}: {sum(len(span.token_ids) for span in spans)} tokens")
    for span in spans:
        for line in _shown(span, tokenizer, each_token=each_token):
            say(line)
    _compare(spans, key)
    say(f"each of the {sum(len(span.logprobs) for span in spans)} tokens of the model is as it was recorded")


def _versions(recorded: RecordedSample) -> list[int]:
    return sorted({version for version, _ in recorded.spans} - {ENVIRONMENT})


def _weights(config: Config, run_dir: str, version: int, say: Callable[[str], None]) -> Path | None:
    """The checkpoint with the weights of a version; None: they are those of `model.path`."""
    if not version:
        return whole_step(config.trainer.init_from, say=say) if config.trainer.init_from else None
    try:
        return whole_step(run_dir, version, say)
    except FileNotFoundError as error:
        raise ValueError(
            f"the weights after step {version} have drawn tokens of this sample: {error}. trainer.save_freq says after "
            "which steps a run saves, and trainer.max_ckpt_to_keep how many checkpoints it keeps"
        ) from None


def _drawn(
    config: Config, recorded: RecordedSample, places: dict[int, Path | None], say: Callable[[str], None]
) -> tuple[list[_Span], Tokenizer]:
    """The spans of a response in their order, each drawn with the weights of its version."""
    mesh = make_mesh(prepare_jax(config))
    config = with_degree(config, mesh, say)
    tokenizer, model = read_tokenizer_and_model(config)
    refuse_too_large(config, model, mesh.size, memory_of(mesh.devices.ravel().tolist()), trains=False)
    for place in places.values():
        if place is not None:
            refuse_other_model(place, config, model, mesh)
    use_compilation_cache(config)
    executor = build_executor(config, model, Layout(mesh, config.rollout.tp))
    engine = build_engine(config, executor, tokenizer)
    spans: list[_Span] = []
    for version, token_ids in recorded.spans:
        spans.append(_Span(version, sum(len(each.token_ids) for each in spans), token_ids))
    for version, place in places.items():
        executor.sync_weights(load_weights(config, model, mesh, place), version)
        executor.allocate()
        own = [i for i, span in enumerate(spans) if span.version == version]
        stops = stop_ids(tokenizer, model.eos_token_ids)
        samples = engine.generate([_request(config, recorded, spans, i, stops) for i in own])
        for i, sample in zip(own, samples, strict=True):
            spans[i] = _compared(spans[i], sample)
    return spans, tokenizer


def _request(
    config: Config, recorded: RecordedSample, spans: Sequence[_Span], number: int, stops: tuple[int, ...]
) -> Request:
    """One that draws a span again, behind all that is recorded before it."""
    rollout, span = config.rollout, spans[number]
    params = SamplingParams(
        rollout.temperature,
        max(rollout.top_k, 0),
        rollout.top_p,
        rollout.min_p,
        span.start + len(span.token_ids),
        stops,
        tuple(rollout.stop),
    )
    before = [(token_id, each.version) for each in spans[:number] for token_id in each.token_ids]
    nothing = (0.0,) * len(before)
    return Request(
        number,
        recorded.key,
        recorded.prompt_ids,
        params,
        generated=tuple(token_id for token_id, _ in before),
        generated_sampled_logprobs=nothing,
        generated_rollout_logprobs=nothing,
        generated_versions=tuple(version for _, version in before),
    )


def _compared(span: _Span, sample: Sample) -> _Span:
    found = sample.token_ids[span.start :].tolist()
    logprobs = tuple(sample.rollout_logprobs[span.start :].tolist())
    others = [(i, now) for i, (now, then) in enumerate(zip(found, span.token_ids, strict=False)) if now != then]
    return _Span(span.version, span.start, span.token_ids, logprobs, others[0] if others else None)


def _shown(span: _Span, tokenizer: Tokenizer, *, each_token: bool) -> Iterator[str]:
    text = tokenizer.decode(span.token_ids, skip_special_tokens=False)
    count = f"{len(span.token_ids)} tokens"
    if span.version == ENVIRONMENT:
        yield f"-- the environment, {count}\n{text}"
        return
    yield f"-- the model, weights after step {span.version}, {count}, mean log-probability {np.mean(span.logprobs):.3f}"
    if not each_token:
        yield text
        return
    for i, (token_id, logprob) in enumerate(zip(span.token_ids, span.logprobs, strict=False)):
        piece = tokenizer.decode([token_id], skip_special_tokens=False)
        yield f"{span.start + i:>6}  {token_id:>7}  {logprob:>9.4f}  {piece!r}"


def _compare(spans: Sequence[_Span], key: str) -> None:
    """Raises RunFailed where a token is another one, or a response has ended earlier."""
    for span in spans:
        if span.version == ENVIRONMENT:
            continue
        if span.other is not None:
            place, token_id = span.other
            raise RunFailed(
                f"sample {key}: token {span.start + place} was {span.token_ids[place]}, and now {token_id} is drawn: "
                "the weights, the options of rollout, the type or the number of devices are not those of the run"
            )
        if len(span.logprobs) != len(span.token_ids):
            raise RunFailed(f"sample {key}: {len(span.token_ids)} tokens were drawn, and now {len(span.logprobs)}")
