"""Files and overrides: YAML and gin give equal configs, and every failure is one ConfigError with its place."""

import pytest

from jaxrl.config import ConfigError
from jaxrl.config.files import load

pytest.importorskip("gin")

YAML = """
model: {path: models/smollm2}
data:
  train_files: [a.jsonl, b.parquet]
  val_files: [c.jsonl]
  task_config: {min_terms: 2, scale: 1e-3, names: [x, y]}
  train_batch_size: 8
  system_prompt: "Think: then answer."
rollout:
  n: 4
  temperature: 1
  stop: ["</answer>"]
  val_kwargs: {n: 2, top_p: 0.9}
actor:
  ppo_mini_batch_size: 4
  optim: {lr: 1e-5, lr_scheduler_type: cosine}
trainer: {logger: [console, tensorboard], val_before_train: true}
"""

GIN = """
batch = 8  # a macro
model.path = 'models/smollm2'
data:
  train_files = ['a.jsonl', 'b.parquet']
  val_files = ['c.jsonl']
  train_batch_size = %batch
  system_prompt = ('Think: '
                   'then answer.')
data.task_config = {'min_terms': 2, 'scale': 1e-3, 'names': ('x', 'y')}
rollout.n = 4
rollout.temperature = 1
rollout.stop = ['</answer>']
rollout.val_kwargs:
  n = 2

  top_p = 0.9
actor.ppo_mini_batch_size = 4
actor.optim.lr = %rates/high
actor.optim.lr_scheduler_type = 'cosine'
trainer.logger = ['console', 'tensorboard']
trainer.val_before_train = True
rates/high = 1e-5  # defined after its use
"""


@pytest.fixture
def file(tmp_path):
    def write(name: str, text: str):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_yaml_and_gin_give_equal_configs(file):
    from_yaml, from_gin = load(file("run.yaml", YAML)), load(file("run.gin", GIN))
    assert from_yaml == from_gin
    assert from_yaml.actor.optim.lr == 1e-5
    assert from_yaml.data.task_config == {"min_terms": 2, "scale": 0.001, "names": ["x", "y"]}
    assert from_yaml.rollout.val_kwargs.top_p == 0.9


def test_overrides_give_the_same_as_a_file(file):
    overrides = ["rollout.n=16", "actor.optim.lr=1e-4", "data.train_files=[c.jsonl]", "data.task_config.min_terms=3"]
    changed = YAML.replace("n: 4\n", "n: 16\n").replace("1e-5", "1e-4").replace("a.jsonl, b.parquet", "c.jsonl")
    expected = load(file("changed.yml", changed.replace("min_terms: 2", "min_terms: 3")))
    assert load(file("run.yaml", YAML), overrides) == expected
    assert load(file("run.gin", GIN), overrides) == expected


def test_includes_are_read_in_place(file):
    file("base.gin", "lr = 1e-6\nmodel.path = 'base'\nactor.optim.lr = %lr\nrollout.n = 2\n")
    file("more/deep.gin", "include '../base.gin'\nrollout.n = 3\n")
    config = load(file("run.gin", "rollout.n = 9\ninclude 'more/deep.gin'\nmodel.path = 'mine'\nlr = 3e-6\n"))
    # later bindings win, wherever they stand, and so does the last value of a macro
    assert (config.model.path, config.rollout.n, config.actor.optim.lr) == ("mine", 3, 3e-6)


def test_an_override_changes_one_of_two_sections_that_an_alias_made(file):
    text = "model: {path: x}\nrollout:\n  tail_batching: &f {prompt_factor: 1.5}\n  over_provisioning: *f\n"
    config = load(file("run.yaml", text), ["rollout.tail_batching.enable=true"])
    assert (config.rollout.tail_batching.enable, config.rollout.over_provisioning.enable) == (True, False)
    assert config.rollout.over_provisioning.prompt_factor == 1.5


def test_a_mapping_changes_the_options_that_it_names(file):
    path = file("run.yaml", YAML)
    config = load(path, ["rollout={n: 8, val_kwargs: {n: 5}}", "data.task_config={a: 1}"])
    assert (config.rollout.n, config.rollout.temperature, config.rollout.stop) == (8, 1.0, ["</answer>"])
    assert (config.rollout.val_kwargs.n, config.rollout.val_kwargs.top_p) == (5, 0.9)
    assert config.data.task_config == {"a": 1}, "an option as a whole, whose names are the task's"


def test_a_password_in_a_url_is_refused_and_not_shown():
    """Also where the option is not read: config.yaml would keep it."""
    given = ["model.path=x", "reward.kind=math", "reward.judge.endpoint=http://user:PASSWORD@localhost:8000/v1"]
    with pytest.raises(ConfigError, match="found one with a name or password in it: give the key by") as refused:
        load(None, given)
    assert "PASSWORD" not in str(refused.value)
    assert str(refused.value).endswith("(command line: reward.judge.endpoint=http://***@localhost:8000/v1)")
    long = f"reward.judge.endpoint=http://{'u' * 60}:PASSWORD{'p' * 60}@localhost:8000/v1"
    for other in (long, *(f"{start}://user:PASSWORD@h" for start in ("trainer.seed=http", "trainer.sed=http", "x"))):
        with pytest.raises(ConfigError) as refused:
            load(None, ["model.path=x", other])
        assert "PASSWORD" not in str(refused.value)


def test_text_on_the_command_line_is_what_stands_there():
    """YAML would make mappings, numbers and comments of it."""
    for value, text in (("{question}", "{question}"), (" 2026 ", "2026"), ('"a\\n {b}"', "a\n {b}"), ("", "")):
        assert load(None, ["model.path=x", f"data.system_prompt={value}"]).data.system_prompt == text


def test_options_without_effect_are_said_with_their_place(file):
    factors = "rollout:\n  tail_batching:\n    prompt_factor: 1.5\n    response_factor: 1.25\n"
    path, said = file("run.yaml", f"model: {{path: x}}\n{factors}"), []
    load(path, ["actor.kl_loss_coef=0.1", "rollout.deal=prompts"], said.append)
    assert said == [
        f"rollout.tail_batching.prompt_factor=1.5 has no effect: rollout.tail_batching.enable is off ({path}, line 4)",
        "rollout.deal=prompts has no effect: rollout.num_workers is 1 (command line: rollout.deal=prompts)",
        "actor.kl_loss_coef=0.1 has no effect: actor.use_kl_loss is off (command line: actor.kl_loss_coef=0.1)",
    ], "those that have their default change nothing, whoever wrote them"


def test_a_single_text_is_a_list_of_one(file):
    """In YAML, in gin and on the command line; a list is as it was."""
    yaml = "model: {path: m}\ndata: {train_files: a.jsonl}\nreward: {env: HOME}\ntrainer: {logger: console}"
    gin = "model.path='m'\ndata.train_files='a.jsonl'\nreward.env='HOME'\ntrainer.logger='console'\n"
    for text in (("run.yaml", yaml), ("run.gin", gin)):
        config = load(file(*text))
        found = config.data.train_files, config.reward.env, config.trainer.logger
        assert found == (["a.jsonl"], ["HOME"], ["console"])
        assert load(file(*text), ["data.train_files=[a.jsonl]"]) == load(file(*text), ["data.train_files=a.jsonl"])
    assert load(file(*text), ["data.train_files=b.jsonl"]).data.train_files == ["b.jsonl"]
