"""A teacher at an endpoint: what it says is what the same model says on the devices, and what is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest
from chat_server import Handler, chat_server, sends, status
from prompt_logprobs import gives_prompt_logprobs
from small_models import TRAINED
from trainer_fixtures import weights_of

from jaxrl.config import Config, ConfigError
from jaxrl.run.teacher_endpoint import EndpointTeacher
from jaxrl.sharding.mesh import make_mesh
from jaxrl.training.teacher import MeshTeacher, teacher_programs
from jaxrl.training.trainer import placed
from jaxrl.types import RunFailed

TRIAL = (3, 4)


def asks(make_config: Any, url: str, **options: Any) -> tuple[Config, EndpointTeacher]:
    section = {"endpoint": url, "endpoint_model": "m", "max_retries": 1} | options
    config = make_config(algorithm__teacher=section)
    return config, EndpointTeacher(config, TRIAL, TRAINED.vocab_size, lambda prompt: prompt, lambda: None)


@pytest.mark.parametrize("top_k", [0, 5])
def test_it_says_what_the_model_says_on_the_devices(top_k, make_config, make_batch):
    weights, batch, other = dict(weights_of(TRAINED, "float32")), make_batch(size=5), make_batch(size=5)
    weights["embed"] = weights["embed"] * 20  # no two tokens are as likely as each other
    for each in (batch, other):
        each.samples[3].token_ids = each.samples[3].token_ids[:0]
    with chat_server(default=gives_prompt_logprobs(weights, TRAINED, 64)) as server:
        config, asked = asks(make_config, server.url, top_k=top_k)
        server.behaviours = [status(503)]
        asked.annotate(batch)
    programs = teacher_programs(config, TRAINED, make_mesh(jax.devices()[:1]))
    MeshTeacher(programs, placed(weights, programs.shardings, programs.ref_dtypes)).annotate(other)
    names = ["teacher_logprobs", "teacher_ids", "teacher_top_logprobs"][: 3 if top_k else 1]
    for name in names:
        for ours, theirs in zip(getattr(batch, name), getattr(other, name), strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            if name == "teacher_top_logprobs":  # what is left is a difference here
                np.testing.assert_allclose(np.exp(ours[:, -1]), np.exp(theirs[:, -1]), atol=2e-6)
                ours, theirs = ours[:, :-1], theirs[:, :-1]
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)
    assert {each["model"] for each in server.seen} == {"m"}
    assert server.seen[0]["prompt"] == [*TRIAL]
    assert len(server.seen) == 1 + 4 + 1, "a sample without tokens has no request, and one was sent again"


def spoilt(entries: Any) -> Any:
    """A behaviour which answers with other entries than those of a model: `entries` makes them of the prompt."""

    def behave(handler: Handler) -> None:
        handler.reply(json.dumps({"choices": [{"prompt_logprobs": entries(handler.body["prompt"])}]}).encode())

    return behave


def right(ids: list[int]) -> list[Any]:
    return [None, *({str(token): {"logprob": -1.0}} for token in ids[1:])]


@pytest.mark.parametrize(
    ("entries", "options", "sentence"),
    [
        (lambda ids: right(ids)[1:], {}, r"prompt_logprobs has \d+ entries, and \d+ token ids were sent"),
        (lambda ids: [None for _ in ids], {}, r"\[\d+\] is not an object from token ids to finite log-prob"),
        (
            lambda ids: [None, *({str(i): {"logprob": -1.0}, "999": {"logprob": -0.1}} for i in ids[1:])],
            {"top_k": 1},
            r"it names the token id 999, and the policy has 64 tokens",
        ),
        (right, {"top_k": 2}, r"\[\d+\] has 1 tokens, and top_k is 2"),
    ],
)
def test_a_wrong_answer_ends_the_run(entries, options, sentence, make_config, make_batch):
    with chat_server(default=spoilt(entries)) as server:
        _, asked = asks(make_config, server.url, **options)
        with pytest.raises(RunFailed, match=rf"^algorithm\.teacher\.endpoint \(http.*\): .*{sentence}"):
            asked.annotate(make_batch(size=4))


def test_refused_at_the_start(make_config):
    with chat_server(default=sends({"choices": [{"text": "a"}]})) as server:
        with pytest.raises(ConfigError, match=r"teacher\.endpoint \(http.*\): its answer has no choices\[0\]\.prompt"):
            asks(make_config, server.url)
        server.default = status(400, "prompt_logprobs: at most 20")
        with pytest.raises(ConfigError, match=r"\): status 400: prompt_logprobs: at most 20"):
            asks(make_config, server.url, top_k=21)
    with pytest.raises(ConfigError, match=r"teacher\.endpoint needs rollout\.temperature=1, found 0\.9"):
        make_config(algorithm__teacher={"endpoint": server.url, "endpoint_model": "m"}, rollout__temperature=0.9)
