"""`jaxrl.train`, `jaxrl.sft` and `jaxrl.dpo`: rows and functions become files of the run, arguments become options."""

import json
import signal
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import jaxrl
from jaxrl.commands import train
from jaxrl.config import Config, to_mapping
from jaxrl.record.run_dir import CONFIG_FILE
from jaxrl.rewards.domains import build_scorer
from jaxrl.rewards.request import ScoreRequest
from jaxrl.run.stop import Stop

MODEL = "random:model"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations with which runs were started; nothing is trained."""
    found: list[Config] = []

    def record(config: Config) -> None:
        found.append(config)
        Path(config.trainer.run_dir, CONFIG_FILE).write_text(yaml.safe_dump(to_mapping(config)))

    monkeypatch.setattr("jaxrl.commands.train.train", lambda config, say, stop: record(config))
    monkeypatch.setattr("jaxrl.commands.supervised.train_on_files", lambda kind, config, *_: record(config))
    return found


def test_rows_and_options(started: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "a?", "answer": "1", "level": np.float32(2)}, {"prompt": "b?", "answer": "2", "level": 3}]
    options = {"rollout": {"n": 4}, "data__train_batch_size": 2, "actor__optim": {"lr": 1e-4}}
    options["algorithm__teacher__dtype"] = "float32"  # without effect
    run = jaxrl.train(MODEL, rows, "math", steps=3, **options)
    (config,) = started
    assert (config.model.path, config.reward.kind, config.trainer.total_training_steps) == (MODEL, "math", 3)
    assert (config.rollout.n, config.data.train_batch_size, config.actor.optim.lr) == (4, 2, 1e-4)
    assert (config.data.prompt_key, config.data.answer_key) == ("prompt", "answer")
    assert run.path.parts[0] == "runs"
    (file,) = config.data.train_files
    assert [*map(json.loads, Path(file).read_text().splitlines())] == [{**rows[0], "level": 2.0}, rows[1]]
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
    for wrong, said in (
        (lambda: run.generate("a?"), "a list of questions, found text"),
        (lambda: run.generate(["a?"], max_new_tokens=3), "no argument 'max_new_tokens': it takes .* max_tokens"),
        (lambda: run.metrics["steps"], "no metric 'steps'; near it: step"),
        (lambda: jaxrl.Run("gone"), "gone is not a run: it has no config"),
        (lambda: jaxrl.train(run_dir=run.path), f"{run.path} is a run: .*config="),
    ):
        with pytest.raises((TypeError, KeyError, ValueError), match=said):
            wrong()
    noted = list[str]()
    jaxrl.train(config=run.path / CONFIG_FILE, say=noted.append)
    assert noted == []


def test_a_file_stays_where_it_is_and_arguments_replace_its_options(started: list[Config], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"trainer: {{run_dir: {tmp_path}/own}}\nrollout: {{n: 2, temperature: 0.5}}\n")
    (tmp_path / "own").mkdir()
    run = jaxrl.train(MODEL, tmp_path / "rows.jsonl", config=tmp_path / "run.yaml", rollout__n=6)
    (config,) = started
    assert config.data.train_files == [str(tmp_path / "rows.jsonl")]
    assert (config.rollout.n, config.rollout.temperature) == (6, 0.5)
    assert run.path == tmp_path / "own"


def test_other_ways_to_learn(started: list[Config], tmp_path: Path) -> None:
    pair = {"prompt": "1 + 1", "chosen": "2", "rejected": "3"}
    for learn, row in ((jaxrl.sft, {"prompt": "1 + 1", "completion": "2"}), (jaxrl.dpo, pair)):
        run = learn(MODEL, [row], val_data=[row], steps=3, run_dir=tmp_path / learn.__name__)
        (file,), (held_out,) = (config := started.pop()).data.train_files, config.data.val_files
        assert [json.loads(Path(each).read_text()) for each in (file, held_out)] == [row, row]
        assert (config.trainer.total_training_steps, run.checkpoint) == (3, None)


def test_a_function_travels_by_value(started: list[Config], tmp_path: Path) -> None:
    bonus = 0.25

    def reward(response: str, answer: str, level: float) -> float:
        return bonus + level * (answer in response)

    jaxrl.train(MODEL, [{"question": "q", "answer": "4", "level": 2}], reward, run_dir=tmp_path / "run")
    assert "def reward" not in (tmp_path / "run" / "inputs" / "reward.py").read_text()
    scorer = build_scorer(started[0])
    assert scorer(ScoreRequest("data", "it is 4", "4", {"level": 2, "question": "q"}))[0] == 2.25


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"data": [3]}, "data.train_files: row 0 must be a mapping of columns or a question, found 3"),
        ({"data": [{"question": object()}]}, "data.train_files: row 0 cannot be written as JSON: object has no form"),
        ({"reward": threading.Lock().acquire}, "reward: .* cannot be sent to other processes"),
        ({"rollout__nn": 2, "rollout__n": 0}, "argument rollout__n"),
        ({"step": 2}, "unknown argument step: did you mean steps"),
        ({"data": [{"question": "q"}, {"question": ""}]}, r"^data\[1\]: 'question' .* must hold some text"),
    ],
)
def test_mistakes_leave_no_folder(tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        jaxrl.train(MODEL, run_dir=tmp_path / "made" / "run", **{"data": ["q"], **arguments})
    assert not (tmp_path / "made").exists()


def test_control_c(tmp_path: Path, started: list[Config], monkeypatch, request) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a background job it is ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    earlier, recorded, said = signal.default_int_handler, train.train, list[str]()

    def interrupted(times: int, config: Config, say: object, stop: Stop) -> None:
        recorded(config, say, stop)
        stop.save_first(said.append)
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        assert stop.asked

    for times, raised in ((1, nullcontext()), (2, pytest.raises(KeyboardInterrupt))):
        monkeypatch.setattr(train, "train", partial(interrupted, times))
        with raised:
            jaxrl.train(MODEL, ["q"], run_dir=tmp_path)
        assert signal.getsignal(signal.SIGINT) is earlier
    assert len(said) == 2


@pytest.mark.slow
def test_a_run(tiny_model: Path, tmp_path: Path) -> None:
    def reward(response: str) -> float:
        return len(response) / 100

    sizes = {"data__max_response_length": 8, "data__max_prompt_length": 64, "rollout__max_num_seqs": 8}
    run = jaxrl.train(
        f"random:{tiny_model}", ["one?", "two?", "three?"], reward, steps=2, run_dir=tmp_path / "run",
        model__random_init=True, data__train_batch_size=2, rollout__n=4, **sizes,
    )  # fmt: skip
    assert run.metrics["step"].tolist() == [1, 2]
    assert (run.metrics["critic/rewards/mean"] > 0).all()
    assert run.checkpoint == tmp_path / "run" / "checkpoints" / "2"
    assert {"prompt", "response", "reward"} <= set(run.samples[0])
    ((first, second),) = run.generate(["one?"], n=2, max_tokens=4)
    assert max(len(first.token_ids), len(second.token_ids)) <= 4
    assert len(run.generate(["two?"], max_tokens=6)) == 1
    assert "<iframe" in run.report()._repr_html_()
    assert jaxrl.Run(tmp_path / "run").config == run.config
