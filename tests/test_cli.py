"""The command line: what commands print and write; help is immediate. `tests/refusals` has what they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_tiny_model

from jaxrl.cli import main

TASK = [
    "data.task=leg_counting",
    "data.task_size=8",
    "data.val_size=2",
    "data.max_prompt_length=400",
    "data.max_response_length=64",
]


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence on stderr of a command that ends with status 2."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    # on a loaded machine a start takes long enough to say what goes on
    assert [line for line in captured.out.splitlines() if not line.endswith(" ...")] == []
    assert captured.err.startswith("jaxrl: ")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_a_model_folder_without_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path):
    error = fails(capsys, "train", f"model.path={tiny_model}", f"trainer.run_dir={tmp_path / 'run'}", *TASK)
    assert str(tiny_model) in error
    assert "safetensors" in error


def test_generate_prints_a_line_per_response(capsys: pytest.CaptureFixture[str], tiny_model: Path):
    options = ["--model", f"random:{tiny_model}", "--max-tokens", "6", "-n", "2", "--json"]
    assert main(["generate", *options, "one", "two"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "one", "two", "two"]
    assert all(line["num_tokens"] == len(line["token_ids"]) <= 6 for line in lines)


def test_export_and_generate_from_it(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path):
    assert main(["export", f"random:{tiny_model}", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    written = capsys.readouterr().out.split()
    assert {Path(file).name for file in written} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not list(tmp_path.glob("*.tmp"))
    greedy = ["--max-tokens", "6", "--temperature", "0", "hello"]
    assert main(["generate", "--model", str(tmp_path / "out"), *greedy]) == 0
    exported = capsys.readouterr().out
    assert main(["generate", "--model", f"random:{tiny_model}", *greedy]) == 0
    assert capsys.readouterr().out == exported


def test_a_model_without_a_tokenizer_is_exported_without_one(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    model = write_tiny_model(tmp_path / "model")
    for file in model.glob("*token*"):
        file.unlink()
    assert main(["export", f"random:{model}", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert f"{model} holds no tokenizer.json: the model is exported without a tokenizer\n" in out
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    assert "holds no tokenizer.json" in fails(capsys, "generate", "--model", str(tmp_path / "out"), "hello")


def test_eval_prints_its_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path):
    sizes = ["data.max_response_length=6", "rollout.max_num_seqs=4", "rollout.val_kwargs.n=2", "rollout.warmup=false"]
    model = [f"model.path={tiny_model}", "model.random_init=true", "rollout.val_kwargs.temperature=1.0"]
    out = tmp_path / "out.jsonl"
    trained = ["hosts.num=16", "rollout.num_workers=16"]  # has no effect on this command
    assert main(["eval", *model, *TASK, *sizes, *trained, "--out", str(out)]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:4] == ["parameters", "rollout.dtype:", "num_prompts", "avg@2"]
    assert len(out.read_text().splitlines()) == 2 * 2


def test_explain_layout(capsys: pytest.CaptureFixture[str], tiny_model: Path):
    assert main(["explain-layout", "--model", str(tiny_model), "--devices", "4", "--tp", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{tiny_model.name}: 4 devices, dp 2 × tp 2\n")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  q ")] == ["q"]
    assert main(["explain-layout", "--shape", "SmolLM2-135M", "--tp", "4", "--max-tp", "8"]) == 0
    assert "8 devices, dp 2 × tp 4" in capsys.readouterr().out, "by default the devices that are here"
    assert "must be one of tiny" in fails(capsys, "explain-layout", "--shape", "none")


def test_neither_help_nor_the_main_module_loads_jax():
    """Reward workers import the module, and help is immediate."""
    code = """
import sys
import jaxrl.__main__
from jaxrl.cli import main
from jaxrl.runtime.stop import Stop
for arguments in (["--help"], ["--version"], ["train", "--help"], ["generate", "--help"]):
    print("asked for", arguments)
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 0
assert "jax" not in sys.modules and "numpy" not in sys.modules
"""
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert all(answer.count("\n") > 1 for answer in said.split("asked for ")[1:])


def test_a_platform_that_is_not_there_is_no_bug(tiny_model: Path):
    """jax says so by an assertion of its own, or an error, depending on the platform."""
    environment = os.environ | {"JAX_PLATFORMS": "nonesuch"}
    command = [sys.executable, "-m", "jaxrl", "generate", "--model", f"random:{tiny_model}", "hello"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    said = "jaxrl: JAX_PLATFORMS=nonesuch: JAX finds no such devices here: unset it"
    assert done.stderr.splitlines()[-1].startswith(said)
