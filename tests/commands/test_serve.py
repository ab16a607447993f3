"""`jaxrl serve` as a client meets it: the `openai` package over HTTP, with the tokens that our own engine draws."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import openai
import pytest
from served import serving

from jaxrl.commands.serve import Address
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models import decoder
from jaxrl.models.loading import load_model
from jaxrl.models.lora import Lora, adapters_alone, with_adapters
from jaxrl.models.peft import export_adapter, merged_params
from jaxrl.models.safetensors import export_hf
from jaxrl.sharding.mesh import make_mesh
from jaxrl.text import TextEngine
from jaxrl.types import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("serve.max_model_len=256", "rollout.max_num_seqs=4", "serve.grace_s=20", "rollout.warmup=false")
CHAT: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    key = tmp_path_factory.mktemp("served") / "key"
    key.write_text("secret\n")
    with serving(f"random:{tiny_model}", SIZES, address=Address(port=0, key_file=str(key))) as url:
        yield url


@pytest.fixture
def client(served: str) -> Iterator[openai.OpenAI]:
    with closing(openai.OpenAI(base_url=served, api_key="secret", max_retries=0)) as made:
        yield made


def test_a_key_must_be_sent(served: str):
    with closing(openai.OpenAI(base_url=served, api_key="other")) as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> TextEngine:
    return TextEngine.from_path(f"random:{tiny_model}", max_length=256, num_slots=4)


def test_a_chat_whole_and_in_pieces(client: openai.OpenAI, engine: TextEngine):
    (model,) = client.models.list().data
    samples = engine.generate([CHAT], SamplingParams(max_tokens=12, seed=3), n=2)[0]
    asked: Any = {"model": model.id, "messages": CHAT, "max_tokens": 12, "seed": 3}
    found = client.chat.completions.create(**asked, n=2, logprobs=True)
    assert [choice.message.content for choice in found.choices] == [sample.text for sample in samples]
    for choice, sample in zip(found.choices, samples, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        told = [each.logprob for each in choice.logprobs.content]
        assert told == pytest.approx(sample.rollout_logprobs.tolist(), abs=1e-5)
    assert found.usage is not None
    assert found.usage.completion_tokens == sum(map(len, samples))
    *pieces, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == samples[0].text
    assert last.usage.completion_tokens == len(samples[0])


def test_a_client_that_goes_away_frees_its_row(client: openai.OpenAI):
    model = client.models.list().data[0].id
    for _ in range(8):  # twice as many as there are rows
        stream = client.completions.create(model=model, prompt="p", max_tokens=250, seed=1, stream=True)
        next(iter(stream))
        stream.close()
    assert client.completions.create(model=model, prompt="p", max_tokens=2).usage is not None


def test_an_adapter_under_its_own_name(tiny_model: Path, tmp_path: Path, engine: TextEngine):
    """What it draws is what the merged model draws, and not what the base does."""
    mesh = make_mesh(jax.devices()[:1])
    base, params = load_model(f"random:{tiny_model}", mesh)
    model = dataclasses.replace(base, lora=Lora(4, 64.0, ("q", "o", "down")))
    new = decoder.init_table(adapters_alone(model.weights()), jax.random.key(1))
    own = {name: jax.random.normal(jax.random.key(2), x.shape) for name, x in new["layers"].items()}
    params = with_adapters(params, {"layers": own})
    export_adapter(params, model, tmp_path / "adapter", np.float32, "tiny")
    export_hf(merged_params(model, params), base, tmp_path / "merged", dtype=np.float32)
    Tokenizer.from_path(tiny_model).save(tmp_path / "merged")
    asked: Any = {"prompt": "p", "max_tokens": 12, "seed": 3, "logprobs": 1}
    told = []
    for source, adapters in (
        (f"random:{tiny_model}", [f"mine={tmp_path / 'adapter'}"]),
        (str(tmp_path / "merged"), []),
    ):
        with (
            serving(source, SIZES, adapters=adapters) as url,
            closing(openai.OpenAI(base_url=url, api_key="none")) as client,
        ):
            (served,) = client.models.list().data
            assert not adapters or served.id == "mine"
            found = client.completions.create(model=served.id, **asked).choices[0].logprobs
            assert found is not None
            told.append(found.token_logprobs)
    assert told[0] == pytest.approx(told[1], abs=1e-5)
    ((of_base,),) = engine.generate(["p"], SamplingParams(max_tokens=12, seed=3), chat=False)
    assert told[0] != pytest.approx(of_base.rollout_logprobs.tolist(), abs=1e-3)


@pytest.mark.slow
def test_a_signal_lets_responses_end(tiny_model: Path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jaxrl", "serve", f"random:{tiny_model}", "--port", "0", *SIZES]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = iter(server.stdout)
        url = next(found[0] for line in lines if (found := re.search(r"http://\S+/v1", line)))
        with closing(openai.OpenAI(base_url=url, api_key="none", max_retries=0)) as client:
            model = client.models.list().data[0].id
            stream = client.completions.create(model=model, prompt="p", max_tokens=250, seed=1, stream=True)
            first, *pieces = iter_and_signal(stream, server)
        assert pieces[-1].choices[0].finish_reason in ("length", "stop")
        assert first.choices[0].finish_reason is None
        assert server.wait(60) == 0


def iter_and_signal(stream: Any, server: subprocess.Popen[str]) -> list[Any]:
    """All pieces; SIGTERM goes out after the first."""
    found = [next(pieces := iter(stream))]
    server.send_signal(signal.SIGTERM)
    return [*found, *pieces]
