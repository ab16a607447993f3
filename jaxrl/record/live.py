"""The live view of a run: what happens now, and one line per finished step.

A terminal shows a panel (drawn with rich) under the lines. Elsewhere (a file, a pipe, TERM=dumb) there are only the
lines, in plain characters. After half a minute without one, a line says what the run is doing and how far it is.

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
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from jaxrl.record.metrics import FAILURES, PHASES, SHOWN, duration, number, step_phases

_SHOWN_S = 0.05  # a phase that took less is not
_SILENT_S = 30.0  # for which a log may say nothing
_MANY_CUT = 0.5  # a share of the responses
_RECENT_STEPS = 10
_COMPILED = ("rollout/recompiles", "actor/recompiles")
# terminal sequences (colours, cursor, window titles), then any control character that is left
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class LiveView:
    """Shows a run on `stream`. `detail` of the phase, and `beside`, what is compiled in the background, may be set.

    `total_steps`: the run's last step, 0 where it is not known, and no time left is shown; `done`: the steps before a
    resumed run's first; `window`: steps from which the time left is estimated, so that evaluations and checkpoints that
    occur only in some of them count with their share.
    """

    def __init__(
        self,
        total_steps: int,
        stream: TextIO = sys.stdout,
        *,
        done: int = 0,
        window: int = _RECENT_STEPS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._stream, self._clock = total_steps, stream, clock
        self._lock = threading.RLock()
        self._phase_name, self._phase_since = "starting", clock()
        self.detail = ""
        self.beside: Callable[[], str] = str
        self._waiting: tuple[int, str, float] | None = None
        self._last_step = done
        self._reward: float | None = None
        self._recent: deque[float] = deque(maxlen=max(window, _RECENT_STEPS))  # seconds of steps
        self._is_first = True
        self._last_step_at = self._printed_at = clock()
        self._no_gradient = False  # in the last step
        self._muted = False
        self._live: Live | None = None
        self._console: Console | None = None
        self._closed = threading.Event()
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
        else:  # a thread, because the run prints nothing while it compiles or computes
            threading.Thread(target=self._watch, name="live view", daemon=True).start()

    def phase(self, name: str) -> None:
        with self._lock:
            self._phase_name, self._phase_since, self.detail = name, self._clock(), ""

    def rollout(self, rows_busy: int, rows_total: int, tokens: int, finished: int, total: int) -> None:
        with self._lock:
            rate = number(tokens / max(self._clock() - self._phase_since, 1e-3))
            drawn = f"{number(float(tokens))} tokens, {rate}/s"
            self.detail = f"{drawn}  finished {finished}/{total}  rows {rows_busy}/{rows_total}"

    def waiting(self, count: int, longest: str, since_s: float) -> None:
        """`count` turns wait for their environments' answers, the `longest` since `since_s`."""
        with self._lock:
            self._waiting = (count, longest, since_s) if count else None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the line of a finished step, and why its gradient is 0 if it is."""
        with self._lock:
            now = self._clock()
            seconds = _finite(metrics, "timing_s/step")
            seconds = now - self._last_step_at if seconds is None else seconds
            # the first step after a start compiles programs
            if not self._is_first and not any(metrics.get(name) for name in _COMPILED):
                self._recent.append(seconds)
            self._is_first, self._last_step, self._last_step_at = False, step, now
            self._reward = _finite(metrics, "critic/rewards/mean")
            eta = self._eta() if self._console is None else ""  # which the panel has
            self._print(_step_line(step, self._total, metrics, eta), in_a_line=True)
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
            self._print(f"{name:<{width}}  {number(value) if isinstance(value, float) else value}")

    def close(self) -> None:
        """Gives the terminal back; may be called twice."""
        self._closed.set()
        live, self._live = self._live, None
        if live is not None:
            try:
                live.stop()
            except (OSError, ValueError):  # the terminal has gone away
                self._muted = True

    def _watch(self) -> None:
        while not self._closed.wait(1.0):
            self._look()

    def _look(self) -> None:
        with self._lock:
            if self._clock() - self._printed_at >= _SILENT_S:
                now = [f"step {self._next_step()}: {self._phase_name}", duration(self._clock() - self._phase_since)]
                self._print("  ".join([*now, *self._progress()]))

    def _progress(self) -> list[str]:
        """Lines of the panel and the log about the current phase."""
        found = [self.detail] if self.detail else []
        if beside := self.beside():
            found.append(f"compiling beside it: {beside}")
        if self._waiting is not None:
            count, longest, since_s = self._waiting
            found.append(f"{count} wait for answers, longest {longest}: {duration(self._clock() - since_s)}")
        return found

    def _next_step(self) -> str:
        step = min(self._last_step + 1, self._total) if self._total else self._last_step + 1
        return f"{step}/{self._total}" if self._total else f"{step}"

    def _print(self, text: str, *, in_a_line: bool = False) -> None:
        """`in_a_line`: on a terminal what is too long is cut."""
        self._printed_at = self._clock()
        if self._muted:
            return
        try:
            if self._console is not None:
                self._console.print(Text(_clean(text)), no_wrap=in_a_line, overflow="ellipsis" if in_a_line else "fold")
            else:
                encoding = getattr(self._stream, "encoding", None) or "utf-8"
                # a log in ASCII must not end the run over a letter
                self._stream.write(_clean(text).encode(encoding, "replace").decode(encoding) + "\n")
                self._stream.flush()
        except (OSError, ValueError):  # a closed pipe or file does not end the run
            self._muted = True

    def _eta(self) -> str:
        """Empty where nothing is known, or left."""
        left = self._total - self._last_step
        if left <= 0 or not self._recent:
            return ""
        return f"eta {duration(max(left * fmean(self._recent) - (self._clock() - self._last_step_at), 0.0))}"

    def _panel(self) -> Group:
        """Called by rich's thread."""
        with self._lock:
            head = Text.assemble(
                ("step ", "dim"),
                (self._next_step(), "bold"),
                ("   phase ", "dim"),
                (self._phase_name, "bold cyan"),
                (f" {duration(self._clock() - self._phase_since)}", "dim"),
            )
            if self._reward is not None:
                head.append("   reward ", "dim").append(number(self._reward), "bold green")
            if eta := self._eta():
                head.append(f"   {eta}", "dim")
            lines: list[Any] = [head]
            lines += [Text(_clean(line), "dim", no_wrap=True, overflow="ellipsis") for line in self._progress()]
            if self._total:
                lines.append(ProgressBar(total=self._total, completed=self._last_step, width=48))
            return Group(*lines)


