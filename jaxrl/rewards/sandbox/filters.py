"""The seccomp filter of a process in the sandbox: which system calls it may make, and with which arguments.

Source: seccomp(2), and Linux's `include/uapi/linux/{bpf_common,seccomp}.h`. A filter is a program of the classic BPF
machine, which the kernel runs on the number and the arguments of each call. Arguments behind pointers cannot be seen,
so calls that hide what matters there are refused (`clone3`, `openat2`).

Shared memory without a file belongs to no process: it stays as long as one page of it is mapped, and none of it counts
as a process's. So a program asks for each such mapping, and its supervisor, which adds them up, decides (`decide`).
Source: seccomp_unotify(2).

Signals go to the process itself alone, unless Landlock keeps them in the sandbox (ABI 6): an ordinary user's programs
could otherwise signal everything of that user's.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import struct

from jaxrl.rewards.sandbox import syscalls

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_ALLOW, _ERRNO, _KILL, _NOTIFY = 0x7FFF0000, 0x00050000, 0x80000000, 0x7FC00000
_NUMBER, _ARCH = 0, 4  # offsets in struct seccomp_data
_ARGUMENT = (16, 24, 32, 40, 48, 56)  # their lower halves
_X32 = 0x40000000
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8

_CLONE_REFUSED = 0x7E028000  # new namespaces; a sibling instead of a child
_UNIX, _STREAM = 1, 1
_SHARED = 0x21  # MAP_SHARED and MAP_ANONYMOUS
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_REQUEST_BYTES, _LENGTH_AT = 80, 40  # of struct seccomp_notif: the second argument
_PRCTL = (15, 16, 3, 0x53564D41)  # the thread's name, whether dumpable, the name of an allocation
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, its size, FIONREAD, FIONBIO, FIO(N)CLEX
_FCNTL = (0, 1, 2, 3, 4, 1030, 1031, 1032)  # duplicates, flags, sizes of pipes; neither owners, leases nor locks

Instruction = tuple[int, int, int, int]


class Unfilterable(OSError):
    """There is no table of calls for this machine."""


def build_filter(pid: int, *, machine: str, files: bool, write: bool, execute: bool, signals: bool) -> bytes:
    """The filter's program, for the process `pid` and what it starts.

    Args:
      files: whether it may open files, which Landlock or a mount then decides.
      write: whether it may change a scratch folder.
      execute: whether it may run other programs.
      signals: whether it may signal any process that Landlock lets it signal.
    """
    if machine not in syscalls.MACHINES:
        raise Unfilterable(f"the sandbox has no table of system calls for {machine}")
    tables = [syscalls.FREE] + [
        table
        for table, wanted in ((syscalls.OPEN, files), (syscalls.WRITE, write), (syscalls.EXECUTE, execute))
        if wanted
    ]
    asked = syscalls.ASKED[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, syscalls.MACHINES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":  # the same calls under other numbers
        program += [(_JUMP_GREATER_EQUAL, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for table in tables:
        for number in table[machine].values():
            program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for name, test in _tests(pid, signals).items():
        program += [(_JUMP_EQUAL, 0, len(test), asked[name]), *test]
    program.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _tests(pid: int, signals: bool) -> dict[str, list[Instruction]]:
    """For each call whose arguments decide: instructions that end the filter."""
    any_signal: list[Instruction] = [(_RETURN, 0, 0, _ALLOW)]
    return {
        "mmap": [
            (_LOAD, 0, 0, _ARGUMENT[3]),
            (_AND, 0, 0, _SHARED),
            (_JUMP_EQUAL, 0, 1, _SHARED),
            (_RETURN, 0, 0, _NOTIFY),
            (_RETURN, 0, 0, _ALLOW),
        ],
        "kill": any_signal if signals else _one_of(0, (pid, 0)),
        "tgkill": any_signal if signals else _one_of(0, (pid,)),
        "clone": [
            (_LOAD, 0, 0, _ARGUMENT[0]),
            (_JUMP_ANY_BIT, 1, 0, _CLONE_REFUSED),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        ],
        "clone3": [(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)],  # on which libc takes clone
        "socketpair": [
            (_LOAD, 0, 0, _ARGUMENT[0]),
            (_JUMP_EQUAL, 0, 4, _UNIX),
            (_LOAD, 0, 0, _ARGUMENT[1]),
            (_AND, 0, 0, 0xF),
            (_JUMP_EQUAL, 0, 1, _STREAM),  # a datagram socket may send to any address
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        ],
        "prctl": _one_of(0, _PRCTL),
        "ioctl": _one_of(1, _IOCTL, errno.ENOTTY),
        "fcntl": _one_of(1, _FCNTL),
        "prlimit64": _one_of(0, (0, pid)),
    }


def _one_of(argument: int, values: tuple[int, ...], otherwise: int = errno.EPERM) -> list[Instruction]:
    tests: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENT[argument])]
    for value in values:
        tests += [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*tests, (_RETURN, 0, 0, _ERRNO | otherwise)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def install_filter(program: bytes) -> int:
    """From here on this process, and all that it starts, has the filter. It has one thread, and gave up new privileges.

    Returns:
      Where shared memory is asked for; -1 where the kernel allows no such thing, and shared memory is refused.

    Raises:
      OSError: the kernel, or the container around it, has no seccomp.
    """
    count = len(program) // 8
    described = _Program(count, program)
    try:
        return syscalls.call("seccomp", _SET_MODE_FILTER, _NEW_LISTENER, ctypes.byref(described))
    except OSError:  # a container's filter asks already
        syscalls.call("seccomp", _SET_MODE_FILTER, 0, ctypes.byref(described))
        return -1


def decide(listener: int, left: int) -> int:
    """Answers a process that waits for shared memory: it gets no more than `left` bytes. Returns what it got."""
    request = bytearray(_REQUEST_BYTES)
    try:
        fcntl.ioctl(listener, _RECEIVE, request)
        (number,), (size,) = struct.unpack_from("=Q", request), struct.unpack_from("=Q", request, _LENGTH_AT)
        error, flags = (0, _CONTINUE) if size <= left else (-errno.ENOMEM, 0)
        fcntl.ioctl(listener, _SEND, struct.pack("=QqiI", number, 0, error, flags))
    except OSError:  # it has ended
        return 0
    return 0 if error else size
