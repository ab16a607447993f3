"""The battery's options: values that no run can have, each refused while options are read."""

from __future__ import annotations

from collections.abc import Callable

from refusals import Refusal, cases

NUMBERS = {
    "actor.entropy_coeff=.nan": (
        "actor.entropy_coeff must be a finite number (at most 3.4e+38, the largest float32), found nan"
    ),
    "actor.entropy_coeff=-.inf": (
        "actor.entropy_coeff must be a finite number (at most 3.4e+38, the largest float32), found -inf"
    ),
    "actor.optim.lr=.inf": (
        "actor.optim.lr must be at most 1 (AdamW moves every weight by about so much per update), found inf"
    ),
    "actor.optim.lr=inf": (
        "actor.optim.lr must be at most 1 (AdamW moves every weight by about so much per update), found inf"
    ),
    "actor.kl_loss_coef=1e39": (
        "actor.kl_loss_coef must be a finite number (at most 3.4e+38, the largest float32), found 1e+39"
    ),
    "actor.optim.lr=1e999": (
        "actor.optim.lr must be at most 1 (AdamW moves every weight by about so much per update), found inf"
    ),
    "actor.optim.lr=.nan": "actor.optim.lr must be at least 0, found nan",
    "rollout.temperature=.inf": (
        "rollout.temperature must be in [0.001, 100], or 0 for the likeliest token, found inf"
    ),
    "rollout.temperature=.nan": (
        "rollout.temperature must be in [0.001, 100], or 0 for the likeliest token, found nan"
    ),
    "rollout.val_kwargs.temperature=inf": (
        "rollout.val_kwargs.temperature must be in [0.001, 100], or 0 for the likeliest token, found inf"
    ),
    "algorithm.kl_coef=.inf": (
        "algorithm.kl_coef must be a finite number (at most 3.4e+38, the largest float32), found inf"
    ),
    "actor.grad_clip=.inf": (
        "actor.grad_clip must be a finite number (at most 3.4e+38, the largest float32), found inf"
    ),
    "actor.clip_ratio_high=.nan": "actor.clip_ratio_high must be at least 0, found nan",
    "actor.clip_ratio_c=.nan": "actor.clip_ratio_c must be above 1, or 0 for off, found nan",
    "actor.optim.weight_decay=.inf": (
        "actor.optim.weight_decay must be a finite number (at most 3.4e+38, the largest float32), found inf"
    ),
    "actor.optim.eps=.nan": "actor.optim.eps must be in [1e-30, 1], found nan",
    "actor.optim.beta2=.nan": "actor.optim.beta2 must be in [0, 1), found nan",
    "rollout.top_p=.nan": "rollout.top_p must be in (0, 1], found nan",
    "rollout.memory_fraction=.inf": "rollout.memory_fraction must be in (0, 1], found inf",
    "reward.timeout_s=.inf": (
        "reward.timeout_s must be at most 10000000 (the system's clocks wait no longer, which is four "
        "months), found inf"
    ),
    "trainer.hang_timeout_s=.nan": "trainer.hang_timeout_s must be at least 0, found nan",
    "reward.overlong_buffer.penalty_factor=.inf": (
        "reward.overlong_buffer.penalty_factor must be a finite number (at most 3.4e+38, the largest "
        "float32), found inf"
    ),
    "algorithm.rollout_correction.rollout_is_threshold=.nan": (
        "algorithm.rollout_correction.rollout_is_threshold must be above 0, or inf for no truncation, found nan"
    ),
    "algorithm.rollout_correction.rollout_is_threshold=-.inf": (
        "algorithm.rollout_correction.rollout_is_threshold must be above 0, or inf for no truncation, found -inf"
    ),
    "rollout.partial_rollout.over_provision=.inf": (
        "rollout.partial_rollout.over_provision must be at most 100 (a round would launch that many "
        "batches at once), found inf"
    ),
    "rollout.layout.planner_rise=.inf": (
        "rollout.layout.planner_rise must be a finite number (at most 3.4e+38, the largest float32), found inf"
    ),
    "rollout.layout.min_gain=.nan": "rollout.layout.min_gain must be in [0, 1), found nan",
    "simulate.task.response.growth=.nan": "simulate.task.response.growth must be above -1, found nan",
    "simulate.host_s=.inf": (
        "simulate.host_s must be at most 1000000000 (that is longer than thirty years), found inf"
    ),
    "simulate.task.weight=.inf": (
        "simulate.task.weight must be a finite number (at most 3.4e+38, the largest float32), found inf"
    ),
    "data.task_config.scale=.nan": "data.task_config.scale must be a finite number, found nan",
    "data.task_config.sizes=[1, .inf]": "data.task_config.sizes[1] must be a finite number, found inf",
    "simulate.efficiency.mfu=.nan": (
        "simulate.efficiency.mfu must be a finite number (at most 3.4e+38, the largest float32), found nan"
    ),
}
"""What is no number, or none that a float32 holds. By override, without the place, which is the command line."""

