"""Mistakes in arguments, and in the files and folders that they name: a command line, and the words that answer it."""

import io
import shlex
import socket
import sys
from pathlib import Path

import pytest
from refusals import contents
from tiny import write_tiny_model

from jaxrl.cli import main

STARTED = '{"devices": {"platform": "cpu"}, "starts": []}'
FILES = {
    "a.jsonl": '{"answer": "1", "response": "1"}\n{"answer": "1", "response": 1}\n',
    "blank": " \n", "cut.py": "f(", "empty.py": "x = 1\n", "list.json": "[1]", "list.yml": "[1]",
    "run/run.json": STARTED, "headless/run.json": STARTED, "simulated/run.json": STARTED.replace("cpu", "simulated"),
    "run/config.yaml": "model: {path: /none}", "full/a": "",
    "sums.jsonl": '{"question": "1 + 1", "answer": "2"}\n',
    "sums.yaml": "model: {path: random:model}\ntrainer: {run_dir: new}\n"
    "data: {train_files: [sums.jsonl], max_prompt_length: 64, max_response_length: 16}\n",
}  # fmt: skip
LINES = [
    ("run.yaml", "'run.yaml' is not a command: did you mean train --config run.yaml?"),
    ("train run.yaml", "train: override 'run.yaml' must have the form section.option=value: did you mean --config run"),
    ("train --rollout.n 4", "train: unknown option '--rollout.n': write rollout.n=4"),
    ("train --config-name x", "train: unknown option '--config-name': --config takes a file's whole path"),
    ("export a b c", "export: 'c' is one argument too many"),
    ("trian", "unknown command 'trian': did you mean train?"),
    ("train --confg x.yaml", "train: unknown option '--confg': did you mean --config?"),
    ("generate --model m --raw --system x hello", "generate: --system and --raw exclude each other"),
    ("report one two", "one is not a run: it has none of metrics.jsonl, samples.jsonl, run.json"),
    ("report run --out list.json/x", "--out (list.json/x) cannot be written: "),
    ("export gone out", "gone: neither a run nor a model: there is no such file or folder"),
    ("score --responses a.jsonl --out a.jsonl", "--out (a.jsonl) would replace a.jsonl, which this command reads"),
    ("score reward.kind=math --responses a.jsonl --out o", "a.jsonl, line 2: 'response' must be text, found 1"),
    ("explain-config --fit 8x80", "explain-config --fit: name the model with --shape (Qwen2.5-7B)"),
    ("explain-config --fit 1x1 --shape Qwen2.5-7B", "nothing fits 1 × 1 GiB for Qwen2.5-7B with responses of 4096"),
    ("explain-config --fit 8x80 --shape m rollout.n=4", "takes neither --config nor options: leave them out"),
    ("explain-config --shape Qwen2.5-7B --devices 3 hosts.num=2", "devices (3) must be a multiple of hosts.num (2)"),
    ("generate --model m --seed -1", "generate: --seed must be a whole number from 0 to"),
    ("generate --model m --temperature warm", "--temperature must be a number from 0 to 1000, found 'warm'"),
    ("generate --model m --top-p 0", "--top-p must be a number above 0 and at most 1, found 0"),
    ("generate --model m --dtype float23", "one of float32, bfloat16, found 'float23': did you mean float32?"),
    ("generate --model ' '", "generate: --model must not be empty, found ' '"),
    ("generate --model m --stop ''", "generate: --stop must not be empty"),
    ("generate --model m --system \udcff", r"--system must be UTF-8 text, found '\udcff' in it"),
    ("generate --model m --chat-template-kwargs {", "must be a JSON object, found '{' (Expecting property name"),
    ("generate --model m", "generate: no prompt is given: add them as arguments, or as lines on standard input"),
    ("check-numerics --model random:model --tp 16", "--tp (16) must be at most the devices there are (8)"),
    ("profile model.path=m", "profile: give the table's file with --out, or as rollout.layout.profile"),
    ("profile --config sums.yaml rollout.dtype=float32 --out list.json", "list.json cannot be used: latency"),
    ("train --config sums.yaml reward.kind=code", "sums.jsonl, line 1: sums: the reference answer asserts nothing"),
    ("train --config sums.yaml reward.kind=judge reward.judge.endpoint=http://h/v1 reward.judge.endpoint_model=m "
     "'reward.judge.prompt=a {response} {rubric}'", "the field {rubric} is no column of the data; there are answer,"),
    ("sft model.path=m", "data.train_files is missing: jaxrl sft learns from files"),
    ("simulate model.path=m data.task=chain_sum", "simulate.run_dir is missing (as is trainer.run_dir)"),
    ("replay gone --sample 0-0-0", "gone is no run: it has no config.yaml"),
    ("tune --run gone", "gone is not a run directory: it holds no run.json"),
    ("eval --checkpoint run", "run: no folder in it is named like a step"),
    ("eval model.path=random:model", "no held-out prompts: give data.val_files, or a data.task with data.val_size"),
    ("eval --config sums.yaml reward.kind=model reward.judge.model=/none", "/none: there is no such file or folder"),
    ("score reward.kind=model reward.judge.model=m --responses a.jsonl --out o", "eval, or a model at an endpoint"),
    ("export m full", "full must be empty or absent: an export never overwrites"),
    ("export random:model out --merge", "has no adapters to merge: it is no run with model.lora_rank"),
    ("export simulated out", "simulated is a simulated run: it has no weights to export"),
    ("export headless out", "headless is a run without its config.yaml, which names its model: put it back"),
    ("export run out", "run is a run of the model /none, which is not there any more: put it back, or name its new"),
    ("serve m --api-key-file blank", "serve --api-key-file: blank must hold one word of ASCII characters, the key"),
    ("serve m --host example.invalid", "example.invalid is reached from other machines"),
    ("serve m --port {port}", "serve --port: 127.0.0.1:{port} cannot be listened on ("),
    ("serve m --port 0 --adapter a=b --adapter c=d", "serve --adapter: one can be served, found 2"),
    ("serve m --port 0 --adapter a", "serve --adapter: must be NAME=FOLDER, found 'a'"),
    ("serve run --port 0 --adapter a=b", "serve --adapter: run is a run, which has its own weights"),
    ("serve m --jetstream --adapter a=b", "serve --jetstream: takes neither a key nor adapters"),
    ("options rollout.nn", "options: there is no section and no option 'rollout.nn': did you mean rollout.n?"),
    ("options trainer.balance_batch", "no option 'trainer.balance_batch': batches are always packed by tokens"),
    ("port --from verl gone.sh", "port: no such file: gone.sh"),
    ("port --from verl x=1", "port: x=1 has no option of verl, such as algorithm.adv_estimator=grpo"),
    ("port --from verl list.yml", "port: list.yml must hold options by name"),
    ("port --from trl cut.py", "cut.py, line 1: not valid Python ('(' was never closed)"),
    ("port --from trl empty.py", "port: empty.py has no options of TRL: no GRPOConfig, SFTConfig or DPOConfig"),
]  # fmt: skip
"""`{port}` is one that is taken."""


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    write_tiny_model(tmp_path / "model")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" \n")))
    before, wrong = contents(tmp_path), []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for line, words in LINES:
            given, wanted = (text.replace("{port}", str(taken.getsockname()[1])) for text in (line, words))
            status, said = main(shlex.split(given)), capsys.readouterr()
            out = [each for each in said.out.splitlines() if not each.endswith(" ...")]  # which a slow machine says
            if (status, out, said.err.count("\n")) != (2, [], 1) or wanted not in said.err:
                wrong.append((given, status, said))
    assert not wrong, wrong
    assert contents(tmp_path) == before
