"""Programs that try to get out of the sandbox, to hurt the machine, or to be scored as right although they are not.

They stand in `hostile/*.txt`. Each is bounded: on a machine without a sandbox it would cost a few seconds, a few
hundred MiB or a file of some bytes. A script prints `BROKE` when something succeeded that must not; the host's canaries
(`bench.canaries`) tell the rest. `{...}` are the canaries' places.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
        return begin + self.text


def _group(name: str) -> list[Attack]:
    """Attacks in one file: `# name [slow] [x86]` begins each, and `#? ` a line of its own test."""
    found: list[Attack] = []
    shape = "function" if name == "function_verdicts" else "script"
    text = Path(__file__).with_suffix("").joinpath(f"{name}.txt").read_text(encoding="utf-8")
    for part in f"\n{text}".split("\n# ")[1:]:
        head, _, body = part.partition("\n")
        name, *flags = head.split()
        test = "".join(f"{line[3:]}\n" for line in body.splitlines() if line.startswith("#? "))
        found.append(Attack(name, body, shape, "slow" in flags, "x86" in flags, test))
    return found


GROUPS = ("resources", "processes", "files", "network", "script_verdicts", "function_verdicts")
ATTACKS = tuple(attack for name in GROUPS for attack in _group(name))
assert len({attack.name for attack in ATTACKS}) == len(ATTACKS), "each has a name of its own"
