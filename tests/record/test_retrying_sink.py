"""Steps on their way to a logger: each once, in order, and later where the logger cannot be reached."""

import json
import logging
import sys
from collections.abc import Container, Mapping, Sequence
from typing import Any

import pytest

from jaxrl.record.metrics import MetricsWriter
from jaxrl.record.sinks import RETRY_S, RetryingSink, Unreachable


class Sink:
    def __init__(self, sent: Container[int] = ()) -> None:
        self.sent, self.is_down, self.tried = sent, False, 0
        self.got: list[tuple[int, dict[str, float], list[Any]]] = []
        self.is_closed = False

    def write(self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> None:
        self.tried += 1
        if self.is_down:
            raise Unreachable("no\nroute")
        self.got.append((step, dict(metrics), list(rows)))

    def close(self) -> None:
        self.is_closed = True


def steps(sink: Sink) -> list[int]:
    return [step for step, _, _ in sink.got]


def test_a_sink_that_is_down_gets_its_steps_later(caplog: pytest.LogCaptureFixture):
    sink, now_s = Sink(), [0.0]
    delivery = RetryingSink("mlflow", sink, lambda: now_s[0])
    delivery.send(1, {"x": 1.0}, [])
    sink.is_down = True
    with caplog.at_level(logging.WARNING):
        for step in (2, 3, 4):
            delivery.send(step, {"x": float(step)}, [])
        assert sink.tried == 2, "it is left alone for a while"
        now_s[0] += RETRY_S
        delivery.send(5, {}, [])
    assert (sink.tried, steps(sink)) == (3, [1])
    assert caplog.messages == ["trainer.logger: mlflow takes nothing (no route): it is tried again every 60 s"]
    sink.is_down, now_s[0] = False, 2 * RETRY_S
    delivery.send(6, {}, [])
    assert steps(sink) == [1, 2, 3, 4, 5, 6]
    assert sink.got[1] == (2, {"x": 2.0}, [])


@pytest.mark.parametrize(("has", "sent"), [((), [1, 2, 3, 4]), ({1}, [2, 3, 4]), (range(4), [4])])
def test_a_run_that_goes_on_sends_what_is_missing(tmp_path, monkeypatch, has, sent):
    """From the run's own files, of the steps up to the checkpoint; what runs again is not sent again."""
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"x": step / 2, "high": float("inf")})
    rows = [{"step": step, "prompt": f"{step}", "reward": 0.5} for step in (1, 2, 2, 3)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sink = Sink(has)
    monkeypatch.setattr("jaxrl.record.sinks.open_sink", lambda *arguments: sink)
    with MetricsWriter(tmp_path, ["x"], resume_step=2) as writer:
        writer.write(3, {"x": 9.0}, [rows[3]])
        writer.write(4, {"x": 10.0}, [])
    assert steps(sink) == sent
    by_step = {step: (metrics, got) for step, metrics, got in sink.got}
    if 2 in by_step:
        assert by_step[2] == ({"x": 1.0, "high": float("inf")}, rows[1:3])
    if 3 in by_step:
        assert by_step[3] == ({"x": 9.0}, [rows[3]])


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    said = r"tensorboard needs the package tensorboardX.*pip install 'jaxrl\[tensorboard\]'"
    with pytest.raises(ValueError, match=said):
        MetricsWriter(tmp_path, ["tensorboard"]).open_sinks()
