"""The configuration's checks as a table: settings, and the sentence that refuses them."""

import math
import re
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from jaxrl.config import Config, ConfigError, differences, flatten, from_mapping, to_mapping
from jaxrl.config.checks import GROUP_RELATIVE, without_effect
from jaxrl.config.files import apply_override
from jaxrl.config.mapping import by_path, unchecked
from jaxrl.config.options import AdvantageEstimator
from jaxrl.config.reference import options as option_docs
from jaxrl.schema.declared import Cap, Or
from jaxrl.schema.section import mark


def build(options=None):
    """A config from flat options `a.b`, on top of the least that is valid."""
    values: dict[str, Any] = {"model": {"path": "m"}}
    for path, value in (options or {}).items():
        *sections, name = path.split(".")
        node = values
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return from_mapping(values)


TP, DRAFTS = "rollout.tensor_model_parallel_size", "rollout.speculation"
SPANS = "rollout.hosts_per_worker"
FILTERED = {"algorithm.filter_groups.enable": True, "rollout.n": 2}


def devices(rollout: int, trainer: int) -> dict[str, Any]:
    return {"rollout.num_devices": rollout, "trainer.num_devices": trainer, "trainer.one_step_off": True}


REFUSED = [
    # names
    ({"rolout": {}}, "unknown option rolout: did you mean rollout?"),
    ({"actor.lr": 1.0}, "unknown option actor.lr: did you mean actor.optim.lr?"),
    ({"data.zzzzzz": 1}, "unknown option data.zzzzzz: known here: train_files, val_files"),
    # types
    ({"rollout": 3}, "rollout must be a section with options, found 3"),
    ({"rollout.val_kwargs": [1]}, "rollout.val_kwargs must be a section with options, found [1]"),
    ({"rollout.n": 4.0}, "rollout.n must be a whole number, found 4.0"),
    ({"rollout.n": True}, "rollout.n must be a whole number, found True"),
    ({"rollout.n": None}, "rollout.n must be a whole number, found None"),
    ({TP: "all"}, f"{TP} must be a whole number or auto, found 'all'"),
    ({TP: 2.0}, f"{TP} must be a whole number or auto, found 2.0"),
    ({TP: []}, f"{TP} must be a whole number or auto, found []"),
    ({"model.path": 3}, "model.path must be text, found 3"),
    ({"data.train_files": {"a": 1}}, "data.train_files must be a list, found {'a': 1}"),
    ({"data.train_files": None}, "data.train_files must be a list, found None"),
    ({"data.task_config": None}, "data.task_config must be a mapping, found None"),
    ({"data.task_config": [1]}, "data.task_config must be a mapping, found [1]"),
    ({"actor.remat": []}, "actor.remat must be one of auto, none, dots, full, found []"),
    ({"trainer.logger": ["console", "comet"]}, "trainer.logger[1] must be one of console, wandb, tensorboard"),
    ({"data.source_quotas": {1: 4}}, "data.source_quotas: a name must be text, found 1 (int): put it in"),
    # sizes that do not fit together
    (
        {"data.gen_batch_size": 1, "data.train_batch_size": 12, **FILTERED},
        "data.gen_batch_size (1 prompts) × algorithm.filter_groups.max_num_gen_batches (10) must be >= "
        "data.train_batch_size (12 prompts)",
    ),
    ({**FILTERED, "algorithm.filter_groups.metric": ""}, "algorithm.filter_groups.metric is empty"),
    # workers that span hosts
    ({SPANS: 2}, f"{SPANS} (2) must cut hosts.num (1) along the major axes of the mesh, into groups of one of 1 "),
    (
        {SPANS: 3, "hosts.num": 12},
        f"{SPANS} (3) must cut hosts.num (12) along the major axes of the mesh, into groups of one of 1, 2, 4, 12 ",
    ),
    (
        {SPANS: 2, "hosts.num": 4, "rollout.num_workers": 4},
        f"rollout.num_workers (4) must be hosts.num (4) / {SPANS} (2), or 1 for as many: a host has a part of one",
    ),
    ({SPANS: 2, "hosts.num": 2, TP: "auto"}, f"{TP} is auto, and with {SPANS} (2) there is nothing to choose"),
    ({SPANS: 2, "hosts.num": 2, "rollout.warmup": False}, f"rollout.warmup=false and {SPANS} (2) exclude each"),
    ({"data.task": "t", "data.train_files": ["a"]}, "data.task and data.train_files exclude each other"),
    ({"reward.kind": "custom"}, "reward.path is missing: reward.kind is custom, which needs a Python file"),
    ({"reward.kind": "task"}, "reward.kind is task, which needs data.task"),
    *(
        (
            {"rollout.n": 1, "algorithm.adv_estimator": name},
            f"rollout.n (1) must be at least 2 with algorithm.adv_estimator={name}",
        )
        for name in sorted(GROUP_RELATIVE)
    ),
    (
        {"algorithm.use_kl_in_reward": True, "actor.use_kl_loss": True},
        "algorithm.use_kl_in_reward and actor.use_kl_loss exclude each other: count KL once",
    ),
    ({"reward.overlong_buffer": {"enable": True, "len": 129}}, "reward.overlong_buffer.len (129 tokens) must be at "),
    ({"reward.overlong_buffer.enable": True}, "reward.overlong_buffer.len (0 tokens) must be at least 1"),
    (
        {f"{DRAFTS}.min_prefix": 8},
        f"{DRAFTS}.min_prefix (8 tokens) must be at most {DRAFTS}.max_prefix (7 tokens)",
    ),
    (
        {
            DRAFTS: {"enable": True, "epochs": 2},
            "rollout.n": 16,
            "data.max_response_length": 16777216,
            "actor.ppo_max_token_len_per_gpu": 33554432,
        },
        f"{DRAFTS}: rollout.n (16) × {DRAFTS}.epochs (2) responses of data.max_response_length (16777216 tokens) "
        "with 5 lengths of prefixes",
    ),
    (
        {"actor.old_logprobs": "rollout", "rollout.stale_tokens": "recompute"},
        "rollout.stale_tokens=recompute needs actor.old_logprobs=recompute, found rollout",
    ),
    (
        {"actor.old_logprobs": "rollout", "algorithm.rollout_correction.rollout_is": "token"},
        "algorithm.rollout_correction.rollout_is=token needs actor.old_logprobs=recompute, found rollout: the ratio of "
        "actor.loss_mode=vanilla",
    ),
    (
        {"algorithm.rollout_correction.rollout_rs": ["token_k1", "token_k1"]},
        "algorithm.rollout_correction.rollout_rs names token_k1 twice",
    ),
    (
        {"algorithm.rollout_correction": {"rollout_rs": ["token_k1", "seq_sum_k2"], "rollout_rs_threshold": []}},
        "rollout_rs_threshold must have one entry, or one for each of rollout_rs (2), found 0",
    ),
    *(
        (
            {"algorithm.rollout_correction": {"rollout_rs": [name], "rollout_rs_threshold": [given]}},
            f"rollout_rs_threshold for {name} must be {rule}, found '{given}'",
        )
        for name, given, rule in (
            ("seq_mean_k3", "0.5_2.0", "a number above 0"),
            ("seq_mean_k3", "-1", "a number above 0"),
            ("seq_mean_k1", "1.0", "two ratios above 0 as lower_upper, or one above 1"),
            ("seq_mean_k1", "2_0.5", "two ratios above 0 as lower_upper, or one above 1"),
            ("token_k1", "much", "two ratios above 0 as lower_upper, or one above 1"),
            ("token_k1", "nan", "two ratios above 0 as lower_upper, or one above 1"),
        )
    ),
    (
        {"algorithm": {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "a"]}},
        "needs algorithm.gdpo_reward_keys with at least two different names, found a, a",
    ),
    (
        {"algorithm": {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1]}},
        "gdpo_reward_weights must have one number for each of gdpo_reward_keys (2), found 1",
    ),
    (
        {"algorithm": {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"], "use_kl_in_reward": True}},
        "algorithm.use_kl_in_reward and algorithm.adv_estimator=gdpo exclude each other",
    ),
    (
        {"actor": {"numerics": "invariant", "dtype": "bfloat16"}},
        "actor.dtype (bfloat16) must be rollout.dtype (auto) where actor.numerics is invariant",
    ),
    (
        {"actor.numerics": "invariant", "rollout.quantization": "int8"},
        "rollout.quantization=int8 and actor.numerics=invariant exclude each other: the trainer, which quantises",
    ),
    (
        {"actor.numerics": "invariant", "rollout.quantization": "fp8", "rollout.kv_cache_dtype": "int8"},
        "rollout.quantization=fp8 and rollout.kv_cache_dtype=int8 and actor.numerics=invariant exclude each other",
    ),
    ({"actor.param_dtype": "float64"}, "actor.dtype must be float64 where actor.param_dtype is, found auto"),
    ({"actor.ppo_max_token_len_per_gpu": 383}, "(383 tokens) must hold the longest sequence: "),
    (
        {"actor.ppo_max_token_len_per_gpu": 191, "actor.context_parallel_size": 2},
        "actor.ppo_max_token_len_per_gpu (191 tokens) × actor.context_parallel_size (2) must hold the longest sequence",
    ),
    (
        {"actor.context_parallel_size": 2, "actor.numerics": "invariant"},
        "actor.context_parallel_size (2) must be 1 where actor.numerics is invariant",
    ),
    (
        {"rollout.num_workers": 4, TP: 4, "trainer.num_devices": 8},
        f"{TP} (4) must divide trainer.num_devices (8) / rollout.num_workers (4)",
    ),
    (
        {"rollout.num_workers": 4, **devices(2, 4)},
        "rollout.num_workers (4) must cut rollout.num_devices (2) along the major axes of their mesh, into one of "
        "1, 2 workers",
    ),
    (
        {
            "rollout.num_workers": 4,
            "trainer.num_devices": 8,
            "rollout.layout": {"planner": True, "degrees": [1, 4]},
        },
        "rollout.layout.degrees: 4 must divide trainer.num_devices (8) / rollout.num_workers (4)",
    ),
    ({"rollout.num_devices": 2}, "rollout.num_devices (2) needs trainer.one_step_off"),
    (devices(4, 4), "rollout.num_devices (4) must be below trainer.num_devices (4): some are left for training"),
    (
        devices(3, 8),
        "rollout.num_devices (3) and the 5 devices left of trainer.num_devices (8) must have nested meshes for "
        "weights to pass: the prime factors of one, (3,) and (5,), must begin those of the other",
    ),
    ({TP: 2, **devices(3, 4)}, f"{TP} (2) must divide rollout.num_devices (3)"),
]
"""`tests/refusals/test_options.py` has the others, as a command says them."""


def test_what_is_refused():
    for options, message in REFUSED:
        with pytest.raises(ConfigError, match=re.escape(message)) as caught:
            build(options)
        assert all(line for line in str(caught.value).split("\n"))


def test_every_estimator_compares_samples_or_takes_a_single_one():
    for name in get_args(AdvantageEstimator):
        if name not in GROUP_RELATIVE:
            build({"rollout.n": 1, "algorithm": {"adv_estimator": name, "teacher": {"path": "t"}}})
    assert set(get_args(AdvantageEstimator)) > GROUP_RELATIVE


def test_bounds():
    """What lies beyond an end, or at an open one, is refused, as is no number at all; a sentinel is accepted."""
    for option in (option for option in option_docs() if option.type.split(",")[0] in ("int", "float")):
        if ".NAME." in option.path:
            continue
        whole, field = option.type.startswith("int"), by_path()[option.path]
        ends = [float(end) for end in re.findall(r"-?\d[\d.]*(?:e-?\d+)?", option.bounds.partition(", or ")[0])]
        step = 1 if whole else math.ulp(max([1.0, *map(abs, ends)]))
        cap, other = mark(field, Cap), mark(field, Or)
        is_upper = option.bounds.startswith(("at most", "below"))
        beyond = [end + step if i or is_upper else end - step for i, end in enumerate(ends)]
        beyond += [cap.most + (1 if whole else cap.most)] if cap else []
        beyond += [10**400, -(10**400)] if whole else [math.nan, math.inf, -math.inf, 1e300, -1e300]
        beyond = [int(value) if whole else value for value in beyond if other is None or value != other.value]
        for value in beyond:
            with pytest.raises(ConfigError, match=rf"^{re.escape(option.path)} must be ") as caught:
                build({option.path: value})
            assert len(str(caught.value)) < 300
        if other is not None:
            unchecked({option.path.split(".")[0]: nested(option.path.split(".")[1:], other.value)})


def nested(names: list[str], value: Any) -> Any:
    return {names[0]: nested(names[1:], value)} if names else value


def test_three_wrong_options_are_told_at_once():
    options = {"rollout.n": 0, "actor.optim.lr": "high", "data.train_fils": ["a"], "reward.kind": "math"}
    with pytest.raises(ConfigError) as caught:
        build(options)
    assert str(caught.value).split("\n") == [
        "unknown option data.train_fils: did you mean data.train_files?",
        "rollout.n must be at least 1, found 0",
        "actor.optim.lr must be a number, found 'high' (text)",
    ]
    with pytest.raises(ConfigError) as caught:
        build({"rollout.n": 1, "actor.param_dtype": "float64", "rollout.num_devices": 2})
    assert [line.split(" ")[0] for line in str(caught.value).split("\n")] == [
        "rollout.n",
        "actor.dtype",
        "rollout.num_devices",
    ]


def test_every_number_has_bounds():
    """All but a few, which may be any finite number."""
    unbounded = [option.path for option in option_docs() if option.type in ("int", "float") and not option.bounds]
    assert unbounded == [
        "actor.entropy_coeff",
        "reward.domains.NAME.weight",
        "reward.parts.NAME.weight",
        "reward.judge.min_score",
        "reward.judge.max_score",
    ]


def test_defaults_are_within_their_bounds():
    found = from_mapping(to_mapping(Config()) | {"model": {"path": "m"}})
    assert found == Config().replace(model=Config().model.replace(path="m"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rollout.n": 1, "algorithm.adv_estimator": "reinforce_plus_plus"},
        {"rollout.n": 1, "algorithm.adv_estimator": "gae", "critic.cliprange_value": float("inf")},
        {"algorithm.adv_estimator": "gae", "critic.optim": {"lr_warmup_steps": 3}, "trainer.critic_warmup": 3},
        {"rollout.num_blocks": 25},
        {"actor.ppo_max_token_len_per_gpu": 384},
        {"actor.clip_ratio_c": 3},
        {"rollout.temperature": 1},
        {"rollout.tensor_model_parallel_size": "auto", "trainer.num_devices": 8, "rollout.layout.degrees": [2, 4]},
        {"reward.overlong_buffer": {"enable": True, "len": 128}},
        {"algorithm.rollout_correction": {"rollout_is": "sequence", "rollout_is_threshold": float("inf")}},
        {"algorithm.rollout_correction": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}},
        {
            "actor": {"old_logprobs": "rollout", "loss_mode": "reinforce"},
            "algorithm.rollout_correction.rollout_is": "token",
        },
        {"actor.param_dtype": "float64", "actor.dtype": "float64"},
        {"rollout.tensor_model_parallel_size": 4, "trainer.num_devices": 8},
        {"reward.kind": "task", "data.task": "t"},
        {"rollout.val_kwargs": None},
        {**FILTERED, "algorithm.filter_groups.path": "f.py"},
    ],
)
def test_what_is_accepted(options):
    config = build(options)
    assert from_mapping(to_mapping(config)) == config, "a resolved config resolves to itself"


