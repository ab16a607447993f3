"""Options that do not fit each other: a row for each rule, with what its sentence must name."""

import re
from functools import partial
from pathlib import Path

import pytest

from jaxrl.config import ConfigError
from jaxrl.config.files import load
from jaxrl.config.functions import UserFile, read_user_file, user_function
from jaxrl.config.verl_options import advice_by_word

RULES = [
    ("data.train_files=[a.jsonl]", "data.task and data.train_files exclude each other"),
    ("data.prompt_template=solve", "data.prompt_template must contain {question}, found 'solve'"),
    ("data.source_quotas={a: -1, b: 9}", "data.source_quotas.a must be at least 0, found -1"),
    ("data.source_quotas={a: 3}", "data.source_quotas must add up to data.train_batch_size (8 prompts), found 3"),
    ("reward.overlong_buffer={enable: true, len: 999}", "reward.overlong_buffer.len (999 tokens) must be at least 1"),
    ("algorithm.use_kl_in_reward=true actor.use_kl_loss=true", "exclude each other: count KL once"),
    ("actor.param_dtype=float64 actor.dtype=float32", "actor.dtype must be float64 where actor.param_dtype is"),
    ("actor.numerics=invariant actor.context_parallel_size=2", "actor.context_parallel_size (2) must be 1"),
    ("actor.numerics=invariant rollout.quantization=int8", "=int8 and actor.numerics=invariant exclude each other"),
    ("algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[a, b] algorithm.gdpo_reward_weights=[1]",
     "algorithm.gdpo_reward_weights must have one number for each of gdpo_reward_keys (2), found 1"),
    ("algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[a, b] algorithm.use_kl_in_reward=true",
     "algorithm.use_kl_in_reward and algorithm.adv_estimator=gdpo exclude each other"),
    ("model.lora_adapter_path=a trainer.init_from=b", "(a) and trainer.init_from (b) exclude each other: adapters"),
    ("model.base_quantization=nf4", "model.base_quantization=nf4 needs adapters (model.lora_rank): weights in so few"),
    ("model={base_quantization: nf4, lora_rank: 8} actor.remat=none", "=nf4 excludes actor.remat=none, which would"),
    ("hosts.num=4 rollout={hosts_per_worker: 2, tensor_model_parallel_size: auto}", "there is nothing to choose"),
    ("algorithm.adv_estimator=gspo", "found 'gspo'; here it is actor.ratio_level=sequence"),
    ("rollout.task_size=3", "unknown option rollout.task_size: did you mean data.task_size?"),
    ("rollout.seven=3", "unknown option rollout.seven: known here: n, num_devices"),
    ("actor_rollout_ref.rollout.n=3", "it is rollout.n (there is no actor_rollout_ref here)"),
    ("hosts.num=2 rollout.num_workers=3", "rollout.num_workers (3) counts the workers of all hosts"),
    ("hosts.num=2 trainer.num_devices=4", "trainer.num_devices (4) and"),
    ("hosts.num=2 reward.kind=judge reward.judge.model=m", "reward.judge.model (m) and"),
    ("hosts.num=2 algorithm.teacher.path=t algorithm.teacher.offload=true", "algorithm.teacher.offload and"),
    ("hosts.num=4 rollout.hosts_per_worker=2 rollout.num_workers=4", "a host has a part of one worker"),
    ("hosts.num=4 rollout.hosts_per_worker=2 rollout.num_devices=2", "rollout.num_devices (2) and rollout.hosts_per"),
    ("hosts.num=4 rollout.hosts_per_worker=2 rollout.warmup=false", "rollout.warmup=false and rollout.hosts_per"),
    ("algorithm.rollout_correction.rollout_rs=[token_k1, token_k1]", "rollout_rs names token_k1 twice"),
    ("algorithm.rollout_correction.rollout_rs=[token_k1]", "rollout_rs_threshold must have one entry"),
    ("algorithm.rollout_correction={rollout_rs: [token_k2], rollout_rs_threshold: ['0.5_2']}",
     "rollout_rs_threshold for token_k2 must be a number above 0, found '0.5_2'"),
    ("algorithm.rollout_correction={rollout_rs: [token_k1], rollout_rs_threshold: [half]}", "must be two ratios above"),
    ("algorithm.rollout_correction.rollout_is=token actor.old_logprobs=rollout", "needs actor.old_logprobs=recompute"),
    ("rollout.num_devices=8 trainer.num_devices=8", "rollout.num_devices (8) must be below trainer.num_devices (8)"),
    ("actor.grad_clip=1e300", "must be at most 3.4e+38 (the largest float32), found 1e+300"),
    ("rollout.num_blocks=99999999999", "must be at most 2147483647 (the largest 32-bit integer)"),
    ("data.apply_chat_template_kwargs={messages: 1}", "the run gives the chat template messages itself"),
    ("data.apply_chat_template_kwargs={tools: 3}", "tools must be a list of JSON schemas, found 3"),
    ("reward={kind: judge, judge: {endpoint: 'http://h:x', endpoint_model: m}}", "'http://h:x' (Port could not be"),
    ("reward={kind: judge, judge: {endpoint: 'http://h/v1'}}", "reward.judge.endpoint_model is missing"),
    ("reward={kind: judge, judge: {endpoint: 'h/completions', endpoint_model: m}}", "before /chat/completions, found"),
    ("rollout.layout.switch=true", "rollout.layout.profile is missing: rollout.layout.switch needs a file"),
    ("rollout.layout={switch: true, planner: true, profile: p, direction: both}", "must be up where rollout.layout.pl"),
    ("rollout.layout={switch: true, profile: p, degrees: [1, 2, 3]}", "must ascend from at least 1, each dividing"),
    ("rollout.layout={planner: true, degrees: [1, 3]} trainer.num_devices=8", "3 must divide trainer.num_devices (8)"),
    ("data.gen_batch_size=4", "data.gen_batch_size (4 prompts) needs algorithm.filter_groups.enable"),
    ("data.gen_batch_size=2 algorithm.filter_groups={enable: true, max_num_gen_batches: 3}", "(3) must be >= data."),
    ("algorithm.filter_groups={enable: true, path: f.py, metric: acc}", "algorithm.filter_groups.metric (acc) exclude"),
    ("algorithm.filter_groups={enable: true, metric: ''}", "algorithm.filter_groups.metric is empty: name reward"),
    ("algorithm={adv_estimator: gae, filter_groups: {enable: true}} rollout.temperature=0",
     "filter_groups.enable leav"),
    ("trainer.stream={enable: true, min_done: 0.9, max_done: 0.5}", "(0.9) must be at most trainer.stream.max_done"),
    ("hosts.num=2 rollout.ranking_groups={enable: true, move: kv}", "rollout.ranking_groups.move (kv)"),
    ("algorithm.adv_estimator=none", "needs algorithm.teacher.path or algorithm.teacher.endpoint"),
    ("algorithm.adv_estimator=none algorithm.teacher.path=t algorithm.use_kl_in_reward=true",
     "algorithm.use_kl_in_reward and algorithm.adv_estimator=none exclude each other"),
    ("algorithm.teacher={path: t, context_key: answer, context_template: '{question}'}", "must contain {context}"),
    ("algorithm.teacher={path: t, context_key: answer} actor.ppo_max_token_len_per_gpu=400", "the teacher's longest"),
    ("algorithm.teacher={path: t, endpoint: 'http://h/v1', endpoint_model: m}", "there is one teacher"),
    ("reward.domains={'': {kind: math}}", "a source must have a name, found an empty one"),
    ("reward.domains.a.kind=environment", "reward.domains.a.kind is environment, which needs environment.kind"),
    ("reward.kind=custom", "reward.path is missing: reward.kind is custom"),
    ("reward.kind=math reward.path=r.py", "reward.path (r.py) needs reward.kind=custom, found math"),
    ("reward.parts.f.kind=format", "reward.parts.f.pattern is missing: reward.parts.f.kind is format"),
    ("reward.parts.f={kind: format, pattern: '('}", "reward.parts.f.pattern must be a regular expression, found '('"),
    ("reward.parts.f={kind: length, pattern: a}", "reward.parts.f.pattern ('a') needs reward.parts.f.kind=format"),
    ("reward.parts.f={kind: length, free_tokens: 999}", "must be below data.max_response_length"),
    ("reward.parts.f={kind: format, pattern: a, free_tokens: 3}", "needs reward.parts.f.kind=length, found format"),
    ("reward.kind=judge", "needs one of reward.judge.model and reward.judge.endpoint, found neither"),
    ("reward.kind=judge reward.judge={model: m, prompt: '{question}'}", "must have the field {response}"),
    ("reward.kind=judge reward.judge={model: m, score_pattern: '('}", "reward.judge.score_pattern ('(') is no regular"),
    ("reward.kind=judge reward.judge={model: m, score_pattern: a}", "reward.judge.score_pattern"),
    ("reward.kind=model", "reward.judge.model is missing: reward.kind=model needs a reward model's folder"),
    ("reward.kind=model reward.judge={model: m, endpoint: 'http://h/v1'}", "reward.judge.endpoint"),
    ("reward={kind: model, judge: {model: m}, domains: {a: {kind: judge}}}", "reward.kind is model, and another kind"),
    ("environment.kind=verifiers", "environment.kind=verifiers needs environment.id"),
    ("environment={kind: verifiers, id: a, python: p} data.system_prompt=s", "begin with prompts of their own"),
    ("environment={kind: openai, path: a.py, group: g}", "environment.group (g) needs environment.kind tools, class"),
    ("environment={kind: tools, path: a.py} data.apply_chat_template=false", "needs data.apply_chat_template"),
    ("environment={kind: tools, path: a.py} data.apply_chat_template_kwargs={tools: []}", "kwargs.tools excludes env"),
    ("environment={kind: tools, path: a.py, reward: last} algorithm.adv_estimator=grpo_turns",
     "algorithm.adv_estimator=grpo_turns excludes environment.reward=last"),
    ("environment={kind: tools, path: a.py} rollout.stop=[x]", "rollout.stop excludes environment.kind"),
]  # fmt: skip


