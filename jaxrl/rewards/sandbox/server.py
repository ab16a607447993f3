"""The fork server: a warm, clean Python process, whose forks are what runs.

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
import pickle
import signal
import socket
import sys
from typing import NoReturn

from jaxrl.rewards.sandbox.orders import Order
from jaxrl.rewards.sandbox.probe import find_means
from jaxrl.rewards.sandbox.processes import make_cage, prctl
from jaxrl.rewards.sandbox.supervisor import Supervisor

_DEATH_SIGNAL, _ADOPT_ORPHANS = 1, 36  # prctl's options
_PRELOADED = """
    abc argparse array ast asyncio base64 bisect calendar cmath collections.abc concurrent.futures.thread contextlib
    copy csv ctypes dataclasses datetime decimal difflib enum fcntl fractions functools gc glob hashlib heapq html
    inspect io itertools json keyword linecache locale logging math mmap numbers operator os pathlib pickle platform
    pprint queue random re resource secrets select selectors shutil signal socket statistics string struct subprocess
    sys tempfile textwrap threading time timeit traceback types typing unicodedata unittest uuid warnings weakref zlib
    zoneinfo _strptime encodings.idna encodings.latin_1 encodings.ascii encodings.utf_8_sig
"""


def main() -> NoReturn:
    prctl(_DEATH_SIGNAL, signal.SIGKILL)
    prctl(_ADOPT_ORPHANS, 1)
    sock, is_caged = socket.socket(fileno=int(sys.argv[2])), sys.argv[3] == "caged"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _keep_only_pythons_folders()
    for name in _PRELOADED.split():
        with contextlib.suppress(ImportError):  # one that this Python was built without
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    means = find_means()
    first = make_cage() if is_caged and means.namespaces else 0
    stream, reply = sock.makefile("rb"), vars(means)
    with contextlib.suppress(OSError, EOFError):  # the client is gone
        while True:
            sock.sendall(json.dumps(reply).encode() + b"\n")
            fds = socket.recv_fds(sock, 1, 2)[1]
            order: Order = pickle.load(stream)
            try:
                for name in order.modules:
                    importlib.import_module(name)
                reply = vars(Supervisor(order, sock, first).run(*fds))
            except (OSError, ImportError) as error:
                reply = {"failed": str(error)}
    os._exit(0)


def _keep_only_pythons_folders() -> None:
    """No checkout that was installed in place can be imported from, or found."""
    homes = tuple(f"{prefix}/" for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix})
    sys.path[:] = [path for path in sys.path if path.startswith(homes)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
    sys.argv = [""]
