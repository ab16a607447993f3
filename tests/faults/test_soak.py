"""300 tiny steps: nothing grows after the tenth.

Compared are the lowest of the first quarter of looks and the lowest of the last: a save that is under way has up to ten
threads and two files of its own. The memory of the process may grow by 24 MiB: the allocator keeps what the largest
batch and a save needed, and the longest draws of 300 steps come late. It has one arena here. With an arena for every
thread, those of saves spread what is free over all of them: 50 MiB in 300 steps, where one arena has 12. Programs are
counted by jax's own log of what it compiles; a batch of a shape that was not there before may still bring 2.
"""

import os
import re
import time
from pathlib import Path

import pytest
from runs import PATIENCE_S, Runs, num_steps

MAX_MORE = {"threads": 2, "files": 2, "MiB": 24}
MAX_MORE_PROGRAMS = 2


def look(pid: int) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    found = {name: int(value) for name, value in re.findall(r"^(Threads|VmRSS):\s+(\d+)", status, re.MULTILINE)}
    return {
        "threads": found["Threads"],
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "MiB": found["VmRSS"] / 1024,
    }


@pytest.mark.slow
def test_three_hundred_steps_leave_nothing_behind(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_EXPLAIN_CACHE_MISSES", "0")
    monkeypatch.setenv("JAX_LOG_COMPILES", "1")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    steps, runs, run_dir, output = 300, Runs(tmp_path, tiny_model), tmp_path / "run", tmp_path / "output"
    with open(output, "wb") as file:
        process = runs.start(run_dir, f"trainer.total_training_steps={steps}", stdout=file)
    looks, compiled = {}, {}
    deadline = time.monotonic() + PATIENCE_S + steps
    while process.poll() is None:
        assert time.monotonic() < deadline
        step = num_steps(run_dir)
        if step not in looks and 10 <= step < steps:
            compiled[step] = output.read_bytes().count(b"Finished XLA compilation")
            looks[step] = look(process.pid)
        time.sleep(0.02)
    assert process.returncode == 0, output.read_text()[-2000:]
    first, last = min(looks), max(looks)
    quarter = len(looks) // 4
    assert quarter >= 5, f"{len(looks)} looks are too few"
    ordered = [looks[step] for step in sorted(looks)]
    early, late = (
        {name: min(each[name] for each in part) for name in MAX_MORE}
        for part in (ordered[:quarter], ordered[-quarter:])
    )
    print(f"steps {first} to {last}: {early}, {compiled[first]} programs; then {late}, {compiled[last]} programs")
    for name, allowed in MAX_MORE.items():
        assert late[name] - early[name] <= allowed, (name, early, late)
    assert compiled[last] - compiled[first] <= MAX_MORE_PROGRAMS
