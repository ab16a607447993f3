"""The runs that `record_runs.py` records: a name, options on top of a small configuration, and how each is run.

Together they have every mechanism, simulated and with a tiny model in float64, with several workers and several hosts;
every two mechanisms that compose, simulated (`PAIRS`); and `jaxrl sft` and `jaxrl dpo`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import yaml
from tiny import write_tiny_model

SIMULATED_CONFIG = """
model: {path: Qwen2.5-7B}
data: {train_batch_size: 6, max_prompt_length: 256, max_response_length: 512, task: chain_sum, val_size: 4}
rollout: {n: 4, max_num_seqs: 4, decode_steps: 8, tensor_model_parallel_size: 1, dtype: bfloat16, num_blocks: 60}
reward: {num_workers: 2, timeout_s: 3.0}
actor: {dtype: float32, ppo_max_token_len_per_gpu: 1024}
trainer: {total_training_steps: 8, save_freq: 3, test_freq: 4, val_before_train: true, seed: 3}
simulate:
  num_devices: 4
  num_prompts: 25
  tasks:
    simulated:
      response: {median: 60, sigma: 1.0, tail_from: 0.9}
      scoring: {median_s: 0.5, sigma: 1.0, per_token_s: 0.001, hang_share: 0.05}
"""
REAL_CONFIG = """
model: {path: inputs/model, random_init: true}
data:
  train_files: [inputs/train.jsonl]
  val_files: [inputs/val.jsonl]
  val_size: 2
  max_prompt_length: 48
  max_response_length: 32
  train_batch_size: 4
rollout:
  n: 4
  max_num_seqs: 4
  max_num_batched_tokens: 64
  decode_steps: 4
  num_blocks: 8
  block_size: 128  # one block a row: few programs
  warmup: false
  dtype: float64
  stop: [a, b, c, d, e, f, g, h, i, j, k, l, m]  # lengths that differ: one token in twenty ends a response
actor: {dtype: float64, param_dtype: float64, optim: {lr: 0.01}, ppo_max_token_len_per_gpu: 128, ppo_mini_batch_size: 2}
reward: {kind: custom, path: inputs/reward.py}
trainer: {total_training_steps: 3, save_freq: 2, test_freq: 2, max_ckpt_to_keep: 1, compilation_cache_dir: ""}
"""
REWARD = '''"""Every sample differs, and one in nine cannot be scored."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    total = sum(solution_str.encode())
    if total % 9 == 0:
        raise ValueError("no score")
    return total % 7 / 6
'''


TALK = '''"""Answers follow from what was said, and come at once."""

import zlib

from jaxrl.environments.env import StepResult


class Talk:
    def __init__(self, index):
        self.index, self.said = index, []

    def step(self, action):
        self.said.append(action.text)
        number = zlib.crc32(repr((self.index, self.said)).encode())
        done = number % 5 == 0 or len(self.said) == 3
        return StepResult(number % 3 / 2, done, "" if done else f"<{number % 100}>", {"odd": number % 2})
