"""Programs that drive the policy themselves, as they would drive a model behind OpenAI's chat completions.

`environment.kind=openai` names a function that is run once for each trajectory, in a worker process, and calls
`/v1/chat/completions` at the address that it is given. `AgentPool` is the server behind it. To the round it is like any
other environment: what the model says answers the program's request, and the next request holds the environment's
answer. Each trajectory has its own key, the program's `api_key`, which identifies its requests.

A program's state is its own: after a resume, or where its process has died, it is run again from its beginning, and
given what the model had said, turn by turn.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import queue
import secrets
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jaxrl.data.tool_calls import calls_in, seems_to_call
from jaxrl.environments.env import Schema, is_answer
from jaxrl.environments.worker import STARTED
from jaxrl.mechanisms.turns.rule import Observed, row_of
from jaxrl.rewards.pool import Pool
from jaxrl.rewards.scorers import Scored
from jaxrl.schema.declared import MAX_FLOAT
from jaxrl.serving.objects import error_object, tool_calls
from jaxrl.types import Prompt, SampleKey

MODEL = "policy"
_ROUTE = "/chat/completions"
_MAX_BODY = 16 << 20  # bytes
_SHOWN = 200  # characters of a message in an error
_BESIDE = ("name", "tool_call_id")  # the content of a message


class Refused(Exception):
    """A request that no conversation of this kind has; the sentence is for the program."""


@dataclass(slots=True)
class Session:
    key: SampleKey
    secret: str
    given: Sequence[Mapping[str, Any]]  # what the row asks, as messages
    replies: list[str]  # what the model has said so far
    outcome: Future[Scored] = field(default_factory=Future)  # of the program
    messages: list[dict[str, Any]] = field(default_factory=list)  # of the newest request
    num_requests: int = 0
    is_over: bool = False  # nobody answers any more
    asked_s: float | None = None  # since when it is the program's turn; None: it is the model's
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def waited_s(self) -> float:
        """How long it has been the program's turn."""
        return 0.0 if self.asked_s is None else time.monotonic() - self.asked_s

    def ask(self, messages: Sequence[Any]) -> tuple[int, list[dict[str, Any]]]:
        """Takes in a request; its number, and what is new in it. Raises Refused."""
        found = [_plain(message) for message in messages]
        if self.num_requests and found == self.messages:
            return self.num_requests - 1, []  # a client that has lost its connection asks again
        if self.num_requests > len(self.replies):
            raise Refused("a conversation has one request at a time, and the one before is not answered yet")
        if not self.num_requests:
            if found != [_plain(message) for message in self.given]:
                raise Refused("the first request must have the row's messages (row['messages']), and no others")
            new: list[dict[str, Any]] = []
        else:
            known = len(self.messages)
            if found[:known] != self.messages or len(found) < known + 2:
                raise Refused("a request must have the messages of the one before it, and an answer behind them")
            said, answered = found[known], self.replies[self.num_requests - 1].strip()
            is_whole = said["content"].strip() == answered
            has_called = seems_to_call(answered) or '{"name"' in answered  # it has the rest
            if said["role"] != "assistant" or not (is_whole or (has_called and said["content"].strip() in answered)):
                raise Refused("behind the messages of the request before must come what was answered, as it was")
            new = found[known + 1 :]
            if not all(map(is_answer, new)):
                raise Refused("what follows an answer must be messages of a user or of tools, with text as content")
        self.messages, self.num_requests = found, self.num_requests + 1
        return self.num_requests - 1, new


