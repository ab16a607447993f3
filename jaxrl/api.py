"""Training from Python: `jaxrl.train`, `jaxrl.sft` and `jaxrl.dpo` do what the commands of these names do, with rows
and functions as objects.

Example::

    def reward(response, answer):
        return float(answer in response)

    rows = [{"prompt": "What is 2 + 2?", "answer": "4"}, ...]
    run = jaxrl.train("Qwen/Qwen3-0.6B", rows, reward, steps=20, data__train_batch_size=8, rollout__n=8)
    run.metrics["critic/rewards/mean"]

Rows become a file in `inputs/` of the run's folder. So does a function, which `cloudpickle` writes by value: one from a
notebook reaches the processes that score. The run resumes, and every command reads its folder.
"""

from __future__ import annotations

import base64
import difflib
import html
import inspect
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.config import Config, ConfigError
from jaxrl.config.files import checked, put, read
from jaxrl.config.inputs import Options
from jaxrl.record.run_dir import CONFIG_FILE, recorded_config, remove_empty
from jaxrl.report.runs import read_run
from jaxrl.run.stop import Stop
from jaxrl.training.steps import steps_of
from jaxrl.types import Sample, SamplingParams

if TYPE_CHECKING:
    from jaxrl.text import TextEngine

Rows = str | Path | Iterable[Mapping[str, Any] | str]
"""A file that `data.train_files` may name, or rows: mappings of columns, such as a `datasets.Dataset`, or questions."""
INPUTS = "inputs"
"""The folder inside the run's own that holds rows and functions as files."""
_SHOWN = 8  # names in an error
_FUNCTION = '''"""The reward function that `jaxrl.train` was given. Written by `jaxrl.train`."""

import base64

import cloudpickle

compute_score = cloudpickle.loads(base64.b64decode({text!r}))
'''


def train(
    model: str | None = None,
    data: Rows | None = None,
    reward: Callable[..., Any] | str | None = None,
    *,
    val_data: Rows | None = None,
    steps: int | None = None,
    run_dir: str | Path | None = None,
    config: str | Path | None = None,
    say: Callable[[str], None] = print,
    **options: Any,
) -> Run:
    """Trains with reinforcement learning, as `jaxrl train` does.

    Args:
      model: `model.path`: a name of the Hub, a folder, or a GGUF file.
      data: prompts. Without `data.prompt_key` their column is `question`, or else `prompt` (text, or messages); without
        an `answer` column there are no reference answers.
      reward: a function, as `jaxrl.rewards.custom` says what it may take (`response`, `answer` and other columns, or
        the names of verl or TRL); or the name of a scorer (`reward.kind`).
      val_data: held-out prompts.
      steps: `trainer.total_training_steps`.
      run_dir: the run's folder, `trainer.run_dir`; a run that is there resumes. None: the one in `config`, or else a
        new folder under `runs/`.
      config: a YAML or gin file. What is given here replaces its options.
      say: shows a line of the start.
      options: of the configuration, `rollout__n=8` for `rollout.n`, or a section at a time: `rollout={"n": 8}`.

    Returns the finished run, or the one that Ctrl-C has stopped: in the main thread, the first Ctrl-C after the start
    lets the run save its state and end. Any other raises KeyboardInterrupt.

    Raises:
      ValueError: rows or a function that cannot be used. Of options it is a `jaxrl.ConfigError`, all problems at once.
      jaxrl.types.RunFailed: the run cannot continue.
    """
    return _start("train", model, data, reward, val_data, steps, run_dir, config, say, options)


def sft(
    model: str | None = None,
    data: Rows | None = None,
    *,
    val_data: Rows | None = None,
    steps: int | None = None,
    run_dir: str | Path | None = None,
    config: str | Path | None = None,
    say: Callable[[str], None] = print,
    **options: Any,
) -> Run:
    """Fine-tunes on conversations, as `jaxrl sft` does: rows with `messages`, or with `prompt` and `completion`.
    Arguments and errors are those of `train`."""
    return _start("sft", model, data, None, val_data, steps, run_dir, config, say, options)


def dpo(
    model: str | None = None,
    data: Rows | None = None,
    *,
    val_data: Rows | None = None,
    steps: int | None = None,
    run_dir: str | Path | None = None,
    config: str | Path | None = None,
    say: Callable[[str], None] = print,
    **options: Any,
) -> Run:
    """Learns from preferences, as `jaxrl dpo` does: rows with `prompt`, `chosen` and `rejected`. Arguments and errors
    are those of `train`."""
    return _start("dpo", model, data, None, val_data, steps, run_dir, config, say, options)


