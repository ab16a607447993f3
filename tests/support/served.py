"""Servers in the test's own process: routes that are called without HTTP, and whole ones."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import httpx2
from checked_blocks import check_blocks

from jaxrl.commands.serve import Address, serve
from jaxrl.run.stop import Stop
from jaxrl.serving.app import Routes
from jaxrl.serving.driver import Driver
from jaxrl.serving.generation import ServedModel
from jaxrl.text import TextEngine

LENGTH, ROWS, WAITING = 256, 2, 8
Client = httpx2.AsyncClient
Talk = Callable[..., None]
"""Runs a conversation (of a `Client`) with a server's routes; its key may follow."""


def talk_to(engine: TextEngine) -> Talk:
    """With a server over this engine, which is idle in the end and has lost no block."""

    def run(conversation: Callable[[Client], Coroutine[Any, Any, None]], key: str | None = None) -> None:
        async def inside() -> None:
            driver = Driver(engine.engine, WAITING)
            model = ServedModel(driver, engine.tokenizer, LENGTH, engine.stop_token_ids, engine.tokenizer.vocab_size)
            async with AsyncExitStack() as stack:
                stack.push_async_callback(driver.close, 5.0)
                app = httpx2.ASGITransport(Routes(model, "tiny", key).app())
                client = await stack.enter_async_context(Client(transport=app, base_url="http://server"))
                await conversation(client)
            assert driver.failure is None

        asyncio.run(inside())
        assert engine.engine.is_idle
        check_blocks(engine.engine.batcher.blocks)

    return run


@contextmanager
def serving(*arguments: Any, address: Address | None = None, adapters: Sequence[str] = ()) -> Iterator[str]:
    """A server in a thread of this process, as the address of its routes; it ends without an error."""
    said, stop, failed = [], Stop(), []

    def run() -> None:
        try:
            serve(*arguments, address=address or Address(port=0), say=said.append, stop=stop, adapters=adapters)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        while not (found := re.search(r"http://\S+/v1", "\n".join(said))):
            assert thread.is_alive(), failed
            time.sleep(0.05)
        yield found[0]
    finally:
        stop.asked = True
        thread.join()
    assert not failed
