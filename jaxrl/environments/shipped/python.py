"""A tool: Python programs in the sandbox of `reward.kind=code`. `environment.kind=tools environment.path=python`.

Each program has its own process, without network and files, which ends with its call. `environment.timeout_s` limits
the turn, and `SECONDS` a program.
"""

import threading

from jaxrl.rewards.sandbox.client import Sandbox
from jaxrl.rewards.sandbox.orders import Limits
from jaxrl.rewards.sandbox.probe import choose_means

SECONDS = 5.0
_sandbox = Sandbox(Limits(memory_mib=512, processes=32, file_mib=0, output_kib=16))
_sandbox.means = choose_means("auto", _sandbox.start())
_one_at_a_time = threading.Lock()


def python(code: str) -> str:
    """Runs a Python program and returns what it prints.

    Args:
        code: The program. It starts anew each time, so what is needed again has to be in it again.
    """
    with _one_at_a_time:
        ran = _sandbox.script(code, "", SECONDS)
    if ran.end != "exit":
        why = {"time": f"it took longer than {SECONDS:g} s", "output": "it wrote too much", "memory": "memory was full"}
        return f"{ran.output}\nError: the program was ended: {why.get(ran.end, ran.end)}".strip()
    if ran.code:
        return f"{ran.output}\nError: {ran.errors.strip()[-1000:]}".strip()
    return ran.output or "(it printed nothing)"