def test_numbers_become_the_option_s_type():
    assert isinstance(build({"rollout.temperature": 1}).rollout.temperature, float)


def test_a_mapping_within_an_option_stays_whole():
    assert flatten(to_mapping(build({"data.task_config": {"a": {"b": 1}}})))["data.task_config"] == {"a": {"b": 1}}


def test_derived_sizes():
    config = build({"data.train_batch_size": 6, "actor.use_kl_loss": True})
    assert (config.mini_batch_prompts, config.needs_ref, config.max_model_length) == (6, True, 384)
    assert build({"actor.ppo_mini_batch_size": 2}).mini_batch_prompts == 2


def test_what_a_critic_has_of_the_actor():
    config = build({"algorithm.adv_estimator": "gae", "actor.ppo_epochs": 3, "actor.ppo_mini_batch_size": 4})
    assert (config.critic_epochs, config.critic_mini_batch_prompts, config.critic_updates_per_step) == (3, 4, 6)
    own = {"critic.ppo_epochs": 2, "critic.ppo_mini_batch_size": 8}
    assert build({"algorithm.adv_estimator": "gae", **own}).critic_updates_per_step == 2
    assert config.critic.optim.lr == 1e-5, "verl's, ten times the actor's"
    assert build().critic_updates_per_step == build({"trainer.critic_warmup": 3}).critic_warmup == 0


