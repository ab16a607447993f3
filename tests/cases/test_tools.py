"""Conversations with calls of tools, in public layouts: what the prompt has, or where the error is; and what is
answered to what a model says. The right values of `tools.jsonl` were judged by hand.

A row has `messages` (and perhaps `more` of the body) for a server, or `said` for an environment of two tools. `has` and
`lacks` are pieces of the prompt, `param` and `says` of the error; `answers` are the tools' (null: nothing was called).
`template` is one of `templates/`, ours in the structure of the published ones.
"""

from __future__ import annotations

import asyncio
import copy
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tiny import write_tiny_model

from jaxrl.data.chat_template import ChatTemplate
from jaxrl.environments.env import Action
from jaxrl.environments.kinds import answers
from jaxrl.serving.app import Routes
from jaxrl.serving.driver import Driver
from jaxrl.serving.generation import ServedModel
from jaxrl.text import TextEngine

HERE = Path(__file__).parent
ROWS = list(map(json.loads, (HERE / "tools.jsonl").read_text(encoding="utf-8").splitlines()))
HISTORIES = [row for row in ROWS if "messages" in row]
SAYINGS = [row for row in ROWS if "said" in row]
LENGTH = 2048


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TextEngine:
    folder = write_tiny_model(tmp_path_factory.mktemp("cases"), max_position_embeddings=LENGTH)
    return TextEngine.from_path(f"random:{folder}", max_length=LENGTH, num_slots=2, decode_steps=4)


@pytest.mark.parametrize("row", HISTORIES, ids=[row["id"] for row in HISTORIES])
def test_a_history_is_in_the_prompt_or_refused_by_its_place(row: dict[str, Any], engine: TextEngine):
    tokenizer = copy.copy(engine.tokenizer)
    template = HERE / "templates" / f"tools_{row['template'].replace(' ', '_')}.jinja"
    tokenizer.chat_templates = {"default": ChatTemplate(template.read_text().strip(), "a template")}
    body = {"messages": row["messages"], "max_tokens": 1, "return_token_ids": True, **row.get("more", {})}

    async def answer() -> Any:
        driver = Driver(engine.engine, 4)
        routes = Routes(ServedModel(driver, tokenizer, LENGTH, (), tokenizer.vocab_size), "tiny")
        async with AsyncExitStack() as stack:
            stack.push_async_callback(driver.close, 5.0)
            app = httpx2.ASGITransport(routes.app())
            client = await stack.enter_async_context(httpx2.AsyncClient(transport=app, base_url="http://server"))
            return (await client.post("/v1/chat/completions", json=body)).json()

    found = asyncio.run(answer())
    if "says" in row:
        assert (found["error"]["param"], row["says"] in found["error"]["message"]) == (row["param"], True), found
    else:
        assert "error" not in found, found
        prompt = tokenizer.decode(found["prompt_token_ids"], skip_special_tokens=False)
        assert [piece for piece in row["has"] if piece not in prompt] == [], prompt
        assert [piece for piece in row.get("lacks", ()) if piece in prompt] == [], prompt


def look(at: str = "nothing") -> str:
    return f"seen {at}"


def add(a: int, b: int = 0) -> int:
    return a + b


@pytest.mark.parametrize("row", SAYINGS, ids=[row["id"] for row in SAYINGS])
def test_what_a_model_says_is_answered(row: dict[str, Any]):
    action = Action.of(row["said"], [{"type": "function", "function": {"name": name}} for name in ("look", "add")])
    if row["answers"] is None:
        assert not action.calls
        assert not action.is_unread
    else:
        result, _ = answers({"look": look, "add": add}, action)
        assert [message["content"] for message in result.messages] == row["answers"]
