"""Where else numbers and samples go: what each package is told, and the packages themselves where they are there."""

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest

from jaxrl.record.metrics import MetricsWriter, read_metrics
from jaxrl.record.sinks import PACKAGES
from jaxrl.types import RunFailed

ROWS = [{"prompt": "1 | 2<br>\n*x*", "reward": 0.5}, {"prompt": "b", "parts": {"a": 1}}]
TABLE = (["prompt", "reward", "parts"], [["1 | 2<br>\n*x*", 0.5, None], ["b", None, '{"a": 1}']])


def steps(folder):
    return [row["step"] for row in read_metrics(folder)]


def write(folder, numbers, **options):
    with MetricsWriter(folder, **options) as writer:
        for step in numbers:
            writer.write(step, {"x": step * 0.5})


@pytest.mark.parametrize(("sink", "package"), PACKAGES.items())
def test_a_missing_extra_is_named(tmp_path, monkeypatch, sink, package):
    monkeypatch.setitem(sys.modules, package, None)
    write(tmp_path, [1, 2])
    with pytest.raises(ValueError, match=rf"{sink} needs the package {package}.*pip install 'jaxrl\[{sink}\]'"):
        MetricsWriter(tmp_path, [sink], resume_step=1).open_sinks()
    assert steps(tmp_path) == [1, 2]  # nothing was removed


def test_tensorboard_gets_the_numbers(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step, flush_secs):
            assert flush_secs < 1
            calls.append((folder, purge_step))

        def add_scalar(self, name, value, global_step):
            calls.append((name, value, global_step))

        def add_text(self, name, value, global_step):
            calls.append((name, value, global_step))

        def close(self):
            calls.append("close")

    module = ModuleType("tensorboardX")
    module.SummaryWriter = SummaryWriter  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    with MetricsWriter(tmp_path, ["tensorboard"]) as writer:
        writer.write(5, {"x": 1.5}, ROWS)
    table = (
        "| prompt | reward | parts |\n| --- | --- | --- |\n"
        '| 1 \\| 2&lt;br&gt;<br>\\*x\\* | 0.5 |  |\n| b |  | \\{"a": 1\\} |'
    )
    assert calls == [(str(tmp_path / "tensorboard"), 0), ("x", 1.5, 5), ("samples", table, 5), "close"]
    calls.clear()
    (tmp_path / "tensorboard").mkdir()
    for resume_step, first in ((50, 31), (5, 0)):  # what is sent from there on takes the place of what is there
        calls.clear()
        write(tmp_path, [60], sinks=["tensorboard"], resume_step=resume_step)
        assert calls == [
            (str(tmp_path / "tensorboard"), first),
            *[("x", 1.5, 5)] * (first == 0),
            ("x", 30.0, 60),
            "close",
        ]


class Wandb(ModuleType):
    """What wandb is told; `server_has`: the steps on the server, None: offline."""

    Error = OSError

    class Settings:
        model_fields: ClassVar = {"x_transaction_log_flush_interval": 0}

        def __init__(self, **given):
            self.given = given

    def __init__(self, server_has=None):
        super().__init__("wandb")
        self.calls = []
        self.id, self.offline, self.starting_step = "abc", server_has is None, server_has or 0

    def init(self, **options):
        self.calls.append(options | {"settings": options["settings"].given})
        return self

    def define_metric(self, *arguments, **options):
        self.calls.append(("define", arguments, options))

    def log(self, values, step, commit):
        assert commit
        self.calls.append(("log", values, step))

    def finish(self):
        self.calls.append("finish")

    @staticmethod
    def Table(columns, data):
        return "table", columns, data


def test_wandb_goes_on_in_the_same_run(tmp_path, monkeypatch):
    for run_id in (None, "abc"):
        module = Wandb()
        monkeypatch.setitem(sys.modules, "wandb", module)
        with MetricsWriter(tmp_path, ["wandb"], project="p", config={"a": 1}) as writer:
            writer.write(writer.last_step + 1, {"x": 1.5}, ROWS)
        options, _, logged, finished = module.calls
        assert options == {
            "project": "p",
            "name": tmp_path.name,
            "dir": str(tmp_path),
            "id": run_id,
            "resume": "allow",
            "config": {"a": 1},
            "settings": {"x_transaction_log_flush_interval": 0.1},
        }
        step = writer.last_step
        assert logged == ("log", {"x": 1.5, "step": step, "samples": ("table", *TABLE)}, step)
        assert finished == "finish"


@pytest.mark.parametrize(("server_has", "sent"), [(None, [4]), (2, [2, 3, 4]), (4, [4]), (5, [])])
def test_wandb_is_sent_what_it_lacks(tmp_path, monkeypatch, server_has, sent):
    """After a kill in step 4: offline what was sent is known, online the server knows what came."""
    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    write(tmp_path, range(4), sinks=["wandb"])
    module = Wandb(server_has)
    monkeypatch.setitem(sys.modules, "wandb", module)
    with MetricsWriter(tmp_path, ["wandb"], resume_step=2) as writer:
        for step in (3, 4):
            writer.write(step, {"x": step * 0.5})
    assert [call[2] for call in module.calls if isinstance(call, tuple) and call[0] == "log"] == sent


class Trackio(ModuleType):
    """What trackio is told; `stored`: the steps that it has on this machine."""

    def __init__(self, stored=()):
        super().__init__("trackio")
        self.calls = []
        lines = [{"step": step} for step in stored]
        self.sqlite_storage = SimpleNamespace(SQLiteStorage=SimpleNamespace(get_logs=lambda project, run: lines))

    def init(self, **options):
        self.calls.append(options)
        return self

    def log(self, values, step):
        self.calls.append((values, step))

    def finish(self):
        self.calls.append("finish")

    @staticmethod
    def Table(columns, data):
        return columns, data


