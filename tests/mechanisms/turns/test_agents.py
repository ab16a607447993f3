"""Programs that drive the policy by OpenAI's API: what they may ask, and what becomes of those that do otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from jaxrl.config import from_mapping
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.data.tool_calls import call_id
from jaxrl.mechanisms.turns.agents import AgentPool
from jaxrl.mechanisms.turns.pool import EnvironmentPool
from jaxrl.mechanisms.turns.rule import Observed
from jaxrl.types import Prompt, SampleKey

pytest.importorskip("openai")

PROGRAM = '''
import openai

schemas = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {
    "type": "object", "properties": {"at": {"type": "string", "description": "What."}}, "required": ["at"]}}}]

async def run(row, base_url, api_key):
    """Asks until the model says `stop`; the reward is the number of turns."""
    if row["how"] == "never asks":
        import asyncio
        await asyncio.sleep(60)
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages, count, how = list(row["messages"]), 0, row["how"]
    if how == "other beginning":
        messages = [{"role": "system", "content": "I know better."}, *messages]
    if how == "other words":  # as newer clients write the same
        messages = [{"role": "developer" if message["role"] == "system" else message["role"],
                     "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    if how == "picture":
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        messages[-1] = messages[-1] | {"content": [{"type": "text", "text": "Well?"}, part]}
    while True:
        streams = how == "streams"
        asked = {"model": "policy", "messages": messages, "tools": schemas, "stream": streams}
        if how == "no tools":
            del asked["tools"]
        if how == "none":
            asked["tool_choice"] = "none"
        if how == "wishes":
            asked |= {"tool_choice": "required", "parallel_tool_calls": False, "store": True, "temperature": 0.1}
        if how == "two at once" and count:
            import asyncio
            other = asked | {"messages": [*messages, {"role": "user", "content": "and"}]}
            await asyncio.gather(*[client.chat.completions.create(**each) for each in (asked, other)])
        if how == "asks again" and count:
            import asyncio
            first = asyncio.ensure_future(client.chat.completions.create(**asked))
            await asyncio.sleep(0.1)
            first.cancel()
        answer = await client.chat.completions.create(**asked)
        if streams:
            chunks = [chunk async for chunk in answer]
            message = chunks[-1].choices[0].delta
        else:
            message = answer.choices[0].message
        count += 1
        said = message.content or ""
        if how == "dies":
            import os
            os._exit(1)
        if said == "stop":
            return {"score": count, "depth": count}
        if how == "rewrites":
            said = "I said something else"
        messages.append({"role": "assistant", "content": said})
        if message.tool_calls:
            messages[-1]["tool_calls"] = [call.model_dump() for call in message.tool_calls]
            at = message.tool_calls[0].function.arguments
            messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": f"seen {at}"})
        else:
            messages.append({"role": "user", "content": f"{len(said)} letters"})
'''
_CAME: list[Observed] = []
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Well?"}]


@pytest.fixture
def agents(tmp_path: Path, tiny_model: Path) -> Iterator[AgentPool]:
    (tmp_path / "agent.py").write_text(PROGRAM)
    section = {"kind": "openai", "path": str(tmp_path / "agent.py"), "num_workers": 3, "timeout_s": 2.0}
    config = from_mapping({"model": {"path": "m"}, "environment": section, "data": {"train_files": ["x"]}})
    with ExitStack() as stack:
        pool = stack.enter_context(closing(EnvironmentPool(config)))
        made = pool.conversation(Tokenizer.from_path(tiny_model)).acting
        assert isinstance(made, AgentPool)
        assert [each["function"]["name"] for each in pool.schemas({}, "row 1")] == ["look"]
        yield made


def prompt_of(how: str = "") -> Prompt:
    return Prompt(0, 0, (), "", "x", extra={"messages": MESSAGES, "how": how})


def observed(agents: AgentPool) -> Observed:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        _CAME.extend(agents.completed(0.1))
        if _CAME:
            return _CAME.pop(0)
    raise AssertionError("nothing came")


@pytest.mark.parametrize("how", ["", "streams", "other words", "wishes"])
def test_a_conversation_from_its_first_request_to_its_reward(agents: AgentPool, how: str):
    key = SampleKey(0, 0, 0)
    agents.submit(key, prompt_of(how), "hello", None)
    first = observed(agents)
    assert (first.messages, first.done) == (({"role": "user", "content": "5 letters"},), False)
    called = 'So\n<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
    agents.submit(key, prompt_of(how), called, first.state)
    second = observed(agents)
    (answer,) = second.messages
    assert answer == {"role": "tool", "content": 'seen {"at": "it"}', "tool_call_id": call_id(1, 0)}
    agents.submit(key, prompt_of(how), "stop", second.state)
    last = observed(agents)
    assert (last.done, last.reward, last.metrics, last.status) == (True, 3.0, {"depth": 3.0}, "ok")
    assert 0 < second.seconds < 30
    assert agents.completed() == []


@pytest.mark.parametrize("how", ["no tools", "none"])
def test_a_call_of_what_a_request_does_not_offer_is_text(agents: AgentPool, how: str):
    key, called = SampleKey(0, 0, 0), '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
    agents.submit(key, prompt_of(how), called, None)
    assert observed(agents).messages == ({"role": "user", "content": f"{len(called)} letters"},)


def test_a_program_that_is_gone_is_run_again_from_its_beginning(agents: AgentPool):
    key, prompt = SampleKey(0, 0, 0), prompt_of()
    agents.submit(key, prompt, "hello", None)
    first = observed(agents)
    agents.submit(key, prompt, "hi", first.state)
    second = observed(agents)
    agents.cancel([key])
    for text, state, letters in (("abc", second.state, 3), ("other", first.state, 5)):
        agents.submit(key, prompt, text, state)
        found = observed(agents)
        assert found.messages == ({"role": "user", "content": f"{letters} letters"},), "given what was said, it asks on"
    agents.submit(key, prompt, "stop", found.state)
    assert observed(agents).reward == 3.0


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("other beginning", "error", "the first request must have the row's messages"),
        ("rewrites", "error", "what was answered, as it was"),
        ("picture", "error", "parts of a message must be text"),
        ("never asks", "timeout", "no request within environment.timeout_s"),
        ("two at once", "error", "one request at a time"),
        ("dies", "crash", "ended with exit code 1"),
    ],
)
def test_programs_that_do_otherwise(agents: AgentPool, how: str, status: str, words: str):
    key = SampleKey(0, 0, 0)
    agents.submit(key, prompt_of(how), "hello", None)
    found = observed(agents)
    if not found.done:
        found = observed(agents) if how == "two at once" else found
    assert (found.done, found.status) == (True, status)
    assert words in found.error
