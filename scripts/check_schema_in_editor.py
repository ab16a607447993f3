#!/usr/bin/env python3
"""Opens a configuration in yaml-language-server, as editors do: an option must be completed and a wrong value marked.

npm install --prefix /tmp/yls yaml-language-server
python scripts/check_schema_in_editor.py /tmp/yls/node_modules/.bin/yaml-language-server
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from jaxrl.commands.options import schema_json

TEXT = """# yaml-language-server: $schema={schema}
rollout:
  n: 0
  max_num_s
"""


class Server:
    """A language server in a process; one message at a time, over its standard input and output."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen([command, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout

    def send(self, method: str, number: int | None = None, **params: Any) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params} | ({} if number is None else {"id": number})
        body = json.dumps(message).encode()
        self._to.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        self._to.flush()

    def wait(self, wanted: int | str) -> Any:
        """What answers a request of that number, or the parameters of a notice of that name."""
        while True:
            length = 0
            while line := self._from.readline().strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            message = json.loads(self._from.read(length))
            if message.get("method") == wanted:
                return message["params"]
            if "method" not in message and message.get("id") == wanted:
                return message["result"]

    def close(self) -> None:
        self._process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="the program yaml-language-server")
    server = Server(parser.parse_args().server)
    with tempfile.TemporaryDirectory() as folder:
        schema, file = Path(folder) / "jaxrl.schema.json", Path(folder) / "run.yaml"
        schema.write_text(schema_json(), encoding="utf-8")
        document = {"uri": file.as_uri(), "languageId": "yaml", "version": 1, "text": TEXT.format(schema=schema)}
        server.send("initialize", 1, processId=None, rootUri=None, capabilities={})
        server.wait(1)
        server.send("initialized")
        server.send("textDocument/didOpen", textDocument=document)
        marked = server.wait("textDocument/publishDiagnostics")["diagnostics"]
        at = {"line": 3, "character": 11}
        server.send("textDocument/completion", 2, textDocument={"uri": file.as_uri()}, position=at)
        offered = {each["label"]: each.get("documentation") for each in server.wait(2)["items"]}
    server.close()
    said = [each["message"] for each in marked if each["range"]["start"]["line"] == 2]
    print(f"n: 0 is marked: {said}\nmax_num_s is completed: max_num_seqs: {offered.get('max_num_seqs')}")
    assert said
    assert "max_num_seqs" in offered


if __name__ == "__main__":
    main()
