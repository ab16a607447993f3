"""What each logger's package is told, in a run of the logger that a resumed run continues.

`tests/commands/test_logged_runs.py` has the packages themselves, where they are installed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from jaxrl.record.metrics import MetricsWriter
from jaxrl.record.sinks import PACKAGES
from jaxrl.types import RunFailed


def started(name: str, folder: Path, monkeypatch: Any, resume_step: int | None, *steps: int, broken: Any = ()) -> Any:
    """The package, as a mock, after a start that reports these steps. `broken`: its functions that raise an error."""
    package = MagicMock(**{f"{each}.side_effect": OSError("no room") for each in broken})
    package.Settings.model_fields = {"x_transaction_log_flush_interval": 0}
    package.Error = package.exceptions.MlflowException = OSError
    package.init.return_value.id = package.start_run.return_value.info.run_id = "abc"
    package.MlflowClient.return_value.get_metric_history.return_value = [MagicMock(step=1)]
    package.sqlite_storage.SQLiteStorage.get_logs.return_value = [{"step": 1}] if resume_step else []
    monkeypatch.setitem(sys.modules, PACKAGES[name], package)
    options = {"project": "p", "experiment": "e", "config": {"rollout": {"n": 4}}}
    with MetricsWriter(folder, [name], resume_step=resume_step, **options) as writer:
        for step in steps:
            writer.write(step, {"val/best@4": step / 2}, [{"prompt": "a", "reward": 0.5}])
    return package


def begun(name: str, package: Any) -> tuple[Any, Any]:
    """Which run of the logger was begun, and the steps that were sent to it."""
    if name == "wandb":
        options = package.init.call_args.kwargs
        return options["id"], [each.kwargs["step"] for each in package.init.return_value.log.call_args_list]
    if name == "trackio":
        return package.init.call_args.kwargs["name"], [
            each.kwargs["step"] for each in package.init().log.call_args_list
        ]
    if name == "mlflow":
        sent = [each.kwargs["step"] for each in package.log_metrics.call_args_list]
        return package.start_run.call_args.kwargs["run_id"], sent
    writer = package.SummaryWriter
    return writer.call_args.args, [each.kwargs["global_step"] for each in writer.return_value.add_scalar.call_args_list]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_resumed_run_goes_on_in_the_same_run_and_sends_no_step_twice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, sent = begun(name, started(name, tmp_path, monkeypatch, None, 1))
    assert sent == [1]
    (tmp_path / "tensorboard").mkdir()
    again, sent = begun(name, started(name, tmp_path, monkeypatch, 1, 2))
    if name == "tensorboard":  # what is sent from the first step on takes the place of what is there
        assert (again, sent) == ((str(tmp_path / "tensorboard"),), [1, 2])
    else:
        assert sent == [2]
        assert again == (first if name == "trackio" else "abc")


@pytest.mark.parametrize("name", ["mlflow", "trackio", "wandb"])
def test_a_logger_that_fails(name: str, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture):
    """A start is refused; a step is left for the next start."""
    said = rf"^trainer.logger: {name} began no run \(no room\): mend that, or leave {name} out of trainer.logger$"
    with pytest.raises(RunFailed, match=said):
        started(name, tmp_path, monkeypatch, None, broken=("init", "set_experiment"))
    if name != "trackio":
        started(name, tmp_path, monkeypatch, None, 1, broken=("init.return_value.log", "log_metrics"))
        assert f"{name} lacks 1 of the steps, from step 1 on: a resumed run sends them" in caplog.text
