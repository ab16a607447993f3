"""When a judge may take a turn."""

import pytest

from jaxrl.mechanisms.judge import Judge


@pytest.mark.parametrize(
    ("when", "share", "busy", "allowed"),
    [
        ("gaps", 0.5, 4, True),
        ("gaps", 0.5, 5, False),
        ("gaps", 0.0, 0, True),
        ("gaps", 0.0, 1, False),
        ("gaps", 1.0, 8, True),
        ("after", 1.0, 1, False),
        ("after", 0.0, 0, True),
    ],
)
def test_turns_by_rows(when, share, busy, allowed):
    assert Judge.Options(when=when, busy_share=share).allows_turn(busy, 8) == allowed