def _start(
    kind: str,
    model: str | None,
    data: Rows | None,
    reward: Callable[..., Any] | str | None,
    val_data: Rows | None,
    steps: int | None,
    run_dir: str | Path | None,
    config: str | Path | None,
    say: Callable[[str], None],
    options: Mapping[str, Any],
) -> Run:
    given = _Given(kind, config, options)
    given.put("model.path", model)
    given.put("trainer.total_training_steps", steps)
    stop = Stop()
    with given.folder(run_dir) as folder, stop.watching():
        given.rows("data.train_files", data, folder / "train.jsonl")
        given.rows("data.val_files", val_data, folder / "val.jsonl")
        if isinstance(reward, str):
            given.put("reward.kind", reward)
        elif reward is not None:
            given.put("reward.kind", "custom")
            given.put("reward.path", str(_write_function(reward, folder / "reward.py")))
        with _naming_rows({"data": folder / "train.jsonl", "val_data": folder / "val.jsonl"}):
            if kind == "train":
                from jaxrl.commands.train import train as learn

                learn(given.config(say), say, stop)
            else:
                from jaxrl.commands.supervised import train_on_files

                train_on_files(kind, given.config(say), stop, say)
    return Run(folder.parent)


class _Given:
    """The options of a run: those of a file, and the arguments on top of them."""

    def __init__(self, kind: str, file: str | Path | None, options: Mapping[str, Any]) -> None:
        self._kind = kind
        self._options = Options() if file is None else read(Path(file))
        own = inspect.signature(train).parameters
        for name, value in options.items():
            if name not in Config.model_fields and (near := difflib.get_close_matches(name, own, n=1)):
                raise ConfigError(f"unknown argument {name}: did you mean {near[0]}?")
            put(self._options, name.replace("__", "."), value, f"argument {name}")

    def put(self, option: str, value: Any) -> None:
        if value is not None:
            put(self._options, option, value, f"argument for {option}")

    def get(self, option: str) -> Any:
        found: Any = self._options.values
        for name in option.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return found

    @contextmanager
    def folder(self, run_dir: str | Path | None) -> Iterator[Path]:
        """The folder for inputs inside the run's own. It goes if the start of the run is refused."""
        own = run_dir or self.get("trainer.run_dir") or f"runs/{time.strftime('%Y-%m-%dT%H-%M-%S')}-{self._kind}"
        run = Path(own).expanduser()
        if self.get("model.path") is None and (run / CONFIG_FILE).exists():
            raise ConfigError(
                f"{run} is a run: pass the model that it began with, or config={str(run / CONFIG_FILE)!r}"
            )
        self.put("trainer.run_dir", str(run))
        made = [each for each in (run, *run.parents) if not each.exists()]
        try:
            yield run / INPUTS
        except BaseException:
            if not (run / CONFIG_FILE).exists():
                shutil.rmtree(run / INPUTS, ignore_errors=True)
                remove_empty(made)
            raise

    def rows(self, option: str, rows: Rows | None, file: Path) -> None:
        """Sets `option` to the file of these rows."""
        if rows is None:
            return
        if isinstance(rows, str | Path):
            self.put(option, [str(rows)])
            return
        table = [{"question": row} if isinstance(row, str) else row for row in rows]
        for number, row in enumerate(table):
            if not isinstance(row, Mapping):
                raise ConfigError(
                    f"{option}: row {number} must be a mapping of columns or a question, found {row!r:.80}"
                )
        if self._kind == "train" and table:
            self._name_columns(table[0])
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w", encoding="utf-8") as out:
            for number, row in enumerate(table):
                try:
                    out.write(json.dumps(dict(row), ensure_ascii=False, default=_plain) + "\n")
                except (TypeError, ValueError) as error:
                    raise ConfigError(f"{option}: row {number} cannot be written as JSON: {error}") from None
        self.put(option, [str(file)])

    def _name_columns(self, row: Mapping[str, Any]) -> None:
        """The options that name columns, from the first row, where nobody has set them."""
        own = self.get("data.prompt_key") or self.get("data.messages_key")
        if not own and "question" not in row and "prompt" in row:
            self.put("data.prompt_key" if isinstance(row["prompt"], str) else "data.messages_key", "prompt")
        if self.get("data.answer_key") is None and "answer" not in row:
            self.put("data.answer_key", "")

    def config(self, say: Callable[[str], None]) -> Config:
        own = f"({Path(self.get('trainer.run_dir')) / CONFIG_FILE}, line"  # has all options, and nobody wrote them
        return checked(self._options, lambda text: None if own in text else say(text), self._kind)