FILES = [
    ("a.gin", "rollout = 3\n", "line 1: rollout is a section: give its options one by one, as rollout.option = value"),
    ("a.gin", "lr = 3\n", "line 1: lr is a macro that nothing uses, since it names no section: did you mean"),
    ("a.gin", "include 'a.gin'\n", "includes itself"),
    ("a.gin", "a/rollout.n = 3\n", "line 1: scopes (a/...) are not supported"),
    ("a.gin", "a/rollout:\n  n = 3\n", "line 1: scopes (a/...) are not supported"),
    ("a.gin", "import os\n", "line 1: imports are not supported"),
    ("a.gin", "rollout.n = 3\nrollout.n.m = 4\n", "line 2: rollout.n.m: 'n' is an option, not a section"),
    ("a.gin", "rollout.n = %many\n", "line 1: the macro %many is used but never given a value"),
    ("a.gin", "a = %b\nb = %a\nrollout.n = %a\n", "is defined by itself"),
    ("a.gin", "data.task_config = {%a: 1}\na = 1\n", "a name in a mapping must be text, not a macro or a reference"),
    ("a.gin", "rollout.n = @many()\n", "line 1: the reference @many() is not supported"),
    ("a.gin", "trainer.val_before_train = true\n", "'true' is no value: text must be in quotation marks, and true is"),
    ("a.gin", "data.task_config = {[1]: 2}\n", "not valid gin (unhashable type: 'list')"),
    ("a.txt", "rollout: {n: 3}\n", "a config file must end in .yaml, .yml, .gin"),
    ("a.yaml", "- rollout\n", "must hold sections with options, found ['rollout']"),
    ("a.yaml", "1: {n: 2}\n", "must hold sections with options, found {1: {'n': 2}}"),
    ("a.yaml", "rollout:\n  1: 2\n", "a name must be text, found 1 (int): put it in quotation marks"),
    ("a.yaml", "rollout: {n: 1:30}\n", "line 1: 1:30 would be read to base 60"),
    ("a.yaml", "rollout: {n: 010}\n", "line 1: 010 would be read to base 8, as 8"),
    ("a.yaml", "data: {system_prompt: {a: b}}\n", "data.system_prompt must be text"),
    ("a.yaml", "rollout: {temperature: .inf}\n", "rollout.temperature must be a finite number"),
    ("a.yaml", "rollout: {n: *many}\n", "line 1: found undefined alias 'many'"),
    ("a.yaml", "data: {train_files: *.jsonl}\n", "(to YAML * begins an alias: put text with it in quotation marks"),
    ("a.yaml", "rollout: {n: [1\n", "line 2: expected ',' or ']'"),
    ("a.yaml", "rollout: {n: 3}\nalgorithm: {adv_estimator: ppo}\n", "a.yaml, line 2)"),
    ("a.yaml", "a\x07: 1\n", "line 1: the character U+0007 is not allowed"),
    ("a.yaml", "\ufeff\ufffe".encode("utf-16"), "not UTF-8 text but UTF-16: save it as UTF-8"),
]