class AgentPool:
    """Implements `jaxrl.mechanisms.turns.rule.Acting` over programs. `pool`: its workers run them, one at a time
    each; closed by who made it; `timeout_s`: until a program that has begun, or has been answered, asks again or
    ends."""

    keeps = False  # its process is wanted by others, an evaluation's for one

    def __init__(self, pool: Pool, timeout_s: float, schemas: Sequence[Schema]) -> None:
        self._pool, self._timeout_s = pool, timeout_s
        self._names = frozenset(schema["function"]["name"] for schema in schemas)
        self._sessions: dict[SampleKey, Session] = {}
        self._by_secret: dict[str, Session] = {}
        self._observed: queue.SimpleQueue[Observed] = queue.SimpleQueue()
        self._server = _Server(self)
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, name="agents", daemon=True)
        self._thread.start()

    # -- Acting ------------------------------------------------------------------------------------------------------

    def submit(self, key: SampleKey, prompt: Prompt, text: str, state: bytes | None) -> None:
        said: list[str] = [] if not state else json.loads(state)
        session = self._sessions.get(key)
        if session is None or session.replies != said:
            self.cancel([key])
            session = self._begin(key, prompt, said)
        with session.changed:
            session.replies.append(text)
            session.changed.notify_all()

    def cancel(self, keys: Collection[SampleKey]) -> None:
        for key in keys:
            session = self._sessions.pop(key, None)
            if session is not None:
                session.outcome.cancel()
                self._end(session)

    def completed(self, timeout_s: float = 0.0) -> list[Observed]:
        found = [*self._ended(), *self._late()]
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._observed.get(timeout=0.0 if found else timeout_s))
        return [each for each in found if each.done or each.key in self._sessions]

    def close(self) -> None:
        self.cancel([*self._sessions])
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _begin(self, key: SampleKey, prompt: Prompt, said: list[str]) -> Session:
        row, secret = row_of(prompt), secrets.token_urlsafe(24)
        session = Session(key, secret, row["messages"], said)
        self._sessions[key] = self._by_secret[secret] = session
        session.outcome = self._pool.submit(pickle.dumps(("run", row, self.base_url, secret)))
        return session

    def _end(self, session: Session) -> None:
        self._by_secret.pop(session.secret, None)
        with session.changed:
            session.is_over = True
            session.changed.notify_all()

    def _ended(self) -> Iterator[Observed]:
        for session in [each for each in self._sessions.values() if each.outcome.done()]:
            del self._sessions[session.key]
            self._end(session)
            yield _outcome(session, session.outcome.result())

    def _late(self) -> Iterator[Observed]:
        for session in [*self._sessions.values()]:
            if session.waited_s > self._timeout_s:
                self.cancel([session.key])
                error = f"no request within environment.timeout_s ({self._timeout_s:g} s) of the answer to the last one"
                yield Observed(session.key, done=True, status="timeout", error=error)

    # -- in the threads of requests ----------------------------------------------------------------------------------

    def answer(self, secret: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Waits for the model and returns a chat completion; None if the trajectory has ended. Raises Refused."""
        session = self._by_secret.get(secret)
        if session is None:
            return None
        messages = body.get("messages")
        if not isinstance(messages, list) or body.get("n") not in (None, 1):
            raise Refused("messages must be a list, and n 1: a conversation has one answer")
        names = self._callable(body)
        with session.changed:
            asked_before = session.num_requests
            number, new = session.ask(messages)
            seconds, session.asked_s = session.waited_s, None
            if number and number == len(session.replies) and session.num_requests > asked_before:
                state = json.dumps(session.replies).encode()
                found = Observed(session.key, done=False, messages=tuple(new), state=state, seconds=seconds)
                self._observed.put(found)
            session.changed.wait_for(lambda: session.is_over or len(session.replies) > number)
            if session.is_over:
                return None
            session.asked_s = time.monotonic()
            return _completion(session.replies[number], names, number)

    def started(self, secret: str) -> None:
        if (session := self._by_secret.get(secret)) is not None:
            session.asked_s = time.monotonic()

    def _callable(self, body: Mapping[str, Any]) -> frozenset[str]:
        """The tools whose calls are read in what is answered to a request."""
        tools = body.get("tools")
        if not isinstance(tools, list | None):
            raise Refused("tools must be a list")
        functions = [tool.get("function") if isinstance(tool, Mapping) else None for tool in tools or ()]
        names = [str(each.get("name")) if isinstance(each, Mapping) else "" for each in functions]
        if not self._names.issuperset(names):
            raise Refused(f"tools must be among the file's `schemas` ({sorted(self._names)}), found {names}")
        return frozenset(() if body.get("tool_choice") == "none" else names)


def _outcome(session: Session, scored: Scored) -> Observed:
    status, reward, info, _ = scored
    state = json.dumps(session.replies).encode()
    if status != "ok":
        return Observed(session.key, True, status=status, error=str(info.get("error", status)), state=state)
    metrics = {name: float(v) for name, v in info.items() if isinstance(v, int | float) and abs(v) <= MAX_FLOAT}
    return Observed(session.key, True, reward=reward, state=state, metrics=metrics, seconds=session.waited_s)


def _completion(text: str, names: frozenset[str], number: int) -> dict[str, Any]:
    """A response to a client of OpenAI's chat completions. Ids of calls reach the prompt, so they follow from the
    number of the request in its conversation, and not from chance."""
    answer_id = secrets.token_hex(12)
    said, calls = calls_in(text, names) if names else (text, [])
    message: dict[str, Any] = {"role": "assistant", "content": said if said or not calls else None}
    if calls:
        message["tool_calls"] = tool_calls(calls, number)
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop", "logprobs": None}
    head = {"id": f"chatcmpl-{answer_id}", "object": "chat.completion", "created": int(time.time()), "model": MODEL}
    return head | {"choices": [choice]}


def _plain(message: Any) -> dict[str, Any]:
    """A message as it is compared, and as a template gets it. Raises Refused."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Refused(f"a message must be an object with a role, found {json.dumps(message)[:_SHOWN]}")
    content = message.get("content")
    if isinstance(content, list):  # parts, as some clients write text
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise Refused(f"parts of a message must be text, found {json.dumps(message)[:_SHOWN]}")
        content = "".join(part["text"] for part in content)
    if not all(isinstance(each, str | None) for each in (content, *map(message.get, _BESIDE))):
        raise Refused(f"content, {', '.join(_BESIDE)} of a message must be text, found {json.dumps(message)[:_SHOWN]}")
    role = "system" if message["role"] == "developer" else message["role"]  # its name in newer clients
    found: dict[str, Any] = {"role": role, "content": content or ""}
    return found | {name: message[name] for name in _BESIDE if message.get(name)}


class _Server(ThreadingHTTPServer):
    """On the loopback device, at a free port; a thread for each connection."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, pool: AgentPool) -> None:
        self.pool = pool
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores the error of a program that has gone; reports all others as usual."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        secret = self.headers.get("Authorization", "").removeprefix("Bearer ")
        assert isinstance(self.server, _Server)
        try:
            content = self._content()  # before any answer: what is left would be taken for the next request
            if self.path.endswith(STARTED):
                self.server.pool.started(secret)
                self._say(HTTPStatus.OK, {})
                return
            if not self.path.endswith(_ROUTE):
                words = f"there is no route {self.path[:_SHOWN]}: the policy is asked by {_ROUTE}"
                self._say(HTTPStatus.NOT_FOUND, error_object(words, "not_found"))
                return
            body = json.loads(content)
            if not isinstance(body, dict):
                raise Refused("the body must be an object")
            answer = self.server.pool.answer(secret, body)
        except (Refused, ValueError, RecursionError) as error:
            self._say(HTTPStatus.BAD_REQUEST, error_object(str(error), "invalid_request_error"))
            return
        if answer is None:
            self._say(HTTPStatus.UNAUTHORIZED, error_object("no trajectory has this key, or it has ended", "gone"))
        elif body.get("stream"):
            self._stream(answer)
        else:
            self._say(HTTPStatus.OK, answer)

    def _content(self) -> bytes:
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= _MAX_BODY:
            self.close_connection = True
            raise Refused(f"a body may have {_MAX_BODY} bytes at the most")
        return self.rfile.read(length)

    def _say(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(body).encode())

    def _stream(self, answer: dict[str, Any]) -> None:
        """In one chunk: the model says a turn at once."""
        (choice,) = answer["choices"]
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        part = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}
        chunk = answer | {"object": "chat.completion.chunk", "choices": [part]}
        self._send(HTTPStatus.OK, "text/event-stream", f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        with contextlib.suppress(OSError):  # the program is gone
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what a program asks is its own."""
