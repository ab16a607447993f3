"""Device time by kernel, and by group of kernels, while something runs: a trace of JAX's profiler, added up.

Source: the XSpace that `jax.profiler.trace` writes, read with `jax.profiler.ProfileData`. On a GPU the lines of its
device planes that are called streams hold one event per kernel or copy; the other lines repeat the same time by module,
operation and source. On a CPU, threads hold one event per operation (those with an `hlo_op`), and an event of a loop or
call spans those inside; so of every event only its own time counts, that of no event inside it.

A loop that XLA has made part of a CUDA graph shows one of its turns, however many it takes: `of_a_loop`. Beside a
profiler other work is not in graphs. So the sum says how long the kernels take, not how long the gaps between them are:
those are the time of the same work without a profiler, less this sum.

Example::

    profile = profiles.during(lambda: jax.block_until_ready(step(x)))
    print(profiles.table(profile))
"""

from __future__ import annotations

import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_GROUPS = {
    "attention": r"attend|decode_kernel|merge_kernel|forward_kernel|gradient_kernel|fmha|flash|sdpa|attention",
    "collectives": r"nccl|all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute",
    "products": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|dot|ynn_fusion",
    "scatter": r"scatter",
    "sort": r"sort|topk",
    "copies": r"memcpy|memset|copy|transpose",
    "reductions": r"reduce",
}
"""By words of a kernel's name, the first that fits; everything else is `elementwise`."""
_LOOPS = "set_while_condition"
"""The kernel with which a CUDA graph asks whether its loop goes on."""


def during(run: Callable[[], Any]) -> dict[str, Any]:
    """Runs something that waits for its own results, under the profiler: `wall_s`, and what `summary` returns."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with jax.profiler.trace(folder):
            run()
        wall_s = time.perf_counter() - began
        (file,) = Path(folder).rglob("*.xplane.pb")
        return {"wall_s": wall_s} | summary(events(jax.profiler.ProfileData.from_file(str(file))))


def events(data: Any) -> Iterator[tuple[str, float]]:
    """(name, seconds) of every kernel of a `ProfileData`, in no particular order."""
    planes = list(data.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in devices or planes:
        for line in plane.lines:
            if not devices:
                yield from _own_time(event for event in line.events if any(name == "hlo_op" for name, _ in event.stats))
            elif "Stream" in line.name:
                yield from ((event.name, event.duration_ns / 1e9) for event in line.events)


def _own_time(found: Iterable[Any]) -> Iterator[tuple[str, float]]:
    """(name, seconds) of a thread's events, each without those inside it."""
    spans = sorted((event.start_ns, -event.duration_ns, event.name) for event in found)
    open_spans: list[list[Any]] = []  # [end, name, own time], outermost first
    for start, minus_duration, name in [*spans, (float("inf"), 0.0, "")]:
        while open_spans and open_spans[-1][0] <= start:
            _, ended, own = open_spans.pop()
            yield ended, max(own, 0.0) / 1e9
        if open_spans:
            open_spans[-1][2] += minus_duration
        open_spans.append([start - minus_duration, name, -minus_duration])


def summary(found: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Adds events up.

    Args:
      found: (kernel's name, seconds) of every launch.

    Returns:
      `kernels_s`, the sum; `of_a_loop`, whether that is of one turn of a loop; `launches`, how many; `groups`, by name
      `seconds` and `launches`, the longest first; `top`, the longest 25 kernels with `name` (its number dropped),
      `seconds` and `launches`.
    """
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    groups: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, seconds in found:
        group = next((group for group, words in _GROUPS.items() if re.search(words, name.lower())), "elementwise")
        for total in (kernels[re.sub(r"([._]\d+)+$", "", name)], groups[group]):
            total[0] += seconds
            total[1] += 1

    def ranked(totals: Mapping[str, list[float]]) -> list[tuple[str, dict[str, Any]]]:
        longest = sorted(totals.items(), key=lambda item: -item[1][0])
        return [(name, {"seconds": seconds, "launches": int(count)}) for name, (seconds, count) in longest]

    return {
        "kernels_s": sum(seconds for seconds, _ in groups.values()),
        "of_a_loop": any(name.startswith(_LOOPS) for name in kernels),
        "launches": int(sum(count for _, count in groups.values())),
        "groups": dict(ranked(groups)),
        "top": [{"name": name[:80]} | each for name, each in ranked(kernels)[:25]],
    }


def table(profile: Mapping[str, Any], per: float = 1.0, names: int = 10) -> str:
    """A profile as text: groups, then the longest kernels.

    Args:
      per: what the times and counts are divided by, such as the steps that ran.
      names: how many kernels are named.
    """
    rows = [(f"[{name}]", each) for name, each in profile["groups"].items()]
    rows += [(each["name"], each) for each in profile["top"][:names]]
    lines = [f"{'kernels':<60}{'ms':>9}{'share':>8}{'launches':>10}"]
    for name, each in rows:
        seconds, launches = each["seconds"], each["launches"] / per
        share = seconds / (profile["kernels_s"] or 1.0)
        lines.append(f"{name[:58]:<60}{seconds * 1e3 / per:>9.3f}{share:>8.1%}{launches:>10.1f}")
    return "\n".join(lines)
