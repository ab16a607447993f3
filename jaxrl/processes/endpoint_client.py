"""Requests to an OpenAI-compatible endpoint: paced, limited in time and size, and sent again after a fault.

Waits between attempts double from `FIRST_WAIT_S`, without chance; a `Retry-After` of the endpoint delays all requests.
The key is in the request's header and nowhere else: every text of an endpoint passes `Client.hide`.

`httpx2` does HTTP: it comes with tokenizers (by way of huggingface_hub), pools connections, and knows TLS and proxies.
Its timeouts are for single reads, so another one limits the complete request. What this machine itself serves is asked
without a proxy. Its log repeats headers and reasons of an endpoint, so it is kept to warnings.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar
from urllib.parse import urlsplit

from jaxrl.schema.endpoint import EndpointOptions
from jaxrl.schema.hidden import hider

if TYPE_CHECKING:
    import httpx2

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
MAX_RETRY_AFTER_S = 300.0
"""An endpoint that asks for a longer pause is not there for this run."""
MAX_BODY_BYTES = 4 << 20
"""The default limit of an answer's size."""
T = TypeVar("T")
_MAX_SAID = 300  # characters of an endpoint's own words that an error repeats
_AGAIN = frozenset({408, 409, 425, 429})  # and 5xx
_COUNTS = ("requests", "sent_again", "throttled", "late", "garbled")


