"""Programs that try to get out of the sandbox, to hurt the machine, or to be scored as right although they are not.

Each is bounded: on a machine without a sandbox it would cost a few seconds, a few hundred MiB or a file of some bytes.
A script prints `BROKE` when something succeeded that must not; the host's canaries (`bench.canaries`) tell the rest.
`{...}` are the canaries' places.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

from bench.forgeries import FUNCTION_VERDICTS, SCRIPT_VERDICTS

_BEGIN = """
import ctypes, os, sys, time, signal, socket, threading, subprocess, resource, fcntl, errno, mmap
libc = ctypes.CDLL(None, use_errno=True)
def no(work, *arguments):
    try:
        found = work(*arguments)
    except BaseException:
        return
    if not (isinstance(found, int) and found < 0):
        print("BROKE", work, str(found)[:60], flush=True)
def call(number, *arguments):
    return libc.syscall(ctypes.c_long(number), *arguments)
HOME, TOKEN, VICTIM, PORT, ROOT = {home!r}, {token!r}, {victim}, {port}, {root!r}
SECRET = HOME + "/secret.txt"
"""


@dataclass(frozen=True)
class Attack:
    """A hostile program.

    Attributes:
      text: with places in braces.
      shape: "script" or "function": how it is tested.
      slow: whether only its time limit ends it.
      x86: whether it names system calls by x86_64's numbers.
      test: of a function, where it is after one test: that test, in which ANSWER stands for what it does not know.
    """

    name: str
    text: str
    shape: str = "script"
    slow: bool = False
    x86: bool = False
    test: str = ""

    def program(self, places: dict[str, object]) -> str:
        begin = _BEGIN
        for name, value in places.items():
            begin = begin.replace("{" + name + "!r}", repr(value)).replace("{" + name + "}", str(value))
        return begin + dedent(self.text)


def _group(shape: str, text: str) -> list[Attack]:
    """Attacks in one text: `# name [slow] [x86]` begins each, and `#? ` a line of its own test."""
    found: list[Attack] = []
    for part in dedent(text).split("\n# ")[1:]:
        head, _, body = part.partition("\n")
        name, *flags = head.split()
        test = "".join(f"{line[3:]}\n" for line in body.splitlines() if line.startswith("#? "))
        found.append(Attack(name, body, shape, "slow" in flags, "x86" in flags, test))
    return found


_RESOURCES = """
# fork_bomb slow
end = time.time() + 3
while time.time() < end:
    try: os.fork()
    except OSError: pass
# fork_bomb_that_ends
for _ in range(12):
    try: os.fork()
    except OSError: pass
time.sleep(0.05)
# too_many_processes
count = 0
for _ in range(100):
    try: pid = os.fork()
    except OSError: break
    if pid == 0: time.sleep(2); os._exit(0)
    count += 1
if count > 40: print("BROKE", count)
# too_many_threads
count = 0
for _ in range(100):
    try: threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
    except RuntimeError: break
    count += 1
if count > 40: print("BROKE", count)
os._exit(1)
# memory_bomb
kept = []
for _ in range(64): kept.append(bytearray(16 << 20))
print("BROKE", len(kept))
# memory_of_shared_map
m = mmap.mmap(-1, 700 << 20)
for i in range(0, 700 << 20, 4096): m[i] = 1
print("BROKE")
# memory_of_children slow
for _ in range(8):
    if os.fork() == 0:
        kept = bytearray(90 << 20)
        for i in range(0, len(kept), 4096): kept[i] = 1
        time.sleep(2); os._exit(0)
time.sleep(2)
print("BROKE")
# shared_memory_that_is_given_up
import select
a, b = os.pipe()
for _ in range(4):
    if os.fork() == 0:
        try:
            m, step = mmap.mmap(-1, 96 << 20), 4 << 20
            for i in range(0, 96 << 20, step): m[i:i + step] = b"x" * step; m.madvise(mmap.MADV_DONTNEED, i, step)
            os.write(b, b"x")
            time.sleep(1)
        finally: os._exit(0)
