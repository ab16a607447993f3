"""A run as one self-contained HTML page: no network, no script, light and dark, wide and narrow screens.

Purpose: `write_report(run_dir)` reads a run's files and shows on one page: headline numbers, curves (inline SVG,
`jaxrl.report.charts`), the configuration, and samples to read.

Each input may be missing, and the page then says so:

- metrics.jsonl: one line per step (`jaxrl.record.metrics`);
- samples.jsonl: one line per shown sample (`jaxrl.record.samples` has its fields);
- layouts.jsonl: the layout over each rollout round, where it adapts (`jaxrl.record.layouts`);
- run.json: config (resolved), versions, commit, devices {platform, kind, count}, started, command.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from jaxrl.config import Config, flatten, to_mapping
from jaxrl.record.files import Removing, read_lines, refuse_file, write_whole
from jaxrl.record.host_timelines import merge_timelines
from jaxrl.record.layouts import FILE_NAME as LAYOUTS_FILE
from jaxrl.record.layouts import read_layouts
from jaxrl.record.live import duration
from jaxrl.record.metrics import FILE_NAME, ROUND_PHASES, hidden_shares, read_metrics, seconds_of, step_phases
from jaxrl.record.outputs import refuse_overwriting
from jaxrl.record.samples import FILE_NAME as SAMPLES_FILE
from jaxrl.report.charts import Chart, Curve, Point, breakable, card, finite, number
from jaxrl.report.layouts import layouts_section
from jaxrl.report.rewards import rewards_section
from jaxrl.report.samples import samples_section

RUN_FILE = "run.json"
PHASES = {  # in a step: label and colour of each
    "gen": ("gen", "c1"),
    "reward": ("reward", "c2"),
    "ahead": ("next rollout", "c10"),
    "stream": ("stream", "c11"),
    "old_log_prob": ("old_log_prob", "c3"),
    "ref": ("ref", "c4"),
    "testing": ("testing", "c5"),
    "update_actor": ("update_actor", "c6"),
    "sync": ("sync", "c7"),
    "save": ("save", "c8"),
}


@dataclass(frozen=True, slots=True)
class Run:
    """What was found in a run's folder; `problems` says what could not be read."""

    folder: Path
    metrics: list[dict[str, float]]
    samples: list[dict[str, Any]]
    layouts: list[dict[str, Any]]
    info: Mapping[str, Any]
    problems: list[str]

    def series(self, name: str) -> list[Point]:
        """(step, value) where the metric was recorded."""
        return [(row["step"], row[name]) for row in self.metrics if name in row]

    def section(self, name: str) -> Mapping[str, Any]:
        """A part of run.json; empty where it is missing or not a mapping."""
        value = self.info.get(name)
        return value if isinstance(value, Mapping) else {}

    def option(self, path: str) -> Any:
        return flatten(self.section("config")).get(path)


def write_report(run_dir: str | Path, out: str | Path | None = None, removing: Removing = nullcontext) -> Path:
    """Writes the page (default: `report.html` in the run's folder, and several hosts' timelines as one beside it) and
    returns where it is."""
    if out is not None:
        refuse_file(out, "--out")
        refuse_overwriting(out, "--out")
    run = read_run(run_dir)
    target = Path(out) if out is not None else run.folder / "report.html"
    write_whole(target, page(run), removing=removing)
    if out is None:
        merge_timelines(run.folder)
    return target


def read_run(run_dir: str | Path) -> Run:
    """Reads a run's folder; ValueError if it is not one."""
    folder = Path(run_dir)
    if not any((folder / name).is_file() for name in (FILE_NAME, SAMPLES_FILE, RUN_FILE)):
        raise ValueError(f"{folder} is not a run: it has none of {FILE_NAME}, {SAMPLES_FILE}, {RUN_FILE}")
    problems: list[str] = []

    def attempt(read: Callable[[Path], Any], name: str, otherwise: Any) -> Any:
        if not (folder / name).is_file():
            problems.append(f"{name} is missing")
            return otherwise
        try:
            value = read(folder / name)
            if type(value) is not type(otherwise):
                raise ValueError("must hold an object")
            return value
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{name} could not be read: {error}")
            return otherwise

    metrics = attempt(lambda _: read_metrics(folder), FILE_NAME, [])
    if not metrics and not problems:
        problems.append("no step has been finished yet")
    info = attempt(lambda path: json.loads(path.read_text(encoding="utf-8")), RUN_FILE, {})
    samples = attempt(_read_samples, SAMPLES_FILE, [])
    adapts = os.path.lexists(folder / LAYOUTS_FILE)
    layouts = attempt(lambda _: read_layouts(folder), LAYOUTS_FILE, []) if adapts else []
    return Run(folder, metrics, samples, layouts, info, problems)


