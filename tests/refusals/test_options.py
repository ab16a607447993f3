"""The battery's options: values that no run can have, and options that contradict each other.

Each is refused while options are read, with the overrides that the sentence names as its place.
`tests/config/test_options.py` has every option's bounds, and the rest of the sentences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from refusals import Refusal

NUMBERS = {
    "actor.entropy_coeff=.nan": "actor.entropy_coeff must be a finite number, found nan",
    "actor.optim.lr=inf": "actor.optim.lr must be a number, found 'inf' (text)",
    "actor.kl_loss_coef=1e39": "actor.kl_loss_coef must be at most 3.4e+38 (the largest float32), found 1e+39",
    "rollout.temperature=.nan": "rollout.temperature must be a finite number, found nan",
    "reward.timeout_s=.inf": "reward.timeout_s must be a finite number, found inf",
    "data.task_config.sizes=[1, .inf]": "data.task_config.sizes must be a finite number, found inf",
    "simulate.efficiency.mfu=.nan": "simulate.efficiency.mfu must be a finite number, found nan",
}
"""What is no number, or none that a float32 holds."""

BOUNDS = {
    "actor.optim.lr=100": (
        "actor.optim.lr must be at most 1 (AdamW moves every weight by about so much per update), found 100"
    ),
    "actor.optim.beta2=0.99999999999": (
        "actor.optim.beta2 must be at most 0.999999 (a larger one is 1 as a float32, and the update a division by 0), "
        "found 0.99999999999"
    ),
    "rollout.temperature=1e-30": (
        "rollout.temperature must be in [0.001, 100], or 0 for the likeliest token, found 1e-30"
    ),
}
"""What makes no sense."""

SIZES = {
    "rollout.n=1000000": (
        "rollout.n must be at most 65536 (a prompt's samples are kept in memory until the last one is scored), found "
        "1000000"
    ),
    "data.task_size=1000000000": (
        "data.task_size must be at most 10000000 (they are made one by one at the start, and kept), found 1000000000"
    ),
    "rollout.num_blocks=1e12": "rollout.num_blocks must be a whole number, found 1000000000000.0",
    "data.seed=1" + 300 * "0": (
        "data.seed must be at most 4294967295 (the largest unsigned 32-bit integer), found a number of 997 bits"
    ),
}
"""What would take the machine down, last for ever or overflow."""

TYPES = {
    "rollout.n=four": "rollout.n must be a whole number, found 'four' (text)",
    "actor.optim.lr=small": "actor.optim.lr must be a number, found 'small' (text)",
    "actor.optim.lr=yes": "actor.optim.lr must be a number, found True",
    "rollout.tail_batching.enable=1": "rollout.tail_batching.enable must be true or false, found 1",
    'data.shuffle="false"': "data.shuffle must be true or false, found 'false' (text)",
    "rollout.layout.degrees=two": "rollout.layout.degrees must be a list, found 'two'",
    "rollout.stop=[1]": "rollout.stop[0] must be text, found 1: put it in quotation marks",
    "data.train_files=[org/none:]": (
        "data.train_files[0] must be text, found {'org/none': None}: put it in quotation marks (to YAML, a { at the "
        "beginning or a : at the end makes a mapping)"
    ),
    "rollout.partial_rollout=true": (
        "rollout.partial_rollout must be a section with options, found True: rollout.partial_rollout.enable is its "
        "switch"
    ),
    "rollout.layout.degrees=[1, two]": "rollout.layout.degrees[1] must be a whole number, found 'two' (text)",
    "data.source_quotas.easy=0.5": "data.source_quotas.easy must be a whole number, found 0.5",
    "simulate.tasks={a: {weight: 0}}": "simulate.tasks.a.weight must be above 0, found 0",
    "simulate.efficiency.mfu=high": "simulate.efficiency.mfu must be a number, found 'high' (text)",
}
"""Another type than the option's."""

NAMES = {
    "rollout.temprature=1": "unknown option rollout.temprature: did you mean rollout.temperature?",
    "actor_rollout_ref.rollout.n=4": (
        "unknown option actor_rollout_ref.rollout.n: it is rollout.n (there is no actor_rollout_ref here)"
    ),
    "rollout.name=vllm": "unknown option rollout.name: jaxrl has its own engine",
    "rollout.N=4": "unknown option rollout.N: did you mean rollout.n?",
    "simulate.tasks={a: {wieght: 1}}": "unknown option simulate.tasks.a.wieght: did you mean simulate.tasks.a.weight?",
    "algorithm.adv_estimator=gpro": (
        "algorithm.adv_estimator must be one of grpo, dr_grpo, grpo_turns, rloo, reinforce_plus_plus, gae, gdpo, none, "
        "found 'gpro'; did you mean grpo?"
    ),
    "rollout.num_generations=8": "unknown option rollout.num_generations: here it is rollout.n",
    "actor.remat=true": "actor.remat must be one of auto, none, dots, full, found True",
}
"""Options and words that do not exist."""

