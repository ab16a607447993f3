"""A watchdog that ends a run that hangs, and says where it hangs.

After half of its timeout without a beat it only reports: the stacks of all threads on stderr, a line on the console.
After the timeout the run is ended: it would hold its devices for ever, and can resume from its last checkpoint. Time in
which the process is suspended (Ctrl-Z, SIGSTOP) does not count: it is a long gap between two looks at the clock.

While native code holds the interpreter's lock no Python thread can look. For that case faulthandler's thread, which
needs no lock, is armed at every look to end the process a little later, with the stacks but without a sentence. It may
be first on waking: a run that was suspended for longer than the rest of its timeout ends then.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable

from jaxrl.record.timeline import Timeline

_STDERR = 2
_LOOK_EVERY_S = 1.0
_SUSPENDED_PERIODS = 5  # between two looks that are made every period; fewer are a machine under load
_END_S = 15.0  # for the end


class Watchdog:
    """Reports after `timeout_s` / 2 seconds without a `beat`, once per silence, and ends the run after `timeout_s` (0:
    never). `end` ends the process with a sentence, from the watchdog's thread; `heard` is called at every beat with
    what the run does next; the last sentence names `saved_step`, that of the last checkpoint."""

    def __init__(
        self,
        timeout_s: float,
        end: Callable[[str], None],
        heard: Callable[[str], None] = lambda doing: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.saved_step: int | None = None
        self._timeout_s, self._end, self._heard = timeout_s, end, heard
        self._clock = clock
        self._report: Callable[[str], None] = lambda text: print(f"jaxrl: {text}", file=sys.stderr)
        self._timeline: Timeline | None = None
        self._doing = "starting"
        self._last_s = self._looked_s = clock()
        self._reported = False
        self._period_s = min(_LOOK_EVERY_S, timeout_s / 20)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if timeout_s > 0:
            self._arm(timeout_s)
            self._thread.start()

    def beat(self, doing: str = "") -> None:
        """`doing`: what the run does next, where no timeline knows it."""
        self._last_s = self._clock()
        if doing:
            self._doing = doing
        self._heard(doing)

    def follow(self, timeline: Timeline, report: Callable[[str], None]) -> None:
        """From now on the open spans of a timeline say where the run is, and reports go to `report`."""
        self._timeline, self._report = timeline, report

    def close(self) -> None:
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._closed.wait(self._period_s):
            if self._look():
                return

    def _look(self) -> bool:
        """Whether the run was ended."""
        before_s, self._looked_s = self._looked_s, self._clock()
        if self._looked_s - before_s > _SUSPENDED_PERIODS * self._period_s:
            self._last_s = min(self._last_s + self._looked_s - before_s, self._looked_s)
        silent_s = self._looked_s - self._last_s
        self._arm(max(self._timeout_s - silent_s, 0.0))
        if silent_s >= self._timeout_s:
            faulthandler.dump_traceback(_STDERR)
            faulthandler.dump_traceback_later(_END_S, exit=True, file=_STDERR)
            kept = "there is no checkpoint yet"
            if self.saved_step is not None:
                kept = f"the last checkpoint is step {self.saved_step}: run again to resume from it"
            self._end(f"no progress for {silent_s:.3g} s in {self._where()} (trainer.hang_timeout_s); {kept}")
            return True
        if silent_s < self._timeout_s / 2:
            self._reported = False
        elif not self._reported:
            self._reported = True
            faulthandler.dump_traceback(_STDERR)
            self._report(
                f"no progress for {silent_s:.3g} s in {self._where()}; the threads' stacks are on stderr; after "
                f"{self._timeout_s:g} s the run is ended (trainer.hang_timeout_s)"
            )
        return False

    def _arm(self, left_s: float) -> None:
        grace_s = 1.0 + min(self._timeout_s / 10, 30.0)  # for the thread, which has the better words
        faulthandler.dump_traceback_later(left_s + grace_s, exit=True, file=_STDERR)

    def _where(self) -> str:
        spans = [] if self._timeline is None else self._timeline.open_spans()
        return " > ".join(f"{name} ({seconds:.0f} s)" for _, name, seconds in spans) or self._doing