os.close(b)
count = 0
while count < 4 and os.read(a, 1): count += 1
if count == 4: print("BROKE", count)
# shared_memory_behind_one_page
libc.mmap.restype, where = ctypes.c_void_p, ctypes.c_void_p
for _ in range(6):
    start, size = libc.mmap(None, ctypes.c_size_t(64 << 20), 3, 0x21, -1, ctypes.c_long(0)), 64 << 20
    if start == ctypes.c_void_p(-1).value: os._exit(1)
    for i in range(start, start + size, 4 << 20):
        ctypes.memset(i, 1, 4 << 20)
        libc.madvise(where(i), ctypes.c_size_t(4 << 20), 4)
    libc.munmap(where(start + 4096), ctypes.c_size_t(size - 4096))
print("BROKE")
# shared_memory_of_a_device
no(mmap.mmap, os.open("/dev/zero", os.O_RDONLY), 1 << 20, mmap.MAP_SHARED, mmap.PROT_READ)
# asks_for_shared_memory_and_is_killed
for i in range(150):
    pid = os.fork()
    if pid == 0:
        while True: mmap.mmap(-1, 4096).close()
    time.sleep(i % 15 / 5000)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
# memory_without_a_process
no(os.memfd_create, "x")
# endless_output slow
end = time.time() + 3
while time.time() < end: os.write(1, b"x" * 65536)
# endless_errors slow
end = time.time() + 3
while time.time() < end: os.write(2, b"x" * 65536)
# deep_recursion
sys.setrecursionlimit(10**6)
def down(n): return n if n == 0 else [down(n - 1)][0]
down(10**6)
# deep_recursion_in_c
sys.setrecursionlimit(10**6)
x = []
for _ in range(300000): x = [x]
print(repr(x) == 1)
# segmentation_fault
ctypes.string_at(0)
# abort
os.abort()
# sleeping slow
time.sleep(4)
# spinning slow
end = time.time() + 4
while time.time() < end: pass
# native_loop slow
sum(1 for _ in iter(int, 1))
# stubborn_regular_expression slow
import re
re.match("(a+)+$", "a" * 40 + "b")
# huge_number slow
x = 7 ** (7 ** 9)
# stops_itself slow
os.kill(os.getpid(), signal.SIGSTOP)
# ignores_signals slow
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
end = time.time() + 4
while time.time() < end: pass
# huge_file
with open(os.environ["TMPDIR"] + "/" + TOKEN, "wb") as file:
    for _ in range(64): file.write(b"x" * (1 << 20))
print("BROKE")
# many_files
import tempfile
for i in range(3000): open(os.environ["TMPDIR"] + "/" + TOKEN + str(i), "w").close()
print("BROKE")
# many_descriptors
kept = []
for _ in range(200): kept.append(os.dup(1))
print("BROKE")
# wide_pipes
for _ in range(100):
    a, b = os.pipe()
    no(fcntl.fcntl, a, 1031, 1 << 24)
# fills_its_folder_and_waits slow
with open(os.environ["TMPDIR"] + "/" + TOKEN, "wb") as file:
    for _ in range(15): file.write(b"x" * (1 << 20))
time.sleep(4)
"""

_PROCESSES = """
# background_child
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(5); open(HOME + "/" + TOKEN, "w")
    os._exit(0)
# child_that_keeps_the_output_open
if os.fork() == 0: time.sleep(5); os._exit(0)
print("wrong", flush=True); os._exit(0)
# many_orphans
for _ in range(10):
    if os.fork() == 0:
        os.fork(); time.sleep(5); os._exit(0)
# session_of_its_own
no(os.setsid)
# group_of_its_own
if os.fork() == 0: no(os.setpgid, 0, 0); os._exit(0)
os.wait()
# session_in_a_child
if os.fork() == 0:
    no(os.setsid)
    time.sleep(5)
# kills_its_parent
no(os.kill, os.getppid(), signal.SIGKILL)
# stops_its_parent
no(os.kill, os.getppid(), signal.SIGSTOP)
# kills_all
try: os.kill(-1, signal.SIGKILL)
except OSError: pass
# kills_its_parents_group
no(os.killpg, os.getpgid(os.getppid()), signal.SIGKILL)
# kills_a_stranger
no(os.kill, VICTIM, signal.SIGKILL)
# kills_a_strangers_thread x86
no(call, 234, VICTIM, VICTIM, 9)
no(call, 200, VICTIM, 9)
no(call, 129, VICTIM, 9, None)
# signals_by_descriptor x86
no(call, 434, VICTIM, 0)
no(call, 424, 3, 9, None, 0)
# signals_by_owner
a, b = socket.socketpair()
no(fcntl.fcntl, a, 8, VICTIM)
no(fcntl.fcntl, a, 10, signal.SIGKILL)
# signals_by_timer x86
no(call, 222, 0, (ctypes.c_int * 16)(0, 0, 9, 4, VICTIM), ctypes.byref(ctypes.c_int()))
# traces_its_parent x86
no(call, 101, 16, os.getppid(), None, None)
# reads_its_parents_memory x86
no(call, 310, os.getppid(), ctypes.create_string_buffer(64), 1, ctypes.create_string_buffer(64), 1, 0)
# opens_its_parents_memory
no(open, f"/proc/{os.getppid()}/mem", "rb")
no(open, f"/proc/{os.getppid()}/environ", "rb")
no(os.listdir, f"/proc/{os.getppid()}/fd")
# follows_others_links
for pid in (VICTIM, os.getppid()):
    for name in ("cwd", "exe", "root"): no(os.readlink, f"/proc/{pid}/{name}")
    no(os.chdir, f"/proc/{pid}/cwd")