BOUNDS = {
    "actor.clip_ratio_low=5": "actor.clip_ratio_low must be in [0, 1], found 5.0",
    "actor.clip_ratio_low=-0.1": "actor.clip_ratio_low must be in [0, 1], found -0.1",
    "actor.clip_ratio_high=-1": "actor.clip_ratio_high must be at least 0, found -1.0",
    "actor.clip_ratio_c=1": "actor.clip_ratio_c must be above 1, or 0 for off, found 1.0",
    "actor.optim.min_lr_ratio=2": "actor.optim.min_lr_ratio must be in [0, 1], found 2.0",
    "actor.optim.min_lr_ratio=-0.5": "actor.optim.min_lr_ratio must be in [0, 1], found -0.5",
    "actor.optim.lr=-1e-6": "actor.optim.lr must be at least 0, found -1e-06",
    "actor.optim.lr=100": (
        "actor.optim.lr must be at most 1 (AdamW moves every weight by about so much per update), found 100.0"
    ),
    "actor.optim.beta1=1": "actor.optim.beta1 must be in [0, 1), found 1.0",
    "actor.optim.beta2=0.99999999999": (
        "actor.optim.beta2 must be at most 0.999999 (a larger one is 1 as a float32, and the update a "
        "division by 0), found 0.99999999999"
    ),
    "actor.optim.eps=0": "actor.optim.eps must be in [1e-30, 1], found 0.0",
    "actor.optim.lr_warmup_steps=-1": "actor.optim.lr_warmup_steps must be at least 0, found -1",
    "rollout.temperature=-1": ("rollout.temperature must be in [0.001, 100], or 0 for the likeliest token, found -1.0"),
    "rollout.temperature=1e-30": (
        "rollout.temperature must be in [0.001, 100], or 0 for the likeliest token, found 1e-30"
    ),
    "rollout.temperature=1000": (
        "rollout.temperature must be in [0.001, 100], or 0 for the likeliest token, found 1000.0"
    ),
    "rollout.top_p=0": "rollout.top_p must be in (0, 1], found 0.0",
    "rollout.top_p=2": "rollout.top_p must be in (0, 1], found 2.0",
    "rollout.min_p=1": "rollout.min_p must be in [0, 1), found 1.0",
    "rollout.top_k=-2": "rollout.top_k must be at least -1, found -2",
    "rollout.n=0": "rollout.n must be at least 1, found 0",
    "rollout.n=-4": "rollout.n must be at least 1, found -4",
    "rollout.memory_fraction=0": "rollout.memory_fraction must be in (0, 1], found 0.0",
    "rollout.memory_fraction=85": "rollout.memory_fraction must be in (0, 1], found 85.0",
    "data.max_response_length=0": "data.max_response_length must be at least 1, found 0",
    "data.max_prompt_length=-1": "data.max_prompt_length must be at least 1, found -1",
    "data.train_batch_size=0": "data.train_batch_size must be at least 1, found 0",
    "trainer.total_epochs=0": "trainer.total_epochs must be at least 1, found 0",
    "trainer.max_ckpt_to_keep=0": "trainer.max_ckpt_to_keep must be at least 1, found 0",
    "trainer.save_freq=-1": "trainer.save_freq must be at least 0, found -1",
    "reward.num_workers=0": "reward.num_workers must be at least 1, found 0",
    "rollout.tail_batching.prompt_factor=0.5": "rollout.tail_batching.prompt_factor must be at least 1, found 0.5",
    "rollout.partial_rollout.max_staleness=-2": ("rollout.partial_rollout.max_staleness must be at least -1, found -2"),
    "rollout.block_size=0": "rollout.block_size must be at least 1, found 0",
    "rollout.decode_steps=0": "rollout.decode_steps must be at least 1, found 0",
    "rollout.layout.min_gain=1": "rollout.layout.min_gain must be in [0, 1), found 1.0",
    "rollout.layout.reversal_factor=1": "rollout.layout.reversal_factor must be above 1, found 1.0",
    "simulate.task.pass_rate=1": "simulate.task.pass_rate must be in (0, 1), found 1.0",
    "simulate.task.correlation=1.5": "simulate.task.correlation must be in [0, 1], found 1.5",
    "simulate.task.response.tail_from=0": "simulate.task.response.tail_from must be in (0, 1], found 0.0",
}
"""What makes no sense. By override, without the place, which is the command line."""

