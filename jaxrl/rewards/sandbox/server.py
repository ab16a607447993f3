"""The fork server: a warm clean Python process that forks a supervisor for each execution.

Clean: it has imported what programs commonly use and nothing else, its environment holds nothing of the run's, and
neither a program nor a test is ever in its memory: both come in files without a name, which only the process that runs
them reads. It ends when its client does, and takes everything below it along.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

from jaxrl.processes.messages import send_message
from jaxrl.processes.process_tree import adopt_orphans, die_with_parent, kill_descendants
from jaxrl.rewards.sandbox.cage import Cage, make_cage
from jaxrl.rewards.sandbox.locks import Limits, Means
from jaxrl.rewards.sandbox.probe import find_means
from jaxrl.rewards.sandbox.supervisor import ExecutionRequest, Supervisor

HEADER = struct.Struct("!I")
_PRELOADED = """
    abc argparse array ast asyncio base64 bisect calendar cmath collections collections.abc concurrent.futures
    concurrent.futures.thread contextlib copy csv ctypes dataclasses datetime decimal difflib enum fcntl fractions
    functools gc glob hashlib heapq html inspect io itertools json keyword linecache locale logging math mmap numbers
    operator os pathlib pickle platform pprint queue random re resource secrets select selectors shutil signal socket
    statistics string struct subprocess sys tempfile textwrap threading time timeit traceback types typing unicodedata
    unittest uuid warnings weakref zlib zoneinfo _strptime encodings.idna encodings.latin_1 encodings.ascii
    encodings.utf_8_sig
"""


def main() -> NoReturn:
    client, fd = int(sys.argv[2]), int(sys.argv[3])
    die_with_parent(client)
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    for name in _PRELOADED.split():
        with contextlib.suppress(ImportError):  # one that this Python was built without
            importlib.import_module(name)
    _keep_only_pythons_folders()
    gc.collect()
    gc.freeze()
    cage = make_cage()
    _say(sock, find_means().as_dict())
    while (found := _next(sock)) is not None:
        order, fds = found
        _say(sock, _execute(sock, cage, order, fds))
    kill_descendants(())
    os._exit(0)


def _keep_only_pythons_folders() -> None:
    """No checkout that was installed in place can be imported from, or found."""
    homes = tuple(f"{prefix}/" for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix})
    sys.path[:] = [path for path in sys.path if path.startswith(homes)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
    sys.argv = [""]


def _next(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next order, and the descriptors of its texts; None when the client is gone."""
    data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 2)
    while data and (len(data) < HEADER.size or len(data) < HEADER.size + HEADER.unpack(data[: HEADER.size])[0]):
        piece = sock.recv(1 << 16)
        if not piece:
            return None
        data += piece
    return (json.loads(data[HEADER.size :]), list(fds)) if data else None


def _say(sock: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the client is gone: `_next` finds the same
        send_message(sock, json.dumps(message).encode())


def _execute(sock: socket.socket, cage: Cage, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Has a fork supervise the execution; what it reports comes through a pipe."""
    source, sink = os.pipe()
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(source)
            die_with_parent(server)
            means = Means(**message.pop("means"))
            caged = cage if means.namespaces and not means.bubblewrap else Cage()  # which has its own
            message["limits"] = Limits(**message["limits"])
            reply = Supervisor(sock, means, caged, ExecutionRequest(**message), fds, _mapped()).run()
            with open(sink, "wb") as file:
                file.write(json.dumps(reply).encode())
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(sink)
    for fd in fds:
        os.close(fd)
    with open(source, "rb") as file:
        text = file.read()
    os.waitpid(pid, 0)
    cage.clear()
    return json.loads(text) if text else {"failed": "the supervisor ended without a report"}


def _mapped() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
