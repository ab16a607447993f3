"""The faults of scripts/sabotage.py still are faults of this tree; finding them takes the suite itself."""

import ast
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest
import sabotage
from sabotage import FAULTS, ROOT, Fault, found_by, put_in


def test_each_fault_can_be_put_in_and_leaves_python(tmp_path: Path) -> None:
    for fault in FAULTS:
        copy = tmp_path / fault.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / fault.file).read_text())
        put_in(fault, tmp_path)
        ast.parse(copy.read_text())
        assert all((ROOT / tests).exists() for tests in fault.tests.split()), fault
    assert len({Path(fault.file).parent for fault in FAULTS}) >= 20, "twenty rooms"


def test_a_fault_whose_place_has_changed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    with pytest.raises(ValueError, match=r"a\.py must have 'x = 1' once, found 2: twice"):
        put_in(Fault("twice", "a.py", "x = 1", "x = 2", "tests"), tmp_path)


def test_a_fault_of_the_same_second_and_size_is_not_taken_for_what_was_there(tmp_path: Path) -> None:
    source = tmp_path / "thing.py"
    source.write_text("x = 1\n")
    before = source.stat().st_mtime_ns
    py_compile.compile(str(source))
    put_in(Fault("another number", "thing.py", "x = 1", "x = 2", ""), tmp_path)
    os.utime(source, ns=(before, before))
    run = (sys.executable, "-c", "import thing; print(thing.x)")
    assert subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, text=True).stdout == "2\n"


def test_what_fails_first_is_told_and_a_tree_that_passes_is_missed(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_right(): pass\ndef test_wrong(): assert 1 == 2\n")
    failed = sabotage.first_failure(tmp_path, ["test_it.py"], processes=0)
    assert failed is not None
    assert failed.startswith("FAILED test_it.py::test_wrong - assert 1 == 2")
    assert sabotage.first_failure(tmp_path, ["test_it.py::test_right"], processes=0) is None


def test_a_test_that_fails_without_the_fault_has_not_found_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "right").mkdir()
    (tmp_path / "right" / "thing.py").write_text("x = 1\n")
    monkeypatch.setattr(sabotage, "ROOT", tmp_path / "right")
    tree = tmp_path / "copy"
    tree.mkdir()
    tests = "import thing\ndef test_it(): assert thing.x == 1\ndef test_old(): assert False\n"
    (tree / "test_thing.py").write_text(tests)
    for test, finds in (("test_it", True), ("test_old", False)):
        fault = Fault("another number", "thing.py", "x = 1", "x = 2", f"test_thing.py::{test}")
        (tree / "thing.py").write_text("x = 2\n")
        if finds:
            assert (found_by(fault, tree, 0) or "").startswith("FAILED test_thing.py::test_it - assert 2 == 1")
        else:
            with pytest.raises(ValueError, match=r"^test_thing\.py::test_old fails without a fault as well"):
                found_by(fault, tree, 0)
