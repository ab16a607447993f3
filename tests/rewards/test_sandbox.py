"""The sandbox: what hostile programs come to, and that none leaves anything behind."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from bench.canaries import Canaries, attack_once, trivial
from bench.hostile import ATTACKS, Attack
from ended import have_ended

from jaxrl.config.rewards import CodeSection
from jaxrl.rewards.code import CodeScorer
from jaxrl.rewards.request import ScoreRequest
from jaxrl.rewards.sandbox.client import Sandbox, SandboxFailed
from jaxrl.rewards.sandbox.orders import Limits, Means
from jaxrl.rewards.sandbox.probe import choose_means
from jaxrl.rewards.sandbox.processes import descendants

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
@pytest.mark.parametrize("way", ["", "-without-landlock", "-without-namespaces", "-bare", "-bubblewrap"])
@pytest.mark.parametrize("user", ["root", "user"])
def test_every_attack_on_every_path(user: str, way: str):
    if user == "root" and os.geteuid() != 0:
        pytest.skip("needs root")
    if way == "-bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("needs bwrap on PATH")
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
from jaxrl.rewards.sandbox.orders import Limits
sandbox = Sandbox(Limits(256, 32, 0, 64))
sandbox.means = sandbox.start()
threading.Thread(target=sandbox.script, args=("import time; time.sleep(600)", "", 600.0), daemon=True).start()
from jaxrl.rewards.sandbox.processes import descendants
while len(found := descendants(sandbox.pid)) < 2:
    time.sleep(0.01)
print(sandbox.pid, *found, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    pids = list(map(int, done.stdout.split()))
    assert len(pids) >= 3
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


@pytest.mark.parametrize("namespaces", [True, False])
def test_programs_with_threads_leave_no_zombies(namespaces: bool):
    with closing(Sandbox(Limits(256, 32, 16, 64), None if namespaces else Means())) as sandbox:
        means = sandbox.start()
        sandbox.means = replace(means, namespaces=namespaces and means.namespaces)
        before = descendants(sandbox.pid)
        for text in THREADS.values():
            for _ in range(3):
                sandbox.script(text, "", 0.2)
        assert descendants(sandbox.pid) == before


ORPHANS = """
import ctypes, os, time
name = ctypes.CDLL(None).prctl
name(15, b"a program")
for _ in range(2):
    if os.fork() == 0:
        if os.fork() == 0:
            name(15, b"an orphan")
            time.sleep(600)
        os._exit(0)
time.sleep(600)
"""
CLIENT = """
import sys, threading
from bench_sandbox import become, means_of
become(sys.argv[1])
from jaxrl.rewards.sandbox.client import Sandbox
from jaxrl.rewards.sandbox.orders import Limits
sandbox = Sandbox(Limits(256, 32, 4, 64))
sandbox.start()
sandbox.means = means_of("")
print(sandbox.pid, int(sandbox.means.namespaces), flush=True)
sandbox.script(sys.argv[2], "", 600.0)
"""


@pytest.mark.parametrize("user", ["root", "user"])
def test_orphans_end_where_all_of_ours_is_killed_at_once(user: str):
    """Each process of ours is stopped, then killed, so that none can end what a program left."""
    if user == "root" and os.geteuid() != 0:
        pytest.skip("needs root")
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    words = [sys.executable, "-c", CLIENT, user, ORPHANS]
    with subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        server, namespaces = map(int, client.stdout.readline().split())
        names: dict[int, str] = {}
        while list(names.values()).count("an orphan") < 2 or len(set(names.values())) < 3:
            names = {pid: name_of(pid) for pid in descendants(server)}
            assert client.poll() is None
        ours = [client.pid, server, *(pid for pid, name in names.items() if name not in ("a program", "an orphan"))]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in ours:
                os.kill(pid, number)
    theirs = [pid for pid in names if pid not in ours]
    is_over = have_ended(theirs, 20.0 if namespaces else 1.0)
    for pid in theirs:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert is_over or not namespaces, "docs/code-rewards.md says so of machines without namespaces"


CAGE = """
import time
from jaxrl.rewards.sandbox import processes
asks = processes.die_with_parent
processes.die_with_parent = lambda parent: (time.sleep(0.5), asks(parent))
processes.make_cage()
"""


def test_a_cage_ends_where_its_parent_is_killed_before_it_asks_to_be_killed_with_it():
    with subprocess.Popen([sys.executable, "-c", CAGE], cwd=ROOT) as parent:
        while not (first := descendants(parent.pid)) and parent.poll() is None:
            pass
        parent.kill()
    assert have_ended(first, 5.0)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_a_program_has_the_limits_that_it_is_given():
    """Each by itself: where memory is also counted for all processes of a program, no attack shows that one is gone."""
    program = "import resource as r; print(*(r.getrlimit(k)[1] for k in (r.RLIMIT_AS, r.RLIMIT_FSIZE, r.RLIMIT_CORE)))"
    for memory_mib, file_mib in ((256, 0), (512, 64)):
        with closing(Sandbox(Limits(memory_mib, 32, file_mib, 64))) as sandbox:
            sandbox.means = choose_means("auto", sandbox.start())
            ran = sandbox.script(program, "", 20.0)
        assert ran.end == "exit", ran.errors
        memory, size, core = map(int, ran.output.split())
        assert memory_mib << 20 <= memory < (memory_mib + 256) << 20, "what the interpreter has mapped comes on top"
        assert (size, core) == (file_mib << 20, 0)


def test_a_killed_server_is_replaced(scorer: CodeScorer):
    before = scorer.server_pid
    os.kill(before, 9)
    assert scorer(trivial())[0] == 1
    assert scorer.server_pid != before


def test_nothing_is_run_where_nothing_locks_in():
    nothing = Means()
    for sandbox in ("auto", "fork"):
        with pytest.raises(ValueError, match=rf"reward\.code\.sandbox={sandbox}: .*libseccomp2.*sandbox=none"):
            choose_means(sandbox, nothing)
    assert choose_means("none", Means(landlock=7, seccomp=True)) == nothing
    with pytest.raises(ValueError, match=r"reward\.code\.command .* no Landlock"):
        choose_means("auto", Means(seccomp=True), needs_files=True)


def test_an_unlocked_process_gives_no_verdict():
    """A lock that cannot be set is no wrong answer."""
    with closing(Sandbox(Limits(256, 32, 0, 64))) as sandbox:
        sandbox.means = Means(landlock=99, seccomp=True, user_ids=(-9, -3))
        sandbox.start()
        with pytest.raises(SandboxFailed, match="could not run a program"):
            sandbox.script("print(1)", "", 20.0)
