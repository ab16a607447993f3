"""Where else numbers and samples go: what each package is told, and the packages themselves where they are there."""

import sys
from types import ModuleType, SimpleNamespace

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
        MetricsWriter(tmp_path, [sink], resume_step=1)
    assert steps(tmp_path) == [1, 2]  # nothing was removed


def test_tensorboard_gets_the_numbers(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, name, value, global_step):
            calls.append((name, value, global_step))

        def add_text(self, name, value, global_step):
            calls.append((name, value, global_step))

        def flush(self):
            calls.append("flush")

        def close(self):
            calls.append("close")

    module = ModuleType("tensorboardX")
    module.SummaryWriter = SummaryWriter  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    with MetricsWriter(tmp_path, ["tensorboard"], resume_step=4) as writer:
        writer.write(5, {"x": 1.5})
        writer.write_samples(5, ROWS)
    table = (
        "| prompt | reward | parts |\n| --- | --- | --- |\n"
        '| 1 \\| 2&lt;br&gt;<br>\\*x\\* | 0.5 |  |\n| b |  | \\{"a": 1\\} |'
    )
    assert calls == [(str(tmp_path / "tensorboard"), 5), ("x", 1.5, 5), "flush", ("samples", table, 5), "close"]


def test_wandb_goes_on_in_the_same_run(tmp_path, monkeypatch):
    calls = []
    run = SimpleNamespace(
        id="abc",
        define_metric=lambda *a, **k: calls.append(("define", a, k)),
        log=lambda values: calls.append(("log", values)),
        finish=lambda: calls.append("finish"),
    )
    module = ModuleType("wandb")
    module.init = lambda **options: calls.append(options) or run  # pyright: ignore[reportAttributeAccessIssue]
    module.Table = lambda columns, data: ("table", columns, data)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "wandb", module)
    for run_id in (None, "abc"):
        calls.clear()
        with MetricsWriter(tmp_path, ["wandb"], project="p", config={"a": 1}) as writer:
            writer.write(writer.last_step + 1, {"x": 1.5})
            writer.write_samples(writer.last_step, ROWS)
        options, _, logged, table, finished = calls
        assert options == {
            "project": "p",
            "name": tmp_path.name,
            "dir": str(tmp_path),
            "id": run_id,
            "resume": "allow",
            "config": {"a": 1},
        }
        assert logged == ("log", {"x": 1.5, "step": writer.last_step})
        assert table == ("log", {"samples": ("table", *TABLE), "step": writer.last_step})
        assert finished == "finish"


class Trackio(ModuleType):
    """What trackio is told."""

    def __init__(self):
        super().__init__("trackio")
        self.calls = []

    def init(self, **options):
        self.calls.append(options)

    def log(self, values, step):
        self.calls.append((values, step))

    def finish(self):
        self.calls.append("finish")

    @staticmethod
    def Table(columns, data):
        return columns, data


def test_trackio_goes_on_under_the_name_of_the_first_start(tmp_path, monkeypatch):
    for experiment in ("first", "second"):
        module = Trackio()
        monkeypatch.setitem(sys.modules, "trackio", module)
        config = {"rollout": {"n": 4, "stop": ["a"]}, "data": {"task_config": {}}}
        with MetricsWriter(tmp_path, ["trackio"], project="p", experiment=experiment, config=config) as writer:
            writer.write(writer.last_step + 1, {"x": 1.5})
            writer.write_samples(writer.last_step, ROWS)
        options, logged, table, finished = module.calls
        flat = {"rollout.n": 4, "rollout.stop": '["a"]', "data.task_config": "{}"}
        assert options == {"project": "p", "name": "first", "resume": "allow", "config": flat, "embed": False}
        assert logged == ({"x": 1.5}, writer.last_step)
        assert table == ({"samples": TABLE}, writer.last_step)
        assert finished == "finish"


class MLflow(ModuleType):
    """What MLflow is told; `fails`: the experiment cannot be set."""

    def __init__(self, fails=False):
        super().__init__("mlflow")
        self.exceptions = SimpleNamespace(MlflowException=type("MlflowException", (Exception,), {}))
        self.calls, self.fails = [], fails

    def set_experiment(self, name):
        if self.fails:
            raise self.exceptions.MlflowException("no server\nat all")
        self.calls.append(name)

    def start_run(self, run_id, run_name):
        self.calls.append((run_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def log_params(self, params):
        self.calls.append(params)

    def log_metrics(self, metrics, step, run_id):
        self.calls.append((metrics, step, run_id))

    def log_dict(self, table, file, run_id):
        self.calls.append((table, file, run_id))

    def end_run(self):
        self.calls.append("end")


def test_mlflow_goes_on_in_the_same_run(tmp_path, monkeypatch):
    config = {"rollout": {f"o{i:03}": i for i in range(120)}}
    for run_id, run_name in ((None, "named"), ("abc", None)):
        module = MLflow()
        monkeypatch.setitem(sys.modules, "mlflow", module)
        with MetricsWriter(tmp_path, ["mlflow"], project="p", experiment="named", config=config) as writer:
            writer.write(writer.last_step + 1, {"val/best@4": 1.5})
            writer.write_samples(writer.last_step, ROWS)
        experiment, started, *params, logged, table, ended = module.calls
        assert (experiment, started, ended) == ("p", (run_id, run_name), "end")
        assert [len(each) for each in params] == ([] if run_id else [100, 20])
        assert logged == ({"val/best_at_4": 1.5}, writer.last_step, "abc")
        file = f"samples/step_{writer.last_step:06d}.json"
        assert table == ({"columns": TABLE[0], "data": TABLE[1]}, file, "abc")


def test_a_server_that_is_not_there_ends_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", MLflow(fails=True))
    with pytest.raises(RunFailed, match=r"mlflow began no run \(no server at all\): mend that, or leave mlflow out"):
        MetricsWriter(tmp_path, ["mlflow"])


def test_the_real_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="trackio is not installed: pip install 'jaxrl[trackio]'")
    for step in (1, 2):
        with MetricsWriter(tmp_path / "run", ["trackio"], project="p", config={"a": {"b": 1}}) as writer:
            writer.write(step, {"x": step * 0.5})
            writer.write_samples(step, ROWS)
    (file,) = (tmp_path / "trackio").glob("p*.db")
    assert file.stat().st_size > 0


def test_the_real_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'jaxrl[mlflow]'")
    for step in (1, 2):
        with MetricsWriter(tmp_path / "run", ["mlflow"], project="p", config={"a": {"b": 1}}) as writer:
            writer.write(step, {"val/best@4": step * 0.5})
            writer.write_samples(step, ROWS)
    run_id = (tmp_path / "run" / "mlflow_id.txt").read_text().strip()
    client = mlflow.MlflowClient()
    assert [each.value for each in client.get_metric_history(run_id, "val/best_at_4")] == [0.5, 1.0]
    assert client.get_run(run_id).data.params == {"a.b": "1"}
    assert [each.path for each in client.list_artifacts(run_id, "samples")] == [
        f"samples/step_{step:06d}.json" for step in (1, 2)
    ]
