"""lm-eval over the server is `jaxrl eval`: the same responses, token by token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from served import serving

from jaxrl.cli import main

NUM_PROBLEMS, LENGTH = 8, 48
TASK = """\
task: problems
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [], max_gen_toks: LENGTH, temperature: 0, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.mark.slow
@pytest.mark.parametrize("chat", [True, False])
def test_the_responses_are_those_of_jaxrl_eval(smollm2: Path, data_folder: Path, tmp_path: Path, chat: bool):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm_eval tenacity")
    problems = (data_folder / "gsm8k_test.jsonl").read_text().splitlines(keepends=True)[:NUM_PROBLEMS]
    (tmp_path / "problems.jsonl").write_text("".join(problems))
    data = [f"data.val_files=[{tmp_path}/problems.jsonl]", f"data.train_files=[{data_folder}/gsm8k_train.jsonl]"]
    sizes = ["data.val_size=0", f"data.max_response_length={LENGTH}", "rollout.max_num_seqs=8"]
    out = ["--out", str(tmp_path / "eval.jsonl"), f"data.apply_chat_template={str(chat).lower()}"]
    assert main(["eval", f"model.path={smollm2}", *data, *sizes, *out]) == 0
    own = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]

    options = ("serve.max_model_len=512", "rollout.max_num_seqs=8", "rollout.warmup=false")
    with serving(str(smollm2), options) as url:
        theirs = asked_by_lm_eval(url, smollm2.name, tmp_path, chat)
    assert [theirs[each["question"]] for each in own] == [each["response"] for each in own]


def asked_by_lm_eval(url: str, model: str, folder: Path, chat: bool) -> dict[str, str]:
    """Responses by question."""
    (folder / "task.yaml").write_text(
        TASK.replace("FILE", str(folder / "problems.jsonl")).replace("LENGTH", str(LENGTH))
    )
    kind, route = ("local-chat-completions", "chat/completions") if chat else ("local-completions", "completions")
    arguments = f"model={model},base_url={url}/{route},num_concurrent=8,max_retries=1,tokenizer_backend=None"
    command = [sys.executable, "-m", "lm_eval", "--model", kind, "--tasks", "problems", "--include_path", str(folder)]
    command += ["--model_args", arguments, "--log_samples", "--output_path", str(folder / "out")]
    command += ["--apply_chat_template"] if chat else []
    environment = os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env=environment, check=True, timeout=900)
    (file,) = (folder / "out").glob("*/samples_*.jsonl")
    samples = map(json.loads, file.read_text().splitlines())
    return {each["doc"]["question"]: each["resps"][0][0] for each in samples}
