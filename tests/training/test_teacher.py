"""A teacher: its log-probabilities against a plain float64 pass, resident and streamed, and what they do to
advantages."""

from __future__ import annotations

import dataclasses
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import TRAINED
from tiny import write_tiny_model
from trainer_fixtures import WIDE, assert_whole_logprobs, group_of, padded, weights_of, whole_log_p

from jaxrl.config import Config, ConfigError, from_mapping
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import config_of
from jaxrl.models.lora import without_adapters
from jaxrl.models.safetensors import export_hf
from jaxrl.models.streaming import STREAMED
from jaxrl.run.build import read_tokenizer_and_model
from jaxrl.run.teacher import build_teacher, read_teacher, with_context
from jaxrl.run.weights import adapted, load_weights
from jaxrl.sharding.mesh import make_mesh
from jaxrl.training import batch_preparation
from jaxrl.training.losses import generalized_jsd
from jaxrl.training.programs import TrainPrograms
from jaxrl.training.teacher import MeshTeacher, offloaded, shares_base, teacher_programs
from jaxrl.training.trainer import MeshTrainer
from jaxrl.training.training_step import teacher_metrics
from jaxrl.training.update_memory import resident_parts
from jaxrl.types import ENVIRONMENT, Prompt, TrainBatch

MODEL = dataclasses.replace(
    TRAINED, num_layers=3, hidden_size=24, num_heads=3, num_kv_heads=1, vocab_size=TRAINED.vocab_size + 8
)
TEMPERATURE = 0.8


def said(teacher: MeshTeacher, batch: TrainBatch) -> list[np.ndarray]:
    teacher.annotate(batch)
    assert batch.teacher_logprobs is not None
    return batch.teacher_logprobs


def teacher_of(config: Config, devices: int, model: ModelConfig = MODEL) -> MeshTeacher:
    mesh = make_mesh(jax.devices()[:devices])
    programs = teacher_programs(config, model, mesh, TRAINED.vocab_size)
    programs.microbatches = programs.microbatches[-1:]
    dtype = config.algorithm.teacher.dtype
    params = jax.tree.map(
        lambda x, place: jax.device_put(np.asarray(x, dtype), place), weights_of(model, dtype), programs.shardings
    )
    if not config.algorithm.teacher.offload:
        return MeshTeacher(programs, params)
    layers = params.pop("layers")
    each = ({name: x[i : i + 1] for name, x in layers.items()} for i in range(MODEL.num_layers))
    return MeshTeacher(programs, offloaded(programs, params, each))


