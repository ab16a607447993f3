"""A teacher behind an HTTP endpoint, which gives the log-probabilities of a prompt's tokens.

Each sample is one request: a text completion of one token, whose prompt is the ids of prompt and response, with vLLM's
`prompt_logprobs`. The answer has them in `choices[0].prompt_logprobs`: null for the first token, and for each other one
an object from token ids (as text) to `{"logprob": ...}`, for the likeliest tokens and the prompt's. The older form,
`echo` with `logprobs`, names tokens by their text: two ids may have the same, and none could be compared with what was
sent.

Such endpoints give the model's own distribution, so `rollout.temperature` must be 1. What fails is sent again
(`jaxrl.processes.endpoint_client`); what then fails ends the run, which can resume from its last checkpoint. A step
that runs again asks again: it has the same bits if the endpoint's are the same.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxrl.config import Config, ConfigError
from jaxrl.processes.endpoint_client import Client, EndpointRefused, RequestFailed, read_json
from jaxrl.training.logprobs import LEAST
from jaxrl.training.teacher import own_prompts
from jaxrl.types import Prompt, RunFailed, TrainBatch

_SECTION = "algorithm.teacher"
_MAX_BODY_BYTES = 256 << 20  # of each token some 80 bytes for each of its likeliest
_WHERE = "choices[0].prompt_logprobs"
R = TypeVar("R")


class EndpointTeacher:
    """Asks for the log-probabilities of a batch's tokens, many at once. Raises ConfigError where the endpoint refuses
    what the options say, or gives no log-probabilities of prompts, and RunFailed where it is out of order. `trial`:
    token ids that it is asked about before all else; `vocab_size`: of the policy; `prompt_of`: as in `MeshTeacher`."""

    def __init__(
        self,
        config: Config,
        trial: Sequence[int],
        vocab_size: int,
        prompt_of: Callable[[Prompt], Prompt],
        on_progress: Callable[[], None],
    ) -> None:
        self._options, self._vocab_size = config.algorithm.teacher, vocab_size
        self._prompt_of, self._on_progress, self._trial = prompt_of, on_progress, self._body(trial)
        self._run(lambda client: client.probe())

    def annotate(self, batch: TrainBatch) -> None:
        """Writes what it thinks of every response token into the batch. Raises RunFailed where it does not say."""
        prompts = [prompt.token_ids for prompt in own_prompts(batch, self._prompt_of)]
        asked = list(zip(prompts, (sample.token_ids.tolist() for sample in batch.samples), strict=True))
        found = self._run(lambda client: self._all(client, asked))
        batch.teacher_logprobs = [own for own, _, _ in found]
        if self._options.top_k:
            batch.teacher_top_logprobs = [tops for _, tops, _ in found]
            batch.teacher_ids = [ids for _, _, ids in found]

    def _run(self, work: Callable[[Client[list[Any]]], Awaitable[R]]) -> R:
        async def run() -> R:
            client: Client[list[Any]] = Client(
                *(self._options, _SECTION, "/completions", _entries, self._trial), max_body_bytes=_MAX_BODY_BYTES
            )
            try:
                return await work(client)
            finally:
                await client.close()

        try:
            return asyncio.run(run())
        except EndpointRefused as refused:
            raise ConfigError(str(refused)) from None
        except RequestFailed as failed:
            raise RunFailed(f"{_SECTION}.endpoint ({self._options.endpoint}): {failed}") from None

    def _body(self, token_ids: Sequence[int]) -> dict[str, Any]:
        options = self._options
        body = {"model": options.endpoint_model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0}
        return body | {"prompt_logprobs": max(options.top_k, 1)}

    async def _all(
        self, client: Client[list[Any]], asked: Sequence[tuple[tuple[int, ...], list[int]]]
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        tasks = [asyncio.create_task(self._one(client, *each)) for each in asked]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after the first that fails
                task.cancel()

    async def _one(
        self, client: Client[list[Any]], prompt: tuple[int, ...], response: list[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For a response: float32 [T], float32 [T, K + 1], int32 [T, K]."""
        k = self._options.top_k
        own, tops, ids = np.empty(len(response), np.float32), [], []
        if response:
            entries, _ = await client.ask(self._body([*prompt, *response]))
            self._on_progress()
            if len(entries) != (sent := len(prompt) + len(response)):
                raise _wrong(f"{_WHERE} has {len(entries)} entries, and {sent} token ids were sent")
            for t, token in enumerate(response):
                known = _logprobs(entries, len(prompt) + t)
                if token not in known:
                    raise _wrong(f"{_WHERE}[{len(prompt) + t}] has no log-probability of the token id {token}")
                own[t] = known[token]
                best = sorted(known, key=lambda token: (-known[token], token))[:k]
                if len(best) < k:
                    raise _wrong(f"{_WHERE}[{len(prompt) + t}] has {len(best)} tokens, and top_k is {k}")
                if k and max(best) >= self._vocab_size:
                    raise _wrong(f"it names the token id {max(best)}, and the policy has {self._vocab_size} tokens")
                mass = 1 - sum(math.exp(known[token]) for token in best)
                tops.append([*(known[token] for token in best), math.log(mass) if mass > 0 else LEAST])
                ids.append(best)
        shape = len(response), k
        named = np.maximum(np.array(tops, np.float32).reshape(shape[0], k + 1), np.float32(LEAST))
        return own, named, np.array(ids, np.int32).reshape(shape)


def _wrong(text: str) -> RequestFailed:
    return RequestFailed(f"its answer's {text}" if text.startswith(_WHERE) else text, "error", again=False)


def _entries(body: bytes, is_probe: bool) -> list[Any]:
    del is_probe
    answer = read_json(body)
    try:
        found = answer["choices"][0]["prompt_logprobs"]
    except (KeyError, IndexError, TypeError):
        found = None
    if not isinstance(found, list):
        text = f"its answer has no {_WHERE}: a teacher must give the log-probabilities of a prompt, as vLLM does"
        raise RequestFailed(text, "error", again=False)
    return found


def _logprobs(entries: list[Any], place: int) -> dict[int, float]:
    """By token id. Raises RequestFailed."""
    try:
        found = {int(token): float(each["logprob"]) for token, each in entries[place].items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        found = {}
    if not found or not all(map(math.isfinite, found.values())):
        raise _wrong(f"{_WHERE}[{place}] is not an object from token ids to finite log-probabilities")
    return found
