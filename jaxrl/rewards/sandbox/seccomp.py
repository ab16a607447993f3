"""Which system calls a program may make, and with which arguments: an allow-list that libseccomp turns into a filter.

Source: seccomp(2), https://github.com/seccomp/libseccomp. What is not allowed fails with EPERM. A filter cannot see
behind pointers, so calls that hide there what matters are refused (`clone3`, `openat2`). So is shared memory without a
file, none of which would count as a process's. Signals go to the process itself alone, unless Landlock or a dedicated
user keeps them from others.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from ctypes import c_int, c_uint, c_uint32, c_uint64

_FREE = """
    read write readv writev pread64 pwrite64 preadv pwritev close close_range fstat newfstatat stat lstat statx lseek
    mprotect munmap mremap madvise mincore brk rt_sigaction rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigpending
    rt_sigtimedwait sigaltstack dup dup2 dup3 pipe pipe2 sched_yield nanosleep clock_nanosleep clock_gettime
    clock_getres gettimeofday time times getitimer setitimer alarm pause timer_create timer_settime timer_gettime
    timer_getoverrun timer_delete getpid gettid getppid getpgid getpgrp getsid getuid geteuid getgid getegid getresuid
    getresgid getgroups uname getcwd sysinfo getrusage getrlimit umask getrandom futex set_robust_list get_robust_list
    set_tid_address rseq membarrier arch_prctl exit exit_group wait4 waitid fork vfork restart_syscall poll ppoll select
    pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2 timerfd_create
    timerfd_settime timerfd_gettime shutdown sendto recvfrom sendmsg recvmsg getsockname getpeername getsockopt access
    faccessat faccessat2 getdents getdents64 fchdir statfs fstatfs sched_getaffinity sched_getparam sched_getscheduler
    sched_get_priority_max sched_get_priority_min getcpu getpriority msync fadvise64
"""  # reach nothing beyond the process, or only read what Landlock lets it read
_OPEN = "open openat readlink readlinkat chdir"  # and `/proc`'s links to other processes' files: as Landlock decides
_WRITE = """
    creat mkdir mkdirat unlink unlinkat rmdir rename renameat renameat2 link linkat symlink symlinkat truncate ftruncate
    fsync fdatasync fallocate
"""  # in a scratch folder, as Landlock decides

_NEW_NAMESPACES = 0x7E028000  # and a sibling instead of a child
_SHARED, _ANONYMOUS = 0x01, 0x20
_PRCTL = (15, 16, 3, 0x53564D41)  # the thread's name, whether dumpable, the name of an allocation
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, its size, FIONREAD, FIONBIO, FIO(N)CLEX
_FCNTL = (0, 1, 2, 3, 4, 1030, 1031, 1032)  # duplicates, flags, sizes of pipes; neither owners, leases nor locks
_ALL = 0xFFFFFFFF
_Test = tuple[int, int, int]  # argument, mask and value: the argument's bits of the mask have this value
_TESTED: dict[str, list[list[_Test]]] = {
    "mmap": [[(3, _SHARED | _ANONYMOUS, flags)] for flags in (0, _SHARED, _ANONYMOUS)],
    "clone": [[(0, _NEW_NAMESPACES, 0)]],
    "socketpair": [[(0, _ALL, 1), (1, 0xF, 1)]],  # streams: a datagram socket may send to any address
    "prctl": [[(0, _ALL, option)] for option in _PRCTL],
    "ioctl": [[(1, _ALL, request)] for request in _IOCTL],
    "fcntl": [[(1, _ALL, command)] for command in _FCNTL],
    "prlimit64": [[(0, _ALL, 0)]],
}
"""Calls whose arguments decide: one is allowed if all tests of a list are right."""

_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_ON_OTHER_ARCHITECTURE, _MASKED_EQUAL = 2, 7


class _Comparison(ctypes.Structure):
    _fields_ = (("argument", c_uint), ("operator", c_int), ("mask", c_uint64), ("value", c_uint64))


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    return library


class Filter:
    """The system calls that a process and all its children may make. A filter made before a fork costs the fork
    nothing.

    Args:
      files: whether it may open files, which Landlock decides.
      write: whether it may change a scratch folder.
      execute: whether it may run other programs.
      signals: whether it may signal any process that Landlock or its user lets it signal; else itself alone.

    Raises OSError: there is no libseccomp, or it refuses.
    """

    def __init__(self, *, files: bool, write: bool, execute: bool, signals: bool):
        self._signals = signals
        self._context = ctypes.c_void_p(_library().seccomp_init(c_uint32(_ERRNO | errno.EPERM)))
        self._call("seccomp_attr_set", _ON_OTHER_ARCHITECTURE, c_uint32(_KILL_PROCESS))
        names = [_FREE, *[_OPEN] * files, *[_WRITE] * write, *["execve"] * execute, *["kill tgkill"] * signals]
        for name in " ".join(names).split():
            self._rule(_ALLOW, name, [])
        for name, ways in _TESTED.items():
            for tests in ways:
                self._rule(_ALLOW, name, tests)
        self._rule(_ERRNO | errno.ENOSYS, "clone3", [])  # on which libc takes clone

    def load(self) -> None:
        """From here on this process, which has one thread, has the filter. Raises OSError: the kernel refuses."""
        for name, target in () if self._signals else (("kill", os.getpid()), ("kill", 0), ("tgkill", os.getpid())):
            self._rule(_ALLOW, name, [(0, _ALL, target)])
        self._call("seccomp_load")

    def _rule(self, action: int, name: str, tests: list[_Test]) -> None:
        number = _library().seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # this processor has it, and this version knows it
            rows = (_Comparison * len(tests))(*((at, _MASKED_EQUAL, mask, value) for at, mask, value in tests))
            self._call("seccomp_rule_add_array", c_uint32(action), number, len(tests), rows)

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(_library(), name)(self._context, *arguments)
        if error:
            raise OSError(-error, f"{name}: {os.strerror(-error)}")
