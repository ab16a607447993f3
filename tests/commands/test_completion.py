"""Completion: what a shell is offered at a Tab, in the shells that are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.commands.completion import config_files, next_names, overrides
from jaxrl.config.reference import options

ROOT = Path(__file__).resolve().parents[2]
BASH = """
eval "$(jaxrl completion bash)"
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
_python_argcomplete jaxrl
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = "jaxrl completion fish | source; complete -C $argv[1]"


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `jaxrl` that shells find."""
    command = tmp_path / "bin" / "jaxrl"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m jaxrl "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HOME", str(tmp_path))
    return command


def offered(shell: str, line: str) -> list[str]:
    command = ["bash", "-c", BASH, "bash", line] if shell == "bash" else ["fish", "-c", FISH, line]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [text.split("\t")[0].strip() for text in done.stdout.splitlines()]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_what_a_shell_is_offered(shell: str, on_path: Path, tmp_path: Path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "models").mkdir()
    head = "rollout.dtype=" if shell == "fish" else ""  # bash cuts words at an equals sign
    assert set(offered(shell, "jaxrl comp")) == {"completion"}
    assert {"rollout.layout.switch=", "rollout.layout.state="} <= set(offered(shell, "jaxrl train rollout.lay"))
    assert set(offered(shell, "jaxrl train rollout.n=4 rollout.dtype=")) == {
        f"{head}{name}" for name in ("auto", "float32", "bfloat16", "float64")
    }
    assert set(offered(shell, "jaxrl score --kind ma")) == {"math"}
    (config,) = offered(shell, "jaxrl train --config configs/algorithms/dap")  # of those in the working directory
    assert config == "configs/algorithms/dapo.yaml"
    (found,) = offered(shell, f"jaxrl train model.path={tmp_path}/mod")
    assert found.endswith(f"{tmp_path}/models/")


def test_the_script_of_zsh_is_one(on_path: Path):
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    test = 'autoload -U compinit && compinit -u -D; eval "$(jaxrl completion zsh)"; print ${_comps[jaxrl]}'
    done = subprocess.run(["zsh", "-f", "-c", test], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "_python_argcomplete"), done.stderr


def test_configurations_that_come_with_jaxrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    complete = config_files
    algorithms = complete(prefix="configs/al")
    assert "configs/algorithms/dapo.yaml" in algorithms
    assert all(name.startswith("configs/algorithms/") for name in algorithms)
    assert complete(prefix="mine") == []
    (tmp_path / "mine.yaml").write_text("")
    assert complete(prefix="mine") == ["mine.yaml"]
    (tmp_path / "configs").mkdir()
    assert complete(prefix="configs/al") == [], "the user's own folder is meant"


def test_options_go_on_section_by_section():
    complete = overrides
    assert list(complete(prefix="")) == [f"{name}." for name in dict.fromkeys(o.path.split(".")[0] for o in options())]
    assert list(complete(prefix="hosts.a")) == ["hosts.address="]
    assert complete(prefix="hosts.a")["hosts.address="].startswith("The address of the Ray cluster")
    assert "rollout.layout." in complete(prefix="rollout.")
    assert "rollout.layout.switch=" not in complete(prefix="rollout.")
    assert list(complete(prefix="rollout.warmup=")) == ["rollout.warmup=true", "rollout.warmup=false"]
    assert list(complete(prefix="no.option=")) == list(complete(prefix="zzz")) == []


def test_every_option_is_reached():
    """From nothing, by taking what is offered."""
    complete, pending, reached = overrides, [""], set()
    while pending:
        for name in complete(prefix=pending.pop()):
            (reached.add if name.endswith("=") else pending.append)(name)
    assert reached == {f"{option.path}=" for option in options() if ".NAME." not in option.path}


def test_names():
    assert next_names(["a.b=", "a.c.d=", "e="], "") == ["a.", "e="]
    assert next_names(["a.b=", "a.c.d="], "") == ["a.b=", "a.c."]
    assert next_names(["a.c.d="], "a") == ["a.c.d="]
    assert next_names(["a.c.d="], "b") == []


def test_a_tab_does_not_load_jax(on_path: Path):
    code = (
        "import sys, jaxrl.commands.completion as c, jaxrl.cli;"
        "list(c.overrides(prefix='rollout.')); print({'jax', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
