"""The configuration's checks as a table: settings, and the sentence that refuses them."""

import math
import re
from typing import Any

import pytest

from jaxrl.config import Config, ConfigError, from_mapping, to_mapping
from jaxrl.config.checks import GROUP_RELATIVE
from jaxrl.config.mapping import by_path, unchecked
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


REFUSED = {
    "rollout.hosts_per_worker (3) must cut hosts.num (12) along the major axes of the mesh, into groups of one of ": (
        {"rollout.hosts_per_worker": 3, "hosts.num": 12}
    ),
    "rollout.stale_tokens=recompute needs actor.old_logprobs=recompute, found rollout": (
        {"actor.old_logprobs": "rollout", "rollout.stale_tokens": "recompute"}
    ),
    "actor.dtype (bfloat16) must be rollout.dtype (auto) where actor.numerics is invariant": (
        {"actor": {"numerics": "invariant", "dtype": "bfloat16"}}
    ),
    "rollout.num_devices (3) and the 5 devices left of trainer.num_devices (8) must have nested meshes": (
        {"rollout.num_devices": 3, "trainer.num_devices": 8, "trainer.one_step_off": True}
    ),
    **{
        f"rollout.n (1) must be at least 2 with algorithm.adv_estimator={name}": (
            {"rollout.n": 1, "algorithm.adv_estimator": name}
        )
        for name in sorted(GROUP_RELATIVE)
    },
}
"""`tests/refusals/test_refused.py` has others, as a command says them."""


def test_what_is_refused():
    for said, options in REFUSED.items():
        with pytest.raises(ConfigError, match=re.escape(said)):
            build(options)
    with pytest.raises(ConfigError) as caught:
        build({"rollout.n": 0, "data.train_fils": ["a"]})
    assert str(caught.value).split("\n") == [
        "unknown option data.train_fils: did you mean data.train_files?",
        "rollout.n must be at least 1, found 0",
    ], "all at once"


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rollout.n": 1, "algorithm.adv_estimator": "reinforce_plus_plus"},
        {"rollout.n": 1, "algorithm.adv_estimator": "gae", "critic.cliprange_value": float("inf")},
        {"algorithm.adv_estimator": "gae", "critic.optim": {"lr_warmup_steps": 3}, "trainer.critic_warmup": 3},
        {"rollout.tensor_model_parallel_size": "auto", "trainer.num_devices": 8, "rollout.layout.degrees": [2, 4]},
        {"algorithm.rollout_correction": {"rollout_is": "sequence", "rollout_is_threshold": float("inf")}},
        {"algorithm.rollout_correction": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}},
        {
            "actor": {"old_logprobs": "rollout", "loss_mode": "reinforce"},
            "algorithm.rollout_correction.rollout_is": "token",
        },
        {"rollout.tensor_model_parallel_size": 4, "trainer.num_devices": 8},
    ],
)
def test_what_is_accepted(options):
    config = build(options)
    assert from_mapping(to_mapping(config)) == config, "a resolved config resolves to itself"


def test_what_a_critic_has_of_the_actor():
    config = build({"algorithm.adv_estimator": "gae", "actor.ppo_epochs": 3, "actor.ppo_mini_batch_size": 4})
    assert (config.critic_epochs, config.critic_mini_batch_prompts, config.critic_updates_per_step) == (3, 4, 6)
    own = {"critic.ppo_epochs": 2, "critic.ppo_mini_batch_size": 8}
    assert build({"algorithm.adv_estimator": "gae", **own}).critic_updates_per_step == 2
    assert config.critic.optim.lr == 1e-5, "verl's, ten times the actor's"
    assert build().critic_updates_per_step == build({"trainer.critic_warmup": 3}).critic_warmup == 0


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
