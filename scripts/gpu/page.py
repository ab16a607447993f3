"""The battery's figures, and the page of them: `parts.yaml` says what each is, what was expected of it, and its bar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Record = Mapping[str, Any]
PARTS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).with_name("parts.yaml")).read_text(encoding="utf-8"))
KINDS = {"NVIDIA H100 80GB HBM3": 0, "NVIDIA H200": 1}
"""Where in `expected` a card stands, by its name in jax."""
SCALE = {"ms": 1e3, "%": 100.0, "TB/s": 1e-12, "TFLOP/s": 1e-12}
SIZES = ("rows", "context", "tokens", "dtype")
TRIAL = "sizes     tiny, whatever is said below: a trial of the battery, and no measurement"
NOT_MEASURED, MET, MISSED = "not measured", "met", "MISSED"


def figures(is_trial: bool = False) -> list[dict[str, Any]]:
    """All of them, in the order of the parts. Of a trial, whose sizes are others, one for each kind of figure."""
    found: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        for figure in part["figures"] if "quick" in part or not is_trial else ():
            own = {"part": part["name"], "where": {}} | figure
            if is_trial and part["name"] != "check":
                own["where"] = {name: value for name, value in own["where"].items() if name not in SIZES}
            found.setdefault(f"{own['part']} {own['key'] if is_trial else own['text']} {own['where']}", own)
    return list(found.values())


def value(figure: Record, records: Sequence[Record]) -> float | None:
    """From the newest record of its part that has the case; None if there is none that knows it."""
    among = figure.get("among", "cases")
    for record in reversed(records):
        if record["part"] != figure["part"] or record["bench"] == "part":
            continue
        for case in [record["ceilings"]] if among == "ceilings" else record["results"][among]:
            if all(case.get(name) == wanted for name, wanted in figure["where"].items()):
                found = case.get(figure["key"])
                if found is None and "/" in figure["key"]:  # `a/b` is `b` in `a`
                    outer, _, inner = figure["key"].partition("/")
                    found = case.get(outer, {}).get(inner)
                if found is not None:
                    return float(found)
    return None


def shown(figure: Record, number: float | None) -> str:
    """With its unit; three digits, or more where they stand before the point."""
    if number is None:
        return "-"
    unit = figure.get("unit", "")
    scaled = number * SCALE.get(unit, 1.0)
    digits = f"{scaled:.0f}" if 100 <= abs(scaled) < 1e6 else f"{scaled:.3g}"
    return f"{digits} {unit}".rstrip()


def bar(figure: Record) -> str:
    words = {"least": "at least", "most": "at most", "within": "within"}
    return next((f"{text} {shown(figure, figure[name])}" for name, text in words.items() if name in figure), "")


def verdict(figure: Record, number: float | None, is_gpu: bool) -> str:
    """Of a figure's bar; empty where it has none, or none on this device. What is no number meets no bar."""
    if not bar(figure) or not (is_gpu or figure.get("everywhere")):
        return ""
    if number is None:
        return NOT_MEASURED
    is_met = number >= figure["least"] if "least" in figure else abs(number) <= figure.get("most", figure.get("within"))
    return MET if is_met else MISSED


def results(records: Sequence[Record], is_trial: bool = False) -> str:
    """The page of results, of the newest records: bars first, then every figure by part, then kernels by group."""
    measured = [record for record in records if record["bench"] != "part"]
    newest = measured[-1] if measured else {}
    device = newest.get("device", {})
    found = [(each, value(each, records)) for each in figures(is_trial)]
    judged = [(each, number, verdict(each, number, device.get("platform") == "gpu")) for each, number in found]
    lines = [*_head(newest), *([TRIAL] if is_trial else []), ""]
    for wanted in (MET, MISSED, NOT_MEASURED):
        of_kind = [each for each, _, said in judged if said == wanted]
        lines.append(f"bars {wanted}: {len(of_kind)}")
        lines += [f"    {each['part']}: {each['text']}" for each in of_kind if wanted != MET]
    ended = {record["part"]: record for record in records if record["bench"] == "part"}
    card = KINDS.get(device.get("kind", ""))
    for part in dict.fromkeys(each["part"] for each, _, _ in judged):
        how = "{status}, {seconds:.0f} s, {date}".format(**ended[part]) if part in ended else "not run"
        lines += ["", f"{part} ({how})"]
        for each, number, said in judged:
            if each["part"] == part:
                expected = each.get("expected", [""] * len(KINDS))[card] if card is not None else ""
                line = f"    {each['text']:<66} {shown(each, number):>12}"
                line += f"   expected {expected:>12}" if expected else " " * 24
                lines.append((line + (f"   bar {bar(each):<13} {said}" if said else "")).rstrip())
    return "\n".join([*lines, *_kernels(records), ""])


def _head(newest: Record) -> Iterator[str]:
    if not newest:
        yield "nothing has been measured yet"
        return
    device = newest["device"]
    yield f"device    {device['count']} x {device['kind']} ({device['platform']})"
    yield f"date      {newest['date']}"
    yield f"commit    {newest['commit'] or 'unknown'}{' with uncommitted changes' if newest['dirty'] else ''}"
    yield "versions  " + ", ".join(f"{name} {version}" for name, version in newest["versions"].items())
    if device["kind"] not in KINDS:
        yield f"expected  nothing: expectations are for {' and '.join(KINDS)}, and bars on speed for GPUs"


def _kernels(records: Sequence[Record]) -> Iterator[str]:
    """Of every newest profile: groups of kernels, and the five kernels that take longest."""
    newest: dict[tuple[str, str], Record] = {}
    for record in records:
        for case in record.get("results", {}).get("cases", ()):
            if case.get("profile"):
                sizes = " x ".join(str(case[name]) for name in ("rows", "context", "tokens") if name in case)
                newest[record["part"], f"{case['case']} {sizes}".strip()] = case["profile"]
    for (part, what), profile in newest.items():
        yield ""
        yield f"kernels of {part}, {what}: {profile['kernels_s'] * 1e3:.3f} ms in {profile['launches']} launches"
        for name, group in profile["groups"].items():
            share = group["seconds"] / (profile["kernels_s"] or 1.0)
            yield f"    {name:<40} {group['seconds'] * 1e3:10.3f} ms {share:6.1%} {group['launches']:>7} launches"
        for kernel in profile["top"][:5]:
            yield f"        {kernel['name'][:60]:<60} {kernel['seconds'] * 1e3:10.3f} ms {kernel['launches']:>7}"