def _no_gradient(metrics: Mapping[str, float]) -> str:
    """Why a step has taught nothing; empty where it has, or where no actor was updated."""
    if metrics.get("actor/grad_norm") != 0 or metrics.get("actor/skipped_updates"):
        return ""
    text = "the gradient is 0"
    if metrics.get("critic/mixed_reward_groups") == 0:
        text += ": no group's rewards differ"
    cut = metrics.get("response_length/clip_ratio", 0.0)
    if cut >= _MANY_CUT:
        whose = "all responses" if cut == 1 else f"{cut:.0%} of the responses"
        text += f"; {whose} were cut at data.max_response_length"
    return text


def _step_line(step: int, total: int, metrics: Mapping[str, float], eta: str) -> str:
    """`step  3/10  reward 0.42  length 118 (longest 256)  12.3s: gen 8.1, update_actor 3.4  eta 1m26s`."""

    def text(name: str) -> str:
        return SHOWN[name].text.format(number(metrics[name])) if name in metrics else ""

    longest = text("response_length/max")
    failed = sum(metrics.get(f"reward/{kind}", 0.0) for kind in FAILURES)
    counts = {"updates skipped": metrics.get("actor/skipped_updates", 0.0), "rewards failed": failed}
    parts = [  # the last ones are cut first
        f"step {step:>{len(str(total))}}/{total}" if total else f"step {step}",
        text("critic/rewards/mean"),
        text("train/loss"),
        *(f"{name}: {count:g}" for name, count in counts.items() if count),
        *(f"{n} {number(v)}" for n, v in metrics.items() if n.startswith("val") and n.count("/") == 1),
        f"{text('response_length/mean')} ({longest})" if longest else "",
        _seconds(metrics),
        text("perf/throughput"),
        text("actor/grad_norm"),
    ]
    return "  ".join(part for part in (*parts, eta) if part)


def _seconds(metrics: Mapping[str, float]) -> str:
    """`12.3s: gen 8.1, scoring 0.4 (+2.1 hidden)`: a step's seconds, and those of its phases."""
    if (whole_s := _finite(metrics, "timing_s/step")) is None:
        return ""
    seconds_of, shown = step_phases(metrics), list[str]()
    for phase in PHASES:
        seconds = seconds_of.get(phase.name)
        hidden_s = metrics.get("reward/hidden_s", 0.0) if phase.name == "reward" else 0.0
        beside = f" (+{number(hidden_s)} hidden)" if hidden_s >= _SHOWN_S else ""
        if seconds is not None and (seconds >= _SHOWN_S or beside):
            shown.append(f"{phase.label} {number(seconds if seconds >= _SHOWN_S else 0.0)}{beside}")
    return f"{number(whole_s)}s" + (f": {', '.join(shown)}" if shown else "")


def _finite(metrics: Mapping[str, float], name: str) -> float | None:
    value = metrics.get(name, math.nan)
    return float(value) if math.isfinite(value) else None


def _clean(text: str) -> str:
    return _CONTROL.sub("", text.replace("\r\n", "\n")).expandtabs(4)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    except (AttributeError, ValueError):  # not a file, or closed already
        return False
