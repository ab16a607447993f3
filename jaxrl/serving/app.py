"""The routes: a body is checked, and answered at once or piece by piece.

Errors are OpenAI's objects, with the status that its clients expect. An answer has no traceback and no path of this
machine in it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxrl.data.chat_template import RefusedMessages
from jaxrl.serving.answers import DONE, Answer, Chat, Completion, TokenTexts, event, generated
from jaxrl.serving.bodies import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    GenerationRequest,
    StrictBody,
    first_mistake,
)
from jaxrl.serving.driver import Unserved
from jaxrl.serving.generation import Generation, ServedModel
from jaxrl.serving.objects import error_object

SESSION = "x-session-id"
MAX_SESSION = 200
DEFAULT_TOKENS = 16
"""The default limit of a completion; a chat message may fill the remaining context, as in OpenAI's API."""
Body = TypeVar("Body", bound=StrictBody)
Handler = Callable[[Request], Awaitable[Response]]
_log = logging.getLogger(__name__)


class HttpRefusal(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class Routes:
    """Answers to the requests of one model's clients. `key`: that requests must bear; None: they need none."""

    def __init__(self, model: ServedModel, name: str, key: str | None = None, max_body_bytes: int = 16 << 20) -> None:
        self.model, self.name, self._key, self._max_body_bytes = model, name, key, max_body_bytes
        self._began = int(time.time())

    def app(self) -> Starlette:
        post = {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
            "/inference/v1/generate": self.generate,
        }
        get = {
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.one_model,
            "/metrics": self.metrics,
        }
        routes = [Route(path, self._answered(path, answer), methods=["POST"]) for path, answer in post.items()]
        routes += [Route(path, self._answered(path, answer), methods=["GET"]) for path, answer in get.items()]
        routes.append(Route("/health", self.health, methods=["GET"]))
        routes.append(Route("/", self.chat_page, methods=["GET"]))
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    # -- routes --------------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def chat_page(self, request: Request) -> Response:
        """A page to chat with, in one file; it asks for the key where there is one."""
        return HTMLResponse(Path(__file__).with_name("chat.html").read_text(encoding="utf-8"))

    async def metrics(self, request: Request) -> Response:
        return Response(self.model.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def completions(self, request: Request) -> Response:
        body = await self._body(request, CompletionBody)
        prompts = await asyncio.to_thread(lambda: [*self._encoded(body)])
        generation = self._begun(request, body, prompts, body.max_tokens, DEFAULT_TOKENS)
        answer = Completion(body, generation, self.model.tokenizer, self.name)
        return await self._respond(request, body, generation, answer)

    async def chat(self, request: Request) -> Response:
        body = await self._body(request, ChatBody)
        prompt = await asyncio.to_thread(self._rendered, body)
        generation = self._begun(request, body, [prompt], body.max_completion_tokens or body.max_tokens)
        names = frozenset(tool.function.name for tool in body.callable_tools)
        answer = Chat(body, generation, self.model.tokenizer, self.name, names)
        return await self._respond(request, body, generation, answer)

    async def generate(self, request: Request) -> Response:
        body = await self._body(request, GenerateBody)
        generation = self._begun(request, body.sampling_params, [body.token_ids], body.sampling_params.max_tokens)
        await self._finished(request, generation)
        texts = TokenTexts(self.model.tokenizer, by_id=True)
        return JSONResponse(generated(generation, texts, body.request_id))

    # -- steps ---------------------------------------------------------------------------------------------------------

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        found = bytearray()
        async for piece in request.stream():
            found += piece
            if len(found) > self._max_body_bytes:
                raise HttpRefusal(413, f"a body may have {self._max_body_bytes} bytes")
        body = await asyncio.to_thread(_checked, found, kind)
        self._check_model(getattr(body, "model", None))
        return body

    def _check_model(self, name: str | None) -> None:
        if name not in (None, "", self.name):
            raise HttpRefusal(
                404, f"model {name!r:.80} is not here: this server has {self.name!r}", "model", "model_not_found"
            )

    def _model(self) -> dict[str, Any]:
        found = {"id": self.name, "object": "model", "created": self._began, "owned_by": "jaxrl"}
        return found | {"max_model_len": self.model.max_length}

    def _begun(
        self,
        request: Request,
        body: Any,
        prompts: Sequence[Sequence[int]],
        asked: int | None,
        default: int | None = None,
    ) -> Generation:
        session = request.headers.get(SESSION) or None
        if session is not None and len(session) > MAX_SESSION:
            raise HttpRefusal(400, f"{SESSION}: a session's name may have {MAX_SESSION} characters")
        params = body.params(self.model.max_tokens(prompts, asked, default), self.model.stop_token_ids)
        return self.model.begin(prompts, params, body.n or 1, body.seed, session)

    def _encoded(self, body: CompletionBody) -> Iterator[list[int]]:
        """The first prompt that is refused spares reading the others."""
        for each in body.prompts:
            prompt = self.model.encode(each, add_special_tokens=True) if isinstance(each, str) else each
            if not prompt:
                raise HttpRefusal(400, "the prompt has no tokens", "prompt")
            self.model.max_tokens([prompt], body.max_tokens)
            yield prompt

    def _rendered(self, body: ChatBody) -> list[int]:
        variables = dict(body.chat_template_kwargs or {})
        if body.callable_tools:
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in body.callable_tools]
        text = self.model.tokenizer.apply_chat_template([each.given for each in body.messages], **variables)
        return self.model.encode(text)

    async def _respond(
        self, request: Request, body: GenerationRequest, generation: Generation, answer: Answer
    ) -> Response:
        if body.stream:
            return Streamed(generation, answer, body.includes_usage)
        await self._finished(request, generation)
        return JSONResponse(answer.whole())

    async def _finished(self, request: Request, generation: Generation) -> None:
        """Waits until all choices have ended, or raises ClientDisconnect."""

        async def ended() -> None:
            async with aclosing(generation.pieces()) as pieces:
                async for _ in pieces:
                    pass

        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.create_task(ended()), asyncio.create_task(gone())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise ClientDisconnect
            tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _answered(self, route: str, answer: Handler) -> Handler:
        async def answered(request: Request) -> Response:
            response = await tried(request)
            self.model.metrics.requests.labels(route, response.status_code).inc()
            return response

        async def tried(request: Request) -> Response:
            try:
                self._check_key(request)
                return await answer(request)
            except HttpRefusal as error:
                return _error(error.status, str(error), error.param, error.code)
            except Unserved as error:
                if not error.retry_s:
                    return _error(500, str(error))
                return _error(503, str(error), headers={"Retry-After": str(error.retry_s)})
            except RefusedMessages as error:
                return _error(400, _without_place(str(error)), "messages")
            except ValueError as error:
                return _error(400, _without_place(str(error)))
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception:
                _log.exception("%s %s failed", request.method, request.url.path)
                return _error(500, "the server failed with this request")

        return answered

    def _check_key(self, request: Request) -> None:
        if self._key is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._key.encode()):
            raise HttpRefusal(
                401, "the key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
            )


