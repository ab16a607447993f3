"""What becomes of a run when processes end: a table of what is told at which second, and what is to be done then."""

import signal

import pytest

from jaxrl.runtime.hosts.restarts import (
    LAST_S,
    SETTLE_S,
    Again,
    Ended,
    Kind,
    Lost,
    Over,
    Refused,
    Restarts,
    described,
    kind_of,
    signal_of,
)

KILLED, ABORTED = Ended(1, -9), Ended(1, -6)
STALL_S = 100.0
GONE = Lost(0, "its agent is gone")

TABLE = {
    # name: what is told at which second; then (a second, what is decided there: kind of decision, status or cause)
    "nothing": ([], (50.0, None)),
    "all-well": ([(0, Ended(0, 0)), (1, Ended(1, 0)), (2, Ended(2, 0))], (2.0, (0, None))),
    "some-well": ([(0, Ended(0, 0)), (1, Ended(1, 0))], (STALL_S + LAST_S - 1, None)),
    "one-never-ends": ([(0, Ended(0, 0)), (1, Ended(1, 0))], (STALL_S + LAST_S, (1, None))),
    "killed": ([(0, KILLED)], (0.0, KILLED)),
    "killed-as-a-shell-says-it": ([(0, Ended(1, 137))], (0.0, Ended(1, 137))),
    "segmentation-fault": ([(0, Ended(2, -11))], (0.0, Ended(2, -11))),
    "lost": ([(0, GONE)], (0.0, GONE)),
    "status-of-nobody's": ([(0, Ended(1, 77))], (0.0, Ended(1, 77))),
    "killed-after-others-were-done": ([(0, Ended(0, 0)), (1, KILLED)], (1.0, KILLED)),
    "aborted-is-not-believed-at-once": ([(0, ABORTED)], (SETTLE_S - 0.1, None)),
    "aborted": ([(0, ABORTED)], (SETTLE_S, ABORTED)),
    "aborted-because-one-was-killed": ([(0, ABORTED), (0.5, Ended(2, -9))], (0.5, Ended(2, -9))),
    "aborted-because-one-could-not-go-on": ([(0, ABORTED), (1, Ended(2, 1))], (SETTLE_S, (1, Ended(2, 1)))),
    "cannot-go-on-is-not-believed-at-once": ([(0, Ended(1, 1))], (SETTLE_S - 0.1, None)),
    "cannot-go-on": ([(0, Ended(1, 1))], (SETTLE_S, (1, Ended(1, 1)))),
    "cannot-go-on-because-a-host-is-lost": ([(0, Ended(1, 1)), (1.9, GONE)], (1.9, GONE)),
    "refused": ([(0, Ended(1, 2))], (SETTLE_S, (2, Ended(1, 2)))),
    "refused-everywhere": ([(0, Ended(2, 2)), (0, Ended(1, 2)), (0.1, Ended(0, 2))], (0.1, (2, Ended(0, 2)))),
    "refused-and-cannot-go-on": ([(0, Ended(0, 1)), (0, Ended(1, 2))], (SETTLE_S, (2, Ended(1, 2)))),
    "not-to-be-started": ([(0, Refused(1, "no such folder"))], (SETTLE_S, (2, Refused(1, "no such folder")))),
    "terminated": ([(0, Ended(1, 143)), (0.3, ABORTED), (0.3, Ended(0, 1))], (SETTLE_S, (143, Ended(1, 143)))),
    "terminated-before-python-listened": ([(0, Ended(1, -15))], (SETTLE_S, (143, Ended(1, -15)))),
    "interrupted": ([(0, Ended(0, 130)), (0, Ended(1, 0)), (0, Ended(2, 0))], (0.0, (130, Ended(0, 130)))),
    "only-the-first-end-counts": ([(0, Ended(1, 1)), (0.1, Lost(1, "its agent is gone"))], (1.0, None)),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_becomes_of_an_end(name):
    ends, (now_s, expected) = TABLE[name]
    restarts = Restarts(3, 3, STALL_S)
    restarts.begin()
    for at_s, end in ends:
        restarts.take(end, at_s)
    decision = restarts.decide(now_s)
    match expected:
        case None:
            assert decision is None
        case (status, cause):
            assert isinstance(decision, Over)
            assert (decision.status, decision.cause) == (status, cause)
        case cause:
            assert decision == Again(cause, 1)


def worlds(restarts: Restarts, *saved: int | None) -> list[Again | Over | None]:
    """What is decided when host 1 is killed, once in each world; before that the checkpoint `saved` comes in it."""
    found = []
    for step in saved:
        restarts.begin()
        if step is not None:
            restarts.saved(step)
        restarts.take(KILLED, 0.0)
        found.append(restarts.decide(0.0))
    return found


def test_restarts_count_without_a_checkpoint_in_between():
    found = worlds(Restarts(2, 2, STALL_S), 4, 4, 6, 6, 6)
    assert [each.number for each in found if isinstance(each, Again)] == [1, 2, 1, 2]
    last = found[-1]
    assert isinstance(last, Over)
    assert (last.status, last.cause) == (1, KILLED)
    assert last.sentence == (
        "host 1 was ended by SIGKILL, after 2 restarts without a checkpoint in between (hosts.max_restarts); the last "
        "checkpoint is step 6: run again to go on from it"
    )


def test_no_checkpoint_at_all():
    *_, last = worlds(Restarts(2, 0, STALL_S), None)
    assert isinstance(last, Over)
    assert last.sentence.endswith("(hosts.max_restarts); there is no checkpoint yet")


def test_an_older_checkpoint_is_none_in_between():
    """A damaged one was left out, say: the run goes on from further back."""
    found = worlds(Restarts(2, 1, STALL_S), 6, 4)
    assert isinstance(found[0], Again)
    assert isinstance(found[1], Over)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_once_a_stop_was_asked_for_nothing_starts_again(number):
    restarts = Restarts(2, 3, STALL_S)
    restarts.begin()
    restarts.saved(8)
    restarts.ask(number)
    restarts.take(KILLED, 0.0)
    over = restarts.decide(0.0)
    assert over == Over(
        1,
        KILLED,
        "host 1 was ended by SIGKILL while the run was being stopped; the last checkpoint is step 8: run again to go "
        "on from it",
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_there_was_something_to_save_has_the_status_of_the_signal_that_the_launcher_got(number):
    restarts = Restarts(2, 3, STALL_S)
    restarts.begin()
    restarts.ask(number)
    restarts.take(Ended(0, 143), 0.0)
    restarts.take(Ended(1, -9), 0.0)
    restarts.begin()
    restarts.take(Ended(0, 143), 0.0)
    restarts.take(Ended(1, 143), 0.0)
    assert restarts.decide(0.0) == Over(128 + number, Ended(0, 143))


def test_kinds():
    assert [kind_of(Ended(0, status)) for status in (0, 1, 2, 130, 143, -2, -15, -6, 134, -9, -7, 3, 255)] == [
        *(Kind.DONE, Kind.FAILED, Kind.REFUSED),
        *[Kind.STOPPED] * 4,
        *[Kind.ABORTED] * 2,
        *[Kind.DEATH] * 4,
    ]
    assert signal_of(2) is None
    assert signal_of(128) is None


def test_words():
    ends = [Ended(3, -11), Ended(3, 1), Lost(3, "its agent is gone"), Refused(3, "/x: no such file or directory")]
    assert [described(end) for end in ends] == [
        "host 3 was ended by SIGSEGV",
        "host 3 ended with status 1",
        "host 3: its agent is gone",
        "host 3: /x: no such file or directory",
    ]
