"""The option reference: every option with a text that stands alone, and with its bounds."""

import re

from jaxrl.config import Config, flatten, to_mapping
from jaxrl.config.reference import options, sections

BY_PATH = {option.path: option for option in options()}


def test_every_option_is_listed_once():
    own = [option.path for option in options() if ".NAME." not in option.path]
    assert own == list(flatten(to_mapping(Config())))
    named = [option.path for option in options() if ".NAME." in option.path]
    assert named[0] == "reward.domains.NAME.kind"
    assert len(named) == len(set(named)) == 37


def test_every_option_has_a_text():
    for option in options():
        assert re.fullmatch(r"[A-Z][^\n]*\.", option.doc), f"{option.path}: {option.doc!r} must be a sentence"
        assert "..." not in option.doc, f"{option.path}: its text must stand alone"


def test_every_section_has_a_text():
    found = sections()
    assert {path.rpartition(".")[0] for path in BY_PATH} == set(found)
    for path, doc in found.items():
        assert re.match(r"[A-Z][^\n]*\.", doc), f"{path}: {doc!r} must begin with a sentence"


def test_options_that_a_text_names_exist():
    outermost = "|".join(path for path in sections() if "." not in path)
    for option in options():
        for name in re.findall(rf"\b(?:{outermost})\.[a-z_.]*[a-z_]", option.doc):
            assert name in {*BY_PATH, *sections()}, f"{option.path}: {name} is no option"


def test_what_an_option_shows():
    batch, direction = BY_PATH["data.train_batch_size"], BY_PATH["rollout.layout.direction"]
    text = "Prompts per training step."
    assert (batch.type, batch.default, batch.bounds, batch.doc) == ("int", 8, "at least 1", text)
    assert (direction.type, direction.default, direction.bounds) == ("one of up, both", "up", "")
    assert BY_PATH["rollout.tensor_model_parallel_size"].type == "int, or auto"
    shown = {path: (BY_PATH[path].type, BY_PATH[path].bounds) for path in ("rollout.top_p", "rollout.min_p")}
    assert shown == {"rollout.top_p": ("float", "in (0, 1]"), "rollout.min_p": ("float", "in [0, 1)")}
    types = [BY_PATH[path].type for path in ("data.train_files", "data.task_config", "simulate.tasks")]
    assert types == ["list of str", "mapping", "mapping of sections"]