# limits_a_stranger
no(resource.prlimit, VICTIM, resource.RLIMIT_CPU, (1, 1))
# slows_a_stranger
no(os.setpriority, os.PRIO_PROCESS, VICTIM, 19)
no(os.sched_setaffinity, VICTIM, [0])
# takes_rights_back
for work in (os.setuid, os.seteuid, os.setgid):
    try: work(0)
    except OSError: continue
    no(open, "/etc/shadow")
no(os.setgroups, [0])
# raises_its_limits
no(resource.setrlimit, resource.RLIMIT_NPROC, (10**6, 10**6))
no(resource.setrlimit, resource.RLIMIT_AS, (1 << 40, 1 << 40))
# new_namespaces x86
for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000): no(call, 272, flag)
no(call, 56, 0x10000000 | 17, None, None, None, None)
# mounts
for kind in (b"tmpfs", b"proc"): no(libc.mount, b"none", b"/mnt", kind, 0, None)
no(os.chroot, "/tmp")
# runs_a_shell
no(subprocess.run, ["/bin/sh", "-c", "echo BROKE"])
# becomes_a_shell
os.execv("/bin/echo", ["echo", "BROKE"])
# runs_a_file_in_memory x86
no(call, 319, b"x", 0)
no(call, 322, 4, b"", None, None, 0x1000)
# adopts_orphans
no(libc.prctl, 36, 1, 0, 0, 0)
# another_filter x86
no(call, 317, 1, 0, None)
no(call, 157, 22, 2, None)
# calls_by_other_numbers x86
no(call, 0x40000000 | 41, 2, 1, 0)
"""

_FILES = """
# reads_home
no(lambda: print(open(SECRET).read()))
# writes_home
no(open, HOME + "/" + TOKEN, "w")
# changes_a_file
no(open, SECRET, "a")
no(open, SECRET, "r+")
# truncates_a_file
no(os.truncate, SECRET, 0)
# changes_modes_and_times
no(os.chmod, SECRET, 0)
no(os.utime, SECRET, (0, 0))
no(os.chown, SECRET, os.getuid(), -1)
# attributes
no(os.setxattr, SECRET, "user.x", b"1")
# deletes_and_renames
no(os.unlink, SECRET)
no(os.rename, SECRET, HOME + "/" + TOKEN)
no(os.rename, SECRET, os.environ["TMPDIR"] + "/x")
no(os.mkdir, HOME + "/" + TOKEN)
no(os.rmdir, HOME + "/empty")
# symbolic_link
os.symlink(SECRET, os.environ["TMPDIR"] + "/link")
no(lambda: print(open(os.environ["TMPDIR"] + "/link").read()))
no(open, os.environ["TMPDIR"] + "/link", "a")
# hard_link
no(os.link, SECRET, os.environ["TMPDIR"] + "/hard")
# temporary_folder_tricks
import tempfile
for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/run/lock"):
    try: open(folder + "/" + TOKEN, "w").write("x")
    except OSError: pass
    try: os.symlink("/etc/passwd", folder + "/" + TOKEN + "l")
    except OSError: pass