@pytest.mark.parametrize(("name", "text", "rule"), FILES, ids=[f"{name}-{rule[:40]}" for name, _, rule in FILES])
def test_what_is_wrong_in_a_file_is_said_with_its_place(name: str, text: str | bytes, rule: str, tmp_path: Path):
    file = tmp_path / name
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as refused:
        load(file, ["model.path=x", "data.task=chain_sum"])
    assert rule in str(refused.value)
    assert name in str(refused.value)


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("rollout..n=3", "must have the form section.option"),
        ("rollout.n", "must have the form section.option=value"),
        ("+rollout.n=3", "there is no + here, since every option has a default: write rollout.n=3"),
        ("rollout.n.m=3", "rollout.n must be"),
    ],
)
def test_an_override_has_a_form(override: str, rule: str):
    with pytest.raises(ConfigError) as refused:
        load(None, ["model.path=x", override])
    assert rule in str(refused.value)


@pytest.mark.parametrize(("given", "rule"), RULES, ids=[rule[:40] for _, rule in RULES])
def test_options_that_do_not_fit_are_refused(given: str, rule: str):
    own = ["model.path=x", "data.task=chain_sum", "data.val_size=4", "data.train_batch_size=8"]
    with pytest.raises(ConfigError) as refused:
        load(None, own + _overrides(given))
    assert rule in str(refused.value)


