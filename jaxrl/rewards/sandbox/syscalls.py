"""Numbers of the system calls that a program in the sandbox may make, and of those that lock it in.

Source: Linux's `arch/x86/entry/syscalls/syscall_64.tbl` and, for aarch64, `include/uapi/asm-generic/unistd.h`. `-`
stands for a call that aarch64 never had. What is not in these tables fails with EPERM: an allow-list, since new calls
come with every kernel.
"""

from __future__ import annotations

import ctypes
import os
import platform

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""What seccomp calls the machines that there are tables for (`AUDIT_ARCH_*`)."""


def _table(text: str) -> dict[str, dict[str, int]]:
    rows = [entry.split(":") for entry in text.split()]
    return {
        machine: {row[0]: int(row[column]) for row in rows if row[column] != "-"}
        for column, machine in ((1, "x86_64"), (2, "aarch64"))
    }


FREE = _table(
    """
    read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70
    close:3:57 close_range:436:436 fstat:5:80 newfstatat:262:79 stat:4:- lstat:6:- statx:332:291 lseek:8:62
    mprotect:10:226 munmap:11:215 mremap:25:216 madvise:28:233 mincore:27:232 brk:12:214
    rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigsuspend:130:133 rt_sigpending:127:136
    rt_sigtimedwait:128:137 sigaltstack:131:132 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59
    sched_yield:24:124 nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114
    gettimeofday:96:169 time:201:- times:100:153 getitimer:36:102 setitimer:38:103 alarm:37:- pause:34:-
    timer_create:222:107 timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111
    getpid:39:172 gettid:186:178 getppid:110:173 getpgid:121:155 getpgrp:111:- getsid:124:156 getuid:102:174
    geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150 getgroups:115:158
    uname:63:160 getcwd:79:17 sysinfo:99:179 getrusage:98:165 getrlimit:97:163 umask:95:166 getrandom:318:278
    futex:202:98 set_robust_list:273:99 get_robust_list:274:100 set_tid_address:218:96 rseq:334:293
    membarrier:324:283 arch_prctl:158:- exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95 fork:57:- vfork:58:-
    restart_syscall:219:128 poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:-
    epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:-
    eventfd2:290:19 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87 shutdown:48:210
    sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 getsockname:51:204 getpeername:52:205
    getsockopt:55:209 access:21:- faccessat:269:48 faccessat2:439:439 getdents:78:-
    getdents64:217:61 fchdir:81:50 statfs:137:43 fstatfs:138:44 sched_getaffinity:204:123
    sched_getparam:143:121 sched_getscheduler:145:120 sched_get_priority_max:146:125 sched_get_priority_min:147:126
    getcpu:309:168 getpriority:140:141 msync:26:227 fadvise64:221:223
    """
)
"""Calls that reach nothing beyond the process, or only read what Landlock lets it read."""
OPEN = _table(
    """
    open:2:- openat:257:56 readlink:89:- readlinkat:267:78 chdir:80:49
    """
)
"""Opening files, and following `/proc`'s links to those of other processes, which Landlock decides."""
WRITE = _table(
    """
    creat:85:- mkdir:83:- mkdirat:258:34 unlink:87:- unlinkat:263:35 rmdir:84:- rename:82:- renameat:264:38
    renameat2:316:276 link:86:- linkat:265:37 symlink:88:- symlinkat:266:36 truncate:76:45 ftruncate:77:46
    fsync:74:82 fdatasync:75:83 fallocate:285:47
    """
)
"""Changing a scratch folder, which Landlock decides."""
EXECUTE = _table(
    """
    execve:59:221
    """
)
"""Running another program: for command lines alone."""
ASKED = _table(
    """
    mmap:9:222 kill:62:129 tgkill:234:131 clone:56:220 clone3:435:435 socketpair:53:199 prctl:157:167 ioctl:16:29
    fcntl:72:25 prlimit64:302:261
    """
)
"""Calls whose arguments decide."""
OWN = _table(
    """
    seccomp:317:277 landlock_create_ruleset:444:444 landlock_add_rule:445:445 landlock_restrict_self:446:446
    capset:126:91
    """
)
"""Calls of the sandbox itself."""

_libc = ctypes.CDLL(None, use_errno=True)


def machine() -> str:
    return platform.machine()


def call(name: str, *arguments: object) -> int:
    """One of `OWN`'s calls. Raises OSError if it fails, also on a machine without a table."""
    numbers = OWN.get(machine(), {})
    if name not in numbers:
        raise OSError(f"no number of {name} is known for {machine()}")
    result = _libc.syscall(ctypes.c_long(numbers[name]), *arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option: int, *values: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    if _libc.prctl(option, *padded) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def libc(name: str, *arguments: object) -> None:
    """A function of libc that returns 0, or fails. Raises OSError."""
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