def test_what_has_no_effect_without_a_critic():
    options = {"critic.grad_clip": 2, "critic.optim": {"lr": 1e-4}, "algorithm.lam": 0.9, "trainer.critic_warmup": 2}
    assert without_effect(build({**options, "algorithm.adv_estimator": "gae"})) == []
    said = [each.partition("=")[0] for each in without_effect(build(options))]
    assert said == ["critic.grad_clip", "critic.optim.lr", "algorithm.lam", "trainer.critic_warmup"]


def test_differences():
    changed = build({"rollout.n": 4, "actor.optim.lr": 1e-5})
    assert differences(build(), changed) == ["rollout.n: 8 -> 4", "actor.optim.lr: 1e-06 -> 1e-05"]
    assert differences(build(), build()) == []


def test_overrides():
    values = {}
    for text in ("a.b=3", "a.c=[x, 1]", "d=", "e=true"):
        apply_override(values, text)
    assert values == {"a": {"b": 3, "c": ["x", 1]}, "d": None, "e": True}


def test_configs_are_frozen():
    with pytest.raises(ValidationError):
        build().rollout = None  # pyright: ignore[reportAttributeAccessIssue]


def test_a_dtype_that_is_auto_follows_the_devices_or_the_run_s_beginning():
    config = from_mapping(
        {"model": {"path": "m"}, "actor": {"dtype": "float32"}, "algorithm": {"teacher": {"path": "t"}}}
    )

    def types(of: Config) -> tuple[str, str, str]:
        return of.actor.dtype, of.rollout.dtype, of.algorithm.teacher.dtype

    assert types(config) == ("float32", "auto", "auto")
    assert types(config.with_types("cpu")) == ("float32",) * 3
    assert types(config.with_types("tpu")) == types(config.with_types("gpu")) == ("float32", "bfloat16", "bfloat16")
    begun = config.with_types("gpu")
    assert types(config.with_types("cpu", begun)) == types(begun), "a run goes on in its types"
    assert types(config.with_types("cpu", config)) == ("float32",) * 3
    assert begun.with_types("cpu") == begun
