"""A simulated run's state comes back as it was, and any change of its file is found; so do arrays from theirs."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from jaxrl.record import state
from jaxrl.record.state import dump_state, load_state, read_arrays, write_arrays

STATE = {"step": 3, "data": {"order": np.arange(5, dtype=np.int16)}, "name": "plain"}


def test_every_change_is_found():
    """Each byte flipped, and each length cut to; the last byte of the text is no line end that could be spared."""
    text, moments = dump_state(STATE), random.Random(1)
    for at in range(len(text)):
        flipped = text[:at] + chr(ord(text[at]) ^ 1 << moments.randrange(7)) + text[at + 1 :]
        for damaged in (flipped, text[:at]):
            with pytest.raises(ValueError, match=r"^state.json: .*remove it to start again$"):
                load_state(damaged, "state.json")


def test_state_is_json_whatever_its_numbers_are():
    state = {"a": [1.5, math.inf], "b": {"c": -math.inf}, "d": np.array([math.nan, 2.0]), "e": None, "f": True}
    text = dump_state(state)
    for line in text.splitlines():
        json.loads(line, parse_constant=pytest.fail)
    found = load_state(text, "state.json")
    assert (found["a"], found["b"], found["e"], found["f"]) == ([1.5, math.inf], {"c": -math.inf}, None, True)
    np.testing.assert_array_equal(found["d"], state["d"])


def test_arrays_of_any_dtype_and_size_come_back_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(state, "_PART_BYTES", 16)
    arrays = {
        "several parts": np.arange(11, dtype=np.int64).reshape(11, 1),
        "one part": np.arange(4, dtype=np.float32),
        "none": np.zeros((0, 5), np.int8),
        "text": np.asarray(["naïve", ""]),
        "not finite": np.asarray([np.nan, np.inf, -0.0], np.float16),
    }
    write_arrays(tmp_path / "a", arrays)
    found = read_arrays(tmp_path / "a")
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
        assert found[name].flags.writeable
    write_arrays(tmp_path / "b", {})
    assert read_arrays(tmp_path / "b") == {}
    with pytest.raises(ValueError, match="array x of a checkpoint holds objects"):
        write_arrays(tmp_path / "c", {"x": np.asarray([{}])})
