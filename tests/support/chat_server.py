"""A chat completions server on the loopback, which misbehaves as it is told, one behaviour for each request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatServer
    body: dict[str, Any]

    def do_POST(self) -> None:
        self.body = body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
            self.server.busy += 1
            self.server.most_busy = max(self.server.most_busy, self.server.busy)
            behaviour = self.server.behaviours.pop(0) if self.server.behaviours else self.server.default
        try:
            behaviour(self)
        except OSError:  # the client has gone
            self.close_connection = True
        finally:
            with self.server.lock:
                self.server.busy -= 1

    def reply(self, body: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


class ChatServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, default: Behaviour) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.over = threading.Event()  # what hangs ends with the test
        self.seen: list[dict[str, Any]] = []
        self.behaviours: list[Behaviour] = []
        self.default = default
        self.busy = self.most_busy = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextmanager
def chat_server(behaviours: Sequence[Behaviour] = (), default: Behaviour | None = None) -> Iterator[ChatServer]:
    """Serves the behaviours in the order of requests, and `default` after them (a score of 7)."""
    server = ChatServer(default or says("Score: 7"))
    server.behaviours = list(behaviours)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def says(text: str | None) -> Behaviour:
    return sends({"choices": [{"message": {"role": "assistant", "content": text}}]})


def sends(value: Any) -> Behaviour:
    return lambda handler: handler.reply(json.dumps(value).encode(), Content_Type="application/json")


def raw(body: bytes) -> Behaviour:
    return lambda handler: handler.reply(body)


def raw_status(code: int, body: str) -> Behaviour:
    return lambda handler: handler.reply(body.encode(), code)


def status(code: int, message: str = "no", **headers: str) -> Behaviour:
    body = json.dumps({"error": {"message": message}}).encode()
    return lambda handler: handler.reply(body, code, **headers)


def hangs(handler: Handler) -> None:
    handler.server.over.wait()


def trickles(handler: Handler) -> None:
    """A byte of the answer every few milliseconds, without an end."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    while not handler.server.over.wait(0.02):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def closes(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


def huge(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(1 << 30))
    handler.end_headers()
    while not handler.server.over.is_set():
        handler.wfile.write(b"x" * (1 << 20))