SIZES = {
    "rollout.max_num_seqs=1000000": (
        "rollout.max_num_seqs must be at most 16384 (every row has its KV blocks, its logits and a place "
        "in every plan, and programs for every size), found 1000000"
    ),
    "rollout.n=1000000": (
        "rollout.n must be at most 65536 (a prompt's samples are kept in memory until the last one is "
        "scored), found 1000000"
    ),
    "data.train_batch_size=1000000000": (
        "data.train_batch_size must be at most 65536 (prompts and their samples are kept in memory until "
        "their step is over), found 1000000000"
    ),
    "data.max_response_length=1000000000": (
        "data.max_response_length must be at most 16777216 (every row of a batch has room for the "
        "longest sequence), found 1000000000"
    ),
    "rollout.max_num_batched_tokens=1000000000": (
        "rollout.max_num_batched_tokens must be at most 4194304 (the activations of all of them exist at "
        "once), found 1000000000"
    ),
    "rollout.decode_steps=1000000": (
        "rollout.decode_steps must be at most 4096 (the host sees nothing of a plan before its last "
        "step), found 1000000"
    ),
    "rollout.block_size=1000000": (
        "rollout.block_size must be at most 4096 (a row leaves up to a block unused), found 1000000"
    ),
    "trainer.num_devices=2147483647": (
        "trainer.num_devices must be at most 16384 (no machine has more, and each is listed), found 2147483647"
    ),
    "simulate.num_devices=1000000": (
        "simulate.num_devices must be at most 16384 (no machine has more, and each is listed), found 1000000"
    ),
    "rollout.tensor_model_parallel_size=1048576": (
        "rollout.tensor_model_parallel_size must be at most 16384 (no machine has more, and each is "
        "listed), found 1048576"
    ),
    "data.task_size=1000000000": (
        "data.task_size must be at most 10000000 (they are made one by one at the start, and kept), found 1000000000"
    ),
    "data.val_size=10000000": (
        "data.val_size must be at most 65536 (prompts and their samples are kept in memory until their "
        "step is over), found 10000000"
    ),
    "trainer.total_epochs=10000000000": (
        "trainer.total_epochs must be at most 1000000000 (updates are counted in 32 bits), found 10000000000"
    ),
    "trainer.total_training_steps=2000000000": (
        "trainer.total_training_steps must be at most 1000000000 (updates are counted in 32 bits), found 2000000000"
    ),
    "actor.ppo_epochs=100000": (
        "actor.ppo_epochs must be at most 1000 (a step trains on its batch that many times), found 100000"
    ),
    "reward.num_workers=100000": (
        "reward.num_workers must be at most 1024 (each is a process with its own Python), found 100000"
    ),
    "trainer.seed=4294967296": (
        "trainer.seed must be at most 4294967295 (the largest unsigned 32-bit integer), found 4294967296"
    ),
    "rollout.top_k=9223372036854775807": (
        "rollout.top_k must be at most 2147483647 (the largest 32-bit integer), found 9223372036854775807"
    ),
    "rollout.num_blocks=1e12": "rollout.num_blocks must be a whole number, found 1000000000000.0",
    "rollout.num_blocks=1000000000000": (
        "rollout.num_blocks must be at most 2147483647 (the largest 32-bit integer), found 1000000000000"
    ),
    "rollout.over_provisioning.response_factor=1000": (
        "rollout.over_provisioning.response_factor must be at most 100 (a round would launch that many "
        "batches at once), found 1000.0"
    ),
    "reward.timeout_s=1e30": (
        "reward.timeout_s must be at most 10000000 (the system's clocks wait no longer, which is four "
        "months), found 1e+30"
    ),
    "trainer.hang_timeout_s=1e18": (
        "trainer.hang_timeout_s must be at most 10000000 (the system's clocks wait no longer, which is "
        "four months), found 1e+18"
    ),
    "simulate.task.response.sigma=100": (
        "simulate.task.response.sigma must be at most 10 (one in six lengths or times would be above "
        "22,000 times the median), found 100.0"
    ),
    "simulate.num_prompts=1000000000": (
        "simulate.num_prompts must be at most 10000000 (their order is drawn at once), found 1000000000"
    ),
}
"""What would take the machine down, last for ever or overflow. By override."""