# climbs_by_relative_paths
no(open, os.path.relpath(SECRET))
no(os.listdir, os.path.relpath(HOME))
# climbs_by_an_open_folder
fd = os.open("/usr/lib", os.O_RDONLY)
try: os.open(os.path.relpath(SECRET, "/usr/lib"), os.O_RDONLY, dir_fd=fd); print("BROKE")
except OSError: pass
# reads_the_checkout
no(open, ROOT + "/README.md")
no(os.listdir, ROOT)
# writes_the_checkout
no(open, ROOT + "/" + TOKEN, "w")
no(open, ROOT + "/README.md", "a")
# reads_the_systems_files
for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/root/.bashrc", "/root/.ssh/id_rsa"): no(open, path)
no(os.listdir, "/root"); no(os.listdir, "/home"); no(os.listdir, "/tmp") if os.environ["TMPDIR"] != "/tmp" else None
# reads_proc
for name in ("self/environ", "self/maps", "self/mem", "1/cmdline", "self/cmdline", "mounts", "net/tcp", "kallsyms"):
    no(open, "/proc/" + name, "rb")
no(os.listdir, "/proc")
# writes_proc_and_sys
for name in ("/proc/self/oom_score_adj", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/power/state"):
    no(open, name, "r+")
# devices
for name in ("/dev/mem", "/dev/kmsg", "/dev/tty", "/dev/ptmx", "/dev/fuse", "/dev/vda"): no(open, name, "rb")
no(os.mknod, os.environ["TMPDIR"] + "/d", 0o600 | 0o060000, os.makedev(8, 0))
# handles x86
no(call, 304, -100, ctypes.create_string_buffer(128), 0)
no(call, 303, -100, SECRET.encode(), ctypes.create_string_buffer(128), ctypes.byref(ctypes.c_int()), 0)
# locks_a_file
fd = os.open(os.__file__, os.O_RDONLY)
no(fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
# other_ways_to_open x86
no(call, 437, -100, SECRET.encode(), (ctypes.c_ulong * 3)(0, 0, 0), 24)
no(call, 425, 4, ctypes.create_string_buffer(256))
# writes_pythons_folders
no(open, os.path.dirname(os.__file__) + "/" + TOKEN, "w")
# writes_its_own_text
no(os.write, 4, b"x")
no(os.write, 0, b"x")
no(os.ftruncate, 0, 0)
# descriptors_it_was_left
import stat
for fd in range(5, 64):
    try: os.fstat(fd)
    except OSError: continue
    print("BROKE", fd)
"""

_NETWORK = """
# connects
no(socket.create_connection, ("127.0.0.1", PORT), 1)
# sends_a_datagram
no(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", PORT)))
# listens
no(lambda: socket.socket().listen())
# version_6
no(socket.create_connection, ("::1", PORT), 1)
# abstract_socket
no(lambda: socket.socket(socket.AF_UNIX).connect("\\0" + TOKEN))
# socket_in_a_folder
no(lambda: socket.socket(socket.AF_UNIX).connect(HOME + "/socket"))
# pair_that_sends_elsewhere
no(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", "\\0" + TOKEN + "d"))
# raw_and_netlink
no(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)
no(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0)
no(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 0)
# asks_for_a_name
no(socket.gethostbyname, "example.com")
# rings x86
no(call, 425, 4, ctypes.create_string_buffer(256))
# shared_memory_of_system_v
no(libc.shmget, 4242, 4096, 0o1666)
no(libc.msgget, 4242, 0o1666)
no(libc.semget, 4242, 1, 0o1666)
# shared_memory_of_posix
from multiprocessing import shared_memory
no(shared_memory.SharedMemory, TOKEN, True, 4096)
# message_queue x86
no(call, 240, TOKEN.encode(), 0o102, 0o666, None)
# keys x86
no(call, 248, b"user", TOKEN.encode(), b"x", 1, -3)
no(call, 250, 0, -3, 1)
# looks_into_the_kernel x86
no(call, 321, 0, ctypes.create_string_buffer(64), 64)
no(call, 298, ctypes.create_string_buffer(128), 0, -1, -1, 0)
no(call, 323, 0)
# types_into_the_terminal
for fd in range(3): no(fcntl.ioctl, fd, 0x5412, b"x")
# sets_the_clock
no(time.clock_settime, time.CLOCK_REALTIME, 0.0)
no(socket.sethostname, TOKEN)
"""

ATTACKS: tuple[Attack, ...] = (
    *_group("script", _RESOURCES),
    *_group("script", _PROCESSES),
    *_group("script", _FILES),
    *_group("script", _NETWORK),
    *_group("script", SCRIPT_VERDICTS),
    *_group("function", FUNCTION_VERDICTS),
)
assert len({attack.name for attack in ATTACKS}) == len(ATTACKS), "each has a name of its own"
