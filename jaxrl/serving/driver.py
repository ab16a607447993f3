"""The thread that owns an engine: requests come in from an event loop, and tokens go out as they are sampled.

The engine has a separate thread because an event loop may not wait for a plan. No other thread touches it: requests go
in through a queue, and the tokens of a plan go out in one call to the event loop, for all requests.

A client that asks again as soon as it has its answer would miss the next plan by milliseconds, and its row would be
idle for that plan. So the next plan waits for as many requests as rows have become free, for a small part of a plan's
time at most. So does the first plan after an idle time.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request, check_request
from jaxrl.types import FinishReason, Sample, TopTokens


class Unserved(Exception):
    """No answer comes. `retry_s`: when to ask again; 0: the engine has failed, and why is the operator's to know
    (`Driver.failure`)."""

    def __init__(self, text: str, retry_s: int = 0) -> None:
        super().__init__(text)
        self.retry_s = retry_s


@dataclass(frozen=True, slots=True)
class Piece:
    """A response's new tokens of one plan: int32 [T], float32 [T], why it ended, and the likeliest tokens, if asked
    for."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason | None = None
    top: TopTokens | None = None


Pieces = asyncio.Queue[tuple[int, Piece | BaseException]]
_STOPPING, _FAILED = "the server is stopping", "the engine has failed"
_LAST_PLAN_S = 10.0  # that the engine may take to end; a compiler may take minutes, and is left behind
_WINDOW, _BESIDE = 0.05, 0.2  # of a plan's time; the latter where the devices have another plan to run meanwhile


