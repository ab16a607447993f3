"""A config says the truth for the command that reads it: what it does not read neither refuses it nor goes unsaid."""

import pytest

from jaxrl.config import ConfigError
from jaxrl.config.files import load

BROKEN = {  # options that a rule of RL's refuses
    "an estimator": ["algorithm.adv_estimator=gdpo"],
    "old log-probabilities": ["actor.old_logprobs=rollout", "rollout.stale_tokens=recompute"],
    "a reward": ["reward.kind=custom"],
    "turns": ["environment.kind=tools"],
}


@pytest.mark.parametrize("command", ["sft", "dpo"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_about_what_is_not_read_refuses_nothing(name: str, command: str):
    said: list[str] = []
    given = ["model.path=x", *BROKEN[name]]
    with pytest.raises(ConfigError):
        load(None, given, command="train")
    config = load(None, given, said.append, command)
    assert len(said) >= sum(not each.startswith("data.train_files") for each in BROKEN[name])
    assert all(f"has no effect: `jaxrl {command}` does not read it (command line: " in each for each in said)
    assert config == load(None, [each for each in given if each.startswith(("model.", "data.train_files"))])


RULES = {
    "lengths": (["data.max_response_length=4000"], "must hold the longest sequence"),
    "held-out rows": (["trainer.test_freq=1", "data.train_files=[a]"], "needs held-out prompts"),
    "a template": (["data.prompt_template=a"], "must contain {question}"),
}


@pytest.mark.parametrize("command", ["sft", "dpo"])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_about_what_is_read_holds(name: str, command: str):
    options, said = RULES[name]
    with pytest.raises(ConfigError, match=said.replace("{", r"\{")):
        load(None, ["model.path=x", *options], command=command)


def test_each_command_has_its_own_sections():
    mean = "algorithm.loss_agg_mode=seq-mean-token-sum"
    options = ["sft.train_on=last", "dpo={chosen_key: a, rejected_key: a}", mean]
    of_dpo = ["dpo.chosen_key", "dpo.rejected_key"]
    unread = {"train": ["sft.train_on", *of_dpo], "sft": of_dpo}
    for command, names in unread.items():
        said: list[str] = []
        load(None, ["model.path=x", *options], said.append, command)
        assert [each.partition("=")[0] for each in said] == names
    with pytest.raises(ConfigError, match="must name two columns"):
        load(None, ["model.path=x", *options], command="dpo")
    said = []
    load(None, ["model.path=x", mean], said.append, "dpo")
    assert len(said) == 1, "a pair's loss is a sum, and the batch's a mean"
    load(None, ["model.path=x", "dpo={loss_type: ipo, label_smoothing: 0.1}"], said.append, "dpo")
    assert "dpo.loss_type is ipo" in said[-1], "what another option switches off is said as before"
