"""From a checked body to responses that grow: requests for the driver, the text of each response so far, and the
metrics for a monitor (`GET /metrics`).

Source: vLLM and text-generation-inference detokenize in this way. The text of a token depends on a few before it (a
word's blank, the bytes of one character). So a window is decoded with and without the new tokens, and the difference is
new. A window that ends in half a character waits for the rest.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.serving.driver import Driver, Piece, Pieces
from jaxrl.types import FinishReason, SampleKey, SamplingParams

HALF = "\ufffd"  # bytes that are no character yet
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


class GrowingText:
    """The text of a response, piece by piece: complete characters only. All pieces together are the text of all tokens,
    cut before the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.text = ""
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._held = ""  # decoded, and perhaps the beginning of a stop string
        self._ids: list[int] = []
        self._start = self._read = 0  # the window, and how much of it has been decoded
        self._longest = max(map(len, self._stops), default=0)

    def add(self, token_ids: Sequence[int], *, ends: bool) -> str:
        """The text that these tokens add; `ends`: they are the last."""
        self._ids.extend(token_ids)
        self._held += self._decoded(ends)
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            new, self._held = self._held[: min(found)], ""
        else:
            kept = 0 if ends else self._num_held()
            new, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        self.text += new
        return new

    def _decoded(self, ends: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        after = self._tokenizer.decode(self._ids[self._start :])
        if not ends and (after.endswith(HALF) or len(after) <= len(before)):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _num_held(self) -> int:
        """Characters at the end of what is held that may begin a stop string."""
        most = min(self._longest - 1, len(self._held))
        ends = (self._held[len(self._held) - count :] for count in range(most, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)


class ServerMetrics(Collector):
    """Counts and latencies of requests, and the engine's load at the time of reading, in Prometheus's form."""

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
        now_s = time.perf_counter()
        self._whole.observe(now_s - began_s)
        self._prompt_tokens.observe(prompt_tokens)
        for length in lengths:
            self._response_tokens.observe(length)
        if first_s is not None and (later := max(lengths) - 1) > 0:
            self._per_token.observe((now_s - first_s) / later)


@dataclass(slots=True)
class Choice:
    """A response. `prompt`: the number of its prompt among those of its answer; `top`: of each token's place the
    likeliest ones, as (token id, log-probability), where they were asked for."""

    index: int
    prompt: int
    prompt_ids: tuple[int, ...]
    text: GrowingText
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, piece: Piece) -> str:
        token_ids = piece.token_ids.tolist()
        self.token_ids += token_ids
        self.logprobs += piece.logprobs.tolist()
        if piece.top is not None:
            pairs = zip(piece.top.token_ids.tolist(), piece.top.logprobs.tolist(), strict=True)
            self.top += [list(zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]
        self.finish_reason = piece.finish_reason
        return self.text.add(token_ids, ends=piece.finish_reason is not None)


class ServedModel:
    """Makes requests of one model, and numbers them."""

    def __init__(
        self, driver: Driver, tokenizer: Tokenizer, max_length: int, stop_token_ids: tuple[int, ...], vocab_size: int
    ) -> None:
        self.driver, self.tokenizer, self.max_length = driver, tokenizer, max_length
        self.metrics = ServerMetrics(driver)
        self.stop_token_ids, self.vocab_size = stop_token_ids, vocab_size
        self._ids = itertools.count()
        self._most_characters = max_length * tokenizer.longest_token

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """A text with more characters than can fit is refused unread: reading holds up all others."""
        if len(text) > self._most_characters:
            raise ValueError(
                f"the prompt has {len(text)} characters, which are more than {self.max_length} tokens: shorten it"
            )
        return self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]  # other threads run on

    def max_tokens(self, prompts: Sequence[Sequence[int]], asked: int | None, default: int | None = None) -> int:
        """Tokens that each response may have: as many as are asked for; or `default`, or as there is room for. Raises
        ValueError for a prompt that leaves no room, or has tokens that the model does not know."""
        longest = max(map(len, prompts))
        room = self.max_length - longest
        if room < 1 or (asked is not None and asked > room):
            wanted = "" if asked is None else f" and max_tokens is {asked}"
            raise ValueError(
                f"the longest sequence has {self.max_length} tokens; the prompt has {longest}{wanted}: shorten the "
                "prompt or ask for fewer tokens"
            )
        if (largest := max(map(max, prompts))) >= self.vocab_size:
            raise ValueError(f"token id {largest} is not in the vocabulary, which has {self.vocab_size} tokens")
        return min(room, default or room) if asked is None else asked

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int = 1,
        seed: int | None = None,
        session: str | None = None,
    ) -> Generation:
        """Submits `n` requests for each prompt, one prompt after another. With a seed a response depends on that, its
        prompt and its place among these alone. Raises ValueError for more than can ever run or wait, or `Unserved`."""
        if len(prompts) * n > self.driver.most_at_once:
            raise ValueError(
                f"{len(prompts) * n} responses are asked for at once, and this server takes "
                f"{self.driver.most_at_once}: ask for fewer"
            )
        params = replace(params, seed=secrets.randbits(63) if seed is None else seed)
        alone = len(prompts) * n == 1
        requests = [
            Request(
                next(self._ids),
                SampleKey(0, i, j),
                tuple(prompt),
                params,
                share=None if alone else (id(params), i),
                session=session if alone else None,
            )
            for i, prompt in enumerate(prompts)
            for j in range(n)
        ]
        for request in requests:
            self.driver.check(request)
        choices = [
            Choice(i, each.key.prompt_index, each.prompt_ids, GrowingText(self.tokenizer, params.stop_strings))
            for i, each in enumerate(requests)
        ]
        return Generation(self.driver, requests, choices, self.driver.submit(requests), self.metrics)


class Generation:
    """The choices of an answer while they are generated, one for each request."""

    def __init__(
        self, driver: Driver, requests: Sequence[Request], choices: list[Choice], pieces: Pieces, metrics: ServerMetrics
    ) -> None:
        self.choices = choices
        self._driver, self._requests, self._pieces, self._metrics = driver, requests, pieces, metrics
        self._began_s = time.perf_counter()

    @property
    def num_prompt_tokens(self) -> int:
        return sum({choice.prompt: len(choice.prompt_ids) for choice in self.choices}.values())

    async def pieces(self) -> AsyncGenerator[tuple[Choice, str, Piece]]:
        """(choice, the text that it gained, its tokens) as they come. Closing it frees their rows."""
        choice_of = dict(zip((request.request_id for request in self._requests), self.choices, strict=True))
        first_s: float | None = None
        try:
            while any(choice.finish_reason is None for choice in self.choices):
                request_id, piece = await self._pieces.get()
                if isinstance(piece, BaseException):
                    raise piece
                choice = choice_of[request_id]
                if first_s is None:
                    first_s = time.perf_counter()
                    self._metrics.first_token.observe(first_s - self._began_s)
                yield choice, choice.take(piece), piece
            lengths = [len(choice.token_ids) for choice in self.choices]
            self._metrics.ended(self._began_s, first_s, self.num_prompt_tokens, lengths)
        finally:
            self.leave()

    def leave(self) -> None:
        self._driver.leave(self._requests)
