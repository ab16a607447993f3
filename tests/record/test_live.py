"""The live view: plain lines where there is no terminal, a panel where there is one, and never an exception."""

import contextlib
import io
import math

import pytest

from jaxrl.record.live import LiveView
from jaxrl.record.numbers import duration

METRICS = {
    "critic/rewards/mean": 0.4219,
    "response_length/mean": 118.4,
    "response_length/max": 256,
    "timing_s/step": 12.34,
    "timing_s/gen": 8.1,
    "timing_s/adv": 0.001,
    "timing_s/update_actor": 3.44,
    "perf/throughput": 812.3,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


def lines_of(*steps: dict[str, float], first: int = 1, total: int = 0) -> list[str]:
    """What a log has of these steps."""
    out = io.StringIO()
    with contextlib.closing(LiveView(total, out)) as view:
        for step, metrics in enumerate(steps, first):
            view.step(step, metrics)
    return out.getvalue().splitlines()


def test_one_plain_line_per_step():
    out = io.StringIO()
    with contextlib.closing(LiveView(10, out)) as view:
        view.phase("gen")
        view.rollout(rows_busy=3, rows_total=32, tokens_per_s=900.0, finished=5, total=64)
        view.step(3, METRICS)
        view.message("\x1b[31mevaluating\x1b[0m\r now\x07\ttab")
    assert out.getvalue().splitlines() == [
        "step  3/10  reward 0.422  length 118 (longest 256)  12.3s: gen 8.1, update_actor 3.44  812 tokens/s/device",
        "evaluating now  tab",
    ]


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({}, "step 1"),
        ({"critic/rewards/mean": math.nan}, "step 1  reward nan"),
        ({"timing_s/step": math.nan}, "step 1"),
        ({"response_length/mean": 3.0}, "step 1"),
        ({"val/acc": 0.25}, "step 1  val/acc 0.25"),
    ],
)
def test_metrics_may_be_missing(metrics, line):
    assert lines_of(metrics) == [line]


@pytest.mark.parametrize(
    ("seconds", "hidden_s", "shown"),
    [
        (0.0, 4.0, "gen 5, scoring 0 (+4 hidden)"),
        (2.0, 4.0, "gen 5, scoring 2 (+4 hidden)"),
        (2.0, 0.0, "gen 5, scoring 2"),
        (0.0, 0.0, "gen 5"),
    ],
)
def test_scoring_that_the_rollout_hid(seconds, hidden_s, shown):
    line = {"timing_s/step": 9.0, "timing_s/gen": 5.0, "timing_s/reward": seconds, "reward/hidden_s": hidden_s}
    assert lines_of(line) == [f"step 1  9s: {shown}"]


def test_the_last_step_has_no_time_to_go():
    assert lines_of({"timing_s/step": 1}, first=3, total=3) == ["step 3/3  1s"]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_log_says_what_a_silent_run_does():
    out, clock = io.StringIO(), Clock()
    with contextlib.closing(LiveView(10, out, done=5, clock=clock)) as view:
        view.phase("compiling programs 1/9")
        for clock.now in (29.0, 31.0, 60.0):
            view._look()
        view.step(6, {})
        view.phase("gen")
        view.rollout(8, 32, 900.0, 28, 70)
        view.waiting(3, "prompt 5, sample 1 (search)", 62.0)
        clock.now = 90.0
        view._look()
    assert out.getvalue().splitlines() == [
        "step 6/10: compiling programs 1/9  31s",
        "step  6/10",
        "step 7/10: gen  30s  finished 28/70  rows 8/32  900 tokens/s  3 wait for answers, longest prompt 5, sample 1 "
        "(search): 28s",
    ]


def test_a_terminal_has_the_panel_and_no_lines_of_progress(terminal):
    with contextlib.closing(LiveView(10, terminal)) as view:
        view.phase("compiling programs 29/29")
        view._live.refresh()  # pyright: ignore[reportOptionalMemberAccess]
    text = terminal.getvalue()
    assert "compiling programs 29/29" in text
    assert "step 1/10: compiling" not in text


def test_the_time_left_is_that_of_steps_that_did_not_compile():
    first, again = {"timing_s/step": 90.0}, {"timing_s/step": 60.0, "actor/recompiles": 1.0}
    said = lines_of(first, {"timing_s/step": 4.0}, again, {"timing_s/step": 6.0}, total=20)
    assert [line.partition("  eta ")[2] for line in said] == ["", "1m12s", "1m08s", "1m20s"]


