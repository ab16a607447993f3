"""A hub of models and data sets on the loopback address: folders on disk, as the Hugging Face Hub serves them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class SmallHub:
    """Repositories by kind (`models`, `datasets`) and name; `asked`: the paths of all requests so far."""

    url: str = ""
    folders: dict[tuple[str, str], Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    def add(self, kind: str, name: str, folder: Path) -> str:
        """Serves a folder; returns its commit."""
        self.folders[kind, name] = folder
        return self.commit(kind, name)

    def commit(self, kind: str, name: str) -> str:
        files = sorted(file for file in self.folders[kind, name].rglob("*") if file.is_file())
        return hashlib.sha1(b"".join(file.read_bytes() for file in files), usedforsecurity=False).hexdigest()


@contextmanager
def small_hub() -> Iterator[SmallHub]:
    hub = SmallHub()

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(path)
            status, headers, body = answer(hub, path.strip("/").split("/"))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


Answer = tuple[int, dict[str, str], bytes]


def refused(status: int, code: str) -> Answer:
    return status, {"X-Error-Code": code, "X-Error-Message": code}, b"{}"


def answer(hub: SmallHub, parts: list[str]) -> Answer:
    """Of `api/<kind>/<org>/<name>/revision|tree/<revision>`, `[datasets/]<org>/<name>/resolve/<revision>/<file>`."""
    is_api = parts[0] == "api"
    parts = parts[1:] if is_api else parts
    kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
    if len(parts) < 4:
        return refused(404, "EntryNotFound")
    name, what, (revision, *rest) = "/".join(parts[:2]), parts[2], parts[3:]
    folder = hub.folders.get((kind, name))
    if folder is None:
        return refused(404, "RepoNotFound")
    if name in hub.gated:
        return refused(403, "GatedRepo")
    commit = hub.commit(kind, name)
    if revision not in ("main", commit):
        return refused(404, "RevisionNotFound")
    if not is_api:
        body = folder.joinpath(*rest).read_bytes()
        etag = hashlib.sha1(body, usedforsecurity=False).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, body
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    if what == "tree":
        found = [
            {
                "type": "file",
                "path": file.relative_to(folder).as_posix(),
                "size": file.stat().st_size,
                "oid": hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest(),
            }
            for file in files
        ]
        return 200, {"Content-Type": "application/json"}, json.dumps(found).encode()
    siblings = [{"rfilename": file.relative_to(folder).as_posix()} for file in files]
    about = {"id": name, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0, "private": False}
    return 200, {"Content-Type": "application/json"}, json.dumps(about).encode()
