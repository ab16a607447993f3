"""`jaxrl port`: command lines, scripts and files of verl and TRL as configurations of jaxrl."""

import re
from pathlib import Path
from typing import Any

import yaml

from jaxrl.commands.port import port
from jaxrl.config.files import load

VERL = """
set -x
n_resp=16
max_prompt_length=$((1024 * 2))
export MODEL_PATH=Qwen/Qwen2.5-3B-Instruct
tokens=$(((max_prompt_length + 512) * 2))
DATA=${DATA:-"${ROOT:-$HOME/sets}/gsm8k"}
clip="actor_rollout_ref.actor.clip_ratio=0.3 actor_rollout_ref.actor.kl_loss_type=k3"
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo $clip \\
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \\
    data.train_files="['$DATA/train.parquet']" data.max_prompt_length=${max_prompt_length} \\
    data.max_response_length=512 data.truncation='error' \\
    actor_rollout_ref.model.path="${MODEL_PATH}" \\
    actor_rollout_ref.rollout.n=${n_resp} actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$tokens \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40 \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=$((256 / 2)) \\
    trainer.n_gpus_per_node=8 trainer.nnodes="${NNODES:-2}" trainer.resume_mode=disable \\
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
        "actor.clip_ratio_c": 0.0,  # gspo has none
        "actor.kl_loss_type": "low_var_kl",
        "actor.optim.lr": 1e-6,
        "actor.ppo_max_token_len_per_gpu": 5120,
        "data.train_files": ["~/sets/gsm8k/train.parquet"],
        "data.max_prompt_length": 2048,
        "data.messages_key": "prompt",
        "data.train_batch_size": 1024,  # verl's defaults
        "rollout.max_num_seqs": 1024,
        "trainer.val_before_train": True,
        "trainer.save_freq": 0,
        "data.val_size": 0,
        "hosts.num": 2,
        "hosts.devices_per_host": 8,
        "model.path": "Qwen/Qwen2.5-3B-Instruct",
        "reward.overlong_buffer.len": 128,
        "rollout.n": 16,
    }
    assert {name: at(found, name) for name in wanted} == wanted
    assert "lr: 1.0e-06\n" in text, "same name, no remark"
    assert "# was actor.clip_ratio=0.3" in text
    ignored, absent, decide = re.split("# No counterpart:|# To decide:", text.split("# Ignored:")[1])
    assert "ref.log_prob_micro_batch_size_per_gpu: actor.ppo_max_token_len_per_gpu" in ignored
    assert "data.truncation=error: no prompt is cut" in absent
    assert "trainer.no_such=1: there is no such" in absent
    assert "lr_warmup_steps_ratio=0.05: set actor.optim.lr_warmup_steps" in decide
    assert "trainer.run_dir: only the script knows" in decide
    assert "trainer.run_dir: trainer.resume_mode=disable" in decide
    assert "hosts.address: " in decide


def test_counts_of_verl() -> None:
    """Warm-up in steps of several updates, microbatches in samples of all GPUs, every custom function."""
    words = ["actor_rollout_ref.actor.optim.lr_warmup_steps=10", "data.train_batch_size=512", "algorithm.gamma=1.0"]
    words += ["actor_rollout_ref.actor.ppo_mini_batch_size=32", "actor_rollout_ref.actor.ppo_micro_batch_size=32"]
    words += ["custom_reward_function.path=my.py", "reward_model.reward_manager=naive"]
    found = yaml.safe_load(port("verl", words))
    assert at(found, "actor.optim.lr_warmup_steps") == 160
    assert at(found, "actor.ppo_max_token_len_per_gpu") == 4 * (512 + 512)
    assert found["reward"] == {"kind": "custom", "path": "my.py"}


def test_turns_of_verl(tmp_path: Path) -> None:
    """Half of them are in the file that the script names."""
    script = tmp_path / "run.sh"
    script.write_text(
        'PROJECT="$(pwd)"\npython3 -m verl.trainer.main_ppo --config-path="$PROJECT/config" --config-name=\'turns\' '
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=$PROJECT/t.yaml data.train_batch_size=64\n"
    )
    assert "--config-name=turns: put this file" in port("verl", [str(script)])
    (tmp_path / "config").mkdir()
    turns = {"multi_turn": {"enable": True, "max_assistant_turns": 5}}
    (tmp_path / "config" / "turns.yaml").write_text(
        yaml.safe_dump({"data": {"train_batch_size": 256}, "actor_rollout_ref": {"rollout": turns}})
    )
    text = port("verl", [str(script)])
    found = yaml.safe_load(text)
    assert found["environment"] == {"kind": "tools", "path": "my_tools.py", "max_turns": 5}
    assert found["data"]["train_batch_size"] == 64
    assert text.count("environment.path: write each tool of ./t.yaml as a function of this file") == 1


def test_a_python_file_of_trl(tmp_path: Path) -> None:
    (tmp_path / "grpo.py").write_text(
        "rows = [{'prompt': [{'role': 'user', 'content': '2+2'}]}]\n"
        "args = GRPOConfig(output_dir='out', per_device_train_batch_size=4, gradient_accumulation_steps=4, beta=0.04,\n"
        "    num_generations=8, epsilon=0.1, epsilon_high=0.3, loss_type='dr_grpo', scale_rewards=False, bf16=True,\n"
        "    reward_weights=[0.5, 1.0], learning_rate=rate)\n"
        "trainer = GRPOTrainer(model='Qwen/Qwen3-0.6B', args=args, reward_funcs=[long, right], train_dataset=rows,\n"
        "    peft_config=LoraConfig(r=32))\n"
    )
    text = port("trl", [str(tmp_path / "grpo.py")], devices=4)
    found = yaml.safe_load(text)
    part = {"kind": "custom", "path": "reward.py", "name": "long", "weight": 0.5}
    wanted = {
        "actor.clip_ratio_low": 0.1,
        "actor.clip_ratio_high": 0.3,
        "actor.kl_loss_coef": 0.04,
        "actor.use_kl_loss": True,
        "actor.grad_clip": 256.0,  # TRL divides the loss by its default of the longest response
        "actor.ppo_max_token_len_per_gpu": 4 * (512 + 256),
        "algorithm.loss_agg_mode": "seq-mean-token-sum",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "data.messages_key": "prompt",
        "data.train_batch_size": 8,  # 4 completions x 4 devices x 4 steps / 8
        "model.lora_rank": 32,
        "model.path": "Qwen/Qwen3-0.6B",
        "reward": {"kind": "custom", "path": "reward.py", "name": "right", "parts": {"long": part}},
        "trainer.run_dir": "out",
    }
    assert {name: at(found, name) for name in wanted} == wanted
    assert "bf16: actor.dtype and rollout.dtype are bfloat16 on GPUs" in text
    assert "learning_rate=rate: only the script knows" in text


def test_steps_of_trl_are_updates(tmp_path: Path) -> None:
    words = ["--num_iterations", "2", "--max_steps", "200", "--save_steps", "100", "--eval_steps", "50"]
    words += ["--warmup_ratio", "0.1", "--report_to", "wandb"]
    found = yaml.safe_load(port("trl", words))
    names = ("total_training_steps", "save_freq", "test_freq", "logger")
    assert [found["trainer"][name] for name in names] == [100, 50, 25, ["wandb"]]
    assert at(found, "actor.optim.lr_warmup_steps") == 20
    words += ["--generation_batch_size", "128", "--per_device_train_batch_size", "4"]
    found = yaml.safe_load(port("trl", words, devices=8))
    assert found["trainer"]["total_training_steps"] == 25, "four updates to a batch, twice"
    assert (found["data"]["train_batch_size"], found["actor"]["ppo_mini_batch_size"]) == (16, 4)
    assert "# - num_generations=$N: only the script knows\n" in port("trl", ["--num_generations", "$N", "--beta", "0"])


def test_a_port_tried_small_is_valid(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(VERL)
    text = port("verl", [str(tmp_path / "run.sh")])
    (tmp_path / "run.yaml").write_text(text)
    (small,) = re.findall(r"^# Try it on one device: jaxrl train --config FILE (.*)", text, re.M)
    config = load(str(tmp_path / "run.yaml"), small.split())
    assert (config.hosts.num, config.trainer.num_devices, config.data.train_batch_size) == (1, 1, 8)
