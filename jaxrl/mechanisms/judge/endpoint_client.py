"""Requests to an OpenAI-compatible endpoint: paced, limited in time and size, and sent again after a fault.

Purpose: `Client.ask` turns a chat completion's body into its text, or raises `Failed` with the status of the verdict.
Waits between attempts double from `FIRST_WAIT_S`, without chance; a `Retry-After` of the endpoint holds all requests
back. The key is in the request's header and nowhere else: whatever an endpoint says goes through `Client.hide`.

`httpx2` does HTTP: it comes with tokenizers (by way of huggingface_hub), pools connections, and knows TLS and proxies.
Its timeouts are for single reads, so one over the whole request stands around it. What this machine itself serves is
asked without a proxy. Its log repeats headers and reasons of an endpoint, so it is kept to warnings.
"""

from __future__ import annotations

import asyncio
import email.utils
import ipaddress
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from jaxrl.mechanisms.judge.options import JudgeSection
from jaxrl.schema.hidden import hider

if TYPE_CHECKING:
    import httpx2

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
MAX_RETRY_AFTER_S = 300.0
"""An endpoint that asks for a longer pause is not there for this run."""
MAX_BODY_BYTES = 4 << 20
_MAX_SAID = 300  # characters of an endpoint's own words that an error repeats
_AGAIN = frozenset({408, 409, 425, 429})  # and 5xx
_COUNTS = ("requests", "sent_again", "throttled", "late", "garbled")


class Failed(Exception):
    """A request came to nothing.

    Attributes:
      status: of the verdict.
      again: whether it may be sent again.
      after_s: how long the endpoint wants to be left alone.
    """

    def __init__(
        self,
        text: str,
        status: Literal["error", "timeout", "crash"],
        *,
        again: bool = True,
        after_s: float = 0.0,
        code: int = 0,
    ) -> None:
        super().__init__(text)
        self.status: Literal["error", "timeout", "crash"] = status
        self.again, self.after_s, self.code = again, after_s, code


@dataclass(slots=True)
class UnderWay:
    """The seconds in which the endpoint had a request, over all times that it was sent."""

    seconds: float = 0.0


class Refused(Exception):
    """The endpoint refuses what the configuration says; the text is a sentence for the user."""


def request_body(judge: JudgeSection, messages: Sequence[Mapping[str, str]], max_tokens: int) -> dict[str, Any]:
    """A chat completion's body. Variables of the chat template stand where vLLM and SGLang read them; a body without
    them has no such entry, because other servers refuse what they do not know."""
    body = {"model": judge.endpoint_model, "messages": messages, "max_tokens": max_tokens}
    variables = judge.apply_chat_template_kwargs
    return body | ({"chat_template_kwargs": variables} if variables else {})


