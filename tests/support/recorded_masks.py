"""What two runs of the same code write differently, and a recording therefore leaves out; each with its reason.

The order of a JSON object's names says nothing. A masked value stays as its name with `-` behind it, so that a metric
which goes away is still missed. In simulated runs all seconds are computed, and only what the process itself is shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any


@dataclass(frozen=True, slots=True)
class Mask:
    """Values that are left out.

    Attributes:
      files: a pattern of file names.
      what: of JSON a pattern of keys at any depth; of text a regular expression, of which the first group
        stays, with `-` behind it.
      why: the reason.
    """

    files: str
    what: str
    why: str


BOTH_KEYS = (
    Mask("metrics.jsonl", "time", "the wall clock at the step's end"),
    Mask("run.json", "started", "a date"),
    Mask("run.json", "commit", "the recorded commit differs by intent"),
    Mask("run.json", "versions", "of Python and packages, which the machine has"),
    Mask("run.json", "command", "begins with the folder of the code"),
    Mask("run.json", "began_with", "the folder's place on this machine"),
)
REAL_KEYS = (
    Mask("metrics.jsonl", "timing_s/*", "measured seconds"),
    Mask("metrics.jsonl", "perf/*throughput", "tokens by measured seconds"),
    Mask("metrics.jsonl", "reward/seconds", "measured"),
    Mask("metrics.jsonl", "reward/code/anchor_s/*", "measured seconds"),
    Mask("metrics.jsonl", "reward/judge/seconds", "measured"),
    Mask("metrics.jsonl", "rollout/spec/build*_s", "measured"),
    Mask("metrics.jsonl", "rollout/scale_down/hidden_s", "measured"),
    Mask("metrics.jsonl", "rollout/ranking/head_start_s", "measured"),
    Mask("metrics.jsonl", "rollout/ranking/idle_share", "of measured seconds"),
    Mask("metrics.jsonl", "rollout/layout/cost_s", "measured"),
    Mask("metrics.jsonl", "rollout/layout/step_s", "measured"),
    Mask("layouts.jsonl", "cost_s", "measured"),
    Mask("layouts.jsonl", "step_s", "measured"),
    Mask("layouts.jsonl", "time*", "measured"),
    Mask(
        "layouts.jsonl",
        "points",
        "each begins with measured seconds; its rows and degree stay. Those without rows are of plans whose rows had "
        "all stopped: the host collects them unless the round has ended by then, which the last verdict decides",
    ),
    Mask("samples.jsonl", "case_s", "seconds of a program's test cases"),
    Mask("checkpoint.jsonl", "host.timeouts.seconds", "seconds of programs"),
    Mask("checkpoint.jsonl", "train_s", "measured, of ranking groups"),
    Mask("metrics.jsonl", "reward/num_scored", "a sample that its round drops may have been scored by then, or not"),
    Mask("metrics.jsonl", "reward/errors", "as reward/num_scored"),
    Mask("metrics.jsonl", "reward/*_s", "measured seconds"),
    Mask("metrics.jsonl", "environment/*_s", "measured seconds"),
    Mask("metrics.jsonl", "environment/seconds/*", "measured"),
    Mask("samples.jsonl", "seconds", "measured, of a turn's answer"),
    Mask("journal.jsonl", "bytes", "of entries with measured seconds in them"),
)
BOTH_TEXT = (
    Mask("*", r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[+-]\d{4})?", "dates of a start"),
    Mask("report.html", r"(<th scope=row>(?:command|commit|versions|folder)</th><td>)<code>[^<]*", "as in run.json"),
    Mask("output.txt", r"(?m)^(wall clock per step +).*", "of the simulation itself"),
    Mask("output.txt", r"(?m)^(resuming ).*(?= after step)", "the folder's place on this machine"),
    Mask("output.txt", r"(?m)^(report +|simulated run +|run +).*", "the folder's place on this machine"),
)
REAL_TEXT = (
    Mask("*rewards.log", r'(File ").*(?=inputs/)', "the folder's place on this machine"),
    Mask("output.txt", r"(?m)^step .*\n", "how often a line comes, and which phases it names, depends on seconds"),
    Mask(
        "output.txt",
        r"(?m)^jaxrl\..*\n",
        "of the errors of a reward so many a second are told, in the order of verdicts",
    ),
    Mask("output.txt", r"(?m)^.* \.\.\.\n", "told where a start takes long"),
    Mask("output.txt", r"(?m)^(time +).*", "measured"),
    Mask("output.txt", r"(?m)^(rewards +).*", "as reward/num_scored"),
)
REAL_ONLY_NAMED = {"report.html": "drawn from the other files, with seconds everywhere"}


def masked(name: str, text: str, simulated: bool, clocked: Sequence[str] = ()) -> str:
    """The text of a file of a run directory as a recording keeps it; `clocked`: metrics of this run to leave out."""
    if not simulated and name in REAL_ONLY_NAMED:
        return f"{REAL_ONLY_NAMED[name]}\n"
    if name.endswith("timeline.json") and not simulated:
        return _tracks(text)
    keys = [mask.what for mask in (*BOTH_KEYS, *(() if simulated else REAL_KEYS)) if fnmatch(name, mask.files)]
    keys += clocked if name == "metrics.jsonl" else ()
    if keys and name.endswith(".jsonl"):
        text = "".join(
            f"{json.dumps(_without(json.loads(line), keys), sort_keys=True)}\n" for line in text.splitlines()
        )
    elif keys:
        text = f"{json.dumps(_without(json.loads(text), keys), indent=1, sort_keys=True)}\n"
    for mask in (*BOTH_TEXT, *(() if simulated else REAL_TEXT)):
        if fnmatch(name, mask.files):
            text = re.sub(mask.what, lambda found: f"{found[1]}-" if found.re.groups else "", text)
    if name.endswith("rewards.log"):  # which samples were scored before their round dropped them is the clock's
        text = "".join(sorted(set(text.splitlines(keepends=True))))
    return text


def _without(value: Any, keys: list[str]) -> Any:
    if isinstance(value, dict):
        return {
            name: _blank(item) if any(fnmatch(name, key) for key in keys) else _without(item, keys)
            for name, item in value.items()
        }
    return [_without(item, keys) for item in value] if isinstance(value, list) else value


def _blank(value: Any) -> Any:
    """Nothing of a value; of a list of points nothing but their first numbers is left out."""
    is_points = isinstance(value, list) and value and all(isinstance(point, list) for point in value)
    return [["-", *point[1:]] for point in value if point[1]] if is_points else "-"


def _tracks(text: str) -> str:
    """A real run's timeline: which tracks it has, and what happens on each; when and how often is the clock's."""
    events = json.loads(text.rstrip().removesuffix(",").removesuffix("]").rstrip().removesuffix(",") + "]")
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    drawn = {f"{names.get((event['pid'], event.get('tid')), '')}: {event['name']}" for event in events}
    return f"{json.dumps(sorted(drawn), indent=0)}\n"
