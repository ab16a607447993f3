"""The routes over a tiny model, as clients see them: what is drawn, how it is told, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jax
import numpy as np
import pytest
from served import LENGTH, ROWS, WAITING, Client, Talk, talk_to
from starlette.requests import ClientDisconnect

from jaxrl.serving.answers import Completion
from jaxrl.serving.app import Routes, Streamed
from jaxrl.serving.bodies import CompletionBody
from jaxrl.serving.driver import Driver
from jaxrl.serving.generation import ServedModel
from jaxrl.text import TextEngine
from jaxrl.types import SamplingParams

CHAT = [{"role": "user", "content": "hi"}]


def events(response: httpx2.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return list(map(json.loads, lines))


def test_completions_are_what_the_engine_draws(talk: Talk, engine: TextEngine):
    """Alone, among others, whole and in pieces."""
    wanted = engine.generate(["hello", "two"], SamplingParams(max_tokens=20, seed=5), n=2, chat=False)
    samples = [sample for group in wanted for sample in group]
    body = {"prompt": ["hello", "two"], "max_tokens": 20, "seed": 5, "n": 2, "logprobs": 0, "return_token_ids": True}

    async def conversation(client: Client) -> None:
        noise = [client.post("/v1/completions", json={"prompt": f"noise {i}", "max_tokens": 30}) for i in range(4)]
        response, *others = await asyncio.gather(client.post("/v1/completions", json=body), *noise)
        assert {other.status_code for other in others} == {200}
        found = response.json()
        assert [choice["token_ids"] for choice in found["choices"]] == [each.token_ids.tolist() for each in samples]
        assert [choice["text"] for choice in found["choices"]] == [each.text for each in samples]
        assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
        assert [choice["finish_reason"] for choice in found["choices"]] == [each.finish_reason for each in samples]
        for choice, sample in zip(found["choices"], samples, strict=True):
            told = np.asarray(choice["logprobs"]["token_logprobs"], np.float32)
            np.testing.assert_allclose(told, sample.rollout_logprobs, atol=1e-5)
            assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == len(sample)
        drawn = sum(map(len, samples))
        assert found["usage"] == {"prompt_tokens": 8, "completion_tokens": drawn, "total_tokens": 8 + drawn}

        stream = {"stream": True, "stream_options": {"include_usage": True}}
        *pieces, last = events(await client.post("/v1/completions", json=body | stream))
        assert (last["choices"], last["usage"]) == ([], found["usage"])
        for i, sample in enumerate(samples):
            own = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == i]
            assert len(own) > 1, "it came in pieces"
            assert "".join(piece["text"] for piece in own) == sample.text
            assert [token for piece in own for token in piece["token_ids"]] == sample.token_ids.tolist()
            assert [piece["finish_reason"] for piece in own] == [None] * (len(own) - 1) + [sample.finish_reason]
            assert own[0]["prompt_token_ids"] == list(engine.tokenizer.encode(["hello", "two"][i // 2]))

    talk(conversation)


def test_a_chat_is_rendered_by_the_models_template(talk: Talk, engine: TextEngine):
    ((sample,),) = engine.generate([CHAT], SamplingParams(max_tokens=12, seed=3))
    body = {"messages": CHAT, "max_completion_tokens": 12, "seed": 3, "model": "tiny"}

    async def conversation(client: Client) -> None:
        found = (await client.post("/v1/chat/completions", json=body | {"logprobs": True})).json()
        (choice,) = found["choices"]
        assert choice["message"] == {"role": "assistant", "content": sample.text}
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == pytest.approx(
            sample.rollout_logprobs.tolist(), abs=1e-5
        )
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        asked = body | {"messages": [{"role": "user", "content": parts}]}
        assert (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]["message"] == choice[
            "message"
        ]
        as_ids = body | {"return_token_ids": True, "logprobs": True, "return_tokens_as_token_ids": True}
        told = (await client.post("/v1/chat/completions", json=as_ids)).json()
        (choice,), prompt = told["choices"], engine.tokenizer.encode(engine.tokenizer.apply_chat_template(CHAT))
        assert (told["prompt_token_ids"], choice["token_ids"]) == (prompt, sample.token_ids.tolist())
        assert [each["token"] for each in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in sample.token_ids]
        first, *pieces = events(await client.post("/v1/chat/completions", json=body | {"stream": True}))
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces) == sample.text
        assert pieces[-1]["choices"][0]["finish_reason"] == sample.finish_reason

    talk(conversation)


def test_the_likeliest_tokens_are_told(talk: Talk, engine: TextEngine):
    """With those of other requests in the same plans that ask for fewer, or for none; greedy tokens are the first."""
    alone = SamplingParams(max_tokens=9, seed=2, top_logprobs=5)
    ((sample,),) = engine.generate(["abc"], alone, chat=False)
    assert sample.top is not None
    assert sample.top.token_ids.shape == sample.top.logprobs.shape == (len(sample), 5)
    assert (np.diff(sample.top.logprobs) <= 0).all()
    at = [
        (ids.tolist().index(token), i)
        for i, (token, ids) in enumerate(zip(sample.token_ids, sample.top.token_ids, strict=True))
        if token in ids
    ]
    for rank, i in at:
        assert sample.top.logprobs[i, rank] == pytest.approx(sample.rollout_logprobs[i], abs=1e-5)
    body = {"prompt": "abc", "max_tokens": 9, "seed": 2}

    async def conversation(client: Client) -> None:
        path, chat = "/v1/completions", "/v1/chat/completions"
        some, few, none, greedy = await asyncio.gather(
            client.post(path, json=body | {"logprobs": 5}),
            client.post(path, json=body | {"logprobs": 1}),
            client.post(path, json=body),
            client.post(
                chat, json={"messages": CHAT, "max_tokens": 9, "temperature": 0, "logprobs": True, "top_logprobs": 3}
            ),
        )
        texts = {each.json()["choices"][0]["text"] for each in (some, few, none)}
        assert texts == {engine.tokenizer.decode(sample.token_ids.tolist())}, "what is told changes no token"
        five, one = (each.json()["choices"][0]["logprobs"]["top_logprobs"] for each in (some, few))
        assert sample.top is not None
        for place, logprobs in enumerate(sample.top.logprobs.tolist()):
            drawn = float(sample.rollout_logprobs[place])
            for told, known in ((five, logprobs), (one, logprobs[:1])):
                values = list(told[place].values())  # some tokens of this vocabulary are written alike
                nearest = [min((*known, drawn), key=lambda each: abs(each - value)) for value in values]
                assert values == pytest.approx(nearest, abs=1e-5)
                assert values[0] == pytest.approx(logprobs[0], abs=1e-5)
                assert engine.tokenizer.decode([int(sample.token_ids[place])], skip_special_tokens=False) in told[place]
        for each in greedy.json()["choices"][0]["logprobs"]["content"]:
            assert len(each["top_logprobs"]) == 3
            assert each["top_logprobs"][0]["token"] == each["token"]
            assert each["top_logprobs"][0]["logprob"] == pytest.approx(each["logprob"], abs=1e-5)
        refused = await client.post(path, json=body | {"logprobs": 21})
        assert "less than or equal to 20" in refused.json()["error"]["message"]

    talk(conversation)


def test_a_stop_string_ends_a_response_and_is_not_in_it(talk: Talk, engine: TextEngine):
    ((whole,),) = engine.generate(["abc"], SamplingParams(max_tokens=40, seed=11), chat=False)
    stop = next(each for each in whole.text[8:] if each.isascii() and each.isprintable())
    body = {"prompt": "abc", "max_tokens": 40, "seed": 11, "stop": [stop]}

    async def conversation(client: Client) -> None:
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        assert choice["text"] == whole.text[: whole.text.index(stop)]
        assert choice["finish_reason"] == "stop"
        pieces = events(await client.post("/v1/completions", json=body | {"stream": True}))
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == choice["text"]

    talk(conversation)


@pytest.fixture
def exact(tiny_model: Path) -> Iterator[TextEngine]:
    """In float64, in whatever thread it runs."""
    jax.config.update("jax_enable_x64", True)
    yield TextEngine.from_path(
        f"random:{tiny_model}", max_length=LENGTH, num_slots=ROWS, decode_steps=4, dtype="float64"
    )
    jax.config.update("jax_enable_x64", False)


def test_a_conversation_of_tokens_prefills_each_token_once(exact: TextEngine):
    """And draws, to the bit, what one request with all of it draws, here and from the engine alone."""
    random, counters, turns = np.random.default_rng(0), exact.engine.counters, []
    ids: list[int] = random.integers(4, 260, 9).tolist()

    async def conversation(client: Client) -> None:
        nonlocal ids
        for turn in range(20):
            body = {"token_ids": ids, "sampling_params": {"max_tokens": 6, "seed": turn}}
            before = counters.prefill_tokens
            answer = (await client.post("/inference/v1/generate", json=body, headers={"X-Session-ID": "a"})).json()
            new = counters.prefill_tokens - before
            assert new == (9 if turn == 0 else 5), "the last token drawn, and the four behind it"
            whole = (await client.post("/inference/v1/generate", json=body)).json()
            assert answer["choices"] == whole["choices"]
            (choice,) = answer["choices"]
            turns.append((ids, choice))
            ids = [*ids, *choice["token_ids"], *random.integers(4, 260, 4).tolist()]
        figures = (await client.get("/metrics")).text
        assert "jaxrl_prompt_tokens_cached_total" in figures
        assert 'jaxrl_requests_total{route="/inference/v1/generate",status="200"} 40.0' in figures

    talk_to(exact)(conversation)
    for turn, (prompt, choice) in enumerate(turns):
        ((sample,),) = exact.generate([prompt], SamplingParams(max_tokens=6, seed=turn), chat=False)
        assert choice["token_ids"] == sample.token_ids.tolist()
        pairs = zip(choice["token_ids"], sample.rollout_logprobs.tolist(), strict=True)
        assert [(each["token"], each["logprob"]) for each in choice["logprobs"]["content"]] == [
            (f"token_id:{token}", logprob) for token, logprob in pairs
        ]


REFUSED = [
    ("/v1/completions", {"prompt": "x", "frequency_penalty": 1}, 400, "frequency_penalty: Input should be 0"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 1000}, 400, "the longest sequence has 256 tokens"),
    ("/v1/completions", {"prompt": [400]}, 400, "token id 400 is not in the vocabulary"),
    ("/v1/completions", {"prompt": "x", "model": "y"}, 404, "model 'y' is not here"),
    ("/v1/completions", {"prompt": "x", "beam": 3}, 400, "beam: Extra inputs are not permitted"),
    ("/v1/completions", {"prompt": ["x"] * 9, "n": 5}, 400, "45 responses are asked for at once, and this server"),
    ("/v1/completions", {"prompt": "x" * 20_000}, 400, "20000 characters, which are more than 256 tokens"),
    ("/v1/chat/completions", {"messages": CHAT, "chat_template_kwargs": {"x": 1}}, 400, "reads no variable 'x'"),
    ("/v1/completions", {"prompt": [[1, 2], [3, -1]]}, 400, "prompt.1.1: Input should be greater than or equal to 0"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400,
     "messages.0.content.0.type: must be 'text': this server takes no images"),
    ("/v1/chat/completions",
     {"messages": [*CHAT, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]}, 400,
     "messages.1.tool_calls.0.function.arguments: must be a JSON object, found "),
    ("/nowhere", {}, 404, "POST /nowhere: Not Found"),
    ("/v1/models", {}, 405, "Method Not Allowed"),
]  # fmt: skip


def path_leads(body: Any, path: str) -> bool:
    """Whether a client has sent something there."""
    for step in path.split("."):
        body = body[int(step)] if isinstance(body, list) else body.get(step) if isinstance(body, dict) else None
    return body is not None


def test_what_is_refused(talk: Talk, tiny_model: Path):
    async def conversation(client: Client) -> None:
        for path, body, status, said in REFUSED:
            response = await client.post(path, json=body)
            error = response.json()["error"]
            assert (response.status_code, said in error["message"]) == (status, True), (path, body, error)
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["param"] is None or path_leads(body, error["param"]) or "required" in error["message"]
            assert str(tiny_model) not in response.text
        broken = await client.post("/v1/completions", content=b'{"prompt": ')
        assert (broken.status_code, "Invalid JSON" in broken.text) == (400, True)
        large = await client.post("/v1/completions", content=b" " * ((16 << 20) + 1))
        assert large.status_code == 413

    talk(conversation)


def test_what_clients_leave_open(talk: Talk):
    """Nulls are defaults, a completion has 16 tokens, a model has its name, and half a character has no bytes."""
    nulls = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "n", "max_tokens", "stop", "seed", "logprobs"))
    deep = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": '{"a": ' * 900 + "1" + "}" * 900}}],
    }

    async def conversation(client: Client) -> None:
        found = (await client.post("/v1/completions", json={"prompt": "p", **nulls, "seed": 3})).json()
        assert found["usage"]["completion_tokens"] == 16
        assert (await client.get("/v1/models/tiny")).json()["max_model_len"] == LENGTH
        assert (await client.get("/v1/models/other")).status_code == 404
        asked = {"messages": [*CHAT, deep], "max_tokens": 100, "seed": 1, "logprobs": True}
        (choice,) = (await client.post("/v1/chat/completions", json=asked)).json()["choices"]
        told = choice["logprobs"]["content"]
        assert {each["bytes"] is None for each in told} == {True, False}
        assert all((each["bytes"] is None) == ("\ufffd" in each["token"]) for each in told)

    talk(conversation)


def test_a_client_is_not_told_why_an_engine_fails(engine: TextEngine, monkeypatch: pytest.MonkeyPatch):
    """Neither the one whose request is under way nor the next one."""
    body = {"prompt": "p", "max_tokens": 4}

    async def inside() -> None:
        driver = Driver(engine.engine, WAITING)
        model = ServedModel(driver, engine.tokenizer, LENGTH, engine.stop_token_ids, engine.tokenizer.vocab_size)
        app = httpx2.ASGITransport(Routes(model, "tiny").app())
        async with Client(transport=app, base_url="http://server") as client:
            for stream in (False, False, True):
                response = await client.post("/v1/completions", json=body | {"stream": stream})
                assert (response.status_code, "secret" in response.text) == (500, False)
                assert response.json()["error"]["message"] == "the engine has failed"
        await driver.close(0)
        assert "secret" in str(driver.failure)

    def fails() -> None:
        raise ValueError("/secret/path: shapes differ")

    with monkeypatch.context() as patch:
        patch.setattr(engine.engine, "step", fails)
        asyncio.run(inside())
    engine.engine.abort(engine.engine.unfinished())
    engine.engine.drain()


def test_more_than_fit_wait_and_more_than_may_wait_are_told_to_come_again(talk: Talk, engine: TextEngine):
    most = ROWS * engine.engine.batcher.capacity.num_groups + WAITING

    async def conversation(client: Client) -> None:
        asked = [
            client.post("/v1/completions", json={"prompt": "p", "max_tokens": 40, "seed": i}) for i in range(most + 3)
        ]
        responses = await asyncio.gather(*asked)
        assert [each.status_code for each in responses].count(200) == most
        late = next(each for each in responses if each.status_code != 200)
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        assert (await client.post("/v1/completions", json={"prompt": "p", "max_tokens": 2})).status_code == 200

    talk(conversation)


def test_the_key_is_asked_for(talk: Talk):
    async def conversation(client: Client) -> None:
        for headers in ({}, {"Authorization": "Bearer secret2"}, {"Authorization": "Basic secret"}):
            response = await client.get("/v1/models", headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        found = await client.get("/v1/models", headers={"Authorization": "Bearer secret"})
        assert found.json()["data"][0]["max_model_len"] == LENGTH
        assert (await client.get("/health")).status_code == 200
        page = await client.get("/")  # it asks for the key itself
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "http://" not in page.text
        assert "https://" not in page.text

    talk(conversation, "secret")


def test_a_stream_that_is_left_before_it_begins_frees_its_row(engine: TextEngine):
    """The connection is lost as the first bytes go out."""

    async def lost(message: Any) -> None:
        raise OSError("the client is gone")

    async def inside() -> None:
        driver = Driver(engine.engine, WAITING)
        model = ServedModel(driver, engine.tokenizer, LENGTH, engine.stop_token_ids, engine.tokenizer.vocab_size)
        params = SamplingParams(max_tokens=200)
        generation = model.begin([[5, 6]], params)
        answer = Completion(CompletionBody(prompt="x"), generation, engine.tokenizer, "tiny")
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        with pytest.raises(ClientDisconnect):
            await Streamed(generation, answer, False)(scope, lost, lost)
        assert not driver._readers
        await driver.close(0)

    asyncio.run(inside())
    assert engine.engine.is_idle
