"""One frame for all benchmarks: arguments, header, gauge, turns, ceilings, verdict, record, exit status.

A script is its cases and its table. It makes a `Benchmark`, whose `parser` and `main` are the script's own, with a
function that measures. That function is given the options and a `Session`, and returns the record::

    def _measure(options, session):
        devices = records.prepare_devices(options.devices)
        with session.on(records.describe_devices(devices)):
            session.bench.interleave(cases, options.repetitions)
        return session.record({"cases": [...]}, model=...)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from . import records
from .ceilings import Ceilings
from .measure import Bench, Gauge, Summary, say, summarise, verdict

Record = Mapping[str, Any]


class Session:
    """A benchmark under way.

    Attributes:
      bench: its timed runs. Entered with `on`.
      ceilings: of the machine: measured before the runs, and from their end on the best of before and after.
    """

    bench: Bench
    ceilings: Ceilings

    def __init__(self, name: str, called: str) -> None:
        self._name, self._called = name, called
        self._head: dict[str, Any] = {}
        self._has_ceilings = False

    @contextmanager
    def on(
        self,
        device: Mapping[str, Any],
        ceilings: Callable[[], Ceilings] | None = None,
        *,
        name: str = "",
        packages: Sequence[str] = (),
        is_timed: bool = True,
    ) -> Iterator[None]:
        """Prints the header; inside, runs are measured; at the end the verdict on them is printed.

        Args:
          device: `records.describe_devices`, or `describe_host`. Timed runs on a CPU have a gauge.
          ceilings: measures them.
          name: of the records, where it is not the benchmark's.
          packages: what takes part besides jax.
          is_timed: runs take turns; else no gauge is needed.
        """
        self._head = records.header(name or self._name, device, records.versions(*packages), self._called)
        records.print_header(self._head, say)
        self.bench = Bench(Gauge() if is_timed and device["platform"] == "cpu" else None, say)
        try:
            if ceilings is not None:
                self.ceilings, self._has_ceilings = ceilings(), True
            yield
            if ceilings is not None:
                self.ceilings = self.ceilings.best(ceilings())
                say(f"ceilings  {self.ceilings}")
        finally:
            if self.bench.gauge:
                self.bench.gauge.close()
        if self.bench.runs:
            say(verdict(self.bench))

    def summaries(self) -> dict[str, Summary]:
        """Medians by case."""
        return summarise(self.bench.runs)

    def record(self, results: Any, **more: Any) -> dict[str, Any]:
        """The header, `more`, what was measured of the machine, and the results."""
        found = self._head | more
        if self._has_ceilings:
            found["ceilings"] = self.ceilings.record()
        if self.bench.runs:
            found["kept"], found["dropped"] = self.bench.counts()
        return found | {"results": results}


def _nothing(_: Any) -> None: ...


def _no_promise(_: Record) -> Iterable[str]:
    return ()


@dataclass(frozen=True)
class Benchmark:
    """What a script says of itself.

    Attributes:
      name: of its records; the script is `bench_<name>.py`.
      text: its docstring, which is its help.
      measure: makes the record. A ValueError of it is a sentence about what was asked for.
      options: adds the script's own options.
      quick: defaults of `--quick`; None: there is no trial.
      counts: options that must be at least 1, besides those that all have.
      check: raises ValueError for options that do not fit together, and may complete them.
      promises: a sentence for each promise that a record breaks.
      has_model: it has a model, devices and repetitions, as most have.
    """

    name: str
    text: str | None
    measure: Callable[[argparse.Namespace, Session], Record]
    options: Callable[[argparse.ArgumentParser], Any] = _nothing
    quick: Mapping[str, Any] | None = field(default_factory=dict)
    counts: Sequence[str] = ()
    check: Callable[[argparse.Namespace], Any] = _nothing
    promises: Callable[[Record], Iterable[str]] = _no_promise
    has_model: bool = True

    def parser(self) -> argparse.ArgumentParser:
        made = argparse.ArgumentParser(description=self.text, formatter_class=argparse.RawDescriptionHelpFormatter)
        if self.has_model:
            records.model_options(made)
        records.record_options(made, is_quick=self.quick is not None)
        self.options(made)
        return made

    def parsed(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Checked options; with `--quick`, its defaults replace the others, and what was given still wins."""
        parser = self.parser()
        options = parser.parse_args(arguments)
        if self.quick is not None and options.quick:
            parser.set_defaults(**self.quick)
            options = parser.parse_args(arguments)
        counts = (*(("devices", "repetitions") if self.has_model else ()), *self.counts)
        for name in counts:
            value = getattr(options, name)
            for one in value if isinstance(value, list) else [value]:
                if one < 1:
                    raise ValueError(f"--{name.replace('_', '-')} ({one}) must be at least 1")
        if self.has_model and not options.model and not options.shape:
            options.shape = "tiny" if options.quick else "SmolLM2-135M"
        self.check(options)
        return options

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Runs it. Exit status 0; 1: a promise is broken (figures are printed and recorded all the same); 2: it was
        asked for nonsense."""
        script = f"bench_{self.name.replace('-', '_')}"
        try:
            options = self.parsed(arguments)
            record = self.measure(options, Session(self.name, records.command(arguments)))
        except ValueError as error:
            print(f"{script}: {error}", file=sys.stderr)
            return 2
        if options.json is not None:
            say(f"appended to {records.append_record(options.json, record).name}")
        broken = list(self.promises(record))
        for sentence in broken:
            print(f"{script}: {sentence}", file=sys.stderr)
        return int(bool(broken))
