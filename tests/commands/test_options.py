"""`jaxrl options`: every option once, in 80 columns, and the same as JSON."""

from __future__ import annotations

import json

import jsonschema

from jaxrl.commands.options import find, options_text, schema_json, shown
from jaxrl.config.files import OWN as CONFIGS
from jaxrl.config.files import load
from jaxrl.config.reference import options
from jaxrl.config.yaml_text import parse_yaml


def test_names_of_verl_and_trl_find_their_counterparts():
    for name, ours in (
        ("warmup_ratio", ["actor.optim.lr_warmup_steps"]),
        ("loss_type", ["actor.loss_mode", "algorithm.loss_agg_mode", "dpo.loss_type"]),
        ("num_generations", ["rollout.n"]),
    ):
        assert sorted(option.path for option in find(name)) == ours
    assert options_text("warmup_ratio").startswith("warmup_ratio: of verl or TRL, here actor.optim.lr_warmup_steps\n")


def test_one_option_is_shown_whole():
    text = " ".join(options_text("rollout.n").split())
    assert text.startswith(
        "rollout.n Samples per prompt: the group size. default 8 type whole number bounds at least 1"
    )
    assert text.endswith("until the last one is scored) in YAML rollout: {n: 8}")


def test_what_is_shown_can_be_given():
    base = ["model.path=somewhere", "data.task=leg_counting"]
    plain = load(None, base)
    every = [option for option in options() if ".NAME" not in option.path and "\n" not in str(option.default)]
    given = [f"{option.path}={shown(option.default)}" for option in every if shown(option.default) != "empty"]
    assert len(given) > 150
    assert load(None, [*base, *given]) == plain


def test_the_schema_takes_every_configuration_and_refuses_what_a_run_does():
    schema = json.loads(schema_json())
    validator = jsonschema.Draft202012Validator(schema)
    files = [path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "cluster"]
    for path in files:
        validator.validate(parse_yaml(path.read_text(), str(path))[0])
    assert len(files) > 20
    described = schema["$defs"]["RolloutSection"]["properties"]["n"]
    assert described["description"] == "Samples per prompt: the group size."
    wrong = (
        {"rollout": {"n": 0}},
        {"rollout": {"m": 1}},
        {"actor": {"remat": "some"}},
        {"actor": {"clip_ratio_c": 0.5}},
    )
    assert [validator.is_valid(each) for each in (*wrong, {"actor": {"clip_ratio_c": 0}})] == [False] * 4 + [True]
