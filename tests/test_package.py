"""The published package: the wheel made from the sdist is complete, and trains in a clean environment."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "scripts" / "constraints" / ("py311.txt" if sys.version_info < (3, 12) else "py312.txt")
LINKED = ("sharding", "kernels")
BESIDE = ("configs", "docs", "examples", "scripts", "tests")

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Standard output of a command that must succeed, outside this process's Python settings."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JAX_", "XLA_"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """(sdist, wheel); built from a copy, as a fresh clone is, so that nothing is left in the working tree."""
    pytest.importorskip("build")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("jaxrl", *LINKED, *BESIDE):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # With neither --sdist nor --wheel: the sdist, then the wheel from that sdist.
    run(sys.executable, "-m", "build", "--outdir", out, source, cwd=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory) -> Iterator[Path]:
    """The `bin` folder of an environment with the wheel, its dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "venv", with_pip=True)
    commands = folder / "venv" / "bin"
    install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", CONSTRAINTS)
    run(commands / "python", *install, built[1], cwd=folder)
    yield commands
    shutil.rmtree(folder)  # more than a gigabyte


def test_sdist_and_wheel_hold_every_file_once(built):
    sdist, wheel = built
    wanted = {
        file.relative_to(ROOT).as_posix() for folder in ("jaxrl", *LINKED) for file in (ROOT / folder).rglob("*.py")
    }
    wanted = {f"jaxrl/{name}" if name.startswith(LINKED) else name for name in wanted}
    wanted |= {"jaxrl/py.typed", "jaxrl/serving/chat.html"}
    configs = [file for kind in ("*.yaml", "*.gin") for file in (ROOT / "configs").rglob(kind)]
    wanted |= {f"jaxrl/{file.relative_to(ROOT).as_posix()}" for file in configs if file.parent.name != "cluster"}
    assert "jaxrl/configs/chain_sum.yaml" in wanted
    assert {"jaxrl/sharding/layout.py", "jaxrl/kernels/attention.py"} <= wanted
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == wanted
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive if not member.isdir()}
    assert wanted <= set(members)
    assert all(members[name].isfile() for name in wanted)


def test_the_wheel_trains_in_a_clean_environment(clean, tiny_model, tmp_path):
    packages = json.loads(run(clean / "python", "-m", "pip", "list", "--format=json", cwd=tmp_path))
    installed = {package["name"].lower() for package in packages}
    assert "jaxrl" in installed
    assert not installed & {"ray", "torch", "transformers"}
    where = run(clean / "python", "-c", "import jaxrl.sharding.rules as r; print(r.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(clean.parent)

    named = ("explain-config", "--config", "configs/gsm8k.yaml", f"model.path={tiny_model}")
    assert "rollout dp 1" in run(clean / "jaxrl", *named, cwd=tmp_path, JAX_PLATFORMS="cpu")

    options = {
        "model.path": f"random:{tiny_model}",
        "data.task": "chain_sum",
        "data.task_size": 8,
        "data.train_batch_size": 2,
        "data.max_prompt_length": 192,
        "data.max_response_length": 16,
        "rollout.n": 2,
        "rollout.max_num_seqs": 4,
        "rollout.max_num_batched_tokens": 256,
        "actor.ppo_max_token_len_per_gpu": 512,
        "trainer.run_dir": "run",
        "trainer.total_training_steps": 2,
        "trainer.compilation_cache_dir": tmp_path / "xla",
    }
    overrides = [f"{name}={value}" for name, value in options.items()]
    shown = run(clean / "jaxrl", "train", *overrides, cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert str(tmp_path / "run" / "report.html") in shown

    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert any((tmp_path / "run" / "checkpoints" / "2").iterdir())
    assert "</html>" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")

    again = run(clean / "jaxrl", "train", *overrides, cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert "already at step 2 of 2: raise trainer.total_training_steps to continue" in again
