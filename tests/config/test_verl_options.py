"""What options of verl are called here."""

from __future__ import annotations

import re

import pytest

from jaxrl.config import ConfigError
from jaxrl.config.files import load
from jaxrl.config.mapping import by_path
from jaxrl.config.verl_options import ABSENT, PREFIX, RENAMED, advice

OURS = set(by_path())
SECTIONS = {path[:end] for path in OURS for end in range(len(path)) if path[end] == "."}


def test_what_is_named_exists():
    """Our options alone are on the right side, and none of them on the left."""
    for verl, ours in RENAMED.items():
        assert set(ours.split(" and ")) <= OURS, verl
    for verl, sentence in ABSENT.items():
        sections = "data|rollout|actor|critic|algorithm|reward|trainer|hosts|environment"
        assert set(re.findall(rf"\b(?:{sections})\.\w+(?:\.\w+)*", sentence)) <= OURS, verl
        assert sentence[-1] != ".", verl
    assert {*RENAMED, *ABSENT}.isdisjoint(OURS | SECTIONS)
    assert not set(RENAMED) & set(ABSENT)


def test_each_name_is_answered():
    """With verl's outer section and without, on the command line."""
    for name in {*RENAMED, *ABSENT}:
        for option in [name] if name == PREFIX else [name, f"{PREFIX}.{name}"]:
            with pytest.raises(ConfigError) as refused:
                load(None, ["model.path=m", "data.task=leg_counting", f"{option}=1"])
            said = str(refused.value)
            assert said.startswith(f"unknown option {option}: ")
            assert said.endswith(f" (command line: {option}=1)")
            assert (RENAMED.get(name) or ABSENT[name]) in said
            assert "did you mean" not in said


def test_the_innermost_section_speaks():
    for option, said in (
        ("actor.fsdp_config.optimizer_offload", "here it is actor.offload_optimizer"),
        ("ref.fsdp_config.param_offload", "here it is actor.offload_reference"),
        ("actor.fsdp_config.param_offload", ABSENT["actor.fsdp_config"]),
        (f"{PREFIX}.made.up", ABSENT[PREFIX]),
    ):
        assert advice(option) == (option, said)
    assert advice("rollout.temprature") is advice("made", {"up": 1}) is None
