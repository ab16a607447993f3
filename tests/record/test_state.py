"""A simulated run's state comes back as it was; any change of its file is found."""

import json
import math
import random

import numpy as np
import pytest

from jaxrl.record.state import dump_state, load_state

STATE = {"step": 3, "data": {"order": np.arange(5, dtype=np.int16)}, "name": "plain"}


def test_round_trip():
    found = load_state(dump_state(STATE), "state.json")
    assert found["data"]["order"].dtype == np.int16
    assert found["data"]["order"].tolist() == [0, 1, 2, 3, 4]
    assert {**found, "data": None} == {**STATE, "data": None}


def test_every_change_is_found():
    """Each byte flipped, and each length cut to; the last byte of the text is no line end that could be spared."""
    text, moments = dump_state(STATE), random.Random(1)
    for at in range(len(text)):
        flipped = text[:at] + chr(ord(text[at]) ^ 1 << moments.randrange(7)) + text[at + 1 :]
        for damaged in (flipped, text[:at]):
            with pytest.raises(ValueError, match=r"^state.json: .*remove it to start again$"):
                load_state(damaged, "state.json")


def test_state_of_another_kind_is_refused():
    for text, match in (("{}", "schema 2"), ("[1]", "schema 2"), ("{", "not a simulation's state")):
        with pytest.raises(ValueError, match=match):
            load_state(text, "state.json")
    with pytest.raises(TypeError, match="neither a JSON value nor an array"):
        dump_state({"a": {1, 2}})
    state = {"left": np.arange(6).reshape(3, 2), "empty": np.zeros((0, 2), np.int64), "n": 1}
    found = load_state(dump_state(state), "state.json")
    assert found["left"].tolist() == state["left"].tolist()
    assert found["empty"].shape == (0, 2)


def test_state_is_json_whatever_its_numbers_are():
    state = {"a": [1.5, math.inf], "b": {"c": -math.inf}, "d": np.array([math.nan, 2.0]), "e": None, "f": True}
    text = dump_state(state)
    for line in text.splitlines():
        json.loads(line, parse_constant=pytest.fail)
    found = load_state(text, "state.json")
    assert (found["a"], found["b"], found["e"], found["f"]) == ([1.5, math.inf], {"c": -math.inf}, None, True)
    np.testing.assert_array_equal(found["d"], state["d"])
