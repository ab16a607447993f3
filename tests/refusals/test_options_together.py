"""The battery's options that contradict each other, and numbers of commands other than `train`.

`tests/refusals/test_options.py` has the values that are wrong on their own.
"""

from __future__ import annotations

from collections.abc import Callable

from refusals import Refusal, cases

NO_MODEL = "model.path is missing: give a Hugging Face folder, a .gguf file or org/name of the Hugging Face Hub"


def run(name: str, sentence: str, *overrides: str) -> Refusal:
    """Of a training run with the tiny model."""
    return Refusal(name, ("train", "model.path={model}", *overrides), sentence)


REFUSALS = (
    Refusal(
        "model-missing",
        ("train",),
        NO_MODEL,
    ),
    run(
        "greedy-grpo",
        (
            "rollout.temperature (0) makes all samples of a prompt equal, and "
            "algorithm.adv_estimator=grpo compares them with each other: every advantage would be 0 "
            "(command line: rollout.temperature=0)"
        ),
        "rollout.temperature=0",
    ),
    run(
        "greedy-rloo",
        (
            "rollout.temperature (0) makes all samples of a prompt equal, and "
            "algorithm.adv_estimator=rloo compares them with each other: every advantage would be 0 "
            "(command line: rollout.temperature=0 algorithm.adv_estimator=rloo)"
        ),
        "rollout.temperature=0",
        "algorithm.adv_estimator=rloo",
    ),
    run(
        "greedy-dr-grpo-top-k",
        (
            "rollout.top_k (1) makes all samples of a prompt equal, and algorithm.adv_estimator=dr_grpo "
            "compares them with each other: every advantage would be 0 (command line: rollout.top_k=1 "
            "algorithm.adv_estimator=dr_grpo)"
        ),
        "rollout.top_k=1",
        "algorithm.adv_estimator=dr_grpo",
    ),
    run(
        "greedy-filter",
        (
            "rollout.temperature (0) makes all samples of a prompt equal, and "
            "algorithm.filter_groups.enable leaves such prompts out: no prompt would be left (command "
            "line: rollout.temperature=0 algorithm.filter_groups.enable=true)"
        ),
        "rollout.temperature=0",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.filter_groups.enable=true",
    ),
    run(
        "critic-minibatch",
        (
            "critic.ppo_mini_batch_size (5 prompts) must divide data.train_batch_size (8 prompts) (command line: "
            "critic.ppo_mini_batch_size=5)"
        ),
        "critic.ppo_mini_batch_size=5",
    ),
    run(
        "one-sample",
        (
            "rollout.n (1) must be at least 2 with algorithm.adv_estimator=grpo: its advantage compares "
            "the samples of a prompt with each other (command line: rollout.n=1)"
        ),
        "rollout.n=1",
    ),
    run(
        "no-held-out-files",
        "trainer.test_freq (5) needs held-out prompts: give data.val_files (command line: trainer.test_freq=5)",
        "data.train_files=[a.jsonl]",
        "trainer.test_freq=5",
    ),
    run(
        "no-held-out-task",
        (
            "trainer.test_freq (5) needs held-out prompts: give data.val_files, or data.val_size above 0 "
            "(command line: trainer.test_freq=5 data.val_size=0)"
        ),
        "data.task=chain_sum",
        "data.val_size=0",
        "trainer.test_freq=5",
    ),
    run(
        "no-held-out-first",
        (
            "trainer.val_before_train (true) needs held-out prompts: give data.val_files (command line: "
            "trainer.val_before_train=true)"
        ),
        "data.train_files=[a.jsonl]",
        "trainer.val_before_train=true",
    ),
    run(
        "task-and-files",
        (
            "data.task and data.train_files exclude each other: problems come from a task or from files; add "
            "data.task= to use the files (command line: data.task=chain_sum data.train_files=[a.jsonl])"
        ),
        "data.task=chain_sum",
        "data.train_files=[a.jsonl]",
    ),
    run(
        "template",
        "data.prompt_template must contain {question}, found 'Solve.' (command line: data.prompt_template=Solve.)",
        "data.prompt_template=Solve.",
    ),
    run(
        "own-variables-of-the-template",
        "data.apply_chat_template_kwargs.messages: the run gives the chat template messages itself (command line: "
        "data.apply_chat_template_kwargs={messages: []})",
        "data.apply_chat_template_kwargs={messages: []}",
    ),
    run(
        "own-variables-of-the-judges-template",
        "reward.judge.apply_chat_template_kwargs.messages: the run gives the chat template messages itself (command "
        "line: reward.judge={model: m, apply_chat_template_kwargs: {messages: []}})",
        "reward.kind=model",
        "reward.judge={model: m, apply_chat_template_kwargs: {messages: []}}",
    ),
    run(
        "tools-that-are-none",
        "data.apply_chat_template_kwargs.tools must be a list of JSON schemas, found ['add'] (command line: "
        "data.apply_chat_template_kwargs={tools: [add]})",
        "data.apply_chat_template_kwargs={tools: [add]}",
    ),
    run(
        "custom-without-file",
        "reward.path is missing: reward.kind is custom, which needs a Python file (command line: reward.kind=custom)",
        "reward.kind=custom",
    ),
    run(
        "file-without-custom",
        "reward.path (r.py) needs reward.kind=custom, found auto (command line: reward.path=r.py)",
        "reward.path=r.py",
    ),
    run(
        "task-reward",
        "reward.kind is task, which needs data.task: the scorer is the task's own (command line: reward.kind=task)",
        "reward.kind=task",
    ),
    run(
        "mini-batch",
        (
            "actor.ppo_mini_batch_size (3 prompts) must divide data.train_batch_size (8 prompts) "
            "(command line: actor.ppo_mini_batch_size=3)"
        ),
        "actor.ppo_mini_batch_size=3",
    ),
    run(
        "two-kl",
        (
            "algorithm.use_kl_in_reward and actor.use_kl_loss exclude each other: count KL once (command "
            "line: algorithm.use_kl_in_reward=true actor.use_kl_loss=true)"
        ),
        "actor.use_kl_loss=true",
        "algorithm.use_kl_in_reward=true",
    ),
    run(
        "overlong-off-scale",
        (
            "reward.overlong_buffer.len (200 tokens) must be at least 1 and at most "
            "data.max_response_length (128 tokens) where reward.overlong_buffer.enable is on (command "
            "line: reward.overlong_buffer.len=200 reward.overlong_buffer.enable=true)"
        ),
        "reward.overlong_buffer.enable=true",
        "reward.overlong_buffer.len=200",
    ),
    run(
        "budget",
        (
            "actor.ppo_max_token_len_per_gpu (100 tokens) must hold the longest sequence: "
            "data.max_prompt_length (256) + data.max_response_length (128) = 384 tokens (command line: "
            "actor.ppo_max_token_len_per_gpu=100)"
        ),
        "actor.ppo_max_token_len_per_gpu=100",
    ),
    run(
        "pool-too-small",
        (
            "rollout.num_blocks (2, one of them reserved) must hold one request of 384 tokens: at least "
            "25 blocks of 16 tokens (command line: rollout.num_blocks=2)"
        ),
        "rollout.num_blocks=2",
    ),
    run(
        "workers-cut",
        (
            "rollout.num_workers (3) must cut trainer.num_devices (8) along the major axes of their mesh, into one of "
            "1, 2, 4, 8 workers (command line: rollout.num_workers=3 trainer.num_devices=8)"
        ),
        "trainer.num_devices=8",
        "rollout.num_workers=3",
    ),
    run(
        "tp-divides",
        (
            "rollout.tensor_model_parallel_size (3) must divide trainer.num_devices (8) (command line: "
            "rollout.tensor_model_parallel_size=3 trainer.num_devices=8)"
        ),
        "trainer.num_devices=8",
        "rollout.tensor_model_parallel_size=3",
    ),
    run(
        "own-devices",
        (
            "rollout.num_devices (2) needs trainer.one_step_off: without it rollout and update wait for "
            "each other, and devices of their own would stand idle in turns (command line: "
            "rollout.num_devices=2)"
        ),
        "rollout.num_devices=2",
    ),
    run(
        "samples-of-a-step",
        (
            "data.train_batch_size × rollout.n must be at most 1048576 samples, which are in memory at "
            "once, found 4194304 (command line: data.train_batch_size=65536 rollout.n=64)"
        ),
        "data.train_batch_size=65536",
        "rollout.n=64",
    ),
    run(
        "samples-of-an-evaluation",
        (
            "data.val_size × rollout.val_kwargs.n must be at most 1048576 samples, which are in memory "
            "at once, found 6000000 (command line: data.val_size=60000 rollout.val_kwargs.n=100)"
        ),
        "data.val_size=60000",
        "rollout.val_kwargs.n=100",
    ),
    run(
        "pool-index",
        (
            "rollout.num_blocks (2000000000) × rollout.block_size (16 tokens) must be at most "
            "2147483647: a token's place in the pool has 32 bits (command line: "
            "rollout.num_blocks=2000000000)"
        ),
        "rollout.num_blocks=2000000000",
    ),
    run(
        "updates",
        (
            "trainer.total_training_steps (1000000000) with 10 updates each makes 10000000000 updates, "
            "of which at most 2147483647 can be counted: lower it, or actor.ppo_epochs (command line: "
            "trainer.total_training_steps=1000000000 actor.ppo_epochs=10)"
        ),
        "trainer.total_training_steps=1000000000",
        "actor.ppo_epochs=10",
    ),
    run(
        "decay",
        (
            "actor.optim.lr (1) × actor.optim.weight_decay (2) must be at most 1: it is the share that "
            "every update takes off each weight (command line: actor.optim.lr=1 "
            "actor.optim.weight_decay=2)"
        ),
        "actor.optim.lr=1",
        "actor.optim.weight_decay=2",
    ),
    run(
        "quotas-sum",
        (
            "data.source_quotas must add up to data.train_batch_size (8 prompts), found 7 (command line: "
            "data.source_quotas={a: 3, b: 4})"
        ),
        "data.source_quotas={a: 3, b: 4}",
    ),
    run(
        "quota-negative",
        "data.source_quotas.a must be at least 0, found -1 (command line: data.source_quotas={a: -1, b: 9})",
        "data.source_quotas={a: -1, b: 9}",
    ),
    run(
        "switch-without-profile",
        (
            "rollout.layout.profile is missing: rollout.layout.switch needs a file of `jaxrl profile` "
            "(command line: rollout.layout.switch=true)"
        ),
        "rollout.layout.switch=true",
    ),
    run(
        "degrees",
        (
            "rollout.layout.degrees: 3 must divide trainer.num_devices (8) (command line: "
            "rollout.layout.degrees=[3] trainer.num_devices=8)"
        ),
        "rollout.layout.planner=true",
        "rollout.layout.degrees=[3]",
        "rollout.tensor_model_parallel_size=auto",
        "trainer.num_devices=8",
    ),
    run(
        "gen-batch",
        (
            "data.gen_batch_size (8 prompts) needs algorithm.filter_groups.enable: without dynamic "
            "sampling a step launches what its rollout rule says (command line: data.gen_batch_size=8)"
        ),
        "data.gen_batch_size=8",
    ),
    run(
        "old-logprobs",
        (
            "rollout.stale_tokens=recompute needs actor.old_logprobs=recompute, found rollout, with "
            "which no log-probability is computed anew (command line: rollout.stale_tokens=recompute "
            "actor.old_logprobs=rollout)"
        ),
        "actor.old_logprobs=rollout",
        "rollout.stale_tokens=recompute",
    ),
    run(
        "wide-weights",
        (
            "actor.dtype must be float64 where actor.param_dtype is, found float32 (command line: "
            "actor.param_dtype=float64)"
        ),
        "actor.param_dtype=float64",
    ),
    Refusal(
        "two-rules",
        (
            "explain-config",
            "model.path={model}",
            "rollout.tail_batching.enable=true",
            "rollout.partial_rollout.enable=true",
        ),
        "tail batching and partial rollout exclude each other: each decides what becomes of unfinished responses",
    ),
    Refusal(
        "devices-a-million",
        ("explain-layout", "--shape", "SmolLM2-135M", "--devices", "1000000"),
        "explain-layout: --devices must be a whole number from 0 to 16384, found 1000000",
    ),
    Refusal(
        "device-gib-nan",
        ("explain-config", "model.path={model}", "--device-gib", "nan"),
        "explain-config: --device-gib must be a number from 0 to 100000, found nan",
    ),
    Refusal(
        "device-gib-negative",
        ("explain-config", "model.path={model}", "--device-gib", "-1"),
        "explain-config: --device-gib must be a number from 0 to 100000, found -1",
    ),
    Refusal(
        "device-gib-huge",
        ("explain-config", "model.path={model}", "--device-gib", "1e30"),
        "explain-config: --device-gib must be a number from 0 to 100000, found 1e30",
    ),
    Refusal(
        "explain-devices",
        ("explain-config", "model.path={model}", "--devices", "1000000"),
        "explain-config: --devices must be a whole number from 0 to 16384, found 1000000",
    ),
    Refusal(
        "repeats-0",
        ("profile", "model.path={model}", "--repeats", "0", "--out", "t.json"),
        "profile: --repeats must be a whole number from 1 to 1000, found 0",
    ),
    Refusal(
        "tune-steps-0",
        ("tune", "--run", "r", "--steps", "0"),
        "tune: --steps must be a whole number from 1 to 100000, found 0",
    ),
    Refusal(
        "tune-values-inf",
        ("tune", "--run", "r", "--values", "inf"),
        "--values must be at most 100 (a round would launch that many batches at once), found inf",
    ),
    Refusal("tune-values-nan", ("tune", "--run", "r", "--values", "nan"), "--values must be at least 1, found nan"),
    Refusal(
        "tune-factors-a-million",
        ("tune", "--run", "r", "--prompt-factors", "1e6"),
        "--prompt-factors must be at most 100 (a round would launch that many batches at once), found 1000000.0",
    ),
    Refusal(
        "simulate-profile-missing",
        ("simulate", "model.path=Qwen2.5-7B", "simulate.cost=table", "simulate.run_dir={tmp}/s"),
        "simulate.profile is missing: simulate.cost is table, which needs a file of `jaxrl profile`",
    ),
    Refusal(
        "simulate-degrees",
        (
            "simulate",
            "model.path=Qwen2.5-7B",
            "rollout.tensor_model_parallel_size=auto",
            "rollout.layout.planner=true",
            "rollout.layout.degrees=[3]",
            "simulate.run_dir={tmp}/s",
        ),
        (
            "rollout.layout.degrees: tp 3 must be one of 1, 2, 4, 8 (which the 8 devices can be factored "
            "into), at most the 8 devices of a host, and the first tp (auto) one of the degrees (3,)"
        ),
    ),
)


@cases(REFUSALS)
def test_refusal(refusal: Refusal, refused: Callable[[Refusal], None]):
    refused(refusal)