TYPES = {
    "rollout.n=four": "rollout.n must be a whole number, found 'four' (text)",
    "rollout.n=4.0": "rollout.n must be a whole number, found 4.0",
    "rollout.n=true": "rollout.n must be a whole number, found True",
    "rollout.n=": "rollout.n must be a whole number, found None",
    "rollout.n=[4]": "rollout.n must be a whole number, found [4]",
    "actor.optim.lr=small": "actor.optim.lr must be a number, found 'small' (text)",
    "actor.optim.lr=yes": "actor.optim.lr must be a number, found True",
    "actor.optim.lr=[1e-6]": "actor.optim.lr must be a number, found [1e-06]",
    "rollout.tail_batching.enable=1": "rollout.tail_batching.enable must be true or false, found 1",
    "rollout.warmup=maybe": "rollout.warmup must be true or false, found 'maybe' (text)",
    'data.shuffle="false"': "data.shuffle must be true or false, found 'false' (text)",
    "data.train_files=3": "data.train_files must be a list, found 3",
    "data.train_files=": "data.train_files must be a list, found None: an empty list is []",
    "rollout.layout.degrees=two": "rollout.layout.degrees must be a list, found 'two'",
    "data.task_config=": "data.task_config must be a mapping, found None: an empty mapping is {}",
    "data.train_files=[a.jsonl, 3]": "data.train_files[1] must be text, found 3: put it in quotation marks",
    "data.val_files={a: b}": "data.val_files must be a list, found {'a': 'b'}",
    "rollout.stop=[1]": "rollout.stop[0] must be text, found 1: put it in quotation marks",
    "data.train_files=[org/none:]": (
        "data.train_files[0] must be text, found {'org/none': None}: put it in quotation marks (to YAML, a { at the "
        "beginning or a : at the end makes a mapping)"
    ),
    "data.task_config=[1]": "data.task_config must be a mapping, found [1]",
    "rollout=3": "rollout must be a section with options, found 3",
    "rollout.partial_rollout=true": (
        "rollout.partial_rollout must be a section with options, found True: rollout.partial_rollout.enable is its "
        "switch"
    ),
    "actor.optim=[lr]": "actor.optim must be a section with options, found ['lr']",
    "rollout.tensor_model_parallel_size=all": (
        "rollout.tensor_model_parallel_size must be a whole number or auto, found 'all'"
    ),
    "rollout.tensor_model_parallel_size=2.0": "rollout.tensor_model_parallel_size must be a whole number, found 2.0",
    "rollout.layout.degrees=[1, two]": "rollout.layout.degrees[1] must be a whole number, found 'two' (text)",
    "data.source_quotas.easy=0.5": "data.source_quotas.easy must be a whole number, found 0.5",
    "data.source_quotas={1: 8}": ("data.source_quotas: a name must be text, found 1 (int): put it in quotation marks"),
    "simulate.tasks={name: a}": "simulate.tasks must be a list, found {'name': 'a'}",
    "simulate.tasks=[{weight: 0}]": "simulate.tasks[0].weight must be above 0, found 0.0",
    "simulate.efficiency.mfu=high": "simulate.efficiency.mfu must be a number, found 'high' (text)",
}
"""Another type than the option's. By override, without the place, which is the command line."""

