"""The sandbox: what hostile programs come to, and that none leaves anything behind."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from bench.canaries import Canaries, attack_once, trivial
from bench.hostile import ATTACKS, Attack
from ended import have_ended

from jaxrl.config.rewards import CodeSection
from jaxrl.processes.process_tree import children
from jaxrl.rewards.code import CodeScorer
from jaxrl.rewards.request import ScoreRequest
from jaxrl.rewards.sandbox.client import Sandbox, SandboxFailed
from jaxrl.rewards.sandbox.orders import Means
from jaxrl.rewards.sandbox.probe import choose_means

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp and Landlock are Linux's")


@pytest.fixture(scope="module")
def canaries() -> Iterator[Canaries]:
    with Canaries() as made:
        yield made


# the others with the slow ones: each is tried on every path there
ALWAYS = ("shared_memory_that", "shared_memory_behind", "shared_memory_of_a_device", "follows_others")
FEW = [
    attack
    for i, attack in enumerate(ATTACKS)
    if not attack.slow and (i % 5 == 0 or attack.shape == "function" or attack.name.startswith(ALWAYS))
]


ENDLESS = ("deep_recursion_in_c", "patches_the_checker")  # until their limit


def test_attacks_are_held(scorer: CodeScorer, canaries: Canaries):
    broken = {
        attack.name: attack_once(scorer, attack, canaries, 1.0 if attack.name in ENDLESS else 20.0)[0]
        for attack in FEW
        if not attack.x86 or platform.machine() == "x86_64"
    }
    assert {name: sentences for name, sentences in broken.items() if sentences} == {}


def test_attacks_begin(scorer: CodeScorer, canaries: Canaries):
    """What every attack begins with runs in the sandbox, so that none fails for another reason than the sandbox."""
    text = Attack("", "print(input() + '!')").program(canaries.places())
    assert scorer(ScoreRequest("test", text, None, {"inputs": ["1"], "outputs": ["1!"]}))[0] == 1


def test_canaries_notice_what_nothing_holds(canaries: Canaries):
    """Without locks the same checks fail."""
    open_one = CodeScorer(CodeSection(sandbox="none"))
    open_one.load()
    try:
        for name in ("reads_home", "changes_modes_and_times", "memory_without_a_process", "writes_home"):
            with Canaries() as own:
                attack = next(attack for attack in ATTACKS if attack.name == name)
                assert attack_once(open_one, attack, own, 20.0)[0] != [], name
    finally:
        open_one.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["", "-without-landlock"])
@pytest.mark.parametrize("user", ["root", "user"])
def test_every_attack_on_every_path(user: str, way: str):
    if user == "root" and os.geteuid() != 0:
        pytest.skip("needs root")
    words = [sys.executable, "scripts/bench_sandbox.py", "--path", user + way, "--rounds", "5", "--json", "-"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    done = subprocess.run(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    [record] = json.loads(done.stdout)
    assert record["broken"] == {}
    assert record["attacks"] >= 60


def test_server_ends_with_its_client(tmp_path: Path):
    """A client that is killed takes the server, and what it runs, along."""
    code = """
import os, sys, threading, time
from jaxrl.rewards.sandbox.client import Sandbox
sandbox = Sandbox(256)
sandbox.start()
threading.Thread(target=sandbox.script, args=("import time; time.sleep(600)", "", 600.0), daemon=True).start()
from jaxrl.processes.process_tree import descendants
while not (found := descendants(sandbox.pid)):
    time.sleep(0.01)
print(sandbox.pid, *found, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    pids = list(map(int, done.stdout.split()))
    assert len(pids) >= 2
    assert have_ended(pids, 20.0)


THREADS = {
    "its first thread ends": """
import ctypes, threading, time
for _ in range(4):
    threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).pthread_exit(None)
""",
    "killed at its limit": """
import threading
def work():
    own = bytearray(20 << 20)
    while True:
        own[::4096] = own[::4096]
for _ in range(8):
    threading.Thread(target=work).start()
""",
    "an orphan has them": """
import os, threading, time
if os.fork() == 0:
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(60,)).start()
else:
    time.sleep(0.05)
    os._exit(0)
""",
}


def test_programs_with_threads_leave_no_zombies():
    with closing(Sandbox(256)) as sandbox:
        sandbox.start()
        before = children(sandbox.pid)
        for text in THREADS.values():
            for _ in range(3):
                sandbox.script(text, "", 0.2)
        assert children(sandbox.pid) == before


def test_a_program_has_the_limits_that_it_is_given():
    """Each by itself: where memory is also counted for all processes of a program, no attack shows that one is gone."""
    program = "import resource as r; print(*(r.getrlimit(k)[1] for k in (r.RLIMIT_AS, r.RLIMIT_FSIZE, r.RLIMIT_CORE)))"
    for memory_mib in (256, 512):
        with closing(Sandbox(memory_mib)) as sandbox:
            sandbox.start()
            ran = sandbox.script(program, "", 20.0)
        assert ran.end == "exit", ran.errors
        memory, size, core = map(int, ran.output.split())
        assert memory_mib << 20 <= memory < (memory_mib + 256) << 20, "what the interpreter has mapped comes on top"
        assert (size, core) == (0, 0)


def test_a_killed_server_is_replaced(scorer: CodeScorer):
    before = scorer.server_pid
    os.kill(before, 9)
    assert scorer(trivial())[0] == 1
    assert scorer.server_pid != before


def test_nothing_is_run_where_nothing_locks_in():
    nothing = Means()
    with pytest.raises(ValueError, match=r"reward\.code\.sandbox=auto: .*libseccomp2.*sandbox=none"):
        choose_means("auto", nothing)
    assert choose_means("none", Means(landlock=7, seccomp=True)) == nothing
    with pytest.raises(ValueError, match=r"reward\.code\.command .* no Landlock"):
        choose_means("auto", Means(seccomp=True), needs_files=True)


def test_an_unlocked_process_gives_no_verdict():
    """A lock that cannot be set is no wrong answer."""
    with closing(Sandbox(256)) as sandbox:
        sandbox.means = Means(landlock=99, seccomp=True, user_ids=(-9, -3))
        sandbox.start()
        with pytest.raises(SandboxFailed, match="could not run a program"):
            sandbox.script("print(1)", "", 20.0)