class RequestFailed(Exception):
    """A request failed.

    Attributes:
      status: what a verdict that it was for becomes. again: whether it may be sent again.
      after_s: how long the endpoint wants to be left alone. seconds: that it took for all attempts.
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
        self.again, self.after_s, self.code, self.seconds = again, after_s, code, 0.0


class EndpointRefused(Exception):
    """The endpoint refuses what the configuration says; the text is a sentence for the user."""


class Client(Generic[T]):
    """Used in one event loop, in which it is closed. Raises ValueError where the environment has no variable
    `api_key_env`, or it holds no key.

    Args:
      section: where the options stand, such as `reward.judge`. path: what is asked there: `/chat/completions`.
      read: of a body with status 200, and whether it answers the probe; raises RequestFailed, and calls `hide` itself.
      trial: the body of a request that costs little, which `probe` sends.
    """

    def __init__(
        self,
        options: EndpointOptions,
        section: str,
        path: str,
        read: Callable[[bytes, bool], T],
        trial: Mapping[str, Any],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._options, self._section, self._path, self._sleep = options, section, path, sleep
        self._read, self._trial, self._max_body_bytes = read, trial, max_body_bytes
        self._key = _api_key(section, options.api_key_env)
        self.hide = hider(self._key)  # for every text that comes from the endpoint
        self._url = options.endpoint.rstrip("/") + path
        self._http: httpx2.AsyncClient | None = None
        self._places = asyncio.Semaphore(options.max_requests)
        self._next_s = 0.0  # in the loop's time: before it no request begins
        self._counts: Counter[str] = Counter()
        self._waited_s = 0.0

    def take(self) -> dict[str, float]:
        """Counts since the last call, and `waited_s`, the seconds in which requests waited for their turn."""
        counts, self._counts = self._counts, Counter()
        waited_s, self._waited_s = self._waited_s, 0.0
        return {name: float(counts[name]) for name in _COUNTS} | {"waited_s": waited_s}

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    def _connections(self) -> httpx2.AsyncClient:
        if self._http is None:
            import httpx2

            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self._options.max_requests)
            headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "jaxrl"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            for name in ("httpx2", "httpcore2"):
                logging.getLogger(name).setLevel(logging.WARNING)
            own: Any = dict.fromkeys(("http://", "https://", "all://")) if _is_loopback(self._url) else None
            needs_tls = self._url.startswith("https:")  # to read the machine's certificates takes half a second
            try:
                self._http = httpx2.AsyncClient(
                    headers=headers, timeout=None, limits=limits, verify=needs_tls, mounts=own
                )
            except Exception as error:  # of certificates or proxies that the environment names
                text = self._said(f"no connection can be made: {type(error).__name__}: {error}")
                raise RequestFailed(text, "crash", again=False) from None
        return self._http

    async def probe(self) -> None:
        """Raises EndpointRefused if the endpoint does not accept URL, model or key, RequestFailed if it is down."""
        try:
            await self.ask(self._trial, is_probe=True)
        except RequestFailed as failed:
            refused = self._refused(failed)
            if refused is None:
                raise
            raise EndpointRefused(refused) from None

    def _refused(self, failed: RequestFailed) -> str | None:
        """An error that the user has to mend; None for an endpoint that is late, busy or broken."""
        options, section = self._options, self._section
        if failed.code in (401, 403):
            named = f"({options.api_key_env})" if options.api_key_env else "is empty: a request without a key"
            return f"{section}.api_key_env {named} is refused by {options.endpoint}: {failed}"
        place = f"{section}.endpoint ({options.endpoint})"
        if failed.code in (404, 405):
            what = self._path.strip("/").replace("/", " ")
            where = "" if options.endpoint.rstrip("/").endswith("/v1") else " (most servers have them under /v1)"
            return f"{place}: no {what} there{where}, or no model {options.endpoint_model!r}: {failed}"
        if failed.status == "error" or (failed.status == "crash" and not failed.code):
            return f"{place}: {failed}"
        return None

    async def ask(self, body: Mapping[str, Any], *, is_probe: bool = False) -> tuple[T, float]:
        """The value read from the answer, and the seconds that the endpoint took for all attempts. Raises RequestFailed
        after `max_retries` retries."""
        content, loop = json.dumps(body).encode(), asyncio.get_running_loop()
        began_s, seconds, wait_s, attempt = loop.time(), 0.0, FIRST_WAIT_S, 0
        try:
            while True:
                try:
                    async with self._places:
                        await self._turn()
                        self._counts["requests"] += 1
                        sent_s = loop.time()
                        try:
                            value = await self._within_time(content, is_probe)
                        finally:
                            seconds += loop.time() - sent_s
                    return value, seconds
                except RequestFailed as failed:
                    failed.seconds = seconds
                    self._note(failed)
                    is_other_server = is_probe and failed.status == "error"
                    if not failed.again or is_other_server or attempt >= self._options.max_retries:
                        raise
                attempt += 1
                self._counts["sent_again"] += 1
                await self._sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        finally:
            self._waited_s += loop.time() - began_s - seconds

    def _note(self, failed: RequestFailed) -> None:
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
        if self._options.requests_per_minute:
            self._next_s = start_s + 60 / self._options.requests_per_minute
        if start_s > now_s:
            await self._sleep(start_s - now_s)

    async def _within_time(self, content: bytes, is_probe: bool) -> T:
        limit_s = self._options.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._once(content, is_probe)
        except TimeoutError:
            text = f"no answer within {self._section}.request_timeout_s ({limit_s:g} s)"
            raise RequestFailed(text, "timeout") from None

    async def _once(self, content: bytes, is_probe: bool) -> T:
        import httpx2

        client = self._connections()
        try:
            async with client.stream("POST", self._url, content=content) as response:
                body = bytearray()
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > self._max_body_bytes:
                        limit = f"{self._max_body_bytes >> 20} MiB"
                        raise RequestFailed(f"its answer is larger than {limit}", "error", again=False)
        except httpx2.ConnectError as error:
            raise RequestFailed(f"it cannot be reached: {self._said(str(error))}", "crash") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            what = self._said(str(error)) or type(error).__name__
            raise RequestFailed(f"it broke the connection off: {what}", "crash") from None
        if response.status_code != 200:
            raise self._of_status(response, bytes(body))
        return self._read(bytes(body), is_probe)

    def _of_status(self, response: httpx2.Response, body: bytes) -> RequestFailed:
        code = response.status_code
        text = f"status {code}" + (f": {said}" if (said := self._said(_message(body))) else "")
        if code not in _AGAIN and code < 500:
            return RequestFailed(text, "error", again=False, code=code)
        after_s = _seconds(response.headers.get("Retry-After", ""))
        if after_s > MAX_RETRY_AFTER_S:
            text = f"{text}; it asks to be left alone for {after_s:.0f} s"
            return RequestFailed(text, "crash", again=False, code=code)
        return RequestFailed(text, "crash", after_s=after_s, code=code)

    def _said(self, text: str) -> str:
        text = " ".join(self.hide(text).split())
        return text if len(text) <= _MAX_SAID else f"{text[:_MAX_SAID]}..."


def read_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise RequestFailed("its answer is not JSON", "error") from None


def _api_key(section: str, variable: str) -> str:
    """The key that an environment variable holds; empty where no variable is named."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not (key and key.isascii() and key.isprintable()):
        what = "holds no key" if variable in os.environ else "is not in the environment"
        raise ValueError(f"{section}.api_key_env: the variable {variable!r} {what}")  # which is never shown
    return key


def _message(body: bytes) -> str:
    """The message in an error's body: the text in `error.message`, `message` or `detail`, or else the body."""
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
    """The seconds in a `Retry-After`; 0 for anything else."""
    return float(value) if value.strip().replace(".", "", 1).isdecimal() else 0.0
