"""A run as one self-contained HTML page: no network, light and dark, wide and narrow screens. A file that is missing is
named on the page. A small script sorts and filters the samples; the rest of the page needs none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from statistics import median

from jaxrl.config import Config, flatten, to_mapping
from jaxrl.config.checks import is_read
from jaxrl.record.batches import reward_failures
from jaxrl.record.files import write_whole
from jaxrl.record.metrics import FAILURES, duration, hidden_shares, number
from jaxrl.record.run_dir import refuse_overwriting
from jaxrl.report.charts import breakable, card, finite
from jaxrl.report.curves import PagePart, charts, short, validation_names
from jaxrl.report.drawings import histogram_card, last_round, prompts_card, rows_card
from jaxrl.report.figures import summed
from jaxrl.report.rewards import rewards_section
from jaxrl.report.runs import RecordedRun, devices, facts, option_text, read_run
from jaxrl.report.samples import samples_section
from jaxrl.report.style import document
from jaxrl.report.verdicts import verdicts_box

ALARMING = 0.02
"""The share of failed rewards from which on the page says so in the colour of alarms."""


def write_report(
    run_dir: str | Path,
    out: str | Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    parts: Sequence[PagePart] = (),
) -> Path:
    """Writes the page (default: `report.html` in the run's folder). The page and `say` name what cannot be read."""
    if out is not None:
        refuse_overwriting(out, "--out")
    run = read_run(run_dir)
    for problem in run.problems:
        say(f"{run_dir}: {problem}")
    target = Path(out) if out is not None else run.folder / "report.html"
    write_whole(target, page(run, parts))
    return target


def page(run: RecordedRun, parts: Sequence[PagePart] = ()) -> str:
    name = str(run.option("trainer.experiment_name") or run.folder.resolve().name)
    problems = "".join(f"<p class=note>{escape(text)}</p>" for text in run.problems)
    span = (run.metrics[0]["step"], run.metrics[-1]["step"]) if run.metrics else None
    drawn = "".join(card(replace(chart, span=span)) for chart in charts(run, parts))
    samples = "" if run.learns_from_files else f"<h2>Samples</h2>{samples_section(run.samples)}"
    return document(
        name,
        _subtitle(run),
        f"{_failed(run)}{problems}{_simulated(run)}{_headlines(run)}{verdicts_box(run)}<section class=charts>{drawn}"
        f"{histogram_card(run.batches)}{prompts_card(run.batches)}</section>"
        f"{rows_card(*last_round(run.folder / 'timeline.json'))}{rewards_section(run, span)}"
        f"{''.join(part.section(run) for part in parts)}{samples}"
        f"<h2>Configuration</h2>{_config(run)}<h2>Where and when</h2>{_facts(run)}",
    )


def _failed(run: RecordedRun) -> str:
    """The page's first message: how many rewards failed, and why."""
    found = reward_failures(run.metrics, run.batches)
    if found is None:
        return ""
    kinds = ", ".join(f"{count} {FAILURES[name][count > 1]}" for name, count in found.kinds.items())
    text = f"<b>{found.failed} of {found.scored} rewards failed</b> and count as 0: {kinds}."
    if found.most:
        text += f" Most often: <code>{breakable(found.most)}</code>."
    if (run.folder / "rewards.log").is_file():
        text += " What the reward printed, with tracebacks, is in rewards.log."
    return f"<p class='note{' alarm' if found.share >= ALARMING else ''}'>{text}</p>"


def _simulated(run: RecordedRun) -> str:
    if not run.is_simulated:
        return ""
    found = run.section("simulation")
    parts = [f"{name.replace('_', ' ')}: {found[name]}" for name in ("cost_model", "workload") if name in found]
    text = "; ".join(["All seconds are simulated: of modelled devices, not measured", *parts])
    return f"<p class=note>{escape(text)}.</p>"


def _model(run: RecordedRun) -> str:
    return str((run.option("simulate.model") if run.is_simulated else "") or run.option("model.path") or "")


def _subtitle(run: RecordedRun) -> str:
    parts = [
        f"simulated {_model(run)}".strip() if run.is_simulated else _model(run),
        run.info.get("kind") if run.learns_from_files else run.option("algorithm.adv_estimator"),
        devices(run),
        run.info.get("started"),
    ]
    return " · ".join(escape(str(part)) for part in parts if part) or "no run.json"


def _headlines(run: RecordedRun) -> str:
    last = run.metrics[-1]["step"] if run.metrics else 0
    total = run.option("trainer.total_training_steps")
    cells = [("steps", f"{last:g}" + (f" of {total}" if isinstance(total, int) and total >= last > 0 else ""), "")]
    reward = run.series("critic/rewards/mean")
    if (first := summed(reward, "first")) is not None and (end := summed(reward, "last")) is not None:
        cells.append(("reward", number(end), f"from {number(first)}"))
    if loss := finite(run.series("train/loss")):
        cells.append(("loss", number(loss[-1][1]), f"from {number(loss[0][1])}"))
    for key in validation_names(run)[:2]:
        if points := finite(run.series(key)):
            best = (min if key.endswith("loss") else max)(points, key=lambda point: point[1])
            since = f"from {number(points[0][1])}, " if len(points) > 1 else ""
            note = f"{short(key)}; {since}best {number(best[1])} at step {best[0]:g}"
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


def _config(run: RecordedRun) -> str:
    config = run.section("config")
    if not config:
        return "<p class=note>run.json does not hold the configuration.</p>"
    defaults, kind = flatten(to_mapping(Config())), str(run.info.get("kind"))
    found = {path: value for path, value in flatten(config).items() if is_read(path, kind)}
    changed = [(key, value, defaults.get(key)) for key, value in found.items() if value != defaults.get(key)]
    rows = "".join(
        f"<tr><td><code>{breakable(key)}</code></td><td><code>{escape(option_text(value))}</code></td>"
        f"<td class=sub><code>{escape(option_text(default))}</code></td></tr>"
        for key, value, default in changed
    )
    head = "<thead><tr><th>Option</th><th>Value</th><th>Default</th></tr></thead>"
    count = f"<p class=sub>{len(changed)} of {len(found)} options that it reads differ from their defaults.</p>"
    return f"{count}<table class=config>{head}<tbody>{rows}</tbody></table>"


def _facts(run: RecordedRun) -> str:
    rows = "".join(
        f"<tr><th scope=row>{name}</th><td><code>{escape(str(value) if value else 'not recorded')}</code></td></tr>"
        for name, value in facts(run).items()
    )
    return f"<table class=facts><tbody>{rows}</tbody></table>"
