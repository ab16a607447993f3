"""The arithmetic of scripts/room_coverage.py."""

from room_coverage import by_room, room_of, table


def test_rooms() -> None:
    files = ("jaxrl/train/step.py", "jaxrl/mechanisms/judge/device.py", "jaxrl/mechanisms/turn.py", "kernels/packed.py")
    assert [*map(room_of, files)] == ["train", "mechanisms/judge", "mechanisms/turn.py", "kernels"]
    assert room_of("jaxrl/kernels/packed.py") == "kernels"
    assert room_of("jaxrl/loop.py") == "loop.py"


def counts(lines: int, of_lines: int, branches: int, of_branches: int) -> dict[str, dict[str, int]]:
    found = {"covered_lines": lines, "num_statements": of_lines, "covered_branches": branches}
    return {"summary": found | {"num_branches": of_branches}}


def test_a_room_is_the_sum_of_its_files() -> None:
    report = {"files": {"jaxrl/train/a.py": counts(8, 10, 3, 4), "jaxrl/train/b.py": counts(1, 2, 0, 0)}}
    assert by_room(report) == {"train": (12, 16)}


def test_less_than_before_is_said_unless_it_is_within_the_slack() -> None:
    before = {"data": (90, 100), "train": (90, 100)}
    text, worse = table({"data": (88, 100), "train": (80, 100), "new": (1, 2)}, before, slack=5)
    assert worse
    assert [line.split()[0] for line in text.splitlines() if line.endswith("LESS")] == ["train"]
    assert not table({"data": (88, 100), "train": (45, 50)}, before, slack=5)[1], "fewer lines, and the same share"
