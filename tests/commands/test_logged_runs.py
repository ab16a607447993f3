"""Whole runs that log to the real mlflow, trackio, wandb (offline) and tensorboardX, where these are installed: killed
after a checkpoint and resumed; then the numbers that each package reads back are compared with the run's own."""

import importlib.util
import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import PLAIN_REWARD, Runs, end, kill, wait_for_steps

from jaxrl.record.metrics import read_metrics
from jaxrl.record.sinks import PACKAGES

INSTALLED = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is not None]
SAVED, STEPS = 3, 7
PROJECT = "sums"
BY_THE_CLOCK = ("timing_s/", "perf/", "reward/", "memory/")

Logged = dict[int, dict[str, float]]


def environment(folder: Path) -> dict[str, str]:
    """Everything stays in a folder, and no network is asked."""
    return {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_ENABLE_TELEMETRY": "false",
        "DO_NOT_TRACK": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
    }


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Of a run that was killed after a step behind its first checkpoint, and went on."""
    if not INSTALLED:
        pytest.skip("no logger's package is installed: pip install 'jaxrl[mlflow,tensorboard,trackio,wandb]'")
    folder = tmp_path_factory.mktemp("logged")
    runs = Runs(folder, tiny_model)
    (folder / "reward.py").write_text(PLAIN_REWARD)
    runs.config["trainer"] |= {"total_training_steps": STEPS, "save_freq": SAVED, "project_name": PROJECT}
    runs.config["trainer"]["logger"] = ["console", *INSTALLED]
    wanted = folder / "my run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # MLflow keeps files in the current folder
        process = runs.start(wanted, environment=environment(folder))
        wait_for_steps(process, wanted, SAVED + 1)
        while not (wanted / "checkpoints" / str(SAVED)).exists():
            assert process.poll() is None, end(process)
            time.sleep(0.02)
        kill(process)
        assert [each.name for each in (wanted / "checkpoints").iterdir() if each.name.isdigit()] == [str(SAVED)]
        end(runs.start(wanted, environment=environment(folder)))
    return wanted


def read_mlflow(run_dir: Path) -> Logged:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run_dir.parent}/mlflow.db")
    (experiment,) = (each for each in client.search_experiments() if each.name == PROJECT)
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (run_dir.name, "FINISHED")
    assert run.data.params["rollout.n"] == "4"
    logged: Logged = defaultdict(dict)
    for name in run.data.metrics:
        for each in client.get_metric_history(run.info.run_id, name):
            assert name not in logged[each.step], f"{name} stands twice at step {each.step}"
            logged[each.step][name] = each.value
    assert [(step, values.pop("step")) for step, values in logged.items()] == [(step, step) for step in logged]
    return logged


def read_tensorboard(run_dir: Path) -> Logged:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard, which reads back what tensorboardX writes, is not installed",
    )
    events = accumulator.EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0, "tensors": 0})
    events.Reload()
    logged: Logged = defaultdict(dict)
    for name in events.Tags()["scalars"]:
        for each in events.Scalars(name):
            assert name not in logged[each.step], f"{name} stands twice at step {each.step}"
            logged[each.step][name] = each.value
    return logged


READ: dict[str, Callable[[Path], Logged]] = {
    "mlflow": read_mlflow,
    "tensorboard": read_tensorboard,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the packages' own
@pytest.mark.parametrize("name", READ)
def test_what_a_logger_reads_back(name: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """Each step once, in one run of the logger, with every number, though a step ran twice."""
    if name not in INSTALLED:
        pytest.skip(f"{PACKAGES[name]} is not installed: pip install 'jaxrl[{name}]'")
    for variable, value in environment(run_dir.parent).items():
        monkeypatch.setenv(variable, value)
    logged = READ[name](run_dir)
    lines = {int(line["step"]): line for line in read_metrics(run_dir)}
    assert sorted(logged) == sorted(lines) == list(range(1, STEPS + 1))
    for step, line in lines.items():
        wanted = {spelt(name, each): value for each, value in line.items() if each not in ("step", "time")}
        assert logged[step].keys() == wanted.keys()
        differs = {
            each: (value, logged[step][each])
            for each, value in wanted.items()
            if not is_same(value, logged[step][each], 1e-6 if name == "tensorboard" else 0.0)
        }
        if step > SAVED:  # it may have run twice, and the logger have the first time's seconds
            differs = {each: pair for each, pair in differs.items() if not each.startswith(BY_THE_CLOCK)}
        assert not differs, f"step {step}"


def spelt(name: str, metric: str) -> str:
    return metric.replace("@", "_at_") if name == "mlflow" else metric


def is_same(value: float, logged: Any, tolerance: float) -> bool:
    if math.isnan(value):
        return str(logged).lower() == "nan"
    return isinstance(logged, int | float) and abs(value - logged) <= tolerance * abs(value)
