"""The teacher of a run: what its files must have, looked at before any weight is read, and its weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxrl.config import Config, ConfigError
from jaxrl.data.problems import Problem
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import check_length, check_vocabulary, checked_path, load_layerwise, load_model, resolve_path
from jaxrl.schema.declared import shown
from jaxrl.training.teacher import (
    MeshTeacher,
    base_weights,
    offloaded,
    shares_base,
    teacher_config,
    teacher_model,
    teacher_programs,
)
from jaxrl.training.trainer import MeshTrainer
from jaxrl.types import Prompt

if TYPE_CHECKING:
    from jaxrl.run.teacher_endpoint import EndpointTeacher

_OPTION = "algorithm.teacher.path"


def read_teacher(config: Config, tokenizer: Tokenizer, model: ModelConfig) -> ModelConfig:
    """The config of `algorithm.teacher.path`, which must fit the policy's tokenizer and model, and the run's lengths
    (else ValueError); no weight is read."""
    own = teacher_model(config)
    folder = str(checked_path(resolve_path(config.algorithm.teacher.path, _OPTION), _OPTION))
    if own.scalar_head:
        raise ConfigError(f"{_OPTION} ({folder}) is a reward model, which has no opinion on a token")
    theirs = Tokenizer.from_path(folder)
    check_vocabulary(theirs, own, folder)
    known, wanted = theirs.vocabulary, tokenizer.vocabulary
    if other := {token: i for token, i in wanted.items() if known.get(token) != i}:
        token = min(other, key=other.__getitem__)
        found = f"has the id {known[token]}" if token in known else "is none"
        raise ConfigError(
            f"{_OPTION} ({folder}) has another tokenizer than model.path: of the policy's {len(wanted)} tokens "
            f"{len(other)} are others there, the first is {token!r} with the id {other[token]}, which {found} there; a "
            "teacher reads the policy's token ids, so take one of the same family"
        )
    if own.vocab_size < model.vocab_size:
        raise ConfigError(
            f"{_OPTION} ({folder}) has a vocabulary of {own.vocab_size} tokens, padding included, and model.path one "
            f"of {model.vocab_size}: the policy could draw an id that the teacher has no row for"
        )
    if (top_k := config.algorithm.teacher.top_k) > model.vocab_size:
        raise ConfigError(f"algorithm.teacher.top_k ({top_k}) is more than the policy's {model.vocab_size} tokens")
    longest = teacher_config(config).max_model_length
    check_length(own, longest, f"{_OPTION} reads prompts and responses of up to {longest} tokens", folder)
    return own


def build_teacher(
    config: Config, model: ModelConfig, policy: MeshTrainer, tokenizer: Tokenizer, **options: Any
) -> MeshTeacher:
    """Reads a teacher's weights, with `offload` layer by layer through the devices of the trainer. `policy`: on whose
    devices it computes, and whose base may be it; `options`: as in `MeshTeacher`."""
    mesh = policy.mesh
    programs = teacher_programs(config, model, mesh, policy.model_config.vocab_size)
    if shares_base(config):
        params = base_weights(programs, policy.params)
    else:
        path = resolve_path(config.algorithm.teacher.path, _OPTION, weights=True)
        dtype = jnp.dtype(config.algorithm.teacher.dtype)
        if config.algorithm.teacher.offload:
            params = offloaded(programs, *load_layerwise(path, mesh, dtype)[1:])
        else:
            params = load_model(path, mesh, dtype)[1]
    prompt_of = partial(with_context, config=config, tokenizer=tokenizer)
    return MeshTeacher(programs, params, prompt_of=prompt_of, **options)


def endpoint_teacher(
    config: Config, model: ModelConfig, tokenizer: Tokenizer, on_progress: Callable[[], None]
) -> EndpointTeacher:
    """The client of `algorithm.teacher.endpoint`, which has answered once."""
    from jaxrl.run.teacher_endpoint import EndpointTeacher

    prompt_of = partial(with_context, config=config, tokenizer=tokenizer)
    trial = tokenizer.encode("1 + 1 = 2")
    return EndpointTeacher(config, trial, model.vocab_size, prompt_of, on_progress)


def refuse_context(config: Config, problems: Sequence[Problem]) -> None:
    """Raises ValueError for training problems without text in `algorithm.teacher.context_key`."""
    teacher = config.algorithm.teacher
    for problem in problems if config.has_teacher and teacher.context_key else ():
        if not isinstance(found := _context(config, problem), str):
            raise ValueError(
                f"{problem.where}: algorithm.teacher.context_key names the column {teacher.context_key!r}, which must "
                f"hold text, found {shown(found)}"
            )


def _context(config: Config, row: Problem | Prompt) -> Any:
    """A row's value in the context column; the reference answer's column is not among the extra ones."""
    key = config.algorithm.teacher.context_key
    return row.answer if key == config.data.answer_key else row.extra.get(key)


def with_context(prompt: Prompt, config: Config, tokenizer: Tokenizer) -> Prompt:
    """A prompt as the teacher reads it: the last occurrence of the question, with the row's text in
    `algorithm.teacher.context_key`. Raises ValueError if the prompt does not contain the question, or the result is too
    long."""
    teacher = config.algorithm.teacher
    if not teacher.context_key:
        return prompt
    where = f"prompt {prompt.index} ({prompt.source})"
    before, question, behind = prompt.text.rpartition(prompt.question)
    if not question:
        raise ValueError(f"{where}: its question is not in the rendered prompt as it is, so the context has no place")
    parts = {"{question}": question, "{context}": str(_context(config, prompt))}
    context = re.sub(r"\{(?:question|context)\}", lambda field: parts[field[0]], teacher.context_template)
    context = tokenizer.as_content(context) if config.data.apply_chat_template else context
    ids = tokenizer.encode(before + context + behind, add_special_tokens=not config.data.apply_chat_template)
    most = config.data.max_prompt_length + teacher.max_context_length
    if len(ids) > most:
        raise ValueError(
            f"{where}: the teacher's prompt has {len(ids)} tokens, more than data.max_prompt_length + "
            f"algorithm.teacher.max_context_length ({most}): raise the latter, or shorten the teacher's context"
        )
    return dataclasses.replace(prompt, token_ids=tuple(ids))
