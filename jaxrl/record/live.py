"""The live view of a run: what happens now, and one line per finished step.

On a terminal, a panel (drawn with rich) stands under the lines. Elsewhere (a file, a pipe, TERM=dumb) there are the
lines alone, in plain characters, and after half a minute without one what the run is doing and how far it has come. A
thread checks that, because the run prints nothing while it compiles or computes.

The view never stops a run: a missing metric is left out, and a closed output only silences the view.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, SupportsFloat, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from jaxrl.record.metrics import FAILURES, PHASES, SHOWN, step_phases

_SHOWN_S = 0.05  # a phase that took less is not
_SILENT_S, _SILENT_FIRST_S = 30.0, 10.0  # for which a log may say nothing, and that before the first step
_BEGUN_S = 3.0  # a phase that has taken less is not what the silence was about
_LOOK_S = 1.0
_MANY_CUT = 0.5  # a share of the responses
_RECENT_STEPS = 10
_COMPILED = ("rollout/recompiles", "actor/recompiles")
_COUNT = re.compile(r" \d+/\d+$")
# terminal sequences (colours, cursor, window titles), then any control character that is left
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class LiveView:
    """Shows a run on `stream`.

    Args:
      total_steps: the run's last step; 0: not known, and no time left is shown.
      done: the steps before a resumed run's first.
      every: by phase, the steps between two times that it is due ("testing", "save").
      clock: in seconds.
    """

    def __init__(
        self,
        total_steps: int,
        stream: TextIO = sys.stdout,
        *,
        done: int = 0,
        every: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._stream, self._clock = total_steps, stream, clock
        self._lock = threading.RLock()
        self._phase_name, self._phase_since = "starting", clock()
        self._rollout: tuple[int, int, float, int, int] | None = None
        self._waiting: tuple[int, str, float] | None = None
        self._last_step = done
        self._last_metrics: Mapping[str, float] = {}
        self._estimator = EtaEstimator(total_steps, every or {})
        self._last_step_at: float | None = None
        self._printed_at = clock()
        self._alarms = {"updates skipped": 0, "rewards failed": 0}  # since the start
        self._no_gradient = False  # in the last step
        self._muted = False
        self._live: Live | None = None
        self._console: Console | None = None
        self._closed = threading.Event()
        self._looking: threading.Thread | None = None
        if _is_terminal(stream):
            self._console = Console(file=stream, highlight=False)
            live = self._live = Live(
                get_renderable=self._panel,
                console=self._console,
                refresh_per_second=4,
                transient=True,
                # other output goes above the panel, but only output that would have reached this terminal anyway
                redirect_stdout=stream is sys.stdout,
                redirect_stderr=_is_terminal(sys.stderr),
            )
            live.start()

    def phase(self, name: str) -> None:
        with self._lock:
            if _COUNT.sub("", name) != _COUNT.sub("", self._phase_name):  # a new count is the same phase
                self._phase_since = self._clock()
            self._phase_name, self._rollout = name, None
            self._log_progress()
            if self._looking is None and self._console is None and not self._closed.is_set():
                self._looking = threading.Thread(target=self._look, name="live view", daemon=True)
                self._looking.start()

    def rollout(self, rows_busy: int, rows_total: int, tokens_per_s: float, finished: int, total: int) -> None:
        with self._lock:
            self._rollout = (rows_busy, rows_total, tokens_per_s, finished, total)
            self._log_progress()

    def waiting(self, count: int, longest: str, since_s: float) -> None:
        """`count` turns wait for their environments' answers, the `longest` since `since_s`."""
        with self._lock:
            self._waiting = (count, longest, since_s) if count else None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the line of a finished step, and why its gradient is 0 if it is."""
        with self._lock:
            now = self._clock()
            seconds = _finite(metrics.get("timing_s/step"))
            if seconds is None and self._last_step_at is not None:
                seconds = now - self._last_step_at
            self._estimator.step(step, seconds, metrics)
            self._last_step, self._last_metrics, self._last_step_at = step, metrics, now
            for name, count in alarms_of(metrics).items():
                self._alarms[name] += count
            self._print(_step_line(step, self._total, metrics, self._eta(0.0)))
            why = _no_gradient(metrics)
            if why and not self._no_gradient:  # the steps that follow would say the same
                self._print(f"step {step}: {why}")
            self._no_gradient = bool(why)

    def message(self, text: str) -> None:
        with self._lock:
            self._print(text)

    def final_table(self, rows: Mapping[str, Any]) -> None:
        self.close()
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            self._print(f"{name:<{width}}  {_value(value)}")

    def close(self) -> None:
        """Gives the terminal back; may be called twice."""
        self._closed.set()
        if self._looking is not None:
            self._looking.join()
        live, self._live = self._live, None
        if live is not None:
            try:
                live.stop()
            except (OSError, ValueError):  # the terminal has gone away
                self._muted = True

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_S):
            with self._lock:
                self._log_progress()

    def _log_progress(self) -> None:
        now = self._clock()
        silent_s = _SILENT_S if self._last_step_at is not None else _SILENT_FIRST_S
        if self._console is not None or now - self._printed_at < silent_s or now - self._phase_since < _BEGUN_S:
            return
        parts = [f"step {self._next_step()}: {self._phase_name}", duration(now - self._phase_since)]
        if self._rollout is not None:
            busy, rows, tokens_per_s, finished, total = self._rollout
            parts += [f"finished {finished}/{total}", f"rows {busy}/{rows}", f"{_value(float(tokens_per_s))} tokens/s"]
        if self._waiting is not None:
            parts.append(self._waiting_text(now))
        self._print("  ".join(parts))

    def _waiting_text(self, now_s: float) -> str:
        assert self._waiting is not None
        count, longest, since_s = self._waiting
        return f"{count} wait for answers, longest {longest}: {duration(now_s - since_s)}"

    def _next_step(self) -> str:
        step = min(self._last_step + 1, self._total) if self._total else self._last_step + 1
        return f"{step}/{self._total}" if self._total else f"{step}"

    def _print(self, text: str) -> None:
        self._printed_at = self._clock()
        if self._muted:
            return
        try:
            if self._console is not None:
                self._console.print(Text(_clean(text)))
            else:
                encoding = getattr(self._stream, "encoding", None) or "utf-8"
                # a log in ASCII must not end the run over a letter
                self._stream.write(_clean(text).encode(encoding, "replace").decode(encoding) + "\n")
                self._stream.flush()
        except (OSError, ValueError):  # a closed pipe or file does not end the run
            self._muted = True

    def _eta(self, since_s: float) -> str:
        """Empty where nothing is known, or left."""
        if not (seconds := self._estimator.seconds()):
            return ""
        return f"eta {'under ' if self._estimator.is_bound else ''}{duration(max(seconds - since_s, 0))}"

    def _panel(self) -> Group:
        """Called by rich's thread."""
        with self._lock:
            now = self._clock()
            head = Text.assemble(
                ("step ", "dim"),
                (self._next_step(), "bold"),
                ("   phase ", "dim"),
                (self._phase_name, "bold cyan"),
                (f" {duration(now - self._phase_since)}", "dim"),
            )
            if (reward := _finite(self._last_metrics.get("critic/rewards/mean"))) is not None:
                head.append("   reward ", "dim").append(_value(reward), "bold green")
            if eta := self._eta(now - (self._last_step_at or now)):
                head.append(f"   {eta}", "dim")
            lines: list[Any] = [head]
            if self._rollout is not None:
                lines.append(_rollout_line(*self._rollout))
            if self._waiting is not None:
                lines.append(Text(_clean(self._waiting_text(now)), style="dim"))
            if (state := self._state_line()).plain:
                lines.append(state)
            if self._total:
                lines.append(ProgressBar(total=self._total, completed=self._last_step, width=48))
            return Group(*lines)

    def _state_line(self) -> Text:
        """The gradient of the last step, and alarms since the start: in red, with their number, if it had any."""
        line = Text()
        if (norm := self._last_metrics.get("actor/grad_norm")) is not None:
            line.append("grad norm ", "dim").append(_value(norm), "" if _finite(norm) is not None else "bold red")
        last = alarms_of(self._last_metrics)
        for name, count in self._alarms.items():
            if count:
                text = f"{name} {count}" + (f" (+{last[name]})" if name in last else "")
                line.append("   " if line.plain else "").append(text, "bold red" if name in last else "dim")
        return line


