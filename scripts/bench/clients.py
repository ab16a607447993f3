"""A server in a process of its own, and clients of its routes: those that only want tokens, and those of a bad day."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

_HEADER = re.compile(r"serving (\S+) on (http://\S+)/v1")


class Server:
    """A `jaxrl serve` that listens.

    Attributes:
      url: without `/v1`.
      status: its exit status, once it has ended.
    """

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.url, self._process = url, process
        self.status: int | None = None

    def resident_bytes(self) -> int:
        """Memory that the server holds now (Linux)."""
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self._process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    def figures(self) -> dict[str, float]:
        """What `/metrics` says, by the names of the lines."""
        lines = httpx2.get(f"{self.url}/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


@contextmanager
def serving(*arguments: str, root: Path) -> Iterator[Server]:
    """A server with these arguments of `jaxrl serve`, ended by SIGTERM."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "jaxrl", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = next((found for line in process.stdout if (found := _HEADER.search(line))), None)
            if found is None:
                raise ValueError(f"jaxrl serve ended with status {process.wait()}")
            reader = threading.Thread(target=process.stdout.read, daemon=True)  # or its pipe would fill
            reader.start()
            server = Server(process, found[2])
            yield server
            process.send_signal(signal.SIGTERM)
            server.status = process.wait(120)
        finally:
            process.kill()


def closed_loop(url: str, model: str, bodies: Sequence[dict[str, Any]], clients: int) -> tuple[float, int]:
    """(seconds, tokens drawn) of requests to `/v1/completions`, of which `clients` are under way at any time."""

    async def one(client: httpx2.AsyncClient, left: Iterator[dict[str, Any]]) -> int:
        drawn = 0
        for body in left:
            response = await client.post("/v1/completions", json=body | {"model": model})
            response.raise_for_status()
            drawn += response.json()["usage"]["completion_tokens"]
        return drawn

    async def all_of_them() -> tuple[float, int]:
        left = iter(bodies)
        async with httpx2.AsyncClient(base_url=url, timeout=None, limits=httpx2.Limits()) as client:
            began = time.perf_counter()
            drawn = await asyncio.gather(*(one(client, left) for _ in range(clients)))
            return time.perf_counter() - began, sum(drawn)

    return asyncio.run(all_of_them())


@dataclass
class Day:
    """What clients met.

    Attributes:
      answered: by what was done and the status that came.
      wrong: sentences about answers that were not as they had to be.
      waits_s: of each whole answer, from the request to its end; retries included.
      first_s: of each stream, from the request to its first chunk.
      other_texts: answers with other tokens than an earlier one to the same body and seed.
    """

    answered: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    other_texts: int = 0


Behave = Callable[["Client"], Any]


class Client:
    """One of many, who for a while asks whole answers and streams, reads slowly, hangs up, and sends what is no body.

    Args:
      random: decides what it does next.
      known: texts by body, which all clients of a day share.
    """

    def __init__(self, http: httpx2.AsyncClient, random: random.Random, day: Day, known: dict[str, str]) -> None:
        self._http, self._random, self._day, self._known = http, random, day, known

    async def until(self, end: float) -> None:
        """Goes on until then (`time.monotonic`), and ends what it has begun."""
        kinds = {self.whole: 60, self.stream: 15, self.read_slowly: 8, self.hang_up: 9, self.send_garbage: 8}
        while time.monotonic() < end:
            (behave,) = self._random.choices([*kinds], [*kinds.values()])
            await behave()

    def _body(self) -> dict[str, Any]:
        number = self._random.randrange(64)
        return {"prompt": f"{number} " * (1 + number % 9), "max_tokens": 8 + number % 5 * 16, "seed": number}

    async def whole(self) -> None:
        body, began = self._body(), time.monotonic()
        while True:
            response = await self._http.post("/v1/completions", json=body)
            self._day.answered[f"whole {response.status_code}"] += 1
            if response.status_code != 503:
                break
            await asyncio.sleep(float(response.headers["retry-after"]))
        if response.status_code != 200:
            self._day.wrong.append(f"{body}: {response.status_code} {response.text}")
            return
        self._day.waits_s.append(time.monotonic() - began)
        (choice,) = response.json()["choices"]
        self._compare(body, choice["text"], choice["finish_reason"])

    async def stream(self, pause_s: float = 0.0) -> None:
        body, began, text, reason = self._body(), time.monotonic(), "", None
        name = "slow stream" if pause_s else "stream"
        while reason is None:
            async with self._http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                self._day.answered[f"{name} {response.status_code}"] += 1
                if response.status_code == 503:
                    await asyncio.sleep(float(response.headers["retry-after"]))
                    continue
                if response.status_code != 200:
                    self._day.wrong.append(f"{body}: {response.status_code}")
                    return
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line[6:])["choices"]
                        if not text:
                            self._day.first_s.append(time.monotonic() - began)
                        text, reason = text + choice["text"], choice["finish_reason"]
                        await asyncio.sleep(pause_s)
                if reason is None:
                    break
        self._compare(body, text, reason)

    async def read_slowly(self) -> None:
        await self.stream(self._random.uniform(0.05, 0.5))

    async def hang_up(self) -> None:
        """In the middle of a stream, or before an answer is whole."""
        body = self._body()
        if self._random.random() < 0.5:
            async with self._http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                async for _ in response.aiter_lines():
                    break
                self._day.answered[f"hung up {response.status_code}"] += 1
            return
        try:
            await self._http.post("/v1/completions", json=body, timeout=self._random.uniform(0.001, 0.2))
        except httpx2.TimeoutException:
            self._day.answered["hung up"] += 1

    async def send_garbage(self) -> None:
        """Bytes that are no JSON, bodies that are no request, and bytes that are no HTTP."""
        path = self._random.choice(("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/v1/x"))
        kind = self._random.randrange(3)
        if kind == 2:
            await self._no_http()
            return
        body = {"prompt": self._random.choice([None, -1, [[]], {"a": 1}]), "n": self._random.choice([-1, 10**9, "x"])}
        content = self._random.randbytes(self._random.randrange(1000)) if kind else json.dumps(body).encode()
        response = await self._http.post(path, content=content)
        self._day.answered[f"garbage {response.status_code}"] += 1
        if response.status_code not in (400, 404):
            self._day.wrong.append(f"{path} {content[:200]}: {response.status_code}")

    async def _no_http(self) -> None:
        url = self._http.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(self._random.randbytes(200) + b"\r\n\r\n")
        answer = await reader.read(100)
        self._day.answered["no HTTP " + (answer.split(b" ")[1].decode() if b" " in answer else "closed")] += 1
        writer.close()

    def _compare(self, body: dict[str, Any], text: str, reason: str | None) -> None:
        if reason not in ("stop", "length"):
            self._day.wrong.append(f"{body}: an answer without its end")
        self._day.other_texts += self._known.setdefault(json.dumps(body), text) != text


def spend_a_day(server: Server, clients: int, seconds: float, seed: int, look: Callable[[float], None]) -> Day:
    """`clients` of them for so long; `look` is called every five seconds with the seconds that have gone."""
    day: Day = Day()

    async def looking(began: float) -> None:
        while True:
            look(time.monotonic() - began)
            await asyncio.sleep(5)

    async def all_of_them() -> None:
        known: dict[str, str] = {}
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
            began = time.monotonic()
            watcher = asyncio.create_task(looking(began))
            made = (Client(http, random.Random(f"{seed} {i}"), day, known) for i in range(clients))
            await asyncio.gather(*(client.until(began + seconds) for client in made))
            watcher.cancel()

    asyncio.run(all_of_them())
    return day