@contextmanager
def _naming_rows(files: Mapping[str, Path]) -> Iterator[None]:
    """Errors about a line of such a file name the row that the user gave, as `data[0]`."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        for name, file in files.items():
            pattern = f"{re.escape(str(file))}, line (\\d+)"
            text = re.sub(pattern, lambda found, name=name: f"{name}[{int(found[1]) - 1}]", text)
        error.args = (text,)
        raise


def _plain(value: Any) -> Any:
    """A number or an array of numpy or torch as JSON has it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _write_function(function: Callable[..., Any], file: Path) -> Path:
    import cloudpickle

    try:
        pickled = cloudpickle.dumps(function)
    except Exception as error:  # whatever the function refers to
        raise ConfigError(f"reward: {function!r:.80} cannot be sent to other processes: {error}") from None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_FUNCTION.format(text=base64.b64encode(pickled).decode()), encoding="utf-8")
    return file


class _Metrics(dict[str, np.ndarray]):
    def __missing__(self, name: str) -> np.ndarray:
        near = [each for each in self if name in each] or difflib.get_close_matches(name, self, cutoff=0.4)
        raise KeyError(f"no metric {name!r}; near it: {', '.join(near[:_SHOWN]) or ', '.join(self)}")


class Page:
    """A run's report, which a notebook shows. `path`: the file, which needs no network."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _repr_html_(self) -> str:
        text = html.escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{text}" style="width: 100%; height: 60em; border: 0"></iframe>'

    def __repr__(self) -> str:
        return f"Page({str(self.path)!r})"


class Run:
    """A run, read from its folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        found = recorded_config(self.path)
        if found is None:
            raise ValueError(f"{self.path} is not a run: it has no {CONFIG_FILE}")
        self.config: Config = found
        self._built: TextEngine | None = None
        self._length = 0  # that it has room for

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {len(self.metrics['step'])} steps)"

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """Each metric by step, float64, NaN where a step has none; and `step`."""
        rows = read_run(self.path).metrics
        names = dict.fromkeys(("step", *(name for row in rows for name in row)))
        return _Metrics({name: np.array([row.get(name, np.nan) for row in rows], np.float64) for name in names})

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Some samples of each step, as `samples.jsonl` has them: `prompt`, `response`, `reward` and so on."""
        return read_run(self.path).samples

    def report(self) -> Page:
        """Writes report.html, and shows it in a notebook."""
        from jaxrl.mechanisms import page_parts
        from jaxrl.report.page import write_report

        return Page(write_report(self.path, parts=page_parts()))

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint; None: there is none."""
        folder = self.path / "checkpoints"
        steps = steps_of(folder)
        return folder / str(steps[-1]) if steps else None

    def generate(
        self, questions: Sequence[str], *, n: int = 1, max_tokens: int = 0, temperature: float = 1.0, **sampling: Any
    ) -> list[list[Sample]]:
        """`n` responses of the trained model to each question, rendered as the run rendered its prompts.

        Args:
          max_tokens: of a response; 0: `data.max_response_length`.
          sampling: more of `jaxrl.types.SamplingParams`: `top_p`, `stop_strings`, `seed` and so on.
        """
        from jaxrl.data.problems import asked_messages

        if isinstance(questions, str):
            raise TypeError(f"generate() takes a list of questions, found text: write [{questions!r:.60}]")
        known = [field.name for field in fields(SamplingParams)]
        if unknown := sampling.keys() - known:
            raise TypeError(f"generate() has no argument {min(unknown)!r}: it takes questions, n, {', '.join(known)}")
        data = self.config.data
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens or data.max_response_length, **sampling)
        messages = [asked_messages([{"role": "user", "content": text}], data) for text in questions]
        chat = data.apply_chat_template
        prompts = messages if chat else ["\n\n".join(each["content"] for each in asked) for asked in messages]
        return self._engine(data.max_prompt_length + params.max_tokens).generate(prompts, params, n=n, chat=chat)

    def _engine(self, max_length: int) -> TextEngine:
        """One with room for prompts and responses of these lengths, in tokens; kept for the next call."""
        if self._built is None or self._length < max_length:
            from jaxrl.run.build import LoneWorker
            from jaxrl.text import TextEngine
            from jaxrl.training.steps import whole_step

            data, place = self.config.data, whole_step(str(self.path), say=lambda note: None)
            data = data.replace(max_response_length=max_length - data.max_prompt_length)
            worker = LoneWorker.open(self.config.replace(data=data), lambda note: None, [place])
            engine = worker.engine(worker.ready_executor(place, truncate=True))
            self._built, self._length = TextEngine(engine, worker.tokenizer, worker.stop_token_ids), max_length
            self._built.chat_template_kwargs = data.apply_chat_template_kwargs
        return self._built