def _rollout_line(busy: int, rows: int, tokens_per_s: float, finished: int, total: int) -> Text:
    cells = 16
    filled = round(cells * busy / rows) if rows > 0 else 0
    return Text.assemble(
        ("rows ", "dim"),
        ("█" * filled, "cyan"),
        ("░" * (cells - filled), "dim"),
        f" {busy}/{rows}   ",
        ("tokens/s ", "dim"),
        _value(float(tokens_per_s)),
        ("   finished ", "dim"),
        f"{finished}/{total}",
    )


class EtaEstimator:
    """Estimates a run's remaining seconds from its finished steps.

    The first step after a start compiles programs, and so does one that reports recompilations: they count only while
    there is no other, and the estimate is an upper bound then. Phases that come every few steps (`every`) are taken out
    of a step's seconds and added for as often as they are due.
    """

    def __init__(self, total_steps: int, every: Mapping[str, int]) -> None:
        self._total, self._every = total_steps, {name: steps for name, steps in every.items() if steps > 0}
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)  # seconds of steps, without what is due now and then
        self._compiling: float | None = None  # of the fastest step that also compiled
        self._due: dict[str, float] = {}  # seconds of each such phase, the last time
        self._last_step, self._num_steps = 0, 0

    def step(self, step: int, seconds: float | None, metrics: Mapping[str, float]) -> None:
        self._last_step, self._num_steps = step, self._num_steps + 1
        if seconds is None:
            return
        for name in self._every:
            took_s = _finite(metrics.get(f"timing_s/{name}")) or 0.0
            if took_s > 0:
                self._due[name] = took_s
                seconds -= took_s
        seconds = max(seconds, 0.0)
        if self._num_steps == 1 or any((_finite(metrics.get(name)) or 0.0) > 0 for name in _COMPILED):
            self._compiling = seconds if self._compiling is None else min(self._compiling, seconds)
        else:
            self._recent.append(seconds)

    @property
    def is_bound(self) -> bool:
        """Whether all steps so far also compiled, so that the rest takes less."""
        return not self._recent

    def seconds(self) -> float | None:
        """From the end of the last step; None where nothing is known."""
        each_s = fmean(self._recent) if self._recent else self._compiling
        if not self._total or each_s is None:
            return None
        left = max(self._total - self._last_step, 0)
        found = left * each_s
        for name, took_s in self._due.items() if left else ():
            every = self._every[name]
            found += (-(-self._total // every) - self._last_step // every) * took_s  # and after the last step
        return found


def duration(seconds: float) -> str:
    """`7s`, `3m05s`, `2h10m`, `3d04h`: two units at most."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    for size, name, part, part_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{name}{whole % size // part:02d}{part_name}"
    return f"{whole}s"


def alarms_of(metrics: Mapping[str, float]) -> dict[str, int]:
    failed = (_finite(metrics.get(f"reward/{kind}")) or 0.0 for kind in FAILURES)
    skipped = _finite(metrics.get("actor/skipped_updates")) or 0.0
    return {name: int(n) for name, n in (("updates skipped", skipped), ("rewards failed", sum(failed))) if n > 0}


def _no_gradient(metrics: Mapping[str, float]) -> str:
    """Why a step has taught nothing; empty where it has, or where no actor was updated."""
    if metrics.get("actor/grad_norm") != 0 or metrics.get("actor/skipped_updates"):
        return ""
    text = "the gradient is 0"
    if metrics.get("critic/mixed_reward_groups") == 0:
        text += ": no group's rewards differ"
    cut = _finite(metrics.get("response_length/clip_ratio")) or 0.0
    if cut >= _MANY_CUT:
        whose = "all responses" if cut == 1 else f"{cut:.0%} of the responses"
        text += f"; {whose} were cut at data.max_response_length"
    return text


def _step_line(step: int, total: int, metrics: Mapping[str, float], eta: str) -> str:
    """`step  3/10  reward 0.42  length 118 (longest 256)  12.3s: gen 8.1, update_actor 3.4  eta 1m26s`."""

    def text(name: str) -> str:
        value = metrics.get(name)
        return "" if value is None else SHOWN[name].text.format(_value(value))

    longest = text("response_length/max")
    parts = [
        f"step {step:>{len(str(total))}}/{total}" if total else f"step {step}",
        text("critic/rewards/mean"),
        text("train/loss"),
        f"{text('response_length/mean')} ({longest})" if longest else "",
        _seconds(metrics),
        text("perf/throughput"),
        text("actor/grad_norm"),
    ]
    for name, value in metrics.items():
        if name.startswith("val") and name.count("/") == 1 and _finite(value) is not None:  # not the details below it
            parts.append(f"{name} {_value(value)}")
    parts += [f"{name}: {count}" for name, count in alarms_of(metrics).items()]
    return "  ".join(part for part in (*parts, eta) if part)


def _seconds(metrics: Mapping[str, float]) -> str:
    """`12.3s: gen 8.1, scoring 0.4 (+2.1 hidden)`: a step's seconds, and those of its phases."""
    if (whole_s := _finite(metrics.get("timing_s/step"))) is None:
        return ""
    seconds_of, shown = step_phases(metrics), list[str]()
    for phase in PHASES:
        if (seconds := _finite(seconds_of.get(phase.name))) is None:
            continue
        hidden_s = (_finite(metrics.get("reward/hidden_s")) or 0.0) if phase.name == "reward" else 0.0
        beside = f" (+{_value(hidden_s)} hidden)" if hidden_s >= _SHOWN_S else ""
        if seconds >= _SHOWN_S or beside:
            shown.append(f"{phase.label} {_value(seconds if seconds >= _SHOWN_S else 0.0)}{beside}")
    return f"{_value(whole_s)}s" + (f": {', '.join(shown)}" if shown else "")


def _finite(value: object) -> float | None:
    """Also of numpy or jax."""
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _value(value: object) -> str:
    """Three or four digits that count; text without control characters."""
    if isinstance(value, bool | str) or not isinstance(value, SupportsFloat):
        return _clean(str(value))
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    if number == int(number) and abs(number) < 1e15:
        return str(int(number))
    size = abs(number)
    if size >= 100:
        return f"{number:.0f}"
    if size >= 1:
        return f"{number:.4g}" if size < 10 else f"{number:.1f}"
    return f"{number:.3f}" if size >= 0.01 else f"{number:.1e}"


def _clean(text: str) -> str:
    return _CONTROL.sub("", text.replace("\r\n", "\n")).expandtabs(4)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    except (AttributeError, ValueError):  # not a file, or closed already
        return False
