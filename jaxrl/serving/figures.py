"""What a monitor reads of a server (`GET /metrics`), in Prometheus's form."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxrl.serving.driver import Driver

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class Figures:
    """Counts and latencies of requests, and the engine's load at the time of reading."""

    def __init__(self, driver: Driver) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "jaxrl_requests", "HTTP requests that were answered.", ["route", "status"], registry=self._registry
        )

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"jaxrl_{name}", text, buckets=buckets, registry=self._registry)

        self.first_token = histogram("time_to_first_token_seconds", "From a request's body to its first tokens.")
        self.whole = histogram("request_seconds", "From a request's body to the end of all its responses.")
        self.per_token = histogram("time_per_output_token_seconds", "Of a response, after its first tokens.")
        self.prompt_tokens = histogram("prompt_tokens", "Tokens of a request's prompts.", TOKENS)
        self.response_tokens = histogram("response_tokens", "Tokens of a response.", TOKENS)
        self._registry.register(_Load(driver))

    def text(self) -> bytes:
        """The page, in Prometheus's text form."""
        return generate_latest(self._registry)


class _Load(Collector):
    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def collect(self) -> Iterator[Metric]:
        load = self._driver.load
        for name, value, text in (
            ("running_requests", load.running, "Requests with a row."),
            ("waiting_requests", load.waiting, "Requests that wait for a row."),
            ("rows", self._driver.num_rows, "Requests that can run at once."),
            ("kv_blocks", load.num_blocks, "Blocks of the KV cache."),
            ("kv_blocks_free", load.free_blocks, "Of these, those that a request could get."),
            ("kv_blocks_parked", load.parked_blocks, "Free ones that hold a conversation's KV."),
        ):
            yield GaugeMetricFamily(f"jaxrl_{name}", text, value=value)
        for name, value, text in (
            ("prompt_tokens_seen", load.prompt_tokens, "Tokens of prompts that were let in."),
            ("prompt_tokens_cached", load.cached_tokens, "Of these, those whose KV was there."),
            ("tokens_drawn", load.drawn_tokens, "Tokens of responses."),
            ("preemptions", load.preemptions, "Requests that lost their row for a while."),
        ):
            yield CounterMetricFamily(f"jaxrl_{name}", text, value=value)


class Timing:
    """Of one request: when its tokens came."""

    def __init__(self, figures: Figures) -> None:
        self._figures, self._began = figures, time.perf_counter()
        self._first: float | None = None

    def drew(self) -> None:
        """Tokens have come."""
        if self._first is None:
            self._first = time.perf_counter()
            self._figures.first_token.observe(self._first - self._began)

    def ended(self, prompt_tokens: int, lengths: list[int]) -> None:
        """All its responses are whole; `lengths` in tokens."""
        now = time.perf_counter()
        self._figures.whole.observe(now - self._began)
        self._figures.prompt_tokens.observe(prompt_tokens)
        for length in lengths:
            self._figures.response_tokens.observe(length)
        if self._first is not None and (later := max(lengths) - 1) > 0:
            self._figures.per_token.observe((now - self._first) / later)
