"""A disk of a few megabytes: a tmpfs in a mount namespace of its own, which only one shell sees.

No rights are needed where the system lets users have namespaces; elsewhere the tests are skipped with the reason.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from quick_xla import flags
from runs import ROOT, Runs


class SmallDisk:
    """The disk at `path`. Use as a context manager."""

    def __init__(self, path: Path, size_kib: int) -> None:
        self.path, self._size_kib = path, size_kib
        path.mkdir()

    def __enter__(self) -> SmallDisk:
        try:
            self._shell = subprocess.Popen(
                ["unshare", "--user", "--map-root-user", "--mount", "sh"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                bufsize=1,
            )
        except OSError as error:
            pytest.skip(f"no small disk: {error}")
        status, output = self.run(f"mount -t tmpfs -o size={self._size_kib}k small {shlex.quote(str(self.path))}")
        if status != 0:
            self.__exit__()
            pytest.skip(f"no small disk: mount ended with {status} {output}")
        return self

    def __exit__(self, *_: object) -> None:
        self._shell.communicate()

    def run(self, command: str) -> tuple[int, str]:
        """Status and output of a shell command that sees the disk."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        mark = "-- status "
        try:
            self._shell.stdin.write(f"{{ {command}\n}} </dev/null 2>&1; status=$?; echo; echo '{mark}'$status\n")
        except BrokenPipeError:
            return 1, "(no namespace)"
        lines = []
        for line in self._shell.stdout:
            if line.startswith(mark):
                return int(line.removeprefix(mark)), "".join(lines).strip()
            lines.append(line)
        return 1, "".join(lines)

    def leave(self, kib: int) -> None:
        self.make_room()
        path = shlex.quote(str(self.path))
        _, free = self.run(f"df -k --output=avail {path} | tail -1")
        self.run(f"head -c {max(int(free) - kib, 0)}K /dev/zero > {path}/ballast")

    def make_room(self) -> None:
        self.run(f"rm -f {shlex.quote(str(self.path))}/ballast")

    def names(self) -> list[str]:
        _, found = self.run(f"cd {shlex.quote(str(self.path))} && find . -mindepth 1")
        return [line.removeprefix("./") for line in found.splitlines()]

    def copy_out(self, name: str, to: Path) -> None:
        status, output = self.run(f"cp -r {shlex.quote(str(self.path / name))} {shlex.quote(str(to))}")
        assert status == 0, output


def train_command(runs: Runs, run_dir: Path, *overrides: str) -> str:
    """`jaxrl train` of `runs` for a shell; what it prints on stdout goes to a file, which is on another disk."""
    file = runs.folder / "config.yaml"
    file.write_text(yaml.safe_dump(runs.config))
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags(1),
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": os.environ["JAX_COMPILATION_CACHE_DIR"],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    words = ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, "-m", "jaxrl", "train"]
    words += [f"--config={file}", f"trainer.run_dir={run_dir}", *overrides]
    return f"{shlex.join(words)} > {shlex.quote(str(runs.folder / 'stdout'))}"