def test_trackio_goes_on_under_the_name_of_the_first_start(tmp_path, monkeypatch):
    names = []
    for experiment in ("first", "second"):
        module = Trackio(stored=[0] if names else [])
        monkeypatch.setitem(sys.modules, "trackio", module)
        config = {"rollout": {"n": 4, "stop": ["a"]}, "data": {"task_config": {}}}
        with MetricsWriter(tmp_path, ["trackio"], project="p", experiment=experiment, config=config) as writer:
            writer.write(writer.last_step + 1, {"x": 1.5}, ROWS)
        options, logged, finished = module.calls
        names.append(options.pop("name"))
        flat = {"rollout.n": 4, "rollout.stop": '["a"]', "data.task_config": "{}"}
        assert options == {"project": "p", "resume": "allow", "config": flat, "embed": False}
        assert logged == ({"x": 1.5, "samples": TABLE}, writer.last_step)
        assert finished == "finish"
    assert names[0] == names[1]
    assert re.fullmatch(r"first-[0-9a-f]{4}", names[0]), "another run of that name is another run"


@pytest.mark.parametrize(("server", "sent"), [(False, [2, 3, 4]), (True, [4])])
def test_trackio_is_sent_what_it_lacks(tmp_path, monkeypatch, server, sent):
    """Steps 0 and 1 had been stored when the run was killed; a server is not asked."""
    if server:
        monkeypatch.setenv("TRACKIO_SERVER_URL", "http://localhost:7860")
    for name, module in (("first", Trackio()), ("second", Trackio(stored=[0, 1]))):
        monkeypatch.setitem(sys.modules, "trackio", module)
        numbers = range(4) if name == "first" else (3, 4)
        write(tmp_path, numbers, sinks=["trackio"], resume_step=None if name == "first" else 2)
    assert [call[1] for call in module.calls if isinstance(call, tuple)] == sent


class MLflow(ModuleType):
    """What MLflow is told; `fails`: the experiment cannot be set; `has`: the steps of the run there."""

    def __init__(self, fails=False, has=()):
        super().__init__("mlflow")
        self.exceptions = SimpleNamespace(MlflowException=type("MlflowException", (Exception,), {}))
        self.calls, self.fails, self.has = [], fails, has

    def MlflowClient(self):
        return SimpleNamespace(get_metric_history=lambda run_id, name: [SimpleNamespace(step=n) for n in self.has])

    def set_experiment(self, name):
        if self.fails:
            raise self.exceptions.MlflowException("no server\nat all")
        self.calls.append(name)

    def start_run(self, run_id, run_name):
        self.calls.append((run_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def log_params(self, params):
        self.calls.append(params)

    def log_metrics(self, metrics, step, run_id, synchronous):
        assert synchronous
        self.calls.append((metrics, step, run_id))

    def log_dict(self, table, file, run_id):
        self.calls.append((table, file, run_id))

    def end_run(self):
        self.calls.append("end")


def test_mlflow_goes_on_in_the_same_run(tmp_path, monkeypatch):
    config = {"rollout": {f"o{i:03}": i for i in range(120)}}
    for run_id, run_name in ((None, "named"), ("abc", None)):
        module = MLflow(has=[0])
        monkeypatch.setitem(sys.modules, "mlflow", module)
        with MetricsWriter(tmp_path, ["mlflow"], project="p", experiment="named", config=config) as writer:
            writer.write(writer.last_step + 1, {"val/best@4": 1.5}, ROWS)
        experiment, started, *params, table, logged, ended = module.calls
        assert (experiment, started, ended) == ("p", (run_id, run_name), "end")
        assert [len(each) for each in params] == ([] if run_id else [100, 20])
        assert logged == ({"val/best_at_4": 1.5, "step": writer.last_step}, writer.last_step, "abc")
        file = f"samples/step_{writer.last_step:06d}.json"
        assert table == ({"columns": TABLE[0], "data": TABLE[1]}, file, "abc")


def test_a_server_that_fails_later_ends_no_run(tmp_path, monkeypatch, caplog):
    module = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    with MetricsWriter(tmp_path, ["mlflow"]) as writer:
        writer.write(1, {"x": 1.0})

        def down(*arguments, **options):
            raise module.exceptions.MlflowException("503")

        monkeypatch.setattr(module, "log_metrics", down)
        writer.write(2, {"x": 1.0}, ROWS)
    assert steps(tmp_path) == [1, 2]
    assert (
        caplog.messages[-1] == "trainer.logger: mlflow lacks 1 of the steps, from step 2 on: a resumed run sends them"
    )


def test_a_server_that_is_not_there_ends_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", MLflow(fails=True))
    with pytest.raises(RunFailed, match=r"mlflow began no run \(no server at all\): mend that, or leave mlflow out"):
        MetricsWriter(tmp_path, ["mlflow"]).open_sinks()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own, with newer releases of what it uses
def test_the_real_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'jaxrl[mlflow]'")
    for step in (1, 2):
        with MetricsWriter(tmp_path / "run", ["mlflow"], project="p", config={"a": {"b": 1}}) as writer:
            writer.write(step, {"val/best@4": step * 0.5}, ROWS)
    run_id = (tmp_path / "run" / "mlflow_id.txt").read_text().strip()
    client = mlflow.MlflowClient()
    assert [each.value for each in client.get_metric_history(run_id, "val/best_at_4")] == [0.5, 1.0]
    assert client.get_run(run_id).data.params == {"a.b": "1"}
    assert [each.path for each in client.list_artifacts(run_id, "samples")] == [
        f"samples/step_{step:06d}.json" for step in (1, 2)
    ]
