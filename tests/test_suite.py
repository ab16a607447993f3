"""The options that `tests/conftest.py` adds to pytest: what a run of limited time begins with, and what tests cost."""

import json
import os
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from suite_order import from_days_file

pytest_plugins = "pytester"
CONFTEST = Path(__file__).parent / "conftest.py"
DAY = date(2026, 11, 25)


@pytest.mark.parametrize("num_files", [1, 2, 7, 40, 151])
def test_a_quarter_of_the_files_each_day_is_all_of_them_within_eight_days(num_files: int) -> None:
    tests = [SimpleNamespace(path=f"test_{n}.py", name=name) for n in range(num_files) for name in "ab"]
    reached = set()
    for days in range(8):
        order = from_days_file(tests, DAY + timedelta(days))
        assert sorted(order, key=lambda test: (test.path, test.name)) == sorted(tests, key=lambda t: (t.path, t.name))
        pairs = zip(order[::2], order[1::2], strict=True)
        assert all(a.path == b.path and (a.name, b.name) == ("a", "b") for a, b in pairs)
        reached |= {test.path for test in order[: max(2, len(order) // 4)]}
    assert len(reached) == num_files


@pytest.fixture
def two_files(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(CONFTEST.parent / "support"), str(CONFTEST.parents[1])]))
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\naddopts = -p no:randomly\nmarkers =\n  slow: slow\n  gpu: gpu")
    pytester.makepyfile(
        test_a="def test_one(): pass",
        test_b="""
            import jax, pytest

            @pytest.mark.slow
            def test_two(): jax.jit(lambda x: x + 1)(2)
        """,
    )
    return pytester


def test_order_limit_and_costs(two_files: pytest.Pytester, tmp_path: Path) -> None:
    one, two = "test_a.py::test_one", "test_b.py::test_two"
    costs = tmp_path / "costs.jsonl"  # runs are processes: jax cannot be imported twice in one
    whole = two_files.runpytest_subprocess("--slow", "--within=600", "--day=2026-11-25", f"--costs={costs}")
    whole.assert_outcomes(passed=2)
    first, second = map(json.loads, costs.read_text().splitlines())
    assert [(first["test"], first["programs"]), (second["test"], second["programs"])] == [(one, 0), (two, 1)]
    assert second["seconds"] > second["programs_s"] > 0 < second["cpu_s"]

    late = two_files.runpytest_subprocess("--slow", "--within=0", "--day=2026-11-26", "-v")
    late.assert_outcomes(skipped=2)
    late.stdout.fnmatch_lines([f"{two} SKIPPED (not begun within 0 s)*", f"{one} SKIPPED*"])


def test_a_process_that_replaces_another_keeps_its_limit(two_files: pytest.Pytester) -> None:
    two_files.makepyfile(
        test_a="""
            import os
            from conftest import BEGUN

            def test_one(request):
                print(request.config.stash[BEGUN], file=open("begun.txt", "a"))
                os._exit(1)
        """,
        test_b="""
            from conftest import BEGUN

            def test_two(request):
                print(request.config.stash[BEGUN], file=open("begun.txt", "a"))
        """,
    )
    two_files.runpytest_subprocess("--within=600", "--numprocesses=1").assert_outcomes(failed=1, passed=1)
    first, second = (two_files.path / "begun.txt").read_text().split()
    assert first == second
