"""A program under another Python: what it is asked, and what becomes of it when it fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxrl.environments.kinds import OtherPython, Program

FILE = """
import os, sys
print("loading")
schemas = [{"type": "function", "function": {"name": "look"}}]
kept = []

def problem(index, seed):
    return {"number": index + seed, "messages": [{"role": "user", "content": f"Is it {index}?"}]}

async def run(row, base_url, api_key, id="x"):
    print("running")
    kept.append(row["number"])
    if row["number"] == 13:
        raise KeyError("thirteen")
    if row["number"] == 99:
        os._exit(3)
    return {"score": len(kept), "where": base_url + api_key + id, "jaxrl": "jaxrl" in sys.modules}
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[OtherPython]:
    file = tmp_path / "program.py"
    file.write_text(FILE)
    made = OtherPython(sys.executable, str(file))
    yield made
    made.close()


def test_a_program_is_asked_in_its_own_process(other: OtherPython):
    program = Program(other, {"id": "one"})
    assert [schema["function"]["name"] for schema in program.schemas] == ["look"]
    row = program.problem(3, 4)
    assert row["number"] == 7
    assert program.first_messages(row) == ({"role": "user", "content": "Is it 3?"},)
    for count in (1, 2):
        found = program.run("run", row, "http://here", "/key/")
        assert found == {"score": count, "where": "http://here/key/one", "jaxrl": False}


def test_what_fails_there_is_told_here(other: OtherPython):
    program = Program(other, {})
    with pytest.raises(ValueError, match="KeyError: 'thirteen'"):
        program.run("run", {"number": 13}, "", "")
    assert program.run("run", {"number": 1}, "", "")["score"] == 2, "it goes on"
    assert not program.has_hung
    with pytest.raises(ValueError, match="no function 'nothing', or it has returned no reward"):
        program.run("nothing", {}, "", "")
    with pytest.raises(ValueError, match=r"environment\.python ended with status 3"):
        program.run("run", {"number": 99}, "", "")
    assert program.has_hung, "its worker is replaced"


def test_a_python_that_is_none(tmp_path: Path):
    with pytest.raises(ValueError, match=r"environment\.python: .*none cannot be run"):
        OtherPython(str(tmp_path / "none"), "x.py")
