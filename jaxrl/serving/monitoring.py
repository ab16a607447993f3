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
GAUGES = {  # of `Driver.load`
    "running_requests": "Requests with a row.",
    "waiting_requests": "Requests that wait for a row.",
    "rows": "Requests that can run at once.",
    "kv_blocks": "Blocks of the KV cache.",
    "kv_blocks_free": "Of these, those that a request could get.",
    "kv_blocks_parked": "Free ones that hold a conversation's KV.",
}
COUNTERS = {
    "prompt_tokens_seen": "Tokens of prompts that were let in.",
    "prompt_tokens_cached": "Of these, those whose KV was there.",
    "tokens_drawn": "Tokens of responses.",
    "preemptions": "Requests that lost their row for a while.",
}


class ServerMetrics(Collector):
    """Counts and latencies of requests, and the engine's load at the time of reading."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._registry = driver, CollectorRegistry()
        self.requests = Counter(
            "jaxrl_requests", "HTTP requests that were answered.", ["route", "status"], registry=self._registry
        )

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"jaxrl_{name}", text, buckets=buckets, registry=self._registry)

        self.first_token = histogram("time_to_first_token_seconds", "From a request's body to its first tokens.")
        self._whole = histogram("request_seconds", "From a request's body to the end of all its responses.")
        self._per_token = histogram("time_per_output_token_seconds", "Of a response, after its first tokens.")
        self._prompt_tokens = histogram("prompt_tokens", "Tokens of a request's prompts.", TOKENS)
        self._response_tokens = histogram("response_tokens", "Tokens of a response.", TOKENS)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        load = self._driver.load
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"jaxrl_{name}", text, value=load[name])
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"jaxrl_{name}", text, value=load[name])

    def ended(self, began_s: float, first_s: float | None, prompt_tokens: int, lengths: list[int]) -> None:
        """All responses to a request have ended; `lengths` in tokens."""
        now_s = time.perf_counter()
        self._whole.observe(now_s - began_s)
        self._prompt_tokens.observe(prompt_tokens)
        for length in lengths:
            self._response_tokens.observe(length)
        if first_s is not None and (later := max(lengths) - 1) > 0:
            self._per_token.observe((now_s - first_s) / later)
