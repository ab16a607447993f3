"""The trace: valid at any moment, bounded, appended to by a resumed run; phases add up from the same spans."""

import itertools
import json
import time

import pytest

from jaxrl.record import timeline as timeline_module
from jaxrl.record.timeline import Timeline


def events(path, kind=None):
    """As trace viewers read it: an array that may lack its closing bracket, as long as it is open."""
    text = path.read_text()
    found = json.loads(text if text.endswith("]\n") else text.rstrip().rstrip(",") + "]")
    return [event for event in found if kind is None or event["ph"] == kind]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "timeline.json"


def test_a_closed_trace_is_json_and_an_open_one_is_loaded(path):
    """What a kill leaves lacks the bracket; the run that goes on takes it from the closed one."""
    timeline = Timeline(path)
    with timeline.span("engine", "first"):
        pass
    timeline.flush()
    with pytest.raises(json.JSONDecodeError):
        json.loads(path.read_text())
    assert [e["name"] for e in events(path, "X")] == ["first"]
    timeline.close()
    closed = path.read_bytes()
    assert [e["name"] for e in json.loads(closed)][-1] == "jaxrl_end"
    Timeline(path, begin=False)
    assert path.read_bytes() == closed, "reading changes nothing"
    for _ in range(2):
        with Timeline(path) as timeline, timeline.span("engine", "again"):
            pass
    found = json.loads(path.read_text())
    assert [e["name"] for e in found if e["ph"] == "X"] == ["first", "again", "again"]
    assert [e["name"] for e in found].count("jaxrl_end") == 1
    spans = [e for e in found if e["ph"] == "X"]
    assert [e["pid"] for e in spans] == [1, 2, 3]
    assert all(e["ts"] > before["ts"] + before["dur"] for before, e in itertools.pairwise(spans))
    starts = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert [name.split(",")[0] for name in starts] == ["start 1", "start 2", "start 3"]


def test_phases_add_up_from_the_spans(path):
    with Timeline(path) as timeline:
        with timeline.phase("step", step=1):
            for _ in range(2):
                with timeline.phase("gen"):
                    time.sleep(0.006)
            with timeline.phase("reward", track="rewards"):
                pass
        seconds = timeline.take_phases()
        assert timeline.take_phases() == {}
    assert set(seconds) == {"timing_s/step", "timing_s/gen", "timing_s/reward"}
    assert seconds["timing_s/step"] >= seconds["timing_s/gen"] >= 0.012
    drawn = [e["dur"] for e in events(path, "X") if e["name"] == "gen"]
    assert len(drawn) == 2
    assert sum(drawn) / 1e6 == pytest.approx(seconds["timing_s/gen"], abs=1e-6)


def test_what_a_step_may_draw_is_bounded(path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timeline_module, "MAX_EVENTS", 10)
    with Timeline(path) as timeline:
        for _ in range(2):
            with timeline.phase("step"):
                for i in range(50):
                    with timeline.span(f"row {i % 5}", "mark"):
                        time.sleep(0.001)
    marks = [e for e in events(path, "X") if e["name"] == "mark"]
    assert len(marks) == 2 * 10
    left_out = [e["args"]["events"] for e in events(path, "i") if e["name"] == "left out"]
    # 40 marks of each step, and the bar of the step itself, since the step was full
    assert left_out == [41, 41]
