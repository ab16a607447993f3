"""The launcher over stand-ins: `python launching.py FOLDER WRITES hosts.option=value ...`. `Launched` runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).with_name("stand_in.py")
PATIENCE_S = 60.0
BITS = "".join(f"{step} " for step in range(6))


class Launched:
    """A launcher in a process of its own, in an empty folder."""

    def __init__(
        self,
        folder: Path,
        plan: dict[str, Any] | None = None,
        *,
        stdout: int = subprocess.PIPE,
        writes: bool = True,
        num: int = 2,
        **hosts: Any,
    ) -> None:
        self.folder = folder
        (folder / "plan.json").write_text(json.dumps(plan or {}))
        options = {"launcher": "local", "stall_timeout_s": 20, "num": num} | hosts
        self._arguments = [str(int(writes)), *(f"hosts.{name}={value}" for name, value in options.items())]
        self.process = self._start(stdout)

    def _start(self, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(self.folder), *self._arguments],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAXRL_STAND_IN": str(self.folder), "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )

    def again(self) -> None:
        """The same command once more, when the one before is gone."""
        self.process.communicate()
        self.process = self._start()

    def end(self, patience_s: float = PATIENCE_S) -> tuple[int, str, str]:
        """Exit status, stdout and stderr, once it has ended; with nothing left of it."""
        try:
            out, err = self.process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            for pid in self.living():
                os.kill(pid, signal.SIGKILL)  # who holds our pipes would be waited for
            out, err = self.process.communicate()
            raise AssertionError(f"did not end: {out}\n{err}") from None
        self.assert_nothing_left()
        return self.process.returncode, out, err

    def assert_nothing_left(self, patience_s: float = 15.0) -> None:
        deadline = time.monotonic() + patience_s
        while (left := self.living()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"left behind: {left}"

    def living(self) -> dict[int, str]:
        """Every process that the launcher or anything below it has started, with its command."""
        mark, found = f"JAXRL_STAND_IN={self.folder}\0".encode(), {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                command = (entry / "cmdline").read_text().replace("\0", " ")
                # an agent on a ray node has the environment of that node
                if mark in (entry / "environ").read_bytes() + b"\0" or f"{self.folder}/run" in command:
                    found[int(entry.name)] = command
            except OSError:  # gone, or another user's
                continue
        return found

    def until(self, what: str) -> Path:
        """Waits for a file in the folder."""
        deadline = time.monotonic() + PATIENCE_S
        while not (path := self.folder / what).exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, what
            time.sleep(0.002)
        return path

    @property
    def worlds(self) -> int:
        return int((self.folder / "worlds").read_text())

    @property
    def bits(self) -> str:
        return (self.folder / "run" / "bits").read_text()


def main() -> int:
    from jaxrl.config.files import load
    from jaxrl.runtime.hosts.launch import launch
    from jaxrl.runtime.stop import Stop

    folder, writes, *overrides = sys.argv[1:]
    stop = Stop()
    stop.watch()
    own = ["model.path=none", "reward.kind=math", f"trainer.run_dir={folder}/run"]
    config = load(None, [*own, *overrides])
    try:
        return launch(config, ["train", *overrides], stop, writes=writes == "1", program=[str(STAND_IN)])
    except Exception as error:
        print(f"jaxrl: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


if __name__ == "__main__":
    assert "jax" not in sys.modules
    status = main()
    assert "jax" not in sys.modules
    sys.exit(status)
