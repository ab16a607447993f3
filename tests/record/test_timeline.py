"""The trace: valid at any moment, bounded, appended to by a resumed run; phases add up from the same spans."""

import itertools
import json
import threading
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


def test_a_trace_is_valid_before_and_after_its_end(path):
    timeline = Timeline(path)
    assert events(path, "X") == []
    with timeline.span("engine", "drain", rows=3):
        timeline.counter("rows", busy=2, idle=1)
    timeline.flush()
    (span,) = events(path, "X")
    assert (span["name"], span["args"]) == ("drain", {"rows": 3})
    assert span["dur"] >= 0
    assert [e["args"] for e in events(path, "C")] == [{"busy": 2, "idle": 1}]
    names = {e["args"]["name"]: e["tid"] for e in events(path, "M") if e["name"] == "thread_name"}
    assert names == {"engine": span["tid"]}
    timeline.close()
    timeline.close()
    assert len(events(path, "X")) == 1


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


@pytest.mark.parametrize("left", [1, 2, 20])
def test_a_bracket_that_was_cut(path, left):
    """A crash while the file was closed leaves a part of the last two lines."""
    with Timeline(path) as timeline, timeline.span("engine", "first"):
        pass
    content = path.read_bytes()
    path.write_bytes(content[:-left])
    with Timeline(path) as timeline, timeline.span("engine", "again"):
        pass
    assert [e["name"] for e in json.loads(path.read_text()) if e["ph"] == "X"] == ["first", "again"]


def test_rows_have_tracks_of_their_own(path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timeline_module, "MAX_EVENTS", 3)
    with Timeline(path) as timeline:
        timeline.begin_step()
        for i in range(4):
            timeline.row(f"0.{i % 2}", i % 2, f"0.7.{i}", timeline.now_s, timeline.now_s, tokens=i)
        for i in range(3):
            with timeline.span("loop", f"mark {i}"):
                pass
        timeline.flush()
    found = json.loads(path.read_text())
    rows = [e for e in found if e.get("cat") == "row"]
    assert [(e["args"]["row"], e["args"]["tokens"]) for e in rows] == [("0.0", 0), ("0.1", 1), ("0.0", 2)]
    names = {e["args"]["name"]: e["tid"] for e in found if e["name"] == "thread_name"}
    assert [e["tid"] for e in rows] == [names["row 0.0"], names["row 0.1"], names["row 0.0"]]
    assert names["row 0.0"] > names["loop"]
    assert len([e for e in found if e["name"].startswith("mark")]) == 3, "rows take no room from others"
    assert [e["args"] for e in found if e["name"] == "left out"] == [{"events": 1}]


def test_rows_of_an_evaluation_are_called_so(path):
    with Timeline(path) as timeline:
        for phase in ("gen", "testing", "gen"):
            with timeline.phase(phase):
                timeline.row("0.0", 0, "0.7.1", timeline.now_s, timeline.now_s)
    rows = [e["name"] for e in json.loads(path.read_text()) if e.get("cat") == "row"]
    assert rows == ["0.7.1", "val 0.7.1", "0.7.1"]


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


def test_an_exception_ends_its_span(path):
    with Timeline(path) as timeline:
        with pytest.raises(KeyError), timeline.phase("gen"):
            raise KeyError
        assert timeline.open_spans() == []
        assert "timing_s/gen" in timeline.take_phases()
    assert [e["name"] for e in events(path, "X")] == ["gen"]


def test_open_spans_name_what_hangs(path):
    with Timeline(path) as timeline, timeline.phase("step"), timeline.span("rewards", "sandbox"):
        (outer, inner) = timeline.open_spans()
    assert outer[:2] == ("loop", "step")
    assert inner[:2] == ("rewards", "sandbox")
    assert outer[2] >= inner[2] >= 0


@pytest.mark.parametrize("content", ["", "["])
def test_a_file_without_a_whole_line_starts_anew(path, content):
    path.parent.mkdir()
    path.write_text(content)
    with Timeline(path) as timeline, timeline.phase("gen"):
        pass
    assert [e["pid"] for e in events(path, "X")] == [1]


def test_adjacent_short_spans_are_merged(path):
    now = time.perf_counter()
    with Timeline(path) as timeline:
        for i in range(10):
            timeline.complete("engine", "plan", now + i * 0.002, now + i * 0.002 + 0.0015, row=i)
        timeline.complete("engine", "plan", now + 1, now + 2, row=10)  # long, and later
    merged, alone = events(path, "X")
    assert merged["args"] == {"count": 10}
    assert merged["dur"] == pytest.approx(19_500, abs=1)
    assert alone["args"] == {"row": 10}


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


def test_long_runs_draw_fewer_steps_and_time_all(path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timeline_module, "MAX_BYTES", 2000)
    with Timeline(path) as timeline:
        seconds = 0
        for step in range(1, 400):
            with timeline.phase("step", step=step):
                pass
            seconds += "timing_s/step" in timeline.take_phases()
            timeline.flush()
    assert seconds == 399
    assert len(events(path, "X")) < 250
    assert path.stat().st_size < 2000 * 10


def test_counters_are_sampled(path):
    with Timeline(path) as timeline:
        for i in range(1000):
            timeline.counter("rows", busy=i)
    assert 1 <= len(events(path, "C")) <= 50


def test_many_threads(path):
    with Timeline(path) as timeline:

        def work(i):
            for _ in range(200):
                with timeline.phase("reward", track=f"worker {i}"), timeline.span(f"worker {i}", "score"):
                    pass

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert timeline.open_spans() == []
    found = events(path, "X")
    assert len([e for e in found if e["name"] == "reward"]) == 800
    assert len({e["tid"] for e in found}) == 4


def test_an_argument_that_json_does_not_know(path):
    with Timeline(path) as timeline, timeline.span("engine", "drain", where=path):
        pass
    assert events(path, "X")[0]["args"] == {"where": str(path)}


def test_a_clock_of_its_own(path):
    now = [100.0]
    with Timeline(path, clock=lambda: now[0]) as timeline:
        with timeline.phase("gen"):
            now[0] += 3600.0
        timeline.complete("engine", "plan", 100.0, 101.5)
        assert timeline.take_phases() == {"timing_s/gen": 3600.0}
    spans = {event["name"]: event for event in events(path, "X")}
    assert (spans["gen"]["ts"], spans["gen"]["dur"]) == (0.0, 3600e6)
    assert (spans["plan"]["ts"], spans["plan"]["dur"]) == (0.0, 1.5e6)
