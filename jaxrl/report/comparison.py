"""Several runs on one page: their curves over each other, and tables of what differs. One self-contained HTML file.

Runs are named A, B, ... and by their folders; a simulated one says so next to its name, because its seconds come from
modelled devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxrl.config import flatten
from jaxrl.record.files import write_whole
from jaxrl.record.metrics import ROUND_PHASES, SHOWN, UPDATE_PHASES
from jaxrl.record.run_dir import refuse_overwriting
from jaxrl.report.charts import Chart, Curve, Point, breakable, card, finite
from jaxrl.report.curves import short, validation_names
from jaxrl.report.figures import Figure, figures_of, seconds
from jaxrl.report.runs import RecordedRun, facts, option_text, read_run
from jaxrl.report.style import document

MOST_RUNS = 8
"""As many colours as a reader can tell apart."""
_WHOSE = ("trainer.run_dir", "trainer.experiment_name", "simulate.run_dir")
"""Options that name a run, and so always differ."""
_SHOWN_OPTIONS = 12  # of a summary
_MISSING = "–"


def write_comparison(folders: Sequence[str | Path], out: str | Path) -> tuple[Path, str]:
    """Writes the page at `out`; returns where it is, and the summary. Raises ValueError for a folder that is no run, or
    too many of them."""
    if len(folders) > MOST_RUNS:
        raise ValueError(f"report: at most {MOST_RUNS} runs can be compared on one page, found {len(folders)}")
    refuse_overwriting(out, "--out")
    runs = [read_run(folder) for folder in folders]
    names = names_of(runs)
    figures = figures_of(runs)
    write_whole(out, _page(runs, names, figures))
    return Path(out), summary(runs, names, figures)


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Folders' names, or where these do not tell the runs apart their paths; and whether they were simulated."""
    names = [run.folder.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
    return [f"{name} (simulated)" if run.is_simulated else name for name, run in zip(names, runs, strict=True)]


def differing(runs: Sequence[RecordedRun]) -> dict[str, list[str]]:
    configs = [flatten(run.section("config")) for run in runs]
    paths = dict.fromkeys(path for config in configs for path in config)
    found = {
        path: [option_text(config[path]) if path in config else _MISSING for config in configs]
        for path in paths
        if path not in _WHOSE
    }
    return {path: values for path, values in found.items() if len(set(values)) > 1}


def _page(runs: Sequence[RecordedRun], names: Sequence[str], figures: Sequence[Figure]) -> str:
    title = " and ".join(names) if len(names) == 2 else f"{len(names)} runs"
    notes = "".join(f"<p class=note>{escape(text)}</p>" for text in _notes(runs, names))
    drawn = "".join(card(chart) for chart in _charts(runs, names))
    legend = "".join(f"<li class=c{i + 1}>{letter(i)}: {escape(name)}</li>" for i, name in enumerate(names))
    return document(
        title,
        f"{len(runs)} runs compared",
        f"{notes}<ul class=legend>{legend}</ul><section class=charts>{drawn}</section>"
        f"<h2>Figures</h2>{_figures(figures, names)}"
        f"<h2>Configuration</h2>{_options(runs, names)}<h2>Where and when</h2>{_facts(runs, names)}",
    )


def _notes(runs: Sequence[RecordedRun], names: Sequence[str]) -> list[str]:
    simulated = [name for name, run in zip(names, runs, strict=True) if run.is_simulated]
    found = [f"{name}: {text}" for name, run in zip(names, runs, strict=True) for text in run.problems]
    if simulated:
        also = " They are not to be compared with those that were measured." if len(simulated) < len(runs) else ""
        whose = " and ".join(name.removesuffix(" (simulated)") for name in simulated)
        found.append(f"Seconds of {whose} are simulated: of modelled devices, not measured.{also}")
    last = [run.metrics[-1]["step"] if run.metrics else 0 for run in runs]
    if len(set(last)) > 1:
        steps = ", ".join(f"{name} {step:g}" for name, step in zip(names, last, strict=True))
        found.append(f"The runs have different numbers of steps ({steps}); figures are over each run's own.")
    return found


def letter(index: int) -> str:
    return "ABCDEFGH"[index]


def _charts(runs: Sequence[RecordedRun], names: Sequence[str]) -> list[Chart]:
    def chart(
        title: str, unit: str, points: Callable[[RecordedRun], Sequence[Point]], dots: bool = False, **more: Any
    ) -> Chart:
        curves = [
            Curve(f"{letter(i)} {name}", series, f"c{i + 1}", dots=dots)
            for i, (name, run) in enumerate(zip(names, runs, strict=True))
            if finite(series := points(run))
        ]
        return Chart(title, unit, curves, legend=True, **more)

    def of(name: str, unit: str = "", **more: Any) -> Chart:
        shown = SHOWN[name]
        return chart(shown.title, unit or shown.unit, lambda run: run.series(name), about=shown.about, **more)

    def ever(found: Chart) -> list[Chart]:
        return [found] if any(y for curve in found.curves for _, y in curve.points) else []

    held_out = dict.fromkeys(name for run in runs for name in validation_names(run)[:2])
    found = [
        of("critic/rewards/mean", "mean per step"),
        *(
            chart(f"Held-out {short(name)}", "at evaluations", lambda run, name=name: run.series(name), dots=True)
            for name in held_out
        ),
        of("response_length/mean", "tokens, mean"),
        of("response_length/max"),
        chart("Step time", "seconds", lambda run: seconds(run, ("step",))),
        chart("Rollout time", "seconds", lambda run: seconds(run, ROUND_PHASES)),
        chart("Update time", "seconds", lambda run: seconds(run, UPDATE_PHASES)),
        of("perf/throughput"),
        of("rollout/bubble_ratio", top=1),
        of("critic/mixed_reward_groups", top=1),
        of("actor/entropy", from_zero=False),
        of("actor/grad_norm"),
        *ever(of("actor/pg_clipfrac")),
        *ever(of("training/off_policy/share", top=1)),
    ]
    return found


def _figures(figures: Sequence[Figure], names: Sequence[str]) -> str:
    def cell(figure: Figure, index: int) -> str:
        beside = f"<p class=sub>{escape(text)}</p>" if (text := figure.beside_first(index)) else ""
        value = figure.values[index]
        return f"<td class=num>{_MISSING if value is None else escape(figure.shown(value))}{beside}</td>"

    rows = [(breakable(figure.name), [cell(figure, i) for i in range(len(names))]) for figure in figures]
    return "<p class=sub>Below a number: how it compares with A's.</p>" + _table("", names, rows)


def _options(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    found = differing(runs)
    if not found:
        return "<p class=sub>The runs have the same options.</p>"
    rows = [(f"<code>{breakable(path)}</code>", [_code(each) for each in values]) for path, values in found.items()]
    return f"<p class=sub>{_differ(found)}; names of runs and folders aside.</p>{_table('Option', names, rows)}"


def _facts(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    found = [facts(run) for run in runs]
    return _table("", names, [(name, [_code(str(each[name] or _MISSING)) for each in found]) for name in found[0]])


def _code(text: str) -> str:
    return f"<td><code>{escape(text)}</code></td>"


def _table(first: str, names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    heads = "".join(f"<th>{letter(i)} {breakable(name)}</th>" for i, name in enumerate(names))
    head = f"<thead><tr><th>{first}</th>{heads}</tr></thead>"
    body = "".join(f"<tr><th scope=row>{name}</th>{''.join(cells)}</tr>" for name, cells in rows)
    return f"<div class=wide><table class=compared>{head}<tbody>{body}</tbody></table></div>"


def summary(runs: Sequence[RecordedRun], names: Sequence[str], figures: Sequence[Figure]) -> str:
    """Figures and options that differ, for a terminal."""
    lines = [*(f"{letter(i)}  {name}" for i, name in enumerate(names)), ""]
    rows = [["", *(letter(i) for i in range(len(names)))], *(_cells(each) for each in figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        right = (f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append(f"{name:<{widths[0]}}{''.join(right)}")
    found = differing(runs)
    lines += ["", f"{_differ(found)}{':' if found else ''}"]
    for path, values in list(found.items())[:_SHOWN_OPTIONS]:
        lines.append(f"  {path}" + "".join(f"  {letter(i)} {value}" for i, value in enumerate(values)))
    if len(found) > _SHOWN_OPTIONS:
        lines.append(f"  and {len(found) - _SHOWN_OPTIONS} more on the page")
    return "\n".join([*lines, *_notes(runs, names)])


def _differ(options: Mapping[str, Any]) -> str:
    return f"{len(options)} option{' differs' if len(options) == 1 else 's differ'}"


def _cells(figure: Figure) -> list[str]:
    shown = [_MISSING if value is None else figure.shown(value) for value in figure.values]
    if len(shown) == 2:  # more runs leave no room for differences; the page has them
        shown[1] = f"{shown[1]} {figure.beside_first(1)}".rstrip()
    return [figure.name, *shown]