def _read_samples(path: Path) -> list[dict[str, Any]]:
    samples = read_lines(path, lambda line: json.loads(line.decode(errors="replace")))
    return [sample for sample in samples if isinstance(sample, dict) and isinstance(sample.get("step"), int | float)]


# ---------------------------------------------------------------- the page


def page(run: Run) -> str:
    """The whole page."""
    name = str(run.option("trainer.experiment_name") or run.folder.resolve().name)
    problems = "".join(f"<p class=note>{escape(text)}</p>" for text in run.problems)
    span = (run.metrics[0]["step"], run.metrics[-1]["step"]) if run.metrics else None
    charts = "".join(card(replace(chart, span=span)) for chart in _charts(run))
    return document(
        name,
        _subtitle(run),
        f"{problems}{_headlines(run)}<section class=charts>{charts}</section>{rewards_section(run.metrics, span)}"
        f"{layouts_section(run.layouts)}<h2>Samples</h2>{samples_section(run.samples)}"
        f"<h2>Configuration</h2>{_config(run)}<h2>Where and when</h2>{_facts(run)}",
    )


def document(name: str, subtitle: str, body: str) -> str:
    """A page in the report's style. `name` is text; `subtitle` and `body` are HTML."""
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{escape(name)} · jaxrl</title><style>{_STYLE}</style></head><body><main>"
        f"<header><h1>{escape(name)}</h1><p class=sub>{subtitle}</p></header>{body}</main></body></html>\n"
    )


def _subtitle(run: Run) -> str:
    devices = run.section("devices")
    parts = [
        run.option("model.path"),
        run.option("algorithm.adv_estimator"),
        " ".join(str(devices[k]) for k in ("count", "kind") if k in devices).replace(" ", " × ", 1),
        run.info.get("started"),
    ]
    return " · ".join(escape(str(part)) for part in parts if part) or "no run.json"


def _headlines(run: Run) -> str:
    last = run.metrics[-1]["step"] if run.metrics else 0
    total = run.option("trainer.total_training_steps")
    cells = [("steps", f"{last:g}" + (f" of {total}" if isinstance(total, int) and total >= last > 0 else ""), "")]
    if reward := finite(run.series("critic/rewards/mean")):
        tenth = max(len(reward) // 10, 1)
        first, end = (fmean(y for _, y in part) for part in (reward[:tenth], reward[-tenth:]))
        cells.append(("reward", number(end), f"from {number(first)}"))
    for key in _validation_names(run)[:2]:
        if points := finite(run.series(key)):
            best = max(points, key=lambda point: point[1])
            note = f"{_short(key)}; best {number(best[1])} at step {best[0]:g}"
            cells.append(("held-out", number(points[-1][1]), note))
    if throughput := finite(run.series("perf/throughput")):
        cells.append(("tokens/s/device", number(median(y for _, y in throughput)), "median"))
    if seconds := finite(run.series("timing_s/step")):
        whole = sum(value for _, value in seconds)
        cells.append(("seconds per step", number(median(y for _, y in seconds)), f"median; {duration(whole)} in all"))
    if hidden := finite(hidden_shares(run.metrics)):
        share = median(y for _, y in hidden)
        cells.append(("update hidden", f"{share:.0%}", "under the rollout, of its seconds; median"))
    if tokens := finite(run.series("perf/total_num_tokens")):
        cells.append(("tokens", number(sum(value for _, value in tokens)), "in all steps"))
    items = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class=sub>{breakable(note)}</dd></div>"
        for name, value, note in cells
    )
    return f"<dl class=headlines>{''.join(items)}</dl>"


def _validation_names(run: Run) -> list[str]:
    """The scores among the evaluation metrics, accuracy first."""
    names = {name for row in run.metrics for name in row if name.startswith("val")}
    scores = [name for name in names if not any(word in name for word in ("length", "timing", "num_"))]
    return sorted(scores, key=lambda name: ("acc" not in name, name))


