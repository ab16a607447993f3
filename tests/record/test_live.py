"""The live view: plain lines where there is no terminal, a panel where there is one, and never an exception."""

import contextlib
import io

import pytest

from jaxrl.record.live import LiveView

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
        view.rollout(rows_busy=3, rows_total=32, tokens=900, finished=5, total=64)
        view.step(3, METRICS)
        view.message("\x1b[31mevaluating\x1b[0m\r now\x07\ttab")
    assert out.getvalue().splitlines() == [
        "step  3/10  reward 0.422  length 118 (longest 256)  12.3s: gen 8.1, update_actor 3.44  812 tokens/s/device",
        "evaluating now  tab",
    ]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_log_says_what_a_silent_run_does():
    out, clock = io.StringIO(), Clock()
    with contextlib.closing(LiveView(10, out, done=5, clock=clock)) as view:
        view.phase("compiling")
        view.detail = "1 of 9 programs ready, about 80 s left: decode 8×64"
        for clock.now in (29.0, 31.0, 60.0):
            view._look()
        view.step(6, {})
        view.phase("gen")
        view.rollout(8, 32, 9, 28, 70)
        view.waiting(3, "prompt 5, sample 1 (search)", 62.0)
        clock.now = 90.0
        view._look()
    assert out.getvalue().splitlines() == [
        "step 6/10: compiling  31s  1 of 9 programs ready, about 80 s left: decode 8×64",
        "step  6/10",
        "step 7/10: gen  30s  9 tokens, 9000/s  finished 28/70  rows 8/32  3 wait for answers, longest prompt 5, "
        "sample 1 (search): 28s",
    ]


def test_the_time_left_is_that_of_steps_that_did_not_compile():
    first, again = {"timing_s/step": 90.0}, {"timing_s/step": 60.0, "actor/recompiles": 1.0}
    said = lines_of(first, {"timing_s/step": 4.0}, again, {"timing_s/step": 6.0}, total=20)
    assert [line.partition("  eta ")[2] for line in said] == ["", "1m12s", "1m08s", "1m20s"]


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
        ({"actor/grad_norm": 0.1, "critic/mixed_reward_groups": 0.0}, None),
    ],
)
def test_a_step_that_teaches_nothing_says_why(metrics, said):
    assert lines_of(metrics, first=7)[1:] == ([] if said is None else [said])


@pytest.mark.parametrize(("width", "end"), [(120, "812 tokens/s/device"), (60, "(longest 256)  12.3s: …")])
def test_a_step_is_one_line_of_the_terminal(width, end, terminal, monkeypatch):
    """The time left is in the panel alone."""
    monkeypatch.setenv("COLUMNS", str(width))
    with contextlib.closing(LiveView(10, terminal)) as view:
        view.step(1, METRICS)
        view.step(2, METRICS)
    (line,) = [line for line in terminal.getvalue().splitlines() if "step  2/10  reward" in line]
    assert line.endswith(end)


@pytest.mark.parametrize("width", [40, 80])
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
