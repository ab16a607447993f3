"""A supervisor's clock; what it does with real workers is in tests/rewards/test_workers.py."""

import math
import os
import signal
import subprocess
import time

from jaxrl.processes.worker_supervisor import WorkerSupervisor, _Worker


def test_a_worker_that_is_stopped_and_goes_on_keeps_its_time():
    """With `timeout_s` 0."""
    supervisor = WorkerSupervisor.__new__(WorkerSupervisor)
    with subprocess.Popen(["sleep", "60"]) as child:
        worker = _Worker(child.pid, None, math.inf, is_ready=True)  # pyright: ignore
        supervisor.__dict__ |= {"_worker": worker, "_task": object(), "_has_taken": lambda _: True}
        for number, is_stopped in ((signal.SIGSTOP, True), (signal.SIGCONT, False)) * 2:
            os.kill(child.pid, number)
            deadline = time.monotonic() + 5
            while math.isfinite(worker.deadline) != is_stopped and time.monotonic() < deadline:
                supervisor._reap()
                time.sleep(0.01)
            assert math.isfinite(worker.deadline) == is_stopped
        child.kill()
