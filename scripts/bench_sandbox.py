"""Milliseconds per verdict of each way to lock programs in on this machine, and which hostile programs it holds.

    python scripts/bench_sandbox.py                       # every path of this machine
    python scripts/bench_sandbox.py --path root --path user --quick
    python scripts/bench_sandbox.py --json out.json

A path is a user and what the kernel is asked for: `root`, or `user`, an ordinary user, to whom root changes; with
`-without-landlock`, `-without-namespaces` or `-bare` (neither); and `root-bubblewrap` and `user-bubblewrap` where there
is a `bwrap` on PATH. Each runs in a process of its own. The hostile programs are in `scripts/bench/hostile/`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import stat
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.canaries import Canaries, attack_once, trivial
from bench.hostile import ATTACKS, Attack

from jaxrl.config.rewards import CodeSection
from jaxrl.rewards.code import CodeScorer
from jaxrl.rewards.request import ScoreRequest
from jaxrl.rewards.sandbox.orders import Means
from jaxrl.rewards.sandbox.probe import choose_means, find_means
from jaxrl.rewards.sandbox.processes import NEW_MOUNTS, libc, prctl

ORDINARY_USER = 64_321
LIMIT_S = 0.6
_SET_DUMPABLE = 4
_PRIVATE, _BIND = (1 << 18) | (1 << 14), (1 << 12) | (1 << 14)


def paths() -> list[str]:
    """What there is to try here."""
    users = ["root", "user"] if os.geteuid() == 0 else ["user"]
    ways = ["", "-without-landlock", "-without-namespaces", "-bare"] + (
        ["-bubblewrap"] if shutil.which("bwrap") else []
    )
    return [user + way for user in users for way in ways]


def scorer_of(path: str) -> CodeScorer:
    """What runs programs on a path; this process has become its user."""
    way = path.partition("-")[2]
    if way == "bubblewrap":
        return CodeScorer(CodeSection(max_memory_mib=256, sandbox="bubblewrap"))
    return CodeScorer(CodeSection(max_memory_mib=256), means=means_of(way))


def means_of(way: str) -> Means:
    means = choose_means("auto", find_means())
    if way in ("without-landlock", "bare"):
        means = replace(means, landlock=0)
    if way in ("without-namespaces", "bare"):
        means = replace(means, namespaces=False)
    return means


def open_python() -> None:
    """Lets others into the folder of this Python, for this process and those below it, if it is root's alone."""
    parents = reversed(Path(sys.base_prefix).parents)
    closed = next((folder for folder in parents if not folder.stat().st_mode & stat.S_IXOTH), None)
    if closed is None:
        return
    inner = closed / Path(sys.base_prefix).relative_to(closed).parts[0]
    libc("unshare", NEW_MOUNTS)
    libc("mount", b"none", b"/", None, _PRIVATE, None)
    fd = os.open(inner, os.O_PATH | os.O_DIRECTORY)
    libc("mount", b"none", str(closed).encode(), b"tmpfs", 0, b"mode=755,size=1m")
    inner.mkdir()
    place = str(inner).encode()
    libc("mount", f"/proc/self/fd/{fd}".encode(), place, None, _BIND, None)
    os.close(fd)


def become(path: str) -> None:
    """Gives this process the user of a path."""
    if os.geteuid() == 0 and (path.startswith("user") or path.endswith("bubblewrap")):
        open_python()
    if os.geteuid() == 0 and path.startswith("user"):
        os.setgroups([])
        os.setresgid(ORDINARY_USER, ORDINARY_USER, ORDINARY_USER)
        os.setresuid(ORDINARY_USER, ORDINARY_USER, ORDINARY_USER)
        prctl(_SET_DUMPABLE, 1)  # as it is for a user who logged in: /proc/self is the process's own


def measure(path: str, rounds: int, names: list[str], quick: bool) -> dict[str, Any]:
    """One path, in this process: verdicts' times, and what each attack broke."""
    become(path)
    scorer = scorer_of(path)
    scorer.load()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        reward, info = scorer(trivial())
        times.append(time.perf_counter() - start)
        if reward != 1:
            raise SystemExit(f"{path}: a program that is right did not score: {info}")
    with Canaries() as canaries:
        begin = Attack("", "print(input() + '!')").program(canaries.places())
    reward, info = scorer(ScoreRequest("bench", begin, None, {"inputs": ["1"], "outputs": ["1!"]}))
    if reward != 1:
        raise SystemExit(f"{path}: attacks could not begin, so that none shows anything: {info}")
    found: dict[str, list[str]] = {}
    after: list[float] = []
    for attack in ATTACKS:
        if names and attack.name not in names:
            continue
        if (attack.slow and quick) or (attack.x86 and platform.machine() != "x86_64"):
            continue
        with Canaries() as canaries:
            found[attack.name], seconds = attack_once(scorer, attack, canaries, LIMIT_S if attack.slow else 5.0)
            after.append(seconds)
    scorer.close()
    return {
        "path": path,
        "median_ms": statistics.median(times) * 1e3,
        "p95_ms": sorted(times)[int(len(times) * 0.95)] * 1e3,
        "attacks": len(found),
        "held": sum(not broken for broken in found.values()),
        "broken": {name: broken for name, broken in found.items() if broken},
        "next_verdict_ms": {"median": statistics.median(after) * 1e3, "max": max(after) * 1e3} if after else {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", action="append", help="a path; may be given again; all that there are")
    parser.add_argument("--attack", action="append", default=[], help="an attack; may be given again; all of them")
    parser.add_argument("--rounds", type=int, default=50, help="verdicts that are timed")
    parser.add_argument("--quick", action="store_true", help="without the attacks that only a time limit ends")
    parser.add_argument("--json", help="a file for the records; - for the standard output, and nothing else there")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.path[0], options.rounds, options.attack, options.quick)))
        return
    records = []
    for path in options.path or paths():
        words = [sys.executable, __file__, "--here", "--path", path, "--rounds", str(options.rounds)]
        words += ["--quick"] if options.quick else []
        words += [word for name in options.attack for word in ("--attack", name)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{path}: the measuring process ended with exit code {done.returncode}")
        record = json.loads(done.stdout.splitlines()[-1])
        records.append(record)
        if options.json != "-":
            print(
                f"{path:28} {record['median_ms']:7.1f} ms per verdict (p95 {record['p95_ms']:.1f}); held "
                f"{record['held']} of {record['attacks']}",
                flush=True,
            )
            for name, broken in record["broken"].items():
                print(f"    {name}: {'; '.join(broken)}", flush=True)
    if options.json == "-":
        print(json.dumps(records))
    elif options.json:
        with open(options.json, "w") as file:
            json.dump(records, file, indent=1)


if __name__ == "__main__":
    main()
