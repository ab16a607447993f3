"""The services of `trainer.logger`, to which a run's metrics and samples go: W&B, TensorBoard, MLflow, trackio.

A service gets a step's metrics under the names of `metrics.jsonl`, and the samples of `samples.jsonl` as a table. A
resumed run continues the same run there, and no step is sent twice (`Sink.sent`). A run does not end because the server
of a sink does (`RetryingSink`). What was sent cannot be taken back, except from TensorBoard: of a step that runs again
after a checkpoint the first numbers stay.

Departures: MLflow takes no `@` in a name, so `val/best@4` is `val/best_at_4` there.
"""

from __future__ import annotations

import html
import importlib
import json
import logging
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from jaxrl.config import flatten
from jaxrl.config.inputs import one_line
from jaxrl.record.files import write_whole
from jaxrl.record.samples import IDS
from jaxrl.types import RunFailed

PACKAGES = {"mlflow": "mlflow", "tensorboard": "tensorboardX", "trackio": "trackio", "wandb": "wandb"}
"""The package of each sink."""
RETRY_S = 60.0
_NOT_IN_MLFLOW = re.compile(r"[^/\w.\- ]")
_TABLE = "samples"
_SENT_AGAIN = 20  # steps: more than fit into the half second between two flushes of TensorBoard's file
_MOST_PARAMS = 100  # that MLflow takes at once
_log = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, Any]]
"""A step's samples."""


class Unreachable(Exception):
    """A sink takes nothing now."""


class Sink(Protocol):
    """`sent`: the steps that the service had when it was opened."""

    sent: Container[int]

    def write(self, step: int, metrics: Mapping[str, float], rows: Rows) -> None:
        """Sends a step's numbers, and its samples as a table. Raises Unreachable."""
        ...

    def close(self) -> None: ...


def open_sink(
    name: str, folder: Path, last_step: int, project: str, experiment: str, config: Mapping[str, Any]
) -> Sink:
    """Opens a sink; `folder` (of the run) remembers what the run is called there, and `last_step` (-1: none) is the
    last that counts. Raises RunFailed if it cannot be opened, ValueError if its package is missing."""
    package = sink_package(name)
    if name == "tensorboard":
        return _TensorBoard(package, folder / "tensorboard", last_step)
    kind = {"mlflow": _MLflow, "trackio": _Trackio, "wandb": _Wandb}[name]
    return kind(package, folder, project, experiment, config)


def sink_package(name: str) -> ModuleType:
    """The package of a sink of `trainer.logger`. Raises ValueError if it is not installed."""
    module = PACKAGES[name]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # it is there, and something that it needs is not
            raise
        raise ValueError(
            f"trainer.logger: {name} needs the package {module}, which is not installed: "
            f"pip install 'jaxrl[{name}]', or leave {name} out of trainer.logger"
        ) from None