def _charts(run: Run) -> list[Chart]:
    def curve(label: str, name: str, colour: str = "c1") -> list[Curve]:
        return [Curve(label, points, colour)] if (points := run.series(name)) else []

    reward, idle = curve("mean", "critic/rewards/mean"), curve("idle", "rollout/bubble_ratio")
    band = (run.series("critic/rewards/min"), run.series("critic/rewards/max"))
    limit = run.option("data.max_response_length")
    lengths = [
        *curve("median", "response_length/p50"),
        *curve("mean", "response_length/mean", "c4"),
        *curve("95 %", "response_length/p95", "c2"),
        *curve("longest", "response_length/max", "c3"),
    ]
    if lengths and isinstance(limit, int | float):
        lengths.append(Curve("limit", [(step, limit) for step, _ in lengths[0].points], "c9", limit=True))
    names = _validation_names(run)[:4]
    held_out = [Curve(_short(name), run.series(name), f"c{i + 1}", dots=True) for i, name in enumerate(names)]
    kl = curve("ppo_kl", "actor/ppo_kl") + curve("kl_loss", "actor/kl_loss", "c2")
    return [
        Chart("Reward", "per step", reward, "critic/rewards/mean", band=band),
        Chart("Held-out", "at evaluations", held_out, "val/* (trainer.test_freq is 0, or none was due yet)"),
        Chart("Response length", "tokens", lengths, "response_length/*"),
        Chart("Step time by phase", "seconds", _one_by_one(run), "timing_s/*", stack=_phases(run)),
        *_by_round(run),
        *_hidden(run),
        *_drafts(run),
        *_ranked(run),
        *_of_hosts(run),
        Chart("Idle row-slots in rollout", "share", idle, "rollout/bubble_ratio", top=1),
        Chart("Throughput", "tokens/s/device", curve("throughput", "perf/throughput"), "perf/throughput"),
        Chart("Entropy", "nats per token", curve("entropy", "actor/entropy"), "actor/entropy"),
        Chart("KL", "nats per token", kl, "actor/ppo_kl, actor/kl_loss", from_zero=False),
        Chart("Gradient norm", "before clipping", curve("grad norm", "actor/grad_norm"), "actor/grad_norm"),
    ]


def _by_round(run: Run) -> list[Chart]:
    """Charts of rollout time and longest response by kind of round, and of the queue; none without long rounds."""
    is_long = dict(run.series("rollout/long_round"))
    if not any(is_long.values()):
        return []

    def dots(series: list[Point]) -> list[Curve]:
        kinds = ((0.0, "short", "c1"), (1.0, "long", "c2"))
        points = {kind: [(step, y) for step, y in series if is_long.get(step) == kind] for kind, *_ in kinds}
        return [Curve(label, points[kind], colour, dots=True, line=False) for kind, label, colour in kinds]

    rollout_s = [(row["step"], seconds_of(ROUND_PHASES, row)) for row in run.metrics if "timing_s/gen" in row]
    queue = [
        Curve("prompts that wait", run.series("rollout/queue_length")),
        Curve("longest wait, steps", run.series("rollout/queue_age_steps/max"), "c2"),
    ]
    return [
        Chart("Rollout time by round", "seconds", dots(rollout_s), "timing_s/gen"),
        Chart("Longest response by round", "tokens", dots(run.series("response_length/max")), "response_length/max"),
        Chart("Long-prompt queue", "prompts, steps", queue, "rollout/queue_length"),
    ]


def _hidden(run: Run) -> list[Chart]:
    """How much of the update ran beside a rollout; none where nothing could."""
    if not (seconds := hidden_shares(run.metrics)):
        return []
    curves = [Curve("of its seconds", seconds)]
    if prompts := run.series("actor/streamed_share"):
        curves.append(Curve("of its prompts", prompts, "c2"))
    return [Chart("Update hidden under the rollout", "share", curves, "rollout/scale_down/hidden_s", top=1)]


def _drafts(run: Run) -> list[Chart]:
    """What speculation brought, with the steps at which an epoch begins; none where it is off."""
    if not run.series("rollout/spec/accept_rate"):
        return []
    shares = [
        Curve("accepted, of those drafted", run.series("rollout/spec/accept_rate")),
        Curve("of decoded tokens from drafts", run.series("rollout/spec/drafted_share"), "c2"),
        Curve("of plans that verify", run.series("rollout/spec/plans_share"), "c4"),
    ]
    tokens = [Curve("tokens", run.series("rollout/spec/tokens_per_step"))]
    charts = [
        Chart("Drafts from history", "share", shares, "rollout/spec/accept_rate", top=1),
        Chart("Tokens of a step that verifies", "per row", tokens, "rollout/spec/tokens_per_step"),
    ]
    return [_with_epochs(run, chart) for chart in charts]


def _ranked(run: Run) -> list[Chart]:
    """How busy ranking groups have kept the workers; none where they are off."""
    if not run.series("rollout/ranking/idle_share"):
        return []
    shares = [
        Curve("of workers' time idle", run.series("rollout/ranking/idle_share")),
        Curve("of responses moved", run.series("rollout/ranking/moved_share"), "c2"),
        Curve("begun in an earlier round", run.series("rollout/ranking/carried_share"), "c4"),
    ]
    return [_with_epochs(run, Chart("Workers of ranking groups", "share", shares, "rollout/ranking/*", top=1))]


