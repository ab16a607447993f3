"""The teacher of on-policy distillation: a frozen model that computes the log-probabilities of the policy's tokens.

`jaxrl.training.batch_preparation` calls `MeshTeacher.annotate` for each batch. A token's advantage then loses
`algorithm.teacher.coef` times log π_old - log π_teacher, whose mean is the reverse KL; this has no gradient
(`jaxrl.training.advantages.with_teacher`). With `algorithm.teacher.top_k` advantages are unchanged, and the loss adds a
divergence of both distributions at each token (`jaxrl.training.losses.generalized_jsd`): over the teacher's `top_k`
likeliest tokens, and all others as one event. It is never larger than the divergence over the whole vocabulary.

Source: Agarwal et al. 2023 (arXiv:2306.13649), on-policy distillation with the reverse KL, and with the generalised
Jensen-Shannon divergence (TRL's GKDTrainer; of its `lmbda`, the share of responses that the policy has drawn, there is
1 alone); Lu and Thinking Machines 2025, "On-Policy Distillation", with the KL of each sampled token as its advantage;
where the teacher's prompt has more than the policy's (`context_key`), context distillation (Snell et al. 2022,
arXiv:2209.15189). Departure: log-probabilities are at the rollout's temperature, as all others here.

It is packed, sharded and chunked like a reference model, and with `offload` streamed like one
(`jaxrl.training.programs.TrainPrograms.places`). Where it is the base of the policy's adapters (`shares_base`), nothing
is loaded again.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.config import Config
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import config_of, resolve_path
from jaxrl.models.lora import without_adapters
from jaxrl.sharding.compiled import Meet, alone
from jaxrl.training.logprobs import top_logprobs
from jaxrl.training.objectives import ObjectiveOf, PolicyObjective
from jaxrl.training.packing import TokenBatch
from jaxrl.training.programs import TrainPrograms
from jaxrl.training.trainer import DispatchQueue, placed
from jaxrl.types import Prompt, TrainBatch

Tree = Any


class TeacherObjective(PolicyObjective):
    """What a teacher says of each token: the log-probability of the policy's, or with `algorithm.teacher.top_k` what
    `logprobs.top_logprobs` returns, over the policy's `vocab_size`."""

    learns = False

    def __init__(self, *given: Any, vocab_size: int, **how: Any) -> None:
        super().__init__(*given, **how)
        self._vocab_size = vocab_size
        self.passes = ("top_logprobs",) if self.teacher_top_k else ("ref_logprobs",)

    def per_token(self, head: Tree, hidden: jax.Array, batch: TokenBatch) -> tuple[jax.Array, ...]:
        if not self.teacher_top_k:
            return super().per_token(head, hidden, batch)
        return (top_logprobs(*self._read(head, hidden, batch), self.teacher_top_k, self._vocab_size),)


@functools.cache
def _objective(vocab_size: int) -> ObjectiveOf:
    return functools.partial(TeacherObjective, vocab_size=vocab_size)


def teacher_programs(config: Config, model_config: ModelConfig, mesh: Mesh, vocab_size: int = 0) -> TrainPrograms:
    """The programs of a reference, for another model that is never trained. Its weights lie at `places`. `vocab_size`:
    the policy's; 0: the teacher's."""
    objective = _objective(vocab_size or model_config.vocab_size)
    return TrainPrograms(teacher_config(config), model_config, mesh, updates=False, objective=objective)


def base_weights(programs: TrainPrograms, params: Tree) -> Tree:
    """The weights of a policy with adapters without those, in a teacher's types: the arrays themselves, but for norms
    of another type."""
    return placed(without_adapters(params), programs.shardings, programs.ref_dtypes, copy=False)


