"""The fork server: a warm, clean Python process, whose forks are what runs.

Clean: it has imported what programs commonly use and nothing else, its environment holds nothing of the run's, and
neither a program nor a test is ever in its memory: both come in files without a name, which only the process that runs
them reads. It ends when its client does, and takes everything below it along.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
from typing import NoReturn

from jaxrl.rewards.sandbox.probe import find_means
from jaxrl.rewards.sandbox.processes import DEATH_SIGNAL, prctl
from jaxrl.rewards.sandbox.supervisor import Supervisor
from jaxrl.rewards.sandbox.wire import Execution, read_file, receive_files, send_files

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
    prctl(DEATH_SIGNAL, signal.SIGKILL)
    sock = socket.socket(fileno=int(sys.argv[2]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for name in _PRELOADED.split():
        with contextlib.suppress(ImportError):  # one that this Python was built without
            importlib.import_module(name)
    _keep_only_pythons_folders()
    gc.collect()
    gc.freeze()
    send_files(sock, pickle.dumps(find_means()))
    supervisor = Supervisor(sock)
    with contextlib.suppress(OSError):  # the client is gone
        while True:
            order, text, data = receive_files(sock)
            reply: Execution | str
            try:
                reply = supervisor.run(pickle.loads(read_file(order)), text, data)
            except OSError as error:
                reply = str(error)
            send_files(sock, pickle.dumps(reply))
    os._exit(0)


def _keep_only_pythons_folders() -> None:
    """No checkout that was installed in place can be imported from, or found."""
    homes = tuple(f"{prefix}/" for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix})
    sys.path[:] = [path for path in sys.path if path.startswith(homes)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
    sys.argv = [""]