PATHS = {
    "model.path=https://huggingface.co/Qwen/Qwen3-0.6B": (
        "model.path is a URL (https://huggingface.co/Qwen/Qwen3-0.6B): download it and give the folder"
    ),
    "data.train_files=[a.jsonl, https://example.com/b.jsonl]": (
        "data.train_files is a URL (https://example.com/b.jsonl): download it and give the file"
    ),
    "trainer.run_dir=gs://bucket/run": "trainer.run_dir is a URL (gs://bucket/run): give one on this machine",
    "reward.path=file:///reward.py": "reward.path is a URL (file:///reward.py): download it and give the file",
    "rollout.layout.profile=s3://bucket/p.json": (
        "rollout.layout.profile is a URL (s3://bucket/p.json): download it and give the file"
    ),
    'trainer.run_dir="a\\0b"': "trainer.run_dir must be a path, found a NUL character in 'a\\x00b'",
    'trainer.project_name="\\ud800"': (
        "trainer.project_name holds '\\ud800', which is no character, so that it cannot be written as UTF-8"
    ),
}
"""What is no path."""

TOGETHER = {
    "rollout.temperature=0": (
        "rollout.temperature (0) makes all samples of a prompt equal, and algorithm.adv_estimator=grpo compares them "
        "with each other: every advantage would be 0"
    ),
    "rollout.top_k=1 algorithm.adv_estimator=dr_grpo": (
        "rollout.top_k (1) makes all samples of a prompt equal, and algorithm.adv_estimator=dr_grpo compares them with "
        "each other: every advantage would be 0"
    ),
    "rollout.temperature=0 algorithm.adv_estimator=reinforce_plus_plus algorithm.filter_groups.enable=true": (
        "rollout.temperature (0) makes all samples of a prompt equal, and algorithm.filter_groups.enable leaves such "
        "prompts out: no prompt would be left"
    ),
    "critic.ppo_mini_batch_size=5": (
        "critic.ppo_mini_batch_size (5 prompts) must divide data.train_batch_size (8 prompts)"
    ),
    "data.train_files=[a.jsonl] trainer.test_freq=5": (
        "trainer.test_freq (5) needs held-out prompts: give data.val_files"
    ),
    "data.task=chain_sum data.val_size=0 trainer.test_freq=5": (
        "trainer.test_freq (5) needs held-out prompts: give data.val_files, or data.val_size above 0"
    ),
    "data.train_files=[a.jsonl] trainer.val_before_train=true": (
        "trainer.val_before_train (true) needs held-out prompts: give data.val_files"
    ),
    "data.prompt_template=Solve.": "data.prompt_template must contain {question}, found 'Solve.'",
    "data.apply_chat_template_kwargs={messages: []}": (
        "data.apply_chat_template_kwargs.messages: the run gives the chat template messages itself"
    ),
    "reward.kind=model reward.judge={model: m, apply_chat_template_kwargs: {messages: []}}": (
        "reward.judge.apply_chat_template_kwargs.messages: the run gives the chat template messages itself"
    ),
    "data.apply_chat_template_kwargs={tools: [add]}": (
        "data.apply_chat_template_kwargs.tools must be a list of JSON schemas, found ['add']"
    ),
    "reward.path=r.py": "reward.path (r.py) needs reward.kind=custom, found auto",
    "reward.overlong_buffer.enable=true reward.overlong_buffer.len=200": (
        "reward.overlong_buffer.len (200 tokens) must be at least 1 and at most data.max_response_length (128 tokens) "
        "where reward.overlong_buffer.enable is on"
    ),
    "actor.ppo_max_token_len_per_gpu=100": (
        "actor.ppo_max_token_len_per_gpu (100 tokens) must hold the longest sequence: data.max_prompt_length (256) + "
        "data.max_response_length (128) = 384 tokens; actor.context_parallel_size parts it among devices"
    ),
    "trainer.num_devices=8 rollout.num_workers=3": (
        "rollout.num_workers (3) must cut trainer.num_devices (8) along the major axes of their mesh, into one of 1, "
        "2, 4, 8 workers"
    ),
    "trainer.num_devices=8 rollout.tensor_model_parallel_size=3": (
        "rollout.tensor_model_parallel_size (3) must divide trainer.num_devices (8)"
    ),
    "data.train_batch_size=65536 rollout.n=64": (
        "data.train_batch_size × rollout.n must be at most 1048576 samples, which are in memory at once, found 4194304"
    ),
    "data.val_size=60000 rollout.val_kwargs.n=100": (
        "data.val_size × rollout.val_kwargs.n must be at most 1048576 samples, which are in memory at once, found "
        "6000000"
    ),
    "rollout.num_blocks=2000000000": (
        "rollout.num_blocks (2000000000) × rollout.block_size (16 tokens) must be at most 2147483647: a token's place "
        "in the pool has 32 bits"
    ),
    "trainer.total_training_steps=1000000000 actor.ppo_epochs=10": (
        "trainer.total_training_steps (1000000000) with 10 updates each makes 10000000000 updates, of which at most "
        "2147483647 can be counted: lower it, or actor.ppo_epochs"
    ),
    "actor.optim.lr=1 actor.optim.weight_decay=2": (
        "actor.optim.lr (1) × actor.optim.weight_decay (2) must be at most 1: it is the share that every update takes "
        "off each weight"
    ),
    "data.source_quotas={a: 3, b: 4}": "data.source_quotas must add up to data.train_batch_size (8 prompts), found 7",
    "data.source_quotas={a: -1, b: 9}": "data.source_quotas.a must be at least 0, found -1",
    "rollout.layout.switch=true": (
        "rollout.layout.profile is missing: rollout.layout.switch needs a file of `jaxrl profile`"
    ),
    "rollout.layout.planner=true rollout.tensor_model_parallel_size=auto rollout.layout.degrees=[3] "
    "trainer.num_devices=8": "rollout.layout.degrees: 3 must divide trainer.num_devices (8)",
    "data.gen_batch_size=8": (
        "data.gen_batch_size (8 prompts) needs algorithm.filter_groups.enable: without dynamic sampling a step "
        "launches what its rollout rule says"
    ),
}
"""Options that contradict each other, or need another one."""

