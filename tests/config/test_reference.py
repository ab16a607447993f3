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
    assert len(named) == len(set(named)) == 34


def test_options_that_a_text_names_exist():
    outermost = "|".join(path for path in sections() if "." not in path)
    for option in options():
        for name in re.findall(rf"\b(?:{outermost})\.[a-z_.]*[a-z_]", option.doc):
            assert name in {*BY_PATH, *sections()}, f"{option.path}: {name} is no option"