def _of_hosts(run: Run) -> list[Chart]:
    """What several hosts cost process 0, and in a simulated run the devices; none with one host."""
    names = {
        "devices idle for the order": "hosts/order_wait_s",
        "process 0 waits for others": "hosts/waited_s",
        "telling each other": "hosts/stream_s",
        "exchange of tokens": "hosts/exchange_s",
        "gates": "hosts/gate_s",
    }
    found = [(label, points) for label, name in names.items() if (points := run.series(name))]
    curves = [Curve(label, points, f"c{place + 1}") for place, (label, points) in enumerate(found)]
    return [Chart("Several hosts", "seconds", curves, "hosts/*")] if curves else []


def _with_epochs(run: Run, chart: Chart) -> Chart:
    """The chart, with the steps at which an epoch begins."""
    newest = run.series("training/epoch")
    begun = [step for (_, before), (step, epoch) in pairwise(newest) if epoch > before]
    return replace(chart, marks=begun, mark="an epoch begins")


def _phases(run: Run) -> list[Curve]:
    """Phases as layers, those that ran in the step and each moment once; the rest of the step's time is "other"."""
    whole = dict(finite(run.series("timing_s/step")))
    parts = {row["step"]: step_phases(row) for row in run.metrics}
    found = [(name, dict(finite([(s, of[name]) for s, of in parts.items() if name in of]))) for name in PHASES]
    found = [(name, seconds) for name, seconds in found if seconds]
    if not found:
        return [Curve("step", list(whole.items()))] if whole else []
    steps = sorted(whole.keys() | set().union(*(seconds.keys() for _, seconds in found)))
    layers = [
        Curve(PHASES[name][0], [(step, seconds.get(step, 0.0)) for step in steps], PHASES[name][1])
        for name, seconds in found
    ]
    other = [(s, max(whole.get(s, 0.0) - sum(seconds.get(s, 0.0) for _, seconds in found), 0.0)) for s in steps]
    return [*layers, Curve("other", other, "c9")] if any(value > 0 for _, value in other) else layers


def _one_by_one(run: Run) -> list[Curve]:
    """Where rollout and update ran at the same time: what the steps would have taken in turns."""
    both = [(row["step"], seconds_of(("step", "overlap"), row)) for row in run.metrics if "timing_s/overlap" in row]
    return [Curve("in turns", both, "c10", limit=True)] if both else []


def _config(run: Run) -> str:
    config = run.section("config")
    if not config:
        return "<p class=note>run.json does not hold the configuration.</p>"
    defaults, found = flatten(to_mapping(Config())), flatten(config)
    changed = [(key, value, defaults.get(key)) for key, value in found.items() if value != defaults.get(key)]
    rows = "".join(
        f"<tr><td><code>{breakable(key)}</code></td><td><code>{escape(str(value))}</code></td>"
        f"<td class=sub><code>{escape(str(default))}</code></td></tr>"
        for key, value, default in changed
    )
    head = "<thead><tr><th>Option</th><th>Value</th><th>Default</th></tr></thead>"
    count = f"<p class=sub>{len(changed)} of {len(found)} options differ from their defaults.</p>"
    return f"{count}<table class=config>{head}<tbody>{rows}</tbody></table>"


def _facts(run: Run) -> str:
    devices, versions, command = run.section("devices"), run.section("versions"), run.info.get("command")
    facts = [
        ("command", " ".join(map(str, command)) if isinstance(command, list) else command),
        ("started", run.info.get("started")),
        ("commit", run.info.get("commit")),
        ("devices", " ".join(str(devices[k]) for k in ("count", "platform", "kind") if k in devices)),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("folder", run.folder.resolve()),
    ]
    rows = "".join(
        f"<tr><th scope=row>{name}</th><td><code>{escape(str(value) if value else 'not recorded')}</code></td></tr>"
        for name, value in facts
    )
    return f"<table class=facts><tbody>{rows}</tbody></table>"


def _short(name: str) -> str:
    """`val-core/gsm8k/acc/mean@1` as `gsm8k/acc/mean@1`."""
    return name.partition("/")[2] or name