def _overrides(text: str) -> list[str]:
    """Of `a.b=[x, y] c.d=z`: a blank inside brackets ends no override."""
    words: list[str] = []
    for word in text.split(" "):
        if words and any(words[-1].count(begin) > words[-1].count(end) for begin, end in ("{}", "[]")):
            words[-1] += " " + word
        else:
            words.append(word)
    return words


FUNCTIONS = [
    ("def other(): ...", "must define a function 'score', found other: reward.name=other"),
    ("def a(): ...\ndef b(): ...", "must define a function 'score', found a, b (reward.name names one)"),
    ("score = 3", "must define a function 'score', found int"),
    ("class score: ...", "score is a class: name an instance of it, as x in x = score()"),
    ("async def score(text): ...", "score must be an ordinary function, found an async one"),
    ("def score(text):\n    yield 1", "score must be an ordinary function, found a generator"),
    ("def score(other): ...", "score must take (text, answer), by these names; found (other): missing a"),
    ("score = max", "found a function without a signature that can be read"),
    ("\n1 / 0", "failed in line 2 with ZeroDivisionError: division by zero"),
    ("a = (", "failed in line 1 with SyntaxError: '(' was never closed"),
    ("# coding: klingon", "cannot be read as text: unknown encoding"),
]


@pytest.mark.parametrize(("text", "rule"), FUNCTIONS, ids=[rule[:40] for _, rule in FUNCTIONS])
def test_a_file_without_the_function_that_is_asked_for(text: str, rule: str, tmp_path: Path):
    (tmp_path / "r.py").write_text(text)
    names, read = ("reward.path", "reward.name"), partial(read_user_file, "reward.path", str(tmp_path / "r.py"))
    with pytest.raises(ValueError, match=re.escape(rule)):
        user_function(names, read(), "score", ("text", "answer"))
    with pytest.raises(ValueError, match=r"^reward\.path: no such file: /"):
        read_user_file("reward.path", str(tmp_path / "gone.py"))


def test_a_function_may_take_one_of_its_arguments():
    file = UserFile("r.py", "def score(other): ...\ndef fits(answer): ...")
    options = ("reward.path", "reward.name")
    assert user_function(options, file, "fits", ("text", "answer"), takes_all=False)(answer=1) is None
    with pytest.raises(ValueError, match=r"score must take one of text, answer; found \(other\)"):
        user_function(options, file, "score", ("text", "answer"), takes_all=False)


@pytest.mark.parametrize(
    ("word", "found"),
    [("xyzzy", None), ("lora", "here it is model.lora_rank"), ("strategy", "there is no FSDP or Megatron")],
)
def test_what_a_word_of_verls_is_here(word: str, found: str | None):
    said = advice_by_word(word)
    assert said is None if found is None else found in said