SIMULATE = ("simulate", "model.path=Qwen2.5-7B", "simulate.run_dir={tmp}/s")
OTHERS = (
    Refusal(
        ("train", "model.path={model}", "data.task=leg_counting"),
        "trainer.run_dir is missing: give the folder that the run writes to and resumes from",
    ),
    Refusal(
        ("train",),
        "model.path is missing: give a Hugging Face folder, a .gguf file or org/name of the Hugging Face Hub",
    ),
    Refusal(
        (
            *SIMULATE,
            "data.task=leg_counting",
            "rollout.tail_batching.enable=true",
            "rollout.partial_rollout.enable=true",
        ),
        "tail batching and partial rollout exclude each other: each decides what becomes of unfinished responses",
    ),
    Refusal(
        SIMULATE[:-1],
        "simulate.run_dir is missing (as is trainer.run_dir): give the folder to write to",
    ),
    Refusal(
        ("train", "model.path={model}", "data.task=leg_counting", "trainer.run_dir=run", "rollout.num_blocks=2"),
        "rollout.num_blocks (2, one of them reserved) must hold one request of 384 tokens: at least 25 blocks of 16 "
        "tokens",
    ),
    Refusal(
        (
            *("train", "model.path={model}", "trainer.num_devices=8", "trainer.stream.enable=true"),
            *("rollout.num_workers=2", "actor.context_parallel_size=8"),
        ),
        "actor.context_parallel_size (8) must be one of 1, 2, 4: products of the first factors of the number of "
        "devices in a half, for trainer.stream.enable (4)",
    ),
    Refusal(
        ("explain-config", "--devices", "8", "model.path={model}", "actor.context_parallel_size=3"),
        "actor.context_parallel_size (3) must be one of 1, 2, 4, 8: products of the first factors of the number of "
        "devices of the trainer (8)",
    ),
    Refusal(
        (
            *SIMULATE,
            "rollout.tensor_model_parallel_size=auto",
            "rollout.layout.planner=true",
            "rollout.layout.degrees=[3]",
        ),
        "rollout.layout.degrees: tp 3 must be one of 1, 2, 4, 8 (which the 8 devices can be factored into), at most "
        "the 8 devices of a host, and the first tp (auto) one of the degrees (3,)",
    ),
)


def refusals_of(table: Mapping[str, str]) -> Iterable[Refusal]:
    """Of a table of overrides, with spaces between them, and sentences without their place."""
    for line, sentence in table.items():
        overrides = re.split(r" (?=[\w.]+=)", line)
        named = [each for each in overrides if each.partition("=")[0] in sentence]
        named.sort(key=lambda each: sentence.index(each.partition("=")[0]))
        # of 300 digits those that a line has room for are shown
        model = [] if line.startswith("model.path=") else ["model.path={model}"]
        place = " ".join(each if len(each) <= 100 else f"{each[:100]}..." for each in named or overrides)
        yield Refusal(("train", *model, *overrides), f"{sentence} (command line: {place})")


def test_refused(refused: Callable[[Iterable[Refusal]], None]):
    tables = (NUMBERS, BOUNDS, SIZES, TYPES, NAMES, PATHS, TOGETHER)
    refused([*OTHERS, *(refusal for table in tables for refusal in refusals_of(table))])