class Streamed(StreamingResponse):
    """An answer as server-sent events. However it ends, its rows are freed."""

    def __init__(self, generation: Generation, answer: Answer, includes_usage: bool) -> None:
        events = _events(generation, answer, includes_usage)
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # a client may be gone before the first event
            self._generation.leave()


async def _events(generation: Generation, answer: Answer, includes_usage: bool) -> AsyncIterator[str]:
    """A server that stops, or whose engine fails, says so."""
    for chunk in answer.opening():
        yield event(chunk)
    try:
        async with aclosing(generation.pieces()) as pieces:
            async for gained in pieces:
                yield event(answer.chunk(*gained))
    except Unserved as error:
        yield event(error_object(str(error), "server_error"))
    else:
        if includes_usage:
            yield event(answer.last())
    yield DONE


def _checked(content: bytearray, kind: type[Body]) -> Body:
    try:
        sent = from_json(content, cache_strings="none")  # a cache costs where a million names differ
    except ValueError as error:
        raise HttpRefusal(400, f"Invalid JSON: {error}") from None
    try:
        return kind.model_validate(sent)
    except ValidationError as error:
        place, said = first_mistake(error, sent)
        raise HttpRefusal(400, f"{place}: {said}" if place else said, place or None) from None


def _without_place(message: str) -> str:
    place, colon, rest = message.partition(": ")
    return rest if colon and ("/" in place or "\\" in place) else message


def _error(
    status: int, message: str, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    kinds = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "server_error"}
    kind = kinds.get(status, "invalid_request_error")
    return JSONResponse(error_object(message, kind, param, code), status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