class MeshTeacher:
    """A teacher's weights, at `programs.places`, and its programs."""

    def __init__(
        self,
        programs: TrainPrograms,
        params: Tree,
        *,
        prompt_of: Callable[[Prompt], Prompt] = lambda prompt: prompt,
        on_progress: Callable[[], None] = lambda: None,
        meet: Meet = alone,
    ) -> None:
        """`params`: in training form and in the dtype that is computed in. `prompt_of`: the prompt that it reads in
        place of the policy's. The others: as in `MeshTrainer`."""
        self.programs, self.params, self.prompt_of = programs, params, prompt_of
        programs.meet = lambda name: meet(f"the teacher's {name}")
        self._queue = DispatchQueue(on_progress)

    def annotate(self, batch: TrainBatch) -> None:
        """Writes its log-probabilities of every response token, at the rollout's temperature, into the batch."""
        (kind,) = self.programs.objective.passes
        self.write(batch, self.programs.forward(kind, self.params, self.read(batch), self._queue.put))

    def read(self, batch: TrainBatch) -> TrainBatch:
        """The batch as the teacher reads it: its own prompts before the policy's responses."""
        return dataclasses.replace(batch, prompts=own_prompts(batch, self.prompt_of))

    def write(self, batch: TrainBatch, found: list[np.ndarray]) -> None:
        """Writes what its program has found into the batch."""
        if not (k := self.programs.config.algorithm.teacher.top_k):
            batch.teacher_logprobs = found
            return
        found = [each.reshape(-1, 2 * k + 2) for each in found]  # of a batch without tokens they are [0]
        batch.teacher_logprobs = [each[:, 0] for each in found]
        batch.teacher_top_logprobs = [each[:, 1 : k + 2] for each in found]
        batch.teacher_ids = [each[:, k + 2 :].astype(np.int32) for each in found]


def own_prompts(batch: TrainBatch, prompt_of: Callable[[Prompt], Prompt]) -> list[Prompt]:
    """The prompts of a batch as a teacher reads them, one per sample."""
    once = {id(prompt): prompt for prompt in batch.prompts}  # a group has one
    own = {name: prompt_of(prompt) for name, prompt in once.items()}
    return [own[id(prompt)] for prompt in batch.prompts]


def shares_base(config: Config) -> bool:
    """Whether the teacher is the base of the policy's adapters: the same files, computed in the same type, and neither
    offloaded, nor a base that is quantised or random (`model.random_init`)."""
    teacher, model = config.algorithm.teacher, config.model
    if not (teacher.path and model.has_adapters) or model.random_init or model.base_quantization != "none":
        return False
    if teacher.offload or teacher.dtype != config.actor.dtype:
        return False
    own, theirs = resolve_path(model.path), resolve_path(teacher.path, "algorithm.teacher.path")
    return own == theirs or (os.path.exists(own) and os.path.exists(theirs) and os.path.samefile(own, theirs))


def teacher_model(config: Config) -> ModelConfig:
    """The model config of `algorithm.teacher.path`. Raises ValueError where it cannot be read."""
    option = "algorithm.teacher.path"
    return config_of(resolve_path(config.algorithm.teacher.path, option), option)


def teacher_config(config: Config) -> Config:
    """A run's configuration for the teacher's programs: its dtype in place of the actor's, and its longer prompts."""
    teacher, data = config.algorithm.teacher, config.data
    if teacher.context_key:
        data = data.replace(max_prompt_length=data.max_prompt_length + teacher.max_context_length)
    param_dtype = "float64" if teacher.dtype == "float64" else "float32"
    actor = config.actor.replace(dtype=teacher.dtype, param_dtype=param_dtype, offload_reference=teacher.offload)
    return config.replace(actor=actor, data=data)


def offloaded(programs: TrainPrograms, outer: Mapping[str, Any], layers: Iterable[Mapping[str, Any]]) -> Tree:
    """Weights in training form at the places of programs with `offload`. `outer`, `layers`: as
    `jaxrl.models.loading.load_layerwise` loads them; each layer leaves the devices before the next one comes."""
    stacked: dict[str, np.ndarray] = {}
    dtype, table = programs.config.actor.dtype, programs.model_config.weights()["layers"]
    for i, layer in enumerate(layers):
        for name, x in layer.items():
            if name not in stacked:
                stacked[name] = np.empty(table[name].shape, dtype)
            stacked[name][i] = np.asarray(x)[0]
    places = programs.places["layers"]
    found = {}
    for name in list(stacked):
        whole = stacked.pop(name)
        found[name] = jax.make_array_from_callback(whole.shape, places[name], whole.__getitem__)
    return {**outer, "layers": found}
