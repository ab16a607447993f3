"""What makes an environment beside pip: the container's recipe, and the checks before a commit."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
CONSTRAINTS = ROOT / "scripts" / "constraints"


def copies() -> list[tuple[list[str], str]]:
    """(sources, target) of each COPY."""
    found = [line.split()[1:] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]
    return [(parts[:-1], parts[-1]) for parts in found]


def test_what_the_image_copies_is_there():
    assert copies()
    for sources, _ in copies():
        for source in sources:
            assert (ROOT / source).exists(), source


def test_tools_before_a_commit_are_those_of_the_tests():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    pinned = {need for hook in hooks for need in hook.get("additional_dependencies", [])}
    for file in CONSTRAINTS.glob("py*.txt"):
        assert pinned == {line for line in file.read_text().splitlines() if line.startswith("ruff==")}


def name_of(requirement: str) -> str:
    """`PyYAML>=6` and `pyyaml==6.0.3` name the same package."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=; ]", requirement)[0]).lower()


@pytest.mark.parametrize("file", sorted(CONSTRAINTS.glob("py*.txt")), ids=lambda file: file.name)
def test_what_the_scripts_install_is_pinned(file: Path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["docs"], *extras["jetstream"], *extras["compile-gpu"]]
    wanted.append("libtpu")  # of jax[tpu], by itself
    lines = file.read_text(encoding="utf-8").split()
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!-]+", line) for line in lines)
    pinned = [name_of(line) for line in lines]
    assert pinned == sorted(set(pinned))
    assert {name_of(each) for each in wanted} - {"jaxrl"} <= set(pinned)


@pytest.mark.slow
def test_the_images_steps_one_by_one(tmp_path: Path):
    """What it copies and installs, in an environment of its own: no step needs a file that it has not copied."""
    work = tmp_path / "src"
    work.mkdir()
    for sources, target in copies():
        for source in sources:
            place = work / source if target == "./" else work / target
            place.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(ROOT / source, place, symlinks=True, ignore=ignored)
            else:
                shutil.copy(ROOT / source, place)
    venv.create(tmp_path / "venv", with_pip=True)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    (step,) = re.findall(r"^RUN (pip install .*?[^\\\n])$", DOCKERFILE, re.MULTILINE | re.DOTALL)
    command = step.replace("\\\n", " ").replace("pip install", f"{tmp_path}/venv/bin/pip install --quiet")
    environment = {"PYTHON": version, "EXTRA": "", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(["sh", "-c", command], cwd=work, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = subprocess.run(
        [tmp_path / "venv" / "bin" / "jaxrl", "explain-config", "--config", "configs/quickstart.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert "134.5M parameters" in shown.stdout