class Driver:
    """Runs an engine that nobody else touches. `max_waiting`: requests that may wait for a row; `load`: numbers of the
    engine after its last plan, by their names in `GET /metrics`; `failure`: what ended the thread before its time."""

    def __init__(self, engine: Engine, max_waiting: int) -> None:
        self._engine, self._max_waiting = engine, max_waiting
        # a request to add, the id of one to abort, or the end
        self._inbox: queue.SimpleQueue[Request | int | None] = queue.SimpleQueue()
        self._readers: dict[int, Pieces] = {}  # the event loop's: of the requests that have not ended
        self._sent: dict[int, int] = {}  # the thread's: tokens of each live request that its reader has
        self._loop = asyncio.get_running_loop()
        self.failure: BaseException | None = None
        self._drawn = 0
        self._expected = 0  # the thread's: requests that may follow those that ended in the last plan
        self._plan_s = 0.0  # what that took
        self._closing = False
        self.load = self._measured()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- the event loop's side ---------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        batcher = self._engine.batcher
        try:
            self._engine.executor.check(request)
            check_request(request, batcher.capacity, batcher.config.max_model_len)
        except ValueError as error:  # which number a request has is nothing to its client
            raise ValueError(str(error).removeprefix(f"request {request.request_id} ({request.key}): ")) from None

    def submit(self, requests: Sequence[Request]) -> Pieces:
        """Returns the queue in which the requests' pieces arrive, each with its request's id. An error comes in place
        of a piece. Raises Unserved: none was taken."""
        if self.failure is not None:
            raise Unserved(_FAILED)
        if self._closing:
            raise Unserved(_STOPPING, 10)
        if len(self._readers) + len(requests) > self.most_at_once:
            waiting = max(len(self._readers) - self.num_rows, 0)
            raise Unserved(f"{waiting} requests wait already: try again in 1 s", 1)
        pieces: Pieces = asyncio.Queue()
        for request in requests:
            self._readers[request.request_id] = pieces
            self._inbox.put(request)
        return pieces

    def leave(self, requests: Sequence[Request]) -> None:
        """Aborts those that have not ended: nobody reads them any more."""
        for request in requests:
            if self._readers.pop(request.request_id, None) is not None:
                self._inbox.put(request.request_id)

    async def close(self, grace_s: float) -> None:
        """Lets running responses end for `grace_s` seconds, and then ends the thread."""
        self._closing = True
        deadline = self._loop.time() + grace_s
        while self._readers and self._loop.time() < deadline and self.failure is None:
            await asyncio.sleep(0.02)
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, _LAST_PLAN_S)
        self._deliver(dict.fromkeys(self._readers, Unserved(_STOPPING, 10)))

    @property
    def num_rows(self) -> int:
        return self._engine.batcher.capacity.num_groups * self._engine.batcher.capacity.num_slots

    @property
    def most_at_once(self) -> int:
        return self.num_rows + self._max_waiting

    def _deliver(self, pieces: Mapping[int, Piece | BaseException]) -> None:
        for request_id, piece in pieces.items():
            if (reader := self._readers.get(request_id)) is not None:
                reader.put_nowait((request_id, piece))
                if isinstance(piece, BaseException) or piece.finish_reason is not None:
                    del self._readers[request_id]

    # -- the thread's side ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_in():
                pieces = self._step()
                self.load = self._measured()
                if pieces:
                    self._loop.call_soon_threadsafe(self._deliver, pieces)
            self._engine.abort(self._sent)
            self._engine.drain()
        except BaseException as error:
            self.failure = error
            self._loop.call_soon_threadsafe(self._deliver, dict.fromkeys(self._sent, Unserved(_FAILED)))

    def _take_in(self) -> bool:
        """Gives the engine the new requests, waiting where it has nothing to do; False at the end."""
        refused: dict[int, Piece | BaseException] = {}
        share = _BESIDE if self._engine.num_in_flight else _WINDOW
        until = time.monotonic() + share * self._plan_s
        while True:
            patience_s = max(until - time.monotonic(), 0.0) if self._expected > 0 else 0.0
            try:
                asked = self._inbox.get(timeout=None if self._engine.is_idle and not refused else patience_s)
            except queue.Empty:
                break
            if asked is None:
                return False
            if isinstance(asked, Request):
                if self._engine.is_idle:
                    self._expected, until = self.num_rows, time.monotonic() + _WINDOW * self._plan_s
                self._expected -= 1
                try:
                    self._engine.add(asked)
                    self._sent[asked.request_id] = 0
                except ValueError as error:
                    refused[asked.request_id] = error
            elif self._sent.pop(asked, None) is not None:
                self._engine.abort([asked])
        if refused:
            self._loop.call_soon_threadsafe(self._deliver, refused)
        return True

    def _step(self) -> dict[int, Piece | BaseException]:
        found: dict[int, Piece | BaseException] = {}
        began = time.monotonic()
        ended = self._engine.step()
        self._plan_s = time.monotonic() - began
        self._expected = len(ended) - self._engine.batcher.num_waiting
        for finished in ended:
            sent = self._sent.pop(finished.request_id, None)
            if sent is not None:
                sample = finished.sample
                found[finished.request_id] = _piece(sample, sent, sample.finish_reason)
        for request_id, sent in self._sent.items():
            progress = self._engine.batcher.progress(request_id)
            if progress.num_tokens > sent:
                found[request_id] = _piece(progress.sample("abort"), sent)
                self._sent[request_id] = progress.num_tokens
        self._drawn += sum(len(piece.token_ids) for piece in found.values() if isinstance(piece, Piece))
        return found

    def _measured(self) -> dict[str, int]:
        batcher = self._engine.batcher
        blocks, counters, groups = batcher.blocks, batcher.counters, range(batcher.capacity.num_groups)
        return {
            "running_requests": batcher.num_running,
            "waiting_requests": batcher.num_waiting,
            "rows": self.num_rows,
            "kv_blocks": blocks.capacity * len(groups),
            "kv_blocks_free": sum(map(blocks.num_free, groups)),
            "kv_blocks_parked": sum(map(blocks.num_parked, groups)),
            "prompt_tokens_seen": counters.prefill_tokens + counters.shared_tokens,
            "prompt_tokens_cached": counters.shared_tokens,
            "tokens_drawn": self._drawn,
            "preemptions": counters.preemptions,
        }


def _piece(sample: Sample, sent: int, finish_reason: FinishReason | None = None) -> Piece:
    """The tokens behind the first `sent`; copies, because a running request writes to its arrays."""
    top = None if sample.top is None else TopTokens(*(each[sent:].copy() for each in sample.top))
    return Piece(sample.token_ids[sent:].copy(), sample.rollout_logprobs[sent:].copy(), finish_reason, top)
