"""A fork server's end; what its supervisors do is in tests/rewards/test_workers.py."""

import time
from pathlib import Path

import pytest

from jaxrl.processes.fork_server import ForkServer
from jaxrl.rewards.worker import WorkerSettings


def test_one_that_still_imports_is_ended_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As when a start is refused while its workers begin."""
    begun = tmp_path / "begun"
    (tmp_path / "slow_import.py").write_text(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = WorkerSettings(scorer=b"", loads="", preload=("slow_import",), start_timeout_s=1.0, max_retries=0)
    server = ForkServer(settings, {})
    server.start()
    while not begun.exists():
        time.sleep(0.01)
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 2
    assert not server.alive
