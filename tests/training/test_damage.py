"""Damaged checkpoints are found before anything is taken from them; the newest whole one is used, the others kept.

`tests/refusals/test_refused.py` has what is said of each kind of damage.
"""

import errno
import os
import random
import re
import threading
import time

import pytest
from damage import ABSTRACT, assert_restores, cut, files_of, flip, saved, state_at

from jaxrl.training import manifest
from jaxrl.training.checkpoint import Checkpointer
from jaxrl.training.steps import choose
from jaxrl.types import RunFailed


def test_a_flip_or_a_cut_in_any_file_is_found_and_the_older_checkpoint_used(tmp_path):
    """The quick one of tests/faults/test_flips.py."""
    moments, folder = random.Random(7), saved(tmp_path / "checkpoints", 2, 4)
    files = files_of(folder / "4")
    assert {file.relative_to(folder / "4").parts[0] for file in files} >= {"state", "host", "arrays", "manifest.json"}
    for i, file in enumerate(files):
        whole, size = file.read_bytes(), file.stat().st_size
        if i % 3:
            flip(file, moments.randrange(size), moments.randrange(8))
        else:
            cut(file, moments.randrange(size))
        assert_restores(folder, 2)
        file.write_bytes(whole)
    assert_restores(folder, 4)
    (folder / "4" / "manifest.json").write_bytes((folder / "2" / "manifest.json").read_bytes())
    (folder / "6").write_text("no folder")
    assert_restores(folder, 2)


@pytest.mark.parametrize(("name", "number"), [("manifest.json", errno.ESTALE), ("host/metadata", errno.EMFILE)])
def test_a_system_that_cannot_read_now_is_no_damage(tmp_path, monkeypatch, name, number):
    folder = saved(tmp_path / "checkpoints", 2, 4)
    refuse(monkeypatch, folder / "4" / name, number)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught:
        choose(folder)
    assert (caught.value.errno, caught.value.filename) == (number, str(folder / "4" / name))


@pytest.mark.parametrize("name", ["host/metadata", "state"])
def test_a_disk_that_has_lost_a_file_or_a_folder_is_damage(tmp_path, monkeypatch, name):
    folder = saved(tmp_path / "checkpoints", 2, 4)
    refuse(monkeypatch, folder / "4" / name, errno.EIO)
    chosen = choose(folder)
    assert chosen is not None
    assert (chosen.step, list(chosen.faults)) == (2, [4])


def test_a_step_that_was_not_chosen_is_compared_as_it_is_taken(tmp_path):
    """An older one, and one that was saved since."""
    folder = saved(tmp_path / "checkpoints", 2, 4)
    flip(folder / "2" / "host" / "metadata")
    with Checkpointer(folder, max_to_keep=3) as checkpoints:
        checkpoints.save(6, *state_at(6))
        checkpoints.wait()
        flip(folder / "6" / "host" / "metadata")
        for step in (2, 6):
            with pytest.raises(ValueError, match=rf"checkpoint .*/{step} is damaged: host/metadata has changed"):
                checkpoints.restore(ABSTRACT, step)


def refuse(monkeypatch, place, number):
    def refusing(really):
        def opened(path, *arguments, **options):
            if str(path) == str(place):
                raise OSError(number, os.strerror(number), str(path))
            return really(path, *arguments, **options)

        return opened

    for name, really in (("builtins.open", open), ("io.open", open), ("os.scandir", os.scandir)):
        monkeypatch.setattr(name, refusing(really))


def test_the_damaged_one_is_kept_aside_and_its_step_saved_again(tmp_path):
    folder = saved(tmp_path / "checkpoints", 2, 4)
    flip(folder / "4" / "host" / "metadata")
    before = files_of(folder)
    with Checkpointer(folder) as checkpoints:
        assert files_of(folder) == before, "looking writes nothing"
        assert checkpoints.all_steps() == [2]
        checkpoints.tidy()
        assert sorted(path.name for path in folder.iterdir()) == ["2", "4.damaged"]
        checkpoints.save(4, *state_at(4))
        checkpoints.save(6, *state_at(6))
    assert sorted(path.name for path in folder.iterdir()) == ["4", "4.damaged", "6"]
    assert_restores(folder, 6)
    flip(folder / "6" / "host" / "metadata")
    flip(folder / "4" / "state" / "_METADATA")
    with pytest.raises(ValueError, match=r"is whole \(6: host/metadata .*; 4: state/_METADATA .*\): bring"):
        Checkpointer(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["4", "4.damaged", "6"]


# -- saves that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["ours", "of Orbax"])
def test_a_folder_that_cannot_be_made_ends_the_save_at_once(tmp_path, whose):
    """Orbax's threads would wait for its temporary folders for five minutes."""
    began, folder = time.monotonic(), saved(tmp_path / "checkpoints", 2)
    with Checkpointer(folder) as checkpoints:
        if whose == "ours":
            folder.rename(tmp_path / "elsewhere")
            folder.write_text("in the way")
        else:
            (folder / "4.tmp.orbax-checkpoint-tmp").symlink_to(tmp_path / "nowhere" / "at" / "all")
        with pytest.raises(RunFailed, match=r"checkpoint 4 cannot be written .* the last good checkpoint is step 2"):
            checkpoints.save(4, *state_at(4))
        checkpoints.wait()
    assert time.monotonic() - began < 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("async", "checkpoint"))]


def test_a_save_that_fails_leaves_what_is_good(tmp_path, monkeypatch):
    """Before the step has its name, and behind that."""
    folder = saved(tmp_path / "checkpoints", 2)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run.json")

    with Checkpointer(folder) as checkpoints, monkeypatch.context() as patch:
        patch.setattr(manifest, "write", full)
        checkpoints.save(4, *state_at(4))
        with pytest.raises(RunFailed, match=r"checkpoint 4 cannot be written .* checkpoint is step 2: make room"):
            checkpoints.wait()
        assert [path.name for path in folder.iterdir()] == ["2"]
    checkpoints = Checkpointer(folder, on_commit=full)
    checkpoints.save(4, *state_at(4))
    with pytest.raises(RunFailed, match=r"run.json cannot be written: .* checkpoint is step 4: make room"):
        checkpoints.close()
    assert_restores(folder, 4)


def test_a_commit_is_told_and_leftovers_are_removed(tmp_path):
    folder, told = tmp_path / "checkpoints", []
    folder.mkdir()
    for name in ("2.tmp", "3.tmp.orbax-checkpoint-tmp", "1.removed", "4.orbax-checkpoint-tmp-12"):
        (folder / name).mkdir()
        (folder / name / "half").write_text("written")
    with Checkpointer(folder, max_to_keep=1, on_commit=told.append) as checkpoints:
        assert checkpoints.latest_step() is None
        for step in (2, 4):
            checkpoints.save(step, *state_at(step))
    assert told == [2, 4]
    assert [path.name for path in folder.iterdir()] == ["4"]