def test_gradient_norm_and_alarms():
    well = {"actor/grad_norm": 0.14, "actor/skipped_updates": 0.0, "reward/errors": 0.0}
    ill = {"actor/grad_norm": math.nan, "actor/skipped_updates": 2.0, "reward/errors": 1.0, "reward/crashes": 2.0}
    assert lines_of(well, ill) == [
        "step 1  grad norm 0.14",
        "step 2  grad norm nan  updates skipped: 2  rewards failed: 3",
    ]


NOTHING = {"actor/grad_norm": 0.0, "critic/mixed_reward_groups": 0.0}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (NOTHING, "step 7: the gradient is 0: no group's rewards differ"),
        (
            NOTHING | {"response_length/clip_ratio": 1.0},
            "step 7: the gradient is 0: no group's rewards differ; all responses were cut at data.max_response_length",
        ),
        (
            {"actor/grad_norm": 0.0, "critic/mixed_reward_groups": 0.5, "response_length/clip_ratio": 0.75},
            "step 7: the gradient is 0; 75% of the responses were cut at data.max_response_length",
        ),
        (NOTHING | {"response_length/clip_ratio": 0.25}, "step 7: the gradient is 0: no group's rewards differ"),
        (NOTHING | {"actor/skipped_updates": 1.0}, None),
        ({"actor/grad_norm": 0.1, "critic/mixed_reward_groups": 0.0}, None),
        ({"critic/mixed_reward_groups": 0.0}, None),
    ],
)
def test_a_step_that_teaches_nothing_says_why(metrics, said):
    assert lines_of(metrics, first=7)[1:] == ([] if said is None else [said])


def test_steps_that_teach_nothing_say_so_once_in_a_row():
    said = lines_of(*({"actor/grad_norm": norm} for norm in (0.0, 0.0, 0.5, 0.0)))
    assert [line for line in said if ": the gradient" in line] == [
        "step 1: the gradient is 0",
        "step 4: the gradient is 0",
    ]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_panel_fits_a_narrow_terminal(width, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    with contextlib.closing(LiveView(1000, stream)) as view:
        view.step(123, METRICS | {"actor/grad_norm": 0.1234, "actor/skipped_updates": 1, "reward/errors": 12})
        view.phase("update_actor")
        view.rollout(123, 256, 12345.0, 1234, 2048)
        view._live.refresh()  # pyright: ignore[reportOptionalMemberAccess]
        console = view._console
        assert console is not None
        lines = console.render_lines(view._panel(), pad=False)
    assert max(sum(segment.cell_length for segment in line) for line in lines) <= width
    if width == 80:
        assert len(lines) == 3, "each part on a line of its own"


def test_final_table_in_plain_text():
    out = io.StringIO()
    LiveView(1, out).final_table({"reward": 0.5, "steps": 100})
    assert out.getvalue() == "reward  0.5\nsteps   100\n"


def test_on_a_terminal(terminal):
    with contextlib.closing(LiveView(10, terminal)) as view:
        view.phase("gen")
        view.rollout(3, 32, 900.0, 5, 64)
        view.step(3, METRICS)
        view.message("[red]not markup[/red]")
        view.rollout(0, 0, 0.0, 0, 0)
        view._live.refresh()  # pyright: ignore[reportOptionalMemberAccess]
        view.final_table({"reward": "0.5"})
    text = terminal.getvalue()
    for part in ("reward 0.422", "[red]not markup[/red]", "phase", "gen", "4/10", "tokens/s", "\x1b[?25h"):
        assert part in text
    assert "0.5" in text.splitlines()[-1]


def test_an_exception_gives_the_terminal_back(terminal):
    with pytest.raises(KeyError), contextlib.closing(LiveView(10, terminal)):
        raise KeyError
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is shown again


def test_dumb_terminals_get_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with contextlib.closing(LiveView(10, terminal)) as view:
        view.step(1, {})
    assert terminal.getvalue() == "step  1/10\n"


def test_a_closed_output_does_not_end_the_run():
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    view = LiveView(10, Broken())
    view.step(1, METRICS)
    view.step(2, METRICS)
    view.close()
    closed = io.StringIO()
    view = LiveView(10, closed)
    closed.close()
    view.message("lost with the stream")
    assert LiveView(1, closed).close() is None


def test_an_ascii_log_gets_question_marks():
    raw = io.BytesIO()
    view = LiveView(1, io.TextIOWrapper(raw, encoding="ascii"))
    view.message("→ fertig")
    assert raw.getvalue() == b"? fertig\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (185, "3m05s"), (7800, "2h10m"), (273_600, "3d04h"), (math.inf, "?")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