class Client:
    """Used in one event loop, while `stay_open` runs in it."""

    def __init__(self, judge: JudgeSection, key: str, sleep: Callable[[float], Awaitable[None]]) -> None:
        self._judge, self._key, self._sleep = judge, key, sleep
        self.hide = hider(key)  # for every text that comes from the endpoint
        self._url = judge.endpoint.rstrip("/") + "/chat/completions"
        self._http: asyncio.Future[httpx2.AsyncClient] | None = None
        self._places = asyncio.Semaphore(judge.max_requests)
        self._next_s = 0.0  # in the loop's time: before it no request begins
        self._counts: Counter[str] = Counter()
        self._waited_s = 0.0

    def take(self) -> dict[str, float]:
        """Counts since the last call, and `waited_s`, the seconds in which requests waited for their turn."""
        counts, self._counts = self._counts, Counter()
        waited_s, self._waited_s = self._waited_s, 0.0
        return {name: float(counts[name]) for name in _COUNTS} | {"waited_s": waited_s}

    async def stay_open(self) -> None:
        """Holds the connections until it is cancelled."""
        import httpx2

        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self._judge.max_requests)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "jaxrl"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        for name in ("httpx2", "httpcore2"):
            logging.getLogger(name).setLevel(logging.WARNING)
        own: Any = dict.fromkeys(("http://", "https://", "all://")) if _is_loopback(self._url) else None
        try:
            needs_tls = self._url.startswith("https:")  # to read the machine's certificates takes half a second
            client = httpx2.AsyncClient(headers=headers, timeout=None, limits=limits, verify=needs_tls, mounts=own)
        except Exception as error:  # of certificates or proxies that the environment names
            text = self._said(f"no connection can be made: {type(error).__name__}: {error}")
            self._opened().set_exception(Failed(text, "crash", again=False))
            await asyncio.Event().wait()
            return
        async with client:
            self._opened().set_result(client)
            await asyncio.Event().wait()

    def _opened(self) -> asyncio.Future[httpx2.AsyncClient]:
        if self._http is None:
            self._http = asyncio.get_running_loop().create_future()
        return self._http

    async def probe(self) -> None:
        """Raises Refused for a URL, model or key that the endpoint does not take; Failed if it is out of order."""
        body = request_body(self._judge, [{"role": "user", "content": "Hi"}], 1)
        try:
            await self.ask(body, is_probe=True)
        except Failed as failed:
            refused = self._refused(failed)
            if refused is None:
                raise
            raise Refused(refused) from None

    def _refused(self, failed: Failed) -> str | None:
        """What the user has to mend; None for an endpoint that is late, busy or broken."""
        judge = self._judge
        if failed.code in (401, 403):
            named = f"({judge.api_key_env})" if judge.api_key_env else "is empty: a request without a key"
            return f"reward.judge.api_key_env {named} is refused by {judge.endpoint}: {failed}"
        place = f"reward.judge.endpoint ({judge.endpoint})"
        if failed.code in (404, 405):
            where = "" if judge.endpoint.rstrip("/").endswith("/v1") else " (most servers have them under /v1)"
            return f"{place}: no chat completions there{where}, or no model {judge.endpoint_model!r}: {failed}"
        if failed.status == "error" or (failed.status == "crash" and not failed.code):
            return f"{place}: {failed}"
        return None

    async def ask(self, body: Mapping[str, Any], under_way: UnderWay | None = None, *, is_probe: bool = False) -> str:
        """The text of the answer. Raises Failed once it has been sent `max_retries` times again."""
        under_way = UnderWay() if under_way is None else under_way
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            return await self._ask(json.dumps(body).encode(), under_way, is_probe)
        finally:
            self._waited_s += loop.time() - began_s - under_way.seconds

    async def _ask(self, content: bytes, under_way: UnderWay, is_probe: bool) -> str:
        wait_s, attempt = FIRST_WAIT_S, 0
        while True:
            try:
                async with self._places:
                    await self._turn()
                    self._counts["requests"] += 1
                    return await self._within_time(content, under_way, is_probe)
            except Failed as failed:
                self._note(failed)
                is_other_server = is_probe and failed.status == "error"
                if not failed.again or is_other_server or attempt >= self._judge.max_retries:
                    raise
            attempt += 1
            self._counts["sent_again"] += 1
            await self._sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _note(self, failed: Failed) -> None:
        self._counts["throttled"] += failed.code == 429
        self._counts["late"] += failed.status == "timeout"
        self._counts["garbled"] += failed.status == "error" and not failed.code
        if failed.after_s:
            now_s = asyncio.get_running_loop().time()
            self._next_s = max(self._next_s, now_s + failed.after_s)

    async def _turn(self) -> None:
        """Waits until a request may begin: as the rate says, and as long as the endpoint wants to be left alone."""
        now_s = asyncio.get_running_loop().time()
        start_s = max(self._next_s, now_s)
        if self._judge.requests_per_minute:
            self._next_s = start_s + 60 / self._judge.requests_per_minute
        if start_s > now_s:
            await self._sleep(start_s - now_s)

    async def _within_time(self, content: bytes, under_way: UnderWay, is_probe: bool) -> str:
        limit_s, loop = self._judge.request_timeout_s, asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.timeout(limit_s):
                return await self._once(content, is_probe)
        except TimeoutError:
            raise Failed(f"no answer within reward.judge.request_timeout_s ({limit_s:g} s)", "timeout") from None
        finally:
            under_way.seconds += loop.time() - began_s

    async def _once(self, content: bytes, is_probe: bool) -> str:
        import httpx2

        client = await self._opened()
        try:
            async with client.stream("POST", self._url, content=content) as response:
                body = bytearray()
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        raise Failed(f"its answer is larger than {MAX_BODY_BYTES >> 20} MiB", "error", again=False)
        except httpx2.ConnectError as error:
            raise Failed(f"it cannot be reached: {self._said(str(error))}", "crash") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            what = self._said(str(error)) or type(error).__name__
            raise Failed(f"it broke the connection off: {what}", "crash") from None
        if response.status_code != 200:
            raise self._of_status(response, bytes(body))
        return self.hide(_text_of(bytes(body), is_probe))

    def _of_status(self, response: httpx2.Response, body: bytes) -> Failed:
        code = response.status_code
        text = f"status {code}" + (f": {said}" if (said := self._said(_message(body))) else "")
        if code not in _AGAIN and code < 500:
            return Failed(text, "error", again=False, code=code)
        after_s = _seconds(response.headers.get("Retry-After", ""))
        if after_s > MAX_RETRY_AFTER_S:
            text = f"{text}; it asks to be left alone for {after_s:.0f} s"
            return Failed(text, "crash", again=False, code=code)
        return Failed(text, "crash", after_s=after_s, code=code)

    def _said(self, text: str) -> str:
        """An endpoint's own words in one line, without secrets."""
        text = " ".join(self.hide(text).split())
        return text if len(text) <= _MAX_SAID else f"{text[:_MAX_SAID]}..."


def _text_of(body: bytes, is_probe: bool) -> str:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise Failed("its answer is not JSON", "error") from None
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise Failed("its answer has no choices[0].message.content", "error") from None
    if text is None:
        if is_probe:  # one token may be too few for any text
            return ""
        raise Failed(
            "its answer has null as choices[0].message.content: a model that thinks first may have no tokens left for "
            "a verdict (raise reward.judge.max_tokens; turn thinking off in reward.judge.apply_chat_template_kwargs)",
            "error",
        )
    if not isinstance(text, str):
        raise Failed("its answer has no text in choices[0].message.content", "error")
    return text.encode("utf-8", "replace").decode()  # half a pair of surrogates is no character


def _message(body: bytes) -> str:
    """What an error's body says: the text in `error.message`, `message` or `detail`, or else the body."""
    text = body.decode("utf-8", "replace")
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        return text
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return found if isinstance(found, str) else text


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified  # servers say that they listen at 0.0.0.0
    except ValueError:  # a name
        return host == "localhost" or host.endswith(".localhost")


def _seconds(value: str) -> float:
    """Of a `Retry-After`: seconds, or a date; 0 for anything else."""
    try:
        return max(float(value), 0.0) if value.strip().replace(".", "", 1).isdigit() else _until(value)
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _until(date: str) -> float:
    from datetime import UTC, datetime

    moment = email.utils.parsedate_to_datetime(date)
    return max((moment - datetime.now(UTC)).total_seconds(), 0.0)