def test_log_probabilities(x64, make_config, make_batch):
    """Those of a model of other sizes, whose vocabulary is padded further; streamed layer by layer on one device, or
    resident on eight."""
    section = {"path": "unused", "dtype": "float64", "offload": True}
    config = make_config(algorithm__teacher=section, rollout__temperature=TEMPERATURE)
    teacher, batch = teacher_of(config, 1), make_batch()
    found = said(teacher, batch)
    assert_whole_logprobs(found, weights_of(MODEL, "float64"), batch, MODEL, TEMPERATURE)
    kinds = {name: x.sharding.memory_kind for name, x in teacher.params["layers"].items()}
    host = {name for name, kind in kinds.items() if kind == "pinned_host"}
    assert host == STREAMED & kinds.keys()
    assert {kind for kind, *_ in teacher.programs.shapes()} == {"ref_logprobs"}
    config = make_config(algorithm__teacher=section | {"offload": False}, rollout__temperature=TEMPERATURE)
    resident = teacher_of(config, 8)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(resident.params)} == {
        jax.devices()[0].default_memory().kind
    }
    for ours, theirs in zip(found, said(resident, batch), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def trl_jsd(student: jax.Array, teacher: jax.Array, beta: float) -> jax.Array:
    """TRL's `GKDTrainer.generalized_jsd_loss` of one position's log-probabilities, before it is averaged:
    torch's kl_div(a, b, log_target=True) is exp(b) (b - a)."""

    def kl_div(a: jax.Array, b: jax.Array) -> jax.Array:
        return (jnp.exp(b) * (b - a)).sum(-1)

    if beta == 0:
        return kl_div(student, teacher)
    if beta == 1:
        return kl_div(teacher, student)
    mixture = jax.nn.logsumexp(jnp.stack([student + jnp.log1p(-beta), teacher + jnp.log(beta)]), axis=0)
    return beta * kl_div(mixture, teacher) + (1 - beta) * kl_div(mixture, student)


@pytest.mark.parametrize(("top_k", "beta", "devices"), [(5, 0.5, 8), pytest.param(64, 1.0, 1, marks=pytest.mark.slow)])
def test_the_distillation_loss(x64, top_k, beta, devices, make_config, make_batch, make_trainer):
    """Loss and gradient are those of TRL's formula over whole float64 distributions; with fewer tokens of one over
    those, and all others in one bin, with what the teacher's larger vocabulary has besides."""
    teacher_options = {"path": "unused", "dtype": "float64", "top_k": top_k, "beta": beta, "coef": 0.7}
    config = make_config(
        algorithm__teacher=teacher_options, algorithm__adv_estimator="none", rollout__temperature=TEMPERATURE, **WIDE
    )
    model = MODEL if top_k < TRAINED.vocab_size else dataclasses.replace(MODEL, vocab_size=TRAINED.vocab_size)
    teacher, trainer, batch = teacher_of(config, devices, model), make_trainer(config, devices), make_batch(turns=True)
    batch.advantages = [np.zeros_like(each) for each in batch.advantages]
    teacher.annotate(batch)
    own, theirs = weights_of(TRAINED, "float64"), weights_of(model, "float64")
    rows = padded(batch)
    mask = rows.loss_mask[:, 1:] > 0
    size = TRAINED.vocab_size

    def whole(params: Any, model: ModelConfig) -> jax.Array:
        return whole_log_p(params, rows, model, TEMPERATURE)[:, :-1]

    said_whole = whole(theirs, model)
    ids = jnp.argsort(-said_whole[..., :size], axis=-1)[..., :top_k]

    def binned(log_p: jax.Array) -> jax.Array:
        if top_k == size:
            return log_p
        named = (jnp.arange(log_p.shape[-1]) == ids[..., None]).any(axis=-2)
        rest = jax.nn.logsumexp(jnp.where(named, -1e30, log_p), axis=-1, keepdims=True)
        return jnp.concatenate([jnp.take_along_axis(log_p, ids, axis=-1), rest], axis=-1)

    def loss(params: Any) -> jax.Array:
        per_token = trl_jsd(binned(whole(params, TRAINED)), binned(said_whole), beta)
        return jnp.where(mask, per_token, 0).sum() / mask.sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(own)
    trainer.accumulate(batch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, 0.7 * b, rtol=2e-5, atol=2e-7), trainer.gradients(), gradient
    )
    metrics = trainer.apply()
    assert metrics["actor/distillation_loss"] == pytest.approx(float(value), rel=1e-5)
    assert metrics["actor/pg_loss"] == 0
    assert value > 0.0001


@pytest.mark.parametrize("beta", [0.0, 0.2, 1.0])
def test_the_divergence_of_whole_distributions_is_trls(x64, beta):
    random = np.random.default_rng(0)
    ours, theirs = (jax.nn.log_softmax(jnp.asarray(random.normal(size=(4, 9)))) for _ in range(2))
    both = [jax.value_and_grad(lambda x, f=f: f(x, theirs, beta).sum())(ours) for f in (generalized_jsd, trl_jsd)]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14), *both)


