"""Asks a process that finds the CUDA plugin, or libtpu, what XLA makes of a program for it, or skips the test.

The process is started at the first question and answers all of a test process: what it has imported it has.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("JAXRL_CUDA_PLUGIN", Path(sys.prefix) / "compile-gpu"))
"""Where the plugin lies: `scripts/test.sh` installs it there, apart from the packages that every process sees."""
TPU_FOLDER = Path(os.environ.get("JAXRL_LIBTPU", Path(sys.prefix) / "compile-tpu"))
"""The same of libtpu."""


@functools.cache
def compile_for_gpu(*arguments: str) -> dict[str, Any]:
    """What `scripts/compile_for_gpu.py` prints with `--json`, with the text of the program as `hlo`; the same request
    is compiled once per test process."""
    _needs("jax_cuda13_plugin", FOLDER, "the CUDA plugin of JAX", "compile-gpu")
    return _compiled(*arguments)


@functools.cache
def compile_for_tpu(chip: str, *arguments: str) -> dict[str, Any]:
    """The same for a TPU of this kind."""
    _needs("libtpu", TPU_FOLDER, "libtpu", "tpu")
    return _compiled(*arguments, "--chip", chip)


def _compiled(*arguments: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.hlo"
        return _ask("compile_for_gpu", *arguments, "--json", "--hlo", str(file)) | {"hlo": file.read_text()}


@functools.cache
def lowered_for_gpu(*arguments: str) -> dict[str, Any]:
    """The same of a program that XLA has not read: its `products` alone."""
    return ask_for_gpu("compile_for_gpu", *arguments, "--lowered")


def ask_for_gpu(module: str, *arguments: str) -> Any:
    """The JSON that the `main` of a module in `scripts` or `tests/support` prints."""
    _needs("jax_cuda13_plugin", FOLDER, "the CUDA plugin of JAX", "compile-gpu")
    return _ask(module, *arguments)


def _needs(package: str, folder: Path, what: str, extra: str) -> None:
    if not folder.is_dir() and importlib.util.find_spec(package) is None:
        pytest.skip(f"{what} is neither installed nor in {folder}: pip install 'jaxrl[{extra}]'")


def _ask(module: str, *arguments: str) -> Any:
    process, said = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    limit = threading.Timer(600, process.kill)
    limit.start()
    try:
        process.stdin.write(json.dumps([module, arguments]) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    finally:
        limit.cancel()
    if not answer:  # XLA's checks end the process
        _process.cache_clear()
        raise AssertionError(f"{module} {arguments}: status {process.wait()}\n{Path(said).read_text()[-4000:]}")
    status, printed = json.loads(answer)
    assert status == 0, printed
    return json.loads(printed)


@functools.cache
def _process() -> tuple[subprocess.Popen[str], str]:
    """The process, and the file with what it says on stderr."""
    path = os.pathsep.join(map(str, (FOLDER, TPU_FOLDER, ROOT, ROOT / "scripts", ROOT / "tests" / "support")))
    path = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    # these programs would be written to the cache and never be found there: each dumps into a folder of its own
    without = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment |= {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    with tempfile.NamedTemporaryFile("w", suffix=".stderr", delete=False) as said:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("answers.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environment,
            cwd=ROOT,
            text=True,
        )

    def end() -> None:
        process.communicate()
        Path(said.name).unlink()

    atexit.register(end)
    return process, said.name
