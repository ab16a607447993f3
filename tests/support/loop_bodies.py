"""What the bodies of a compiled program's loops compute, in a form that two programs can be compared by."""

from __future__ import annotations

import re
from collections import Counter

_MOVES = re.compile(
    "parameter|constant|dynamic-slice|dynamic-update-slice|bitcast|get-tuple-element|tuple|copy|reshape|broadcast"
)


def bodies(text: str, *, innermost: bool = False, kernels: bool = True) -> list[Counter[str]]:
    """Of optimised HLO the entry and the bodies of loops, or of loops without another one inside alone. Each is its
    kernels, and how often it has each.

    A kernel is what it computes, with the configuration that XLA gave it (or the whole of a Triton kernel), under names
    of the order in which they are met. What only moves data is left out, and so are counters. Without `kernels` one of
    Triton is what it gives: it may read another array.
    """
    found = re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{$(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    computations = {each[1]: each[2] for each in found}
    entry = re.findall(r"^ENTRY %?([\w.\-]+) \(", text, re.MULTILINE)
    loops = re.findall(r" while\(.*?\), condition=\S+ body=%?([\w.\-]+)", text)
    names = [name for name in loops if " while(" not in computations[name]] if innermost else [*entry, *loops]
    return [_kernels(computations[name], computations, kernels) for name in names]


def _kernels(body: str, computations: dict[str, str], whole: bool) -> Counter[str]:
    kernels: Counter[str] = Counter()
    for line in body.splitlines():
        made = re.search(r" = (.*?) (fusion|custom-call|reduce|dot|scatter|sort)\((.*)", line)
        if made is None or made[1].startswith("s32[] ") or made[1] == "s32[]":
            continue
        inner = "".join(computations[name] for name in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", line))
        steps = re.findall(r" = (\S+) ([a-z\-]+)\(", inner)
        computes = [
            word for kind, word in steps if not re.match(r"(s32|pred)\[\]", kind) and not _MOVES.fullmatch(word)
        ]
        if made[2] == "fusion" and not computes:
            continue
        config = re.search(r"(?:backend_config|custom_call_target)=.*", made[3])
        of_triton = config is not None and "__gpu$xla.gpu.triton" in config[0]
        told = config[0] if config and (whole or not of_triton) else ""
        kernels[_renamed(f"{made[1]} {made[2]} {told} {inner}")] += 1
    return kernels


def _renamed(text: str) -> str:
    text = re.sub(r", (?:metadata|control-predecessors|origin)=\{[^}]*\}|(?<=parameter\()\d+", "", text)
    names: dict[str, str] = {}
    return re.sub(r"%[\w.\-]+", lambda name: names.setdefault(name[0], f"%{len(names)}"), text)