def test_a_teacher_that_is_told_more(x64, make_config, make_batch):
    """The responses are the policy's, and stand behind the teacher's own prompts, which may be longer than any of the
    policy's."""
    section = {"path": "unused", "dtype": "float64", "context_key": "hint", "max_context_length": 20}
    config = make_config(algorithm__teacher=section, rollout__temperature=TEMPERATURE)
    batch = make_batch(same=True, longest=12)
    told = {prompt.key: (7, 8, 9, *[11] * 15, *prompt.token_ids) for prompt in batch.prompts}
    teacher = teacher_of(config, 1)
    teacher.prompt_of = lambda prompt: dataclasses.replace(prompt, token_ids=told[prompt.key])
    assert max(map(len, told.values())) > config.data.max_prompt_length
    other = dataclasses.replace(batch, prompts=[teacher.prompt_of(prompt) for prompt in batch.prompts])
    assert_whole_logprobs(said(teacher, batch), weights_of(MODEL, "float64"), other, MODEL, TEMPERATURE)


def test_what_a_teacher_is_told(tmp_path: Path):
    tokenizer = Tokenizer.from_path(write_tiny_model(tmp_path))
    section = {"path": "t", "context_key": "solution", "context_template": "{context} ({context}): {question}"}

    def config_of(**options: Any) -> Config:
        algorithm = {"teacher": section | options}
        return from_mapping({"model": {"path": "x"}, "data": {"max_prompt_length": 40}, "algorithm": algorithm})

    def told(config: Config, question: str = "1+1") -> str:
        text = f"<|im_start|>user\n1+1? {question}<|im_end|>\n"
        extra = {"solution": "{question}"}
        prompt = Prompt(0, 3, (1, 2), text, "sums", extra=extra, question=question)
        found = with_context(prompt, config, tokenizer)
        assert found.token_ids[0] == 1, "the chat template's own, and no other"
        return tokenizer.decode(found.token_ids, skip_special_tokens=False)

    assert told(config_of()) == "<|im_start|>user\n1+1? {question} ({question}): 1+1<|im_end|>\n"
    with pytest.raises(ValueError, match=r"prompt 3 \(sums\): its question is not in the rendered prompt as it is"):
        with_context(Prompt(0, 3, (1, 2), "1 + 1", "sums", extra={}, question="1+1"), config_of(), tokenizer)
    with pytest.raises(ValueError, match=r"prompt 3 \(sums\): the teacher's prompt has \d+ tokens, more than .* \(41"):
        told(config_of(max_context_length=1), "123456789")


def distilled(batch: TrainBatch, estimator: str, coef: float) -> TrainBatch:
    config = from_mapping(
        {
            "model": {"path": "x"},
            "rollout": {"n": 3},
            "algorithm": {"adv_estimator": estimator, "teacher": {"path": "t", "coef": coef}},
        }
    )
    groups = [group_of([4, 2, 3], [1.0, 0.0, 0.5])]
    groups[0].samples[:] = batch.samples
    batch_preparation.set_advantages(config, groups, batch)
    return batch


