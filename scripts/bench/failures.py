"""A run that is killed again and again: which share of its time moved it forward, and what the rest was.

    python scripts/bench.py failures --config configs/quickstart.yaml --out runs/failures [--minutes 60]
        [--mtbf 180 360 720] [--hosts 1 2] [--with OVERRIDE ...] [--json]

A run goes undisturbed for --minutes, which decides the number of steps. Each case repeats these steps with SIGKILLs to
all of its processes at random, --mtbf seconds apart on average, and starts it again at once. What is saved
`trainer.save_freq=auto` decides, with that `trainer.mtbf_s`.

- forward: seconds of steps that count, without saving, over all seconds. (RobustRL publishes 0.80 against 0.60.)
- start, save, lost: shares of starting again (imports, devices, weights, programs), of saving, and of the rest: steps
  and starts that a kill cut off.
- same: 1 if the last weights are those of the undisturbed run to the bit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness import Bench, Case, Values
from jaxrl.processes.process_tree import descendants
from jaxrl.record.metrics import read_metrics


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    for hosts in options.hosts:
        whole = Path(options.out).resolve() / f"{hosts}-whole"
        process = _start(options, hosts, whole, "trainer.total_training_steps=100000", "trainer.save_freq=0")
        with suppress(subprocess.TimeoutExpired):
            process.wait(60 * options.minutes)
        process.terminate()  # saves, and ends with status 0
        if process.wait():
            raise ValueError(f"jaxrl train ended with exit status {process.returncode}; the run is {whole}")
        steps, weights = len(_steps(whole)), sha256_of(whole)
        for mtbf_s in options.mtbf:
            facts = {"case": f"every {mtbf_s} s", "hosts": hosts, "steps": steps}
            given = options, hosts, mtbf_s, steps, weights
            yield [Case(facts, lambda turn, given=given: killed(*given))]


def killed(options: argparse.Namespace, hosts: int, mtbf_s: int, steps: int, weights: str) -> Values:
    """The shares of a run that is killed until it has all its steps."""
    folder = Path(options.out).resolve() / f"{hosts}-{mtbf_s}"
    own = f"trainer.total_training_steps={steps}", "trainer.save_freq=auto", f"trainer.mtbf_s={mtbf_s}"
    draw, began_s, starting_s, kills = random.Random(mtbf_s), time.time(), 0.0, 0
    while True:
        start_s, process = time.time(), _start(options, hosts, folder, *own)
        try:
            status = process.wait(draw.expovariate(1 / mtbf_s))
        except subprocess.TimeoutExpired:
            for each in [process.pid, *descendants(process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            status = process.wait()
            kills += 1
        done = [line for line in _steps(folder) if line["time"] > start_s]
        starting_s += done[0]["time"] - done[0]["timing_s/step"] - start_s if done else 0.0
        if status == 0:
            break
        if status != -signal.SIGKILL:
            raise ValueError(f"jaxrl train ended with exit status {status}; the run is {folder}")
    whole_s, lines = time.time() - began_s, _steps(folder)
    save_s = sum(line["timing_s/save"] for line in lines)
    forward_s = sum(line["timing_s/step"] for line in lines) - save_s
    shares = {"forward": forward_s, "start": starting_s, "save": save_s}
    shares["lost"] = whole_s - sum(shares.values())
    same = sha256_of(folder) == weights
    return {name: seconds / whole_s for name, seconds in shares.items()} | {
        "kills": float(kills),
        "same": float(same),
        "start_s": starting_s / (kills + 1),
    }


def _start(options: argparse.Namespace, hosts: int, folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    own = f"trainer.run_dir={folder}", f"hosts.num={hosts}", *getattr(options, "with"), *overrides
    return subprocess.Popen([sys.executable, "-m", "jaxrl", "train", "--config", options.config, *own], stdout=2)


def _steps(folder: Path) -> list[dict[str, float]]:
    return [line for line in read_metrics(folder) if "timing_s/step" in line]


def sha256_of(run_dir: Path) -> str:
    """The checksum of a run's last weights: of what `jaxrl export` writes, in float32."""
    digest = hashlib.sha256()
    with TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "jaxrl", "export", run_dir, f"{folder}/weights", "--dtype", "float32"]
        subprocess.run(words, check=True, stdout=2)
        for file in sorted(Path(folder).glob("weights/*.safetensors")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _check(options: argparse.Namespace) -> None:
    if not options.config or not options.out:
        raise ValueError("--config and --out are needed")
    options.repetitions = 1


OPTIONS = {
    "config": ("", "of the runs"),
    "out": ("", "the folder where the runs go"),
    "minutes": (60, "of the undisturbed run"),
    "mtbf": ([180, 360, 720], "mean seconds between kills"),
    "hosts": ([1], "numbers of hosts"),
    "with": (str, "overrides for all runs"),
}
BENCH = Bench(__doc__, cases, OPTIONS, None, place="host", warm_up=0, average="mean", has_model=False, check=_check)
