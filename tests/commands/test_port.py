"""`jaxrl port`: command lines, scripts and files of verl and TRL as configurations of jaxrl."""

from pathlib import Path
from typing import Any

import yaml

from jaxrl.commands.port import port

VERL = """
set -x
n_resp=16
max_prompt_length=$((1024 * 2))
export MODEL_PATH=Qwen/Qwen2.5-3B-Instruct
tokens=$(((max_prompt_length + 512) * 2))
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \\
    data.train_files="['$HOME/train.parquet']" data.max_prompt_length=${max_prompt_length} \\
    data.max_response_length=512 data.truncation='error' \\
    actor_rollout_ref.model.path="${MODEL_PATH}" \\
    actor_rollout_ref.rollout.n=${n_resp} actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 \\
    actor_rollout_ref.actor.clip_ratio=0.3 actor_rollout_ref.actor.kl_loss_type=k3 \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$tokens \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40 \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=$((256 / 2)) \\
    trainer.n_gpus_per_node=8 trainer.nnodes="${NNODES:-2}" trainer.save_freq=-1 \\
    trainer.default_local_dir="runs/$(basename $MODEL_PATH)" trainer.no_such=1 $@
"""


def at(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values[name]
    return values


def test_a_script_of_verl(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(VERL)
    text = port("verl", [str(tmp_path / "run.sh")])
    found = yaml.safe_load(text)
    wanted = {
        "actor.ratio_level": "sequence",
        "actor.clip_ratio_high": 0.3,
        "actor.kl_loss_type": "low_var_kl",
        "actor.optim.lr": 1e-6,
        "actor.ppo_max_token_len_per_gpu": 5120,
        "data.train_files": ["~/train.parquet"],
        "data.max_prompt_length": 2048,
        "data.messages_key": "prompt",
        "data.train_batch_size": 1024,  # verl's default
        "hosts.num": 2,
        "hosts.devices_per_host": 8,
        "model.path": "Qwen/Qwen2.5-3B-Instruct",
        "reward.overlong_buffer.len": 128,
        "rollout.n": 16,
        "trainer.save_freq": 0,
    }
    assert {name: at(found, name) for name in wanted} == wanted
    assert "lr: 1.0e-06\n" in text, "same name, no remark"
    assert "# was actor_rollout_ref.actor.clip_ratio=0.3" in text
    absent, decide = text.split("# No counterpart:")[1].split("# To decide:")
    assert "data.truncation=error: no prompt is cut" in absent
    assert "trainer.no_such=1: there is no such" in absent
    assert "log_prob_micro_batch_size" not in text, "covered by actor.ppo_max_token_len_per_gpu"
    assert "lr_warmup_steps_ratio=0.05: set actor.optim.lr_warmup_steps" in decide
    assert "trainer.run_dir: the script computes" in decide


def test_a_python_file_of_trl(tmp_path: Path) -> None:
    (tmp_path / "grpo.py").write_text(
        "args = GRPOConfig(output_dir='out', per_device_train_batch_size=4, gradient_accumulation_steps=4, beta=0.04,\n"
        "    num_generations=8, epsilon=0.1, epsilon_high=0.3, loss_type='grpo', scale_rewards=False, bf16=True)\n"
        "trainer = GRPOTrainer(model='Qwen/Qwen3-0.6B', args=args, reward_funcs=reward_len, train_dataset=rows,\n"
        "    peft_config=LoraConfig(r=32))\n"
    )
    text = port("trl", [str(tmp_path / "grpo.py")], devices=4)
    found = yaml.safe_load(text)
    wanted = {
        "actor.clip_ratio_low": 0.1,
        "actor.clip_ratio_high": 0.3,
        "actor.kl_loss_coef": 0.04,
        "actor.use_kl_loss": True,
        "actor.optim.lr": 1e-6,  # TRL's default
        "algorithm.loss_agg_mode": "seq-mean-token-mean",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "data.train_batch_size": 8,  # 4 completions x 4 devices x 4 steps / 8
        "model.lora_rank": 32,
        "model.path": "Qwen/Qwen3-0.6B",
        "reward.kind": "custom",
        "trainer.run_dir": "out",
    }
    assert {name: at(found, name) for name in wanted} == wanted
    assert "bf16=True: actor.dtype and rollout.dtype are bfloat16 on GPUs" in text
