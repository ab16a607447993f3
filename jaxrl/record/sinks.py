"""Other places to which a run's numbers and samples go, by their names in `trainer.logger`.

Purpose: `open_sink` opens one. Each has a step's metrics under the names that `metrics.jsonl` has, and the samples that
`samples.jsonl` has as a table. A run that goes on does so in the same run there.

Departures: MLflow takes no `@` in a name, so `val/best@4` is `val/best_at_4` there. It and TensorBoard replace a step
that runs again; wandb and trackio show it as a second point.
"""

from __future__ import annotations

import html
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from jaxrl.config.text import one_line
from jaxrl.types import RunFailed

PACKAGES = {"mlflow": "mlflow", "tensorboard": "tensorboardX", "trackio": "trackio", "wandb": "wandb"}
"""The package of each sink."""
_NOT_IN_MLFLOW = re.compile(r"[^/\w.\- ]")
_TABLE = "samples"
_MOST_PARAMS = 100  # that MLflow takes at once


class Sink(Protocol):
    """Another place to which a step's metrics and samples go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self) -> None: ...


def open_sink(
    name: str,
    folder: Path,
    resume_step: int | None,
    project: str,
    experiment: str,
    config: Mapping[str, Any] | None,
) -> Sink:
    """Opens the sink of a name.

    Args:
      folder: of the run, which remembers what the run is called there.
      resume_step: the last step that counts; None: all do.
      project, experiment, config: what it shows.

    Raises:
      RunFailed: it cannot be opened.
      ValueError: its package is not installed.
    """
    package = sink_package(name)
    match name:
        case "tensorboard":
            return _TensorBoard(package, folder / "tensorboard", resume_step)
        case "mlflow":
            return _MLflow(package, folder, project, experiment, config)
        case "trackio":
            return _Trackio(package, folder, project, experiment, config)
    return _Wandb(package, folder, project, experiment, config)


def sink_package(name: str) -> ModuleType | None:
    """The package of a sink of `trainer.logger`; None for "console". Raises ValueError if it is not installed."""
    if name == "console":
        return None
    module = PACKAGES.get(name)
    if module is None:
        raise ValueError(f"trainer.logger: {name!r} must be one of console, {', '.join(PACKAGES)}")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # it is there, and something that it needs is not
            raise
        raise ValueError(
            f"trainer.logger: {name} needs the package {module}, which is not installed: "
            f"pip install 'jaxrl[{name}]', or leave {name} out of trainer.logger"
        ) from None


class _TensorBoard:
    def __init__(self, package: Any, folder: Path, resume_step: int | None) -> None:
        purge = None if resume_step is None else resume_step + 1
        self._writer: Any = package.SummaryWriter(str(folder), purge_step=purge)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._writer.add_text(_TABLE, _markdown(rows), global_step=step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """wandb has no way back to an earlier step: a step that runs again after a crash shows as a second point."""

    def __init__(
        self, wandb: Any, folder: Path, project: str, experiment: str, config: Mapping[str, Any] | None
    ) -> None:
        id_file = folder / "wandb_id.txt"  # a resumed run goes on in the same wandb run
        run_id = id_file.read_text().strip() if id_file.exists() else None
        try:
            self._run = wandb.init(
                project=project, name=experiment, dir=str(folder), id=run_id, resume="allow", config=dict(config or {})
            )
        except wandb.Error as error:
            raise _refused("wandb", error) from error
        id_file.write_text(f"{self._run.id}\n")
        # its own step counter refuses to go back, so the step is a value and the axis of the others
        self._run.define_metric("*", step_metric="step")
        self._table = wandb.Table

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns, data = _columns(rows)
        self._run.log({_TABLE: self._table(columns=columns, data=data), "step": step})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """Its runs are told apart by their names, so that of the first start is kept."""

    def __init__(
        self, trackio: Any, folder: Path, project: str, experiment: str, config: Mapping[str, Any] | None
    ) -> None:
        name_file = folder / "trackio_name.txt"
        name = name_file.read_text().strip() if name_file.exists() else experiment
        try:
            self._run = trackio.init(
                project=project, name=name, resume="allow", config=_flat(config or {}), embed=False
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise _refused("trackio", error) from error
        name_file.write_text(f"{name}\n")
        self._trackio = trackio

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns, data = _columns(rows)
        self._trackio.log({_TABLE: self._trackio.Table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        self._trackio.finish()


class _MLflow:
    """The server, or the folder, is MLFLOW_TRACKING_URI's; the project is the experiment there."""

    def __init__(
        self, mlflow: Any, folder: Path, project: str, experiment: str, config: Mapping[str, Any] | None
    ) -> None:
        id_file = folder / "mlflow_id.txt"
        run_id = id_file.read_text().strip() if id_file.exists() else None
        params = {_mlflow_name(name): value for name, value in _flat(config or {}).items()}
        try:
            mlflow.set_experiment(project)
            self._id = mlflow.start_run(run_id=run_id, run_name=None if run_id else experiment).info.run_id
            if run_id is None:  # a parameter is written once
                names = sorted(params)
                for first in range(0, len(names), _MOST_PARAMS):
                    mlflow.log_params({name: params[name] for name in names[first : first + _MOST_PARAMS]})
        except mlflow.exceptions.MlflowException as error:
            raise _refused("mlflow", error) from error
        id_file.write_text(f"{self._id}\n")
        self._mlflow = mlflow

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        named = {_mlflow_name(name): value for name, value in metrics.items()}
        self._mlflow.log_metrics(named, step=step, run_id=self._id)

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns, data = _columns(rows)
        table = {"columns": columns, "data": data}
        self._mlflow.log_dict(table, f"{_TABLE}/step_{step:06d}.json", run_id=self._id)

    def close(self) -> None:
        self._mlflow.end_run()


def _refused(name: str, error: BaseException) -> RunFailed:
    way_on = f"mend that, or leave {name} out of trainer.logger"
    return RunFailed(f"trainer.logger: {name} began no run ({one_line(str(error))}): {way_on}")


def _mlflow_name(name: str) -> str:
    return _NOT_IN_MLFLOW.sub("_", name.replace("@", "_at_"))


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options under dotted names; what is no number and no text as JSON."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, str | int | float) else json.dumps(value)
    return found


def _columns(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """The names that any row has, in their order, and each row's values; what a row lacks is None."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return names, [[_cell(row.get(name)) for name in names] for row in rows]


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table; text of the model is shown as it is, not as markup."""
    names, data = _columns(rows)
    lines = [names, ["---"] * len(names), *([_shown(value) for value in row] for row in data)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: Any) -> str:
    text = html.escape("" if value is None else str(value), quote=False)
    return re.sub(r"([|\\`*_{}\[\]#!~])", r"\\\1", text).replace("\n", "<br>")
