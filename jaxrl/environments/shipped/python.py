"""A tool: Python programs in the sandbox of `reward.kind=code`. `environment.kind=tools environment.path=python`.

Each program has its own process, without network and files, which ends with its call. `environment.timeout_s` limits
the turn, and `SECONDS` a program.
"""

import threading

from jaxrl.rewards.sandbox.client import Sandbox

SECONDS = 5.0
_MAX_OUTPUT = 16_384  # characters that are kept
_sandbox = Sandbox(memory_mib=512)
_sandbox.start()
_one_at_a_time = threading.Lock()


def python(code: str) -> str:
    """Runs a Python program and returns what it prints.

    Args:
        code: The program. It starts anew each time, so what is needed again has to be in it again.
    """
    with _one_at_a_time:
        ran = _sandbox.script(code, "", SECONDS)
    end = "output" if len(ran.output) > _MAX_OUTPUT else ran.end
    if end != "exit":
        why = {"time": f"it took longer than {SECONDS:g} s", "output": "it wrote too much", "memory": "memory was full"}
        return f"{ran.output[:_MAX_OUTPUT]}\nError: the program was ended: {why.get(end, end)}".strip()
    if ran.code:
        return f"{ran.output}\nError: {ran.errors.strip()[-1000:]}".strip()
    return ran.output or "(it printed nothing)"