_STYLE = """
:root{color-scheme:light dark;--bg:#fbfaf8;--card:#fff;--ink:#1d1f23;--soft:#62666e;--rule:#e4e2dd;--c1:#2563a8;
--c2:#c2571a;--c3:#2f855a;--c4:#8554b0;--c5:#b8871b;--c6:#c23b5a;--c7:#16899c;--c8:#5b4bb5;--c9:#8b8f97;--c10:#8fb8de;
--c11:#a3b84a}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1d2024;--ink:#e8e6e1;--soft:#a2a6ae;--rule:#33373d;
--c1:#6ea8e8;--c2:#f0935a;--c3:#63c08f;--c4:#bb92e0;--c5:#dfb655;--c6:#ec7590;--c7:#5cc3d4;--c8:#9d8ff0;--c9:#858a93;--c10:#3f6f9f;
--c11:#7f9136}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);
font:16px/1.5 system-ui,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans","DejaVu Sans",sans-serif;
-webkit-text-size-adjust:100%;overflow-wrap:anywhere}main{max-width:1180px;margin:0 auto;padding:32px 20px 64px}h1{
font-size:1.75rem;line-height:1.2;margin:0}h2{font-size:1.2rem;margin:44px 0 12px}h3{font-size:1rem;margin:0}small{
font-weight:400;color:var(--soft)}p{margin:0}.sub{color:var(--soft);font-size:.875rem}.note{color:var(--soft);
border-left:3px solid var(--c5);padding:4px 12px;margin:12px 0}.headlines{display:grid;
grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:16px 24px;margin:24px 0 28px}.headlines dt{
color:var(--soft);font-size:.875rem}.headlines dd{margin:0}.headlines dd:not(.sub){font-size:1.75rem;line-height:1.2;
font-weight:600;font-variant-numeric:tabular-nums}.charts{display:grid;
grid-template-columns:repeat(auto-fill,minmax(min(320px,100%),1fr));gap:16px}figure{margin:0;background:var(--card);
border:1px solid var(--rule);border-radius:8px;padding:14px 14px 8px;display:flex;flex-direction:column}figure ul{
list-style:none;margin:2px 0 6px;padding:0;display:flex;flex-wrap:wrap;gap:0 12px;min-height:1.3em;font-size:.8125rem;
color:var(--soft)}figure li::before{content:"";display:inline-block;width:10px;height:10px;border-radius:2px;
margin-right:5px;background:var(--c)}figure li.faint::before{opacity:.3}figure li.dash::before{height:0;
border-radius:0;border-top:2px dashed var(--ink);background:none;vertical-align:middle}figure li.mark::before{
width:0;border-radius:0;border-left:2px dotted var(--soft);background:none;vertical-align:-1px}.none{color:var(--soft);
font-size:.875rem;margin:auto;padding:40px 16px;text-align:center}svg{display:block;width:100%;height:auto;
margin-top:auto}svg text{font-size:11.5px;fill:var(--soft);font-variant-numeric:tabular-nums}.grid{stroke:var(--rule);
stroke-width:1}.mark{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 3}.line{fill:none;stroke:var(--c);
stroke-width:1.8;stroke-linejoin:round}.line.dash{stroke-dasharray:5 4;stroke:var(--ink)}
rect,circle{fill:var(--c)}.band{fill:var(--c);opacity:.14}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{
--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}.c6{--c:var(--c6)}.c7{--c:var(--c7)}.c8{--c:var(--c8)}.c9{
--c:var(--c9)}.c10{--c:var(--c10)}.c11{--c:var(--c11)}
table{width:100%;border-collapse:collapse;font-size:.9375rem}th{text-align:left;font-weight:600}thead th{
color:var(--soft);font-size:.8125rem}td,th{padding:7px 16px 7px 0;border-bottom:1px solid var(--rule);
vertical-align:top}.step th{padding-top:20px}.num{font-variant-numeric:tabular-nums}code,pre{
font:.8438rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}pre{margin:0;
white-space:pre-wrap;max-height:20em;overflow:auto}.samples{table-layout:fixed}.samples th:nth-child(1){width:34%}
.samples th:nth-child(3){width:140px}.samples th:nth-child(4){width:150px}.facts th{width:110px;color:var(--soft);
font-weight:400}@media(max-width:640px){main{padding:20px 14px 48px}h1{font-size:1.4rem}.headlines{
grid-template-columns:1fr 1fr}.headlines dd:not(.sub){font-size:1.4rem}.samples thead{display:none}
.samples,.samples tbody,.samples tr,.samples td,.samples th{display:block;width:auto}.samples tr{
border-bottom:1px solid var(--rule);padding:8px 0}.samples td,.samples th{border:0;padding:3px 0}.samples td::before{
content:attr(data-label);color:var(--soft);font-size:.8125rem;display:block}.samples .num{display:inline-block;
margin-right:28px}.config td:nth-child(3),.config th:nth-child(3){display:none}}
"""