@pytest.mark.parametrize(("estimator", "recomputed"), [("none", True), ("grpo", False)])
def test_advantages_lose_the_kl(estimator, recomputed):
    """log π_old - log π_teacher of each token, times the coefficient; nothing where an environment has answered."""
    random, samples = np.random.default_rng(0), group_of([4, 2, 3], [1.0, 0.0, 0.5]).samples
    values = [[random.normal(size=len(s)).astype(np.float32) for s in samples] for _ in range(3)]
    for sample, logprobs in zip(samples, values[0], strict=True):
        sample.rollout_logprobs = logprobs
        sample.versions = np.zeros(len(sample), np.int32)
    samples[0].versions[1:3] = ENVIRONMENT
    prompts = [None] * 3
    batch = TrainBatch(prompts, samples, [], values[1] if recomputed else None, teacher_logprobs=values[2])  # pyright: ignore
    batch.loss_masks = [sample.drawn.astype(np.float32) for sample in samples]
    distilled(batch, estimator, 0.3)
    given = {"none": [0.0, 0.0, 0.0], "grpo": [1.0, -1.0, 0.0]}[estimator]
    gaps = [np.float64(a) - np.float64(b) for a, b in zip(values[recomputed], values[2], strict=True)]
    for found, base, gap, sample in zip(batch.advantages, given, gaps, samples, strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, base - 0.3 * np.where(sample.drawn, gap, 0), rtol=1e-5, atol=2e-6)
    learnt = np.concatenate([gap[sample.drawn] for gap, sample in zip(gaps, samples, strict=True)])
    np.testing.assert_allclose(teacher_metrics(batch)["actor/teacher_kl"], learnt.mean(), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_the_base_of_adapters_teaches_without_a_copy(dtype, tmp_path: Path, make_config, make_batch):
    """The arrays are the policy's, and what they say has the bits of what files would say that are read again."""
    place, mesh = write_tiny_model(tmp_path / "model"), make_mesh(jax.devices()[:1])
    own = config_of(place)
    params = decoder.init(own, jax.random.key(3), jnp.float32)
    params["final_norm"] += 0.001  # no bfloat16 has it
    export_hf(params, own, place, dtype=jnp.float32)
    (tmp_path / "same").symlink_to(place)
    shutil.copytree(place, tmp_path / "copied")

    def config_with(teacher: str = "same", **options: Any) -> Config:
        section = {"path": str(tmp_path / teacher), "dtype": dtype}
        given: Any = {"model__path": str(place), "model__lora_rank": 2, "actor__dtype": dtype}
        return make_config(**given | {"algorithm__teacher": section} | options)

    config, found = config_with(), []
    model = adapted(config, own)
    trainer = MeshTrainer(TrainPrograms(config, model, mesh), load_weights(config, model, mesh))
    batch = make_batch(size=4)
    for each in (config, config_with("copied")):
        teacher = build_teacher(each, own, trainer, Tokenizer.from_path(place))
        base = without_adapters(trainer.params)
        same = [a is b for a, b in zip(*map(jax.tree.leaves, (teacher.params, base)), strict=True)]
        norms = [weight.init == "ones" for weight in jax.tree.leaves(own.weights())]
        is_base = shares_base(each)
        assert same == [is_base and (dtype == "float32" or not norm) for norm in norms]
        assert ("teacher: weights" in resident_parts(each, model, 1)) != is_base
        found.append(said(teacher, batch))
    assert shares_base(config)
    assert not shares_base(config_with("copied"))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for options in ({"model__base_quantization": "nf4"}, {"model__random_init": True}, {"model__lora_rank": 0}):
        assert not shares_base(config_with(**options)), options


def test_what_is_refused(tmp_path: Path):
    policy = write_tiny_model(tmp_path / "policy")

    def read(folder: Path, policy: Path = policy) -> ModelConfig | None:
        config = from_mapping(
            {"model": {"path": f"random:{policy}"}, "algorithm": {"teacher": {"path": f"random:{folder}"}}}
        )
        return read_teacher(config, *read_tokenizer_and_model(config))

    assert read(write_tiny_model(tmp_path / "good", vocab_size=300, num_hidden_layers=3))
    other = write_tiny_model(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"!": 4', '"!": 5').replace('"\\"": 5', '"\\"": 4'))
    words = r"another tokenizer than model\.path: of the policy's 260 tokens 2 are others there, the first is '!' "
    with pytest.raises(ConfigError, match=words):
        read(other)
    padded = write_tiny_model(tmp_path / "padded", vocab_size=300)
    scores = write_tiny_model(tmp_path / "scores", architectures=["LlamaForSequenceClassification"])
    for given, words in (
        ((policy, padded), r"vocabulary of 260 tokens, padding included, and model.path one of 300: the policy could"),
        ((scores, policy), r"^algorithm.teacher.path .* is a reward model, which has no opinion on a token"),
        ((policy, scores), r"^model.path .* is a reward model, which writes nothing; it can score"),
    ):
        with pytest.raises(ConfigError, match=words):
            read(*given)