'''


@dataclass(frozen=True, slots=True)
class Spec:
    """One run.

    Attributes:
      options: on top of the small configuration.
      devices: virtual CPU devices of a real run, of each of its processes.
      first: a first start with these options, which the run then goes on from; none: one start.
      killed_after: the first start is killed once the checkpoint of this step is complete; 0: it comes to its end.
      profile: whether a profile is made up first, by which the layout switches.
      acts: metrics that must be above 0 in some step, or the run would not show what it is for.
      clocked: metrics and files (patterns) that the clock decides in this run alone, and that are not compared.
      command: that runs it, with the configuration of its name; none: of the kind of run, simulate or train.
      keeps: which files of the run directory a recording keeps whole; the others as a digest. None: all.
    """

    options: tuple[str, ...] = ()
    devices: int = 1
    first: tuple[str, ...] = ()
    killed_after: int = 0
    profile: bool = False
    acts: tuple[str, ...] = ()
    clocked: tuple[str, ...] = ()
    command: str = ""
    keeps: tuple[str, ...] | None = None


TAIL = "rollout.tail_batching={enable: true, relaunch: new}"
PARTIAL = "rollout.partial_rollout.enable=true"
OFF = "trainer.one_step_off=true"
FILTER = "algorithm.filter_groups.enable=true"
FILTERS = (FILTER, "algorithm.filter_groups.max_num_gen_batches=20")
PLANNER = "rollout.layout.planner=true"
DRAFTS = "rollout.speculation.enable=true"
RANKED = ("rollout.ranking_groups.enable=true", "rollout.ranking_groups.num_groups=2")
CODE = ("reward.kind=code", "reward.code.max_timeout_s=2.5", "reward.code.min_timeout_s=0.1")
MODELLED = ("rollout.layout.switch=true", "rollout.layout.profile=modelled", "rollout.layout.min_gain=0.0")
STREAM = ("trainer.stream.enable=true", "rollout.num_workers=2", "rollout.max_num_seqs=32", "rollout.num_blocks=1200")
TWO_TASKS = (
    "simulate.tasks={math: {response: {median: 40, sigma: 1.0}, pass_rate: 0.6},"
    " code: {weight: 0.5, response: {median: 120, sigma: 0.8}, scoring: {median_s: 1.0, sigma: 1.0}}}"
)
_HALF = ("trainer.total_training_steps=4",)

SIMULATED = {
    "plain": Spec(acts=("rollout/preemptions", "reward/timeouts")),
    "partial_masked": Spec(
        (PARTIAL, "rollout.stale_tokens=mask", "reward.score_when=group"), acts=("rollout/resumed_share",)
    ),
    "over_provisioning": Spec(("rollout.over_provisioning.enable=true",), acts=("rollout/discarded_prompts",)),
    "one_step_off": Spec((OFF, "rollout.num_devices=2"), acts=("training/off_policy/share",)),
    "switch_up": Spec((*MODELLED, "rollout.decode_steps=4"), acts=("rollout/layout/switches",)),
    "switch_both": Spec(
        (
            *MODELLED,
            TAIL,
            "rollout.decode_steps=4",
            "rollout.layout.direction=both",
            "rollout.layout.bound=expected",
        ),
        acts=("rollout/layout/switches",),
    ),
    "rollout_scored": Spec(
        (FILTER, "reward.score_when=rollout", "algorithm.filter_groups.max_unscored_groups=2"),
        acts=("rollout/filtered_prompts",),
    ),
    "speculation": Spec(
        (DRAFTS, "simulate.tasks.simulated.history.stretch_median=6", "rollout.speculation.epochs=2"),
        acts=("rollout/spec/accept_rate",),
    ),
    "two_tier": Spec(
        (
            *(*RANKED, OFF, DRAFTS, "rollout.ranking_groups.num_groups=4", "data.train_batch_size=5"),
            *("simulate.num_devices=8", "rollout.num_devices=4", "rollout.num_workers=4"),
        ),
        acts=("rollout/ranking/groups", "rollout/ranking/moved_share", "rollout/spec/accept_rate"),
    ),
    "stream": Spec(STREAM, acts=("rollout/scale_down/freed", "actor/streamed_share")),
    "adaptive_timeouts": Spec(CODE, acts=("reward/timeouts/case",)),
    "judge": Spec(("simulate.tasks.simulated.scoring.device_s=0.05", "rollout.num_workers=2")),
    "hosts_by_arrival": Spec(("simulate.num_hosts=2", "rollout.order=arrival", "rollout.num_workers=4")),
    "two_tasks": Spec((TWO_TASKS, "data.source_quotas={math: 4, code: 2}", "simulate.score_in_turn=true")),
    "resumed": Spec((TAIL, PLANNER), first=_HALF),
    "resumed_partial": Spec((PARTIAL, OFF, "rollout.num_workers=2"), first=_HALF),
    "resumed_hosts": Spec(("simulate.num_hosts=2", TAIL, FILTER), first=_HALF),
}

OWN_DEVICES = (OFF, "rollout.num_devices=2")
CHOICES: dict[str, tuple[str, ...]] = {
    "tail": (TAIL,),
    "partial": (PARTIAL, "rollout.partial_rollout.max_staleness=2"),
    "over": ("rollout.over_provisioning.enable=true",),
    "off": (OFF,),
    "own": OWN_DEVICES,
    "filter": FILTERS,
    "stream": (*STREAM, "trainer.stream.short_rounds=true"),
    "switch": (*MODELLED, "rollout.decode_steps=4"),
    "planner": (PLANNER,),
    "drafts": (DRAFTS, "simulate.tasks.simulated.history.stretch_median=6"),
    "ranked": (*RANKED, *OWN_DEVICES, "rollout.num_workers=2", "data.train_batch_size=5"),
    "limits": CODE,
    "judge": ("simulate.tasks.simulated.scoring.device_s=0.05",),
    "turns": (
        *("environment={kind: native, path: number_guessing, name: NumberGuessing, max_turns: 4}",),
        *("data.max_response_length=512", "simulate.tool={turns: 2, answer_tokens: 8, median_s: 0.05}"),
    ),
    "two": ("rollout.num_workers=2",),
    "four": ("rollout.num_workers=4",),
    "hosts2": ("simulate.num_hosts=2", "simulate.host_spread=0.1"),
    "hosts4": ("simulate.num_hosts=4", "simulate.host_spread=0.2"),
}
"""What a pair is made of. Of two options that say the same thing the later one holds."""
EXCLUDED = {
    *map(frozenset, combinations(("tail", "partial", "over"), 2)),  # each decides how a round ends
    *map(frozenset, combinations(("off", "own", "ranked"), 2)),
    *map(frozenset, combinations(("two", "four", "hosts2", "hosts4"), 2)),
    *(frozenset((workers, each)) for workers in ("two", "four") for each in ("stream", "ranked")),
}
"""Pairs that say nothing together, besides those that the configuration refuses (`REFUSED`)."""
REFUSED = {
    *(frozenset(("ranked", each)) for each in ("tail", "stream", "switch", "planner", "turns", "hosts2", "hosts4")),
    *(frozenset(("own", each)) for each in ("stream", "four", "hosts2", "hosts4")),
    *(frozenset(("stream", hosts)) for hosts in ("hosts2", "hosts4")),
}


def _pairs() -> Iterator[tuple[str, Spec]]:
    decided = ("batches.jsonl", "metrics.jsonl")
    for a, b in combinations(CHOICES, 2):
        if frozenset((a, b)) not in EXCLUDED | REFUSED:
            options = (*CHOICES[a], *CHOICES[b], "trainer.total_training_steps=6")
            yield f"{a}_{b}", Spec(options, first=("trainer.total_training_steps=3",), keeps=decided)


PAIRS = dict(_pairs())
"""Each run stops after three steps and resumes."""

PREEMPTED = ("rollout.block_size=16", "rollout.num_blocks=9")  # rows are preempted, of which the planner hears
SWITCHES = (
    "rollout.layout={switch: true, min_gain: 0, cooldown: 2, allow_synthetic: true, profile: inputs/profile.json,"
    " correction_weight: 0}",  # a clock would have its say in when the layout switches
)
TWO_HOSTS = ("hosts.num=2", "hosts.devices_per_host=1")
FOUR_HOSTS = ("hosts.num=4", "hosts.devices_per_host=1")
HOSTS_OF_TWO = ("hosts.num=2", "hosts.devices_per_host=2")
SPANNING = (*TWO_HOSTS, "rollout.warmup=true", "rollout.hosts_per_worker=2", "rollout.tensor_model_parallel_size=2")
LORA = ("model={lora_rank: 4, lora_dropout: 0.2}", "actor.use_kl_loss=true")
TURNS = (
    "environment={kind: native, path: inputs/talk.py, name: Talk}",
    "reward={kind: environment, path: ''}",
    "rollout={stop: [], block_size: 32, num_blocks: 60}",
    "data.max_response_length=96",
    "model.path=inputs/talker",  # it ends a turn with one token in thirty
    "actor.ppo_max_token_len_per_gpu=256",
)
SUPERVISED = ("trainer.total_training_steps=4", "trainer.test_freq=3")
_SECOND = ("trainer.total_training_steps=4",)
JUDGE = (
    "reward.kind=judge",
    "reward.path=",
    "reward.judge={model: 'random:inputs/judge', dtype: float64, prompt: '{question} {response} Score:',"
    " score_pattern: '([0-9])', max_score: 9, max_prompt_tokens: 200, max_tokens: 40, num_samples: 2,"
    " temperature: 1.0, max_num_seqs: 4, resident_layers: 1}",
)
DOMAINS = (
    "data.source_key=of",
    "reward.domains={a: {kind: custom, path: inputs/reward.py, weight: 0.5},"
    " b: {kind: custom, path: inputs/reward.py}}",
    "reward.parts={short: {kind: length, free_tokens: 8, weight: 0.25}, tags: {pattern: '.*e.*', weight: 0.125}}",
)
PROGRAMS = (
    "reward.kind=code",
    "reward.path=",
    "reward.code={tests_key: tests, command: [/bin/grep, -q, e, '{file}'], sandbox: none, score: share,"
    " min_timeout_s: 20}",
)
GAE = (
    "algorithm={adv_estimator: gae, lam: 0.95, use_kl_in_reward: true}",
    "critic={optim: {lr: 0.01}, ppo_epochs: 2}",
    "trainer.critic_warmup=1",
)

BY_ROWS = ("rollout/bubble_ratio", "rollout/decode_steps", "rollout/prefill_tokens", "rollout/shared_tokens")
"""Metrics that say where responses were drawn."""

REAL = {
    "plain": Spec(("actor.use_kl_loss=true",)),
    "tail_planner": Spec((TAIL, PLANNER, *PREEMPTED), devices=2, acts=("rollout/long_round", "rollout/preemptions")),
    "partial": Spec(
        (PARTIAL, "rollout.partial_rollout.max_staleness=1", "rollout.stale_tokens=recompute"),
        acts=("rollout/resumed_share",),
    ),
    "over_provisioning": Spec(("rollout.over_provisioning.enable=true",), acts=("rollout/discarded_prompts",)),
    "dynamic_sampling": Spec((*FILTERS, "rollout.n=2", "rollout.temperature=0.06"), acts=("rollout/filtered_prompts",)),
    "one_step_off": Spec(
        (OFF, "rollout.num_devices=2", "rollout.num_workers=2"), devices=4, acts=("training/off_policy/share",)
    ),
    "two_workers": Spec(("rollout.num_workers=2", "rollout.tensor_model_parallel_size=2"), devices=4),
    "switch": Spec(SWITCHES, devices=2, profile=True, acts=("rollout/layout/switches",)),
    "stream": Spec(
        (
            *("trainer.stream.enable=true", "rollout.num_workers=2", "actor.ppo_mini_batch_size=0"),
            *("rollout.max_num_seqs=16", "rollout.num_blocks=40", "rollout.decode_steps=2"),
        ),
        devices=4,
        acts=("rollout/scale_down/freed", "actor/streamed_share"),
    ),
    "speculation": Spec(
        (DRAFTS, "rollout.temperature=0.06", "rollout.stop=[]"),
        acts=("rollout/spec/accept_rate",),
    ),
    "ranking": Spec(
        (*RANKED, OFF, "rollout.num_devices=2", "rollout.num_workers=2", "trainer.total_training_steps=5"),
        devices=4,
        acts=("rollout/ranking/groups",),
        # workers begin with the next round once they are free, so where a response is drawn is the clock's
        clocked=(
            *BY_ROWS,
            "rollout/ranking/*",
        ),
    ),
    "judge": Spec((*JUDGE, "rollout.num_workers=2"), devices=2, acts=("reward/judge/turns",)),
    "critic": Spec(GAE, acts=("critic/vf_loss",)),
    "programs": Spec(PROGRAMS, acts=("critic/rewards/mean",)),
    "domains": Spec((*DOMAINS, "reward.num_workers=2"), acts=("critic/rewards/mean",)),
    "two_hosts": Spec((*TWO_HOSTS, TAIL), acts=("rollout/long_round",)),
    "four_workers": Spec(("rollout.num_workers=4", PARTIAL), devices=4, acts=("rollout/resumed_share",)),
    "four_hosts": Spec((*FOUR_HOSTS, PARTIAL, "actor.ppo_mini_batch_size=4"), acts=("rollout/resumed_share",)),
    "hosts_of_two": Spec((*HOSTS_OF_TWO, "rollout.num_workers=4")),
    "spanning": Spec((*SPANNING, "rollout.num_workers=1")),
    "killed_hosts": Spec(
        (*TWO_HOSTS, TAIL, "trainer.total_training_steps=4"),
        first=("trainer.total_training_steps=4",),
        killed_after=2,
    ),
    "adapters": Spec(LORA, acts=("actor/kl_loss",)),
    "adapters_hosts": Spec((*LORA, *TWO_HOSTS), acts=("actor/kl_loss",)),
    # answers come when they come, so rows are the clock's
    "turns": Spec(TURNS, acts=("environment/num_turns/mean",), clocked=(*BY_ROWS, "timeline.json", "journal.jsonl")),
    "turns_workers": Spec(
        (*TURNS, "rollout.num_workers=2"),
        devices=2,
        acts=("environment/num_turns/mean",),
        clocked=(*BY_ROWS, "timeline.json", "journal.jsonl"),
    ),
    "sft": Spec(SUPERVISED, first=_SECOND, killed_after=2, command="sft"),
    "sft_hosts": Spec((*SUPERVISED, *TWO_HOSTS), command="sft"),
    "sft_adapters": Spec((*SUPERVISED, "model.lora_rank=4"), command="sft"),
    "dpo": Spec(SUPERVISED, first=_SECOND, killed_after=2, command="dpo"),
    "dpo_hosts": Spec((*SUPERVISED, *TWO_HOSTS), command="dpo"),
    "stopped": Spec((TAIL, "trainer.total_training_steps=4"), first=("trainer.total_training_steps=2",)),
    "killed_tail": Spec(
        ("rollout.tail_batching.enable=true", "trainer.total_training_steps=6"),
        first=("trainer.total_training_steps=6",),
        killed_after=2,
        acts=("rollout/long_round",),
    ),
    "killed_tail_resumes": Spec(
        ("rollout.tail_batching={enable: true, relaunch: resume}", "trainer.total_training_steps=6"),
        first=("trainer.total_training_steps=6",),
        killed_after=2,
        acts=("rollout/long_round", "rollout/resumed_share"),
    ),
    "killed": Spec(
        (PARTIAL, OFF, "trainer.total_training_steps=5", "trainer.save_freq=3"),
        first=("trainer.total_training_steps=5",),
        killed_after=3,
    ),
}
RUNS = {
    f"{kind}/{name}": spec
    for kind, specs in (("simulated", SIMULATED), ("simulated/pairs", PAIRS), ("real", REAL))
    for name, spec in specs.items()
}


def write_inputs(folder: Path) -> None:
    """What runs read, in `folder/inputs`: a model, a judge, problems and a reward."""
    inputs = folder / "inputs"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    write_tiny_model(inputs / "model", **sizes)
    write_tiny_model(inputs / "judge", **sizes, num_hidden_layers=3)
    write_tiny_model(inputs / "talker", **sizes, eos_token_id=[2, *range(4, 260, 43)])
    tests = {"inputs": [""], "outputs": [""]}
    rows = [{"question": "x" * (1 + 3 * i), "answer": str(i), "of": "ab"[i % 2], "tests": tests} for i in range(7)]
    (inputs / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (inputs / "val.jsonl").write_text(
        "".join(json.dumps(row | {"question": f"y{i}"}) + "\n" for i, row in enumerate(rows[:2]))
    )
    (inputs / "reward.py").write_text(REWARD)
    (inputs / "simulated.yaml").write_text(SIMULATED_CONFIG)
    (inputs / "real.yaml").write_text(REAL_CONFIG)
    (inputs / "talk.py").write_text(TALK)
    said = [f"{'ab' * (1 + i)}." for i in range(9)]
    conversations = [{"prompt": f"{i} + 1", "completion": text} for i, text in enumerate(said)]
    pairs = [{"prompt": f"{i}?", "chosen": text, "rejected": text[::-1]} for i, text in enumerate(said)]
    for command, found in (("sft", conversations), ("dpo", pairs)):
        (inputs / f"{command}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
        config = yaml.safe_load(REAL_CONFIG)
        config["data"] |= {"train_files": [f"inputs/{command}.jsonl"], "val_files": [f"inputs/{command}.jsonl"]}
        for section in ("rollout", "reward"):
            del config[section]
        (inputs / f"{command}.yaml").write_text(yaml.safe_dump(config))
