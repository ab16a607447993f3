"""Commands that answer from what is there: `jaxrl options`, `jaxrl completion` and `jaxrl report`.

Purpose: `add_queries` gives them to the parser. What they need is imported when one of them runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

from jaxrl.commands.arguments import Parser, filled, one_of, written

SHELLS = ("bash", "zsh", "fish")


class _Command(Protocol):
    def __call__(self, name: str, run: Callable[..., int], text: str) -> Parser: ...


def add_queries(command: _Command) -> None:
    """Adds the three commands."""
    options = command("options", _options, "List the options of the configuration, with defaults, units and bounds.")
    options.add_argument(
        "section", nargs="?", default="", metavar="SECTION", help="a section (rollout.layout), or an option (rollout.n)"
    )
    options.add_argument("--json", action="store_true", help="as a JSON list")

    completion = command("completion", _completion, 'Print what a shell reads for completion: eval "$(...)".')
    completion.add_argument("shell", type=one_of(*SHELLS), metavar=f"{{{','.join(SHELLS)}}}")

    report = command("report", _report, "Write a run's page, report.html; of several runs one that compares them.")
    report.add_argument("run_dir", type=filled, metavar="RUN")
    report.add_argument("others", nargs="*", type=filled, default=[], metavar="RUN", help="runs to compare it with")
    report.add_argument(
        "--out",
        type=written,
        metavar="FILE",
        help="the page (report.html in the run; of several, comparison.html here)",
    )


def _options(options: argparse.Namespace) -> int:
    from jaxrl.commands.options import options_json, options_text

    print((options_json if options.json else options_text)(options.section))
    return 0


def _completion(options: argparse.Namespace) -> int:
    from jaxrl.commands.completion import script

    print(script(options.shell))
    return 0


def _report(options: argparse.Namespace) -> int:
    removing = nullcontext if options.signals is None else options.signals.removing
    if not options.others:
        from jaxrl.mechanisms.table import page_parts
        from jaxrl.report.page import write_report

        def say(text: str) -> None:
            print(f"jaxrl: {text}", file=sys.stderr)

        print(write_report(options.run_dir, options.out, removing, say, page_parts()))
        return 0
    from jaxrl.report.comparison import write_comparison

    page, summary = write_comparison([options.run_dir, *options.others], options.out or "comparison.html", removing)
    print(f"{summary}\n\n{page}")
    return 0
