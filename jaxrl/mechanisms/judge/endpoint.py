"""A judge at an OpenAI-compatible endpoint: it requests verdicts from a server.

Source: RollPacker §4.3: a judge among the rewards. One thread sends the requests (`jaxrl.processes.endpoint_client`),
while the trainer computes.

Whatever the endpoint does costs the samples at hand, and never the run: after its retries a request is a `crash` (none
was answered, 5xx, 429), a `timeout`, or an `error` (no chat completion, 4xx, a text without a score). Of a sample's
several verdicts those that came count; a sample fails if none came. Each verdict says `outside` in its info: it depends
on something outside the run, so it is journalled whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from jaxrl.config import Config
from jaxrl.mechanisms.judge import Judge
from jaxrl.mechanisms.judge.verdicts import JudgeText
from jaxrl.processes.endpoint_client import Client, EndpointRefused, RequestFailed, read_json
from jaxrl.rewards.reward_pool import RewardPool
from jaxrl.rewards.scorers import Scored, ScoreRequest, describe
from jaxrl.types import Prompt, RunFailed, Sample, SampleKey

R = TypeVar("R")
_CLOSE_S = 5.0
_WORST = ("crash", "timeout", "error")  # of failed requests, what the sample's status becomes: the first that occurs


class EndpointJudge:
    """Implements `jaxrl.rewards.reward_pool.ScoringPlace`. `sleep`: waits between requests. Raises ValueError where
    `reward.judge.api_key_env` names no variable with a key."""

    def __init__(
        self,
        judge: Judge.Options,
        *,
        seed: int = 0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._judge, self._seed = judge, seed
        self._text = JudgeText(judge)
        trial = request_body(judge, [{"role": "user", "content": "Hi"}], 1)
        self._client = Client(judge, "reward.judge", "/chat/completions", _text_of, trial, sleep)
        self._unparsed = 0
        self._has_asked = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def warm(self) -> None:
        """Asks the endpoint for one token: a wrong URL, model or key is known before the first sample."""
        try:
            self._run(self._client.probe()).result()
        except EndpointRefused as refused:
            raise ValueError(str(refused)) from None
        except RequestFailed as failed:
            raise RunFailed(f"reward.judge.endpoint ({self._judge.endpoint}): {failed}") from None

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> Future[Scored]:
        del limits_s  # of test cases
        try:
            messages = self._text.ask(ScoreRequest.of(prompt, sample))
        except ValueError as error:
            if not self._has_asked:  # most likely a field that no prompt has: mended before anything is lost
                raise
            future: Future[Scored] = Future()
            future.set_result(("error", 0.0, {"error": describe(error)}, 0.0))
            return future
        self._has_asked = True
        return self._run(self._score(sample.key, messages))

    def step(self) -> bool:
        return False

    def take_metrics(self) -> dict[str, float]:
        """`reward/judge/{requests,sent_again,throttled,late,garbled,waited_s,unparsed}`. In this order: requests to the
        endpoint; retries; answers 429; requests that timed out; answers that were no chat completions; seconds in which
        requests waited for their turn; verdicts without a score."""
        measured = {f"reward/judge/{name}": count for name, count in self._client.take().items()}
        measured["reward/judge/unparsed"] = float(self._unparsed)
        self._unparsed = 0
        return measured

    def close(self) -> None:
        if self._loop is not None and self._thread is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_S)
            self._loop = self._thread = None

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        """Starts work in the thread, and the thread if it is the first."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name="judge", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.closing(loop):
            loop.run_forever()
            loop.run_until_complete(self._end())

    async def _end(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._client.close()

    async def _score(self, key: SampleKey, messages: list[dict[str, str]]) -> Scored:
        try:
            scored = await self._verdicts(key, messages)
            self._unparsed += int(scored[2].get("unparsed", 0))
            return scored
        except Exception as error:  # a bug of ours costs the sample, too, and says so
            return "error", 0.0, {"error": self._client.hide(describe(error)), "outside": True}, 0.0

    async def _verdicts(self, key: SampleKey, messages: list[dict[str, str]]) -> Scored:
        """The verdict on a sample, whose requests are all in flight at once. Its seconds are the longest that the
        endpoint took for one of them, without the wait for the requests' turns."""
        judge = self._judge
        body = request_body(judge, messages, judge.max_tokens) | {"temperature": judge.temperature}
        seeds = [verdict_seed(self._seed, key, i) if judge.temperature else None for i in range(judge.num_samples)]
        bodies = [body if seed is None else {**body, "seed": seed} for seed in seeds]
        came = await asyncio.gather(*map(self._client.ask, bodies), return_exceptions=True)
        for each in came:
            if isinstance(each, BaseException) and not isinstance(each, RequestFailed):
                raise each
        answered = [each for each in came if isinstance(each, tuple)]
        failed = [each for each in came if isinstance(each, RequestFailed)]
        texts = [self._client.hide(text) for text, _ in answered]
        seconds = max([*(each_s for _, each_s in answered), *(each.seconds for each in failed)])
        late = sum(each.status == "timeout" for each in failed)
        outside = {"outside": True, **({"timeouts": {"endpoint": late}} if late else {})}
        if not texts:
            worst = min(failed, key=lambda each: _WORST.index(each.status))
            return worst.status, 0.0, {"error": f"reward.judge.endpoint: {worst}", **outside}, seconds
        reward, info = self._text.read(texts)
        info |= {**outside, **({"failed": len(failed)} if failed else {})}
        return "error" if "error" in info else "ok", reward, info, seconds


def join_endpoint(config: Config, pool: RewardPool) -> None:
    """Has the endpoint score what a run's pool has for it, if anything; as `EndpointJudge`."""
    if "endpoint" in pool.places:
        pool.join("endpoint", EndpointJudge(config.reward.judge, seed=config.trainer.seed))


def verdict_seed(seed: int, key: SampleKey, number: int) -> int:
    """31 bits for verdict `number` on a sample: from the run's seed and the sample's key alone."""
    identity = json.dumps([seed, key.epoch, key.prompt_index, key.sample_index, key.attempt, number])
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:4], "big") >> 1


def request_body(judge: Judge.Options, messages: Sequence[Mapping[str, str]], max_tokens: int) -> dict[str, Any]:
    """A chat completion's body. Variables of the chat template stand where vLLM and SGLang read them; a body without
    them has no such entry, because other servers refuse what they do not know."""
    body = {"model": judge.endpoint_model, "messages": messages, "max_tokens": max_tokens}
    variables = judge.apply_chat_template_kwargs
    return body | ({"chat_template_kwargs": variables} if variables else {})


def _text_of(body: bytes, is_probe: bool) -> str:
    answer = read_json(body)
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise RequestFailed("its answer has no choices[0].message.content", "error") from None
    if text is None:
        if is_probe:  # one token may be too few for any text
            return ""
        raise RequestFailed(
            "its answer has null as choices[0].message.content: a model that thinks first may have no tokens left for "
            "a verdict (raise reward.judge.max_tokens; turn thinking off in reward.judge.apply_chat_template_kwargs)",
            "error",
        )
    if not isinstance(text, str):
        raise RequestFailed("its answer has no text in choices[0].message.content", "error")
    return text.encode("utf-8", "replace").decode()  # half a pair of surrogates is no character
