"""The plugin of pytest that `tests/conftest.py` loads: what tests cost, and which ones a run of limited time begins
with."""

import json
import os
from pathlib import Path

import pytest
import suite

pytest_plugins = "pytester"
SUPPORT = Path(__file__).parent / "support"


@pytest.fixture
def two_files(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A suite with a quick and a slow test; its runs are processes, since jax cannot be imported twice in one."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])]))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(pytester.path))
    pytester.makeconftest('pytest_plugins = ["suite"]')
    pytester.makeini("[pytest]\nmarkers =\n  slow: slow")
    pytester.makepyfile(
        test_a="def test_one(): pass",
        test_b="""
            import jax, pytest

            @pytest.mark.slow
            def test_two(): jax.jit(lambda x: x + 1)(2)
        """,
    )
    return pytester


def test_costs_are_measured(two_files: pytest.Pytester, tmp_path: Path) -> None:
    costs = tmp_path / "costs.jsonl"
    two_files.runpytest_subprocess("--numprocesses=2", f"--costs={costs}").assert_outcomes(passed=2)
    found = {each["test"]: each for each in map(json.loads, costs.read_text().splitlines())}
    one, two = found["test_a.py::test_one"], found["test_b.py::test_two"]
    assert (one["programs"], two["programs"]) == (0, 1)
    assert two["seconds"] > two["programs_s"] > 0 < two["cpu_s"]


def test_the_oldest_results_come_first_and_no_test_starts_late(two_files: pytest.Pytester) -> None:
    results = two_files.path / suite.RESULTS
    results.write_text(json.dumps({"test_a.py::test_one": 2.0, "test_b.py::test_two": 1.0}))
    ran = two_files.runpytest_subprocess("--within=600", "-v")
    ran.stdout.fnmatch_lines(["test_b.py::test_two PASSED*", "test_a.py::test_one PASSED*"])
    assert json.loads(results.read_text())["test_b.py::test_two"] > 2.0

    late = two_files.runpytest_subprocess("--within=0", "-v", "-rs")
    late.assert_outcomes(skipped=2)


def test_a_test_that_costs_too_much_fails_unless_it_is_slow_or_listed(two_files: pytest.Pytester) -> None:
    body = "import suite\nsuite.MAX_CPU_S = -1.0\n"
    two_files.makepyfile(
        test_a=f"{body}def test_one(): pass", test_b="import pytest\n@pytest.mark.slow\ndef test_two(): pass"
    )
    ran = two_files.runpytest_subprocess("--budget")
    ran.assert_outcomes(failed=1, passed=1)
    ran.stdout.fnmatch_lines(["took * CPU seconds, and at most -1 are allowed*", "CPU s by folder: *", "lines: *"])


def test_a_process_that_replaces_another_keeps_its_limit(two_files: pytest.Pytester) -> None:
    began = 'print(request.config.pluginmanager.getplugin("suite-costs").began, file=open("began.txt", "a"))'
    two_files.makepyfile(
        test_a=f"import os\ndef test_one(request):\n    {began}\n    os._exit(1)",
        test_b=f"def test_two(request): {began}",
    )
    two_files.runpytest_subprocess("--within=600", "--numprocesses=1").assert_outcomes(failed=1, passed=1)
    first, second = (two_files.path / "began.txt").read_text().split()
    assert first == second
