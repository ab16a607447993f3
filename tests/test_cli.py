"""The command line: what commands print and write; help is immediate. `tests/refusals` has what they refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from jaxrl.cli import main

TASK = [
    "data.task=leg_counting",
    "data.task_size=8",
    "data.val_size=2",
    "data.max_prompt_length=400",
    "data.max_response_length=64",
]


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


def test_eval_prints_its_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path):
    sizes = ["data.max_response_length=6", "rollout.max_num_seqs=4", "rollout.val_kwargs.n=2", "rollout.warmup=false"]
    model = [f"model.path={tiny_model}", "model.random_init=true", "rollout.val_kwargs.temperature=1.0"]
    out = tmp_path / "out.jsonl"
    trained = ["hosts.num=16", "rollout.num_workers=16"]  # has no effect on this command
    assert main(["eval", *model, *TASK, *sizes, *trained, "--out", str(out)]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:4] == ["parameters", "rollout.dtype:", "num_prompts", "avg@2"]
    assert len(out.read_text().splitlines()) == 2 * 2


def test_versions(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    first, *versions, devices = capsys.readouterr().out.splitlines()
    assert (first[:6], devices) == ("jaxrl ", "devices 8 × cpu (cpu)")
    assert f"jax {version('jax')}" in versions


def test_neither_help_nor_the_main_module_loads_jax():
    """Reward workers import the module, and help is immediate."""
    code = """
import sys
import jaxrl.__main__
from jaxrl.cli import main
from jaxrl.run.stop import Stop
for arguments in (["--help"], ["train", "--help"], ["generate", "--help"]):
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