class RetryingSink:
    """Sends a sink each step once and in order: at once or, where it cannot be reached, again every `RETRY_S` seconds
    and at the end. What is missing even then is sent by the next start of the run."""

    def __init__(self, name: str, sink: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._sink, self._clock = name, sink, clock
        self._waiting: deque[tuple[int, Mapping[str, float], Rows]] = deque()
        self._again_s: float | None = None  # when it is tried again; None: it was reached last time

    def send(self, step: int, metrics: Mapping[str, float], rows: Rows) -> None:
        if step in self._sink.sent:
            return
        self._waiting.append((step, metrics, rows))
        if self._again_s is None or self._clock() >= self._again_s:
            self._send_waiting()

    def close(self) -> None:
        self._send_waiting()
        if self._waiting:
            first, count = self._waiting[0][0], len(self._waiting)
            _log.warning(
                "trainer.logger: %s lacks %d of the steps, from step %d on: a resumed run sends them",
                *(self._name, count, first),
            )
        self._sink.close()

    def _send_waiting(self) -> None:
        while self._waiting:
            try:
                self._sink.write(*self._waiting[0])
            except Unreachable as error:
                if self._again_s is None:
                    _log.warning(
                        "trainer.logger: %s takes nothing (%s): it is tried again every %g s",
                        *(self._name, one_line(str(error)), RETRY_S),
                    )
                self._again_s = self._clock() + RETRY_S
                return
            self._again_s = None
            self._waiting.popleft()


class _TensorBoard:
    """A kill loses the last steps, which its thread has not written, so a resumed run sends a few again in their
    place."""

    def __init__(self, package: Any, folder: Path, last_step: int) -> None:
        first = max(last_step + 1 - _SENT_AGAIN, 0) if folder.is_dir() else 0
        self.sent: Container[int] = range(first)
        self._writer: Any = package.SummaryWriter(str(folder), purge_step=first, flush_secs=0.5)

    def write(self, step: int, metrics: Mapping[str, float], rows: Rows) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        if rows:
            self._writer.add_text(_TABLE, _markdown(rows), global_step=step)

    def close(self) -> None:
        self._writer.close()


def _sent_steps(file: Path) -> Container[int]:
    """The steps sent to a service that cannot list its steps: a local file holds the last one."""
    if not file.exists():
        return ()
    text = file.read_text().strip()
    if not text.isdecimal():
        raise ValueError(f"{file}: must hold a step, found {text!r:.80}: mend it or move it away")
    return range(int(text) + 1)


class _Wandb:
    """The server says which step comes next; offline, where each start has a folder that `wandb sync` joins, a file of
    ours does."""

    def __init__(self, wandb: Any, folder: Path, project: str, experiment: str, config: Mapping[str, Any]) -> None:
        id_file = folder / "wandb_id.txt"  # a resumed run continues the same wandb run
        run_id = id_file.read_text().strip() if id_file.exists() else None
        # a kill loses what is not in its file yet: by default the last 15 s
        prompt = {"x_transaction_log_flush_interval": 0.1}
        known = wandb.Settings.model_fields  # an experimental one, of some releases
        settings = wandb.Settings(**{name: value for name, value in prompt.items() if name in known})
        own = {"id": run_id, "resume": "allow", "config": dict(config), "settings": settings}
        try:
            self._run = wandb.init(project=project, name=experiment, dir=str(folder), **own)
        except wandb.Error as error:
            raise _refused("wandb", error) from error
        id_file.write_text(f"{self._run.id}\n")
        self._run.define_metric("*", step_metric="step")
        self._table, self._file = wandb.Table, folder / "wandb_step.txt"
        self.sent: Container[int] = _sent_steps(self._file) if self._run.offline else range(self._run.starting_step)
        self._error = wandb.Error

    def write(self, step: int, metrics: Mapping[str, float], rows: Rows) -> None:
        values = _with_table(metrics, rows, self._table) | {"step": step}
        try:
            self._run.log(values, step=step, commit=True)  # without that a step is kept back until the next
        except self._error as error:
            raise Unreachable(str(error)) from error
        write_whole(self._file, f"{step}\n")

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """Trackio finds runs by their names, so each run gets a unique name. For a server, a local file records what was
    sent."""

    def __init__(self, trackio: Any, folder: Path, project: str, experiment: str, config: Mapping[str, Any]) -> None:
        name_file = folder / "trackio_name.txt"
        is_new = not name_file.exists()
        name = f"{experiment}-{secrets.token_hex(2)}" if is_new else name_file.read_text().strip()
        try:
            self._run = trackio.init(project=project, name=name, resume="allow", config=_flat(config), embed=False)
        except (OSError, RuntimeError, ValueError) as error:
            raise _refused("trackio", error) from error
        name_file.write_text(f"{name}\n")
        self._table, self._file = trackio.Table, folder / "trackio_step.txt"
        self.sent: Container[int]
        if any(os.environ.get(variable) for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")):
            self.sent = _sent_steps(self._file)
        else:
            stored = trackio.sqlite_storage.SQLiteStorage.get_logs(project, name)
            self.sent = {line["step"] for line in stored}

    def write(self, step: int, metrics: Mapping[str, float], rows: Rows) -> None:
        self._run.log(_with_table(metrics, rows, self._table), step=step)
        write_whole(self._file, f"{step}\n")

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """The project is the experiment there. Its metric `step` says which steps it has."""

    def __init__(self, mlflow: Any, folder: Path, project: str, experiment: str, config: Mapping[str, Any]) -> None:
        id_file = folder / "mlflow_id.txt"
        run_id = id_file.read_text().strip() if id_file.exists() else None
        params = {_mlflow_name(name): value for name, value in _flat(config).items()}
        try:
            mlflow.set_experiment(project)
            self._id = mlflow.start_run(run_id=run_id, run_name=None if run_id else experiment).info.run_id
            if run_id is None:  # a parameter is written once
                names = sorted(params)
                for first in range(0, len(names), _MOST_PARAMS):
                    mlflow.log_params({name: params[name] for name in names[first : first + _MOST_PARAMS]})
            history = mlflow.MlflowClient().get_metric_history(self._id, "step") if run_id else []
        except mlflow.exceptions.MlflowException as error:
            raise _refused("mlflow", error) from error
        id_file.write_text(f"{self._id}\n")
        self.sent: Container[int] = {each.step for each in history}
        self._mlflow = mlflow

    def write(self, step: int, metrics: Mapping[str, float], rows: Rows) -> None:
        columns, data = _columns(rows)
        named = {_mlflow_name(name): value for name, value in metrics.items()} | {"step": step}
        try:
            if rows:  # before the numbers, which say that the step is there
                table = {"columns": columns, "data": data}
                self._mlflow.log_dict(table, f"{_TABLE}/step_{step:06d}.json", run_id=self._id)
            self._mlflow.log_metrics(named, step=step, run_id=self._id, synchronous=True)
        except self._mlflow.exceptions.MlflowException as error:
            raise Unreachable(str(error)) from error

    def close(self) -> None:
        self._mlflow.end_run()


def _refused(name: str, error: BaseException) -> RunFailed:
    way_on = f"mend that, or leave {name} out of trainer.logger"
    return RunFailed(f"trainer.logger: {name} began no run ({one_line(str(error))}): {way_on}")


def _mlflow_name(name: str) -> str:
    return _NOT_IN_MLFLOW.sub("_", name.replace("@", "_at_"))


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    found = flatten(config).items()
    return {name: value if isinstance(value, str | int | float) else json.dumps(value) for name, value in found}


def _columns(rows: Rows) -> tuple[list[str], list[list[Any]]]:
    """The names that any row has, and each row's values. Token ids stay in the run's own file."""
    names = list(dict.fromkeys(name for row in rows for name in row if name != IDS))

    def cell(value: Any) -> Any:
        return value if value is None or isinstance(value, str | int | float) else json.dumps(value)

    return names, [[cell(row.get(name)) for name in names] for row in rows]


def _with_table(metrics: Mapping[str, float], rows: Rows, table: Any) -> dict[str, Any]:
    if not rows:
        return dict(metrics)
    columns, data = _columns(rows)
    return {**metrics, _TABLE: table(columns=columns, data=data)}


def _markdown(rows: Rows) -> str:
    """The model's text is shown as it is, not as markup."""

    def cell(value: Any) -> str:
        text = html.escape("" if value is None else str(value), quote=False)
        return re.sub(r"([|\\`*_{}\[\]#!~])", r"\\\1", text).replace("\n", "<br>")

    names, data = _columns(rows)
    lines = [names, ["---"] * len(names), *([cell(value) for value in row] for row in data)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