NAMES = {
    "rollout.temprature=1": "unknown option rollout.temprature: did you mean rollout.temperature?",
    "rolout.n=4": "unknown option rolout: did you mean rollout?",
    "actor.lr=1e-6": "unknown option actor.lr: did you mean actor.optim.lr?",
    "actor_rollout_ref.rollout.n=4": (
        "unknown option actor_rollout_ref.rollout.n: it is rollout.n (there is no actor_rollout_ref here)"
    ),
    "actor_rollout_ref.actor.optim.lr=1e-6": (
        "unknown option actor_rollout_ref.actor.optim.lr: it is actor.optim.lr (there is no actor_rollout_ref here)"
    ),
    "rollout.name=vllm": "unknown option rollout.name: jaxrl has its own engine",
    "trainer.n_gpus_per_node=1": "unknown option trainer.n_gpus_per_node: here it is trainer.num_devices",
    "rollout.N=4": "unknown option rollout.N: did you mean rollout.n?",
    "simulate.tasks=[{wieght: 1}]": ("unknown option simulate.tasks[0].wieght: did you mean simulate.tasks[0].weight?"),
    "algorithm.adv_estimator=gpro": (
        "algorithm.adv_estimator must be one of grpo, dr_grpo, rloo, reinforce_plus_plus, gae, found 'gpro'; "
        "did you mean grpo?"
    ),
    "algorithm.adv_estimator=GRPO": (
        "algorithm.adv_estimator must be one of grpo, dr_grpo, rloo, reinforce_plus_plus, gae, found 'GRPO'; "
        "did you mean grpo?"
    ),
    "rollout.num_generations=8": "unknown option rollout.num_generations: here it is rollout.n",
    "rollout.dtype=float16": (
        "rollout.dtype must be one of float32, bfloat16, float64, found 'float16'; did you mean bfloat16?"
    ),
    "trainer.logger=[console, comet]": (
        "trainer.logger[1] must be one of console, wandb, tensorboard, mlflow, trackio, found 'comet'"
    ),
    "actor.remat=true": "actor.remat must be one of auto, none, dots, full, found True",
    "actor.optim.lr_scheduler_type=cosin": (
        "actor.optim.lr_scheduler_type must be one of constant, cosine, linear, found 'cosin'; did you mean cosine?"
    ),
}
"""Options and words that do not exist. By override, without the place, which is the command line."""

PATHS = {
    "model.path=https://huggingface.co/Qwen/Qwen3-0.6B": (
        "model.path: https://huggingface.co/Qwen/Qwen3-0.6B is a URL; download it and give the folder"
    ),
    "data.train_files=[a.jsonl, https://example.com/b.jsonl]": (
        "data.train_files[1]: https://example.com/b.jsonl is a URL; download it and give the file"
    ),
    "trainer.run_dir=gs://bucket/run": "trainer.run_dir: gs://bucket/run is a URL; give one on this machine",
    "reward.path=file:///reward.py": "reward.path: file:///reward.py is a URL; download it and give the file",
    "rollout.layout.profile=s3://bucket/p.json": (
        "rollout.layout.profile: s3://bucket/p.json is a URL; download it and give the file"
    ),
    'trainer.run_dir="a\\0b"': "trainer.run_dir must be a path, found a NUL character in 'a\\x00b'",
    'trainer.project_name="\\ud800"': (
        "trainer.project_name holds '\\ud800', which is no character, so that it cannot be written as UTF-8"
    ),
}
"""What is no path. By override, without the place, which is the command line."""

REFUSALS = (
    *(
        Refusal(override, ("train", override), f"{sentence} (command line: {override})")
        for table in (NUMBERS, BOUNDS, SIZES, TYPES, NAMES, PATHS)
        for override, sentence in table.items()
    ),
    Refusal(
        "data-seed-of-300-digits",
        ("train", "data.seed=1" + 300 * "0"),
        (
            "data.seed must be at most 4294967295 (the largest unsigned 32-bit integer), found a number of 997 "
            "bits (command line: "
            "data.seed=100000000000000000000000000000000000000000000000000000000000000000000000000000000000000000...)"
        ),
    ),
)


@cases(REFUSALS)
def test_refusal(refusal: Refusal, refused: Callable[[Refusal], None]):
    refused(refusal)
