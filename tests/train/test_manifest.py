"""Each process hashes and compares its own files, and none is left out."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from jaxrl.train import manifest


def entries(folder: Path) -> dict[str, Any]:
    """What a manifest must say of a folder's files."""
    return {
        path.name: {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
    }


def test_the_parts_of_all_processes_make_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a", "b", "of nobody"):
        (tmp_path / name).write_text(name)
    expected = entries(tmp_path)
    manifest.write_part(tmp_path, 0, {"a": expected["a"]})
    manifest.write_part(tmp_path, 1, {"b": expected["b"]})
    with pytest.raises(FileNotFoundError, match=r"manifest\.2\.json"):
        manifest.take_parts(tmp_path, 3)
    manifest.write_part(tmp_path, 0, {"a": expected["a"]})
    manifest.write_part(tmp_path, 1, {"b": expected["b"]})
    known = manifest.take_parts(tmp_path, 2)
    really, hashed = manifest._described, list[str]()
    monkeypatch.setattr(
        manifest, "_described", lambda path, progress: (hashed.append(path.name), really(path, progress))[1]
    )
    manifest.write(tmp_path, 2, 7, known=known)
    assert hashed == ["of nobody"]
    assert manifest.read(tmp_path, 7)["files"] == expected
    assert {path.name for path in tmp_path.iterdir()} == {*expected, "manifest.json"}


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
def test_every_file_is_dealt_once(num_processes: int):
    sizes = {f"state/d/{i}": {"size": i * i} for i in range(40)}
    hands = manifest.dealt(sizes, num_processes)
    assert sorted(name for hand in hands for name in hand) == sorted(sizes)
    held = [sum(sizes[name]["size"] for name in hand) for hand in hands]
    assert max(held) <= 1.1 * sum(held) / num_processes


def test_each_process_compares_what_it_wrote_if_as_many_write_and_compare():
    files = {"host/metadata": 3, "state/ocdbt.process_0/d/x": 9, "state/ocdbt.process_1/d/y": 1}
    sizes = {name: {"size": size} for name, size in files.items()}
    assert manifest.dealt(sizes, 2) == [["host/metadata", "state/ocdbt.process_0/d/x"], ["state/ocdbt.process_1/d/y"]]
    assert manifest.dealt(sizes, 3) == [["state/ocdbt.process_0/d/x"], ["host/metadata"], ["state/ocdbt.process_1/d/y"]]
