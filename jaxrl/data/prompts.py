"""Problems from files and procedural tasks -> `Prompt`, in an order that resumes.

Three steps, each usable alone: read (`load_train`, `load_validation`: a list of `Problem`, nothing tokenised), render
and tokenise (`PromptSource`, `validation_prompts`), and walk (`PromptSource.next`; its whole state is one integer).

Files are JSONL, gzipped JSONL, or Parquet; columns are named by `data.*_key`, and a dotted name reaches into nested
columns (`reward_model.ground_truth`, as verl's Parquet files have it). Procedural tasks come from reasoning-gym.

Held-out problems. For files, a validation question that also stands in the training files is dropped (counted). For
tasks, a different seed is no separation: reasoning-gym draws problem i from `Random(seed + i)`, so neighbouring seeds
share nearly all problems, and a small task (one-digit sums) has few problems under any seed. So the hash of a
question's text decides: one question in ten is held out, for every seed and every size, and training never sees it.
Both sets hold distinct questions. Where the task has fewer questions than were asked for, the sets are smaller, and a
warning says so. Two wordings of the same sum are two questions.

Order: grain's deterministic shuffle, a new one per epoch from `data.seed`. grain imports jax (without initialising a
device), so it is imported only where the order is built.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxrl.config import Config, ConfigError, DataSection
from jaxrl.data.quotas import SourceQuotas
from jaxrl.types import Prompt

_log = logging.getLogger(__name__)

_HELD_OUT_SHARE = 0.1  # of a task's questions
_TASK_CHUNK = 1000  # problems per reasoning-gym data set: some refuse, or prepare, large ones
_STATE_VERSION = 1


class PromptTokenizer(Protocol):
    """What rendering needs of a tokenizer (`jaxrl.data.tokenizer.Tokenizer` has it)."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]: ...

    def apply_chat_template(self, messages: list[Any], /, add_generation_prompt: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem as it stands in the file or comes from the task, before templates.

    Attributes:
      index: its position in the data set.
      where: file and line (or row), or task and number; for messages to people.
      messages: the conversation so far, as {"role", "content"}; a plain question is one user message.
      answer: the reference answer, None where `data.answer_key` is empty.
      source: the data set's or task's name.
      extra: all columns not used otherwise; a task's problem has its reasoning-gym entry under "entry".
    """

    index: int
    where: str
    messages: tuple[Mapping[str, str], ...]
    answer: str | None
    source: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """What tells problems apart: the user's text, white space aside."""
        return " ".join(" ".join(m["content"] for m in self.messages if m["role"] != "system").split())


Problems = Sequence[Problem]


def load_train(config: Config) -> Problems:
    """The training problems of `data.train_files` or `data.task`."""
    data = config.data
    if data.task:
        return _draw_task(data, held_out=False, count=data.task_size)
    if not data.train_files:
        raise ConfigError("data.train_files is missing: give files, or name a reasoning-gym task in data.task")
    return _read_files(data.train_files, data)


def load_validation(config: Config, train: Problems | None = None) -> Problems:
    """The held-out problems: from `data.val_files` if given, else from `data.task`; empty if neither is given.

    Args:
      config: the configuration.
      train: the training problems, where the caller has them at hand (they are read again otherwise).
    """
    data = config.data
    if not data.val_files:
        return _draw_task(data, held_out=True, count=data.val_size) if data.task and data.val_size else []
    problems = _read_files(data.val_files, data)
    if train is None:
        train = load_train(config) if data.task or data.train_files else []
    seen = {problem.identity for problem in train}
    kept = [problem for problem in problems if problem.identity not in seen]
    if len(kept) < len(problems):
        _log.warning(
            "dropped %d of %d validation problems: in the training set", len(problems) - len(kept), len(problems)
        )
    if problems and not kept:
        raise ValueError(f"{', '.join(data.val_files)}: all {len(problems)} problems are in the training set")
    return kept[: data.val_size] if data.val_size else kept


def validation_prompts(config: Config, tokenizer: PromptTokenizer, train: Problems | None = None) -> list[Prompt]:
    """The held-out prompts for evaluation, in file order (epoch 0); overlong ones are treated as in training."""
    problems = load_validation(config, train)
    rendered = _Rendered(problems, tokenizer, config.data)
    return [rendered.prompt(row, epoch=0) for row in range(len(rendered))]


class PromptSource:
    """Training prompts without end: a new deterministic order in each epoch, batches crossing epoch ends.

    The position counts prompts handed out since the beginning; the p-th prompt is a pure function of (problems,
    configuration, p). So a set smaller than a batch simply repeats inside it, each time with its own epoch, and the
    cursor is the position.
    """

    def __init__(self, problems: Problems, tokenizer: PromptTokenizer, config: Config):
        import grain

        data = config.data
        self._rendered = _Rendered(problems, tokenizer, data)
        if not len(self._rendered):
            found = f"all {len(problems)} are longer than data.max_prompt_length ({data.max_prompt_length} tokens)"
            raise ValueError(f"no training prompts: {found if problems else 'the training data holds no problems'}")
        self._quotas = SourceQuotas(data.source_quotas, self._rendered.sources()) if data.source_quotas else None

        def endless(count: int) -> Any:
            order = grain.MapDataset.range(count)
            return (order.shuffle(seed=data.seed) if data.shuffle else order).repeat()

        members = {} if self._quotas is None else self._quotas.members
        self._order = endless(len(self._rendered))
        self._orders = {source: endless(len(rows)) for source, rows in members.items()}  # with quotas
        self._position = 0
        # part of the fingerprint: another version of grain, or another seed, may order the same prompts differently
        first = [self._place(i)[0] for i in range(min(1000, 2 * len(self._rendered)))]
        self._fingerprints = {
            "data": self._rendered.fingerprint(),
            "order": hashlib.sha256(json.dumps(first).encode()).hexdigest()[:16],
        }

    def _place(self, position: int) -> tuple[int, int]:
        """The row and the epoch of a position."""
        if self._quotas is None:
            row, epoch = self._order[position], position // len(self._rendered)
        else:
            source, count = self._quotas.at(position)
            rows = self._quotas.members[source]
            row, epoch = rows[self._orders[source][count]], count // len(rows)
        assert row is not None  # grain writes None for an element that a filter removed; nothing here filters
        return row, epoch

    @property
    def num_prompts(self) -> int:
        """Prompts per epoch; with quotas, of all sources that have one."""
        return len(self._rendered) if self._quotas is None else self._quotas.num_prompts

    @property
    def num_filtered(self) -> int:
        """Problems left out because their prompt is too long."""
        return self._rendered.num_filtered

    @property
    def position(self) -> int:
        """Prompts handed out so far, over all epochs."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch of the next prompt, from 0; with quotas, of its source."""
        return self._place(self._position)[1]

    def next(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; never fewer than asked for."""
        positions = range(self._position, self._position + num_prompts)
        self._position += num_prompts
        return [self._rendered.prompt(*self._place(p)) for p in positions]

    def get(self, epoch: int, index: int) -> Prompt:
        """A prompt that was handed out before, by its key. Raises ValueError if the data does not hold it."""
        return self._rendered.prompt(self._rendered.row_of(index), epoch)

    def state(self) -> dict[str, Any]:
        """The cursor, as JSON values. The caller saves the prompts that were handed out and not yet consumed."""
        return {
            "version": _STATE_VERSION,
            "position": self._position,
            "num_prompts": self.num_prompts,
            **self._fingerprints,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved cursor; refuses one that was taken on other data or in another order."""
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"data cursor: version {state.get('version')!r} is not {_STATE_VERSION}, the one known here"
            )
        now = self.state()
        if (state["data"], state["num_prompts"]) != (now["data"], now["num_prompts"]):
            raise ValueError(
                f"data cursor: saved with {state['num_prompts']} prompts (fingerprint {state['data']}), found "
                f"{now['num_prompts']} ({now['data']}): the files, templates, tokenizer and data.max_prompt_length of "
                "a resumed run must be what they were"
            )
        if state["order"] != now["order"]:
            raise ValueError(
                f"data cursor: saved with order {state['order']}, found {now['order']}: data.seed, data.shuffle, "
                "data.source_quotas and the version of grain must be what they were"
            )
        self._position = int(state["position"])


class _Rendered:
    """Problems with their tokenised prompts, the overlong ones dropped; tokens lie in one flat array."""

    def __init__(self, problems: Problems, tokenizer: PromptTokenizer, data: DataSection):
        self._tokenizer = tokenizer
        self._data = data
        kept: list[Problem] = []
        pieces: list[np.ndarray] = []
        for problem in problems:
            # a chat template writes its special tokens itself; plain text gets the tokenizer's own (a BOS, say)
            ids = tokenizer.encode(_render(problem, tokenizer, data), add_special_tokens=not data.apply_chat_template)
            if not ids:
                raise ValueError(f"{problem.where}: the rendered prompt has no tokens")
            if len(ids) <= data.max_prompt_length:
                kept.append(problem)
                pieces.append(np.asarray(ids, np.int32))
            elif not data.filter_overlong_prompts:
                raise ValueError(
                    f"{problem.where}: the prompt has {len(ids)} tokens, more than data.max_prompt_length "
                    f"({data.max_prompt_length}), and data.filter_overlong_prompts is false"
                )
        self._problems = kept
        self._tokens = np.concatenate(pieces) if pieces else np.zeros((0,), np.int32)
        self._ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        self._rows = {problem.index: row for row, problem in enumerate(kept)}
        self.num_filtered = len(problems) - len(kept)
        if self.num_filtered:
            limit = data.max_prompt_length
            _log.warning("dropped %d of %d prompts: over %d tokens", self.num_filtered, len(problems), limit)

    def __len__(self) -> int:
        return len(self._problems)

    def _ids(self, row: int) -> np.ndarray:
        return self._tokens[self._ends[row - 1] if row else 0 : self._ends[row]]

    def sources(self) -> list[str]:
        """The source of each row."""
        return [problem.source for problem in self._problems]

    def row_of(self, index: int) -> int:
        if index not in self._rows:
            raise ValueError(f"prompt {index}: the training data holds no such problem, or it was dropped as too long")
        return self._rows[index]

    def prompt(self, row: int, epoch: int) -> Prompt:
        problem = self._problems[row]
        return Prompt(
            epoch=epoch,
            index=problem.index,
            token_ids=tuple(self._ids(row).tolist()),
            text=_render(problem, self._tokenizer, self._data),
            source=problem.source,
            answer=problem.answer,
            extra=problem.extra,
        )

    def fingerprint(self) -> str:
        """A hash of what the model sees and its answers are compared with: identities, tokens, sources, answers."""
        digest = hashlib.sha256()
        for row, problem in enumerate(self._problems):
            digest.update(json.dumps([problem.index, problem.source, problem.answer]).encode())
            digest.update(self._ids(row).tobytes())
        return digest.hexdigest()[:16]


def _render(problem: Problem, tokenizer: PromptTokenizer, data: DataSection) -> str:
    messages = [dict(message) for message in problem.messages]
    for message in reversed(messages):
        if message["role"] == "user":
            # not str.format: templates are full of braces (\boxed{})
            message["content"] = data.prompt_template.replace("{question}", message["content"])
            break
    if data.system_prompt:
        messages = [m for m in messages if m["role"] != "system"]
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    if data.apply_chat_template:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return "\n\n".join(message["content"] for message in messages)


# ---------------------------------------------------------------- files


def _read_files(paths: Sequence[str], data: DataSection) -> list[Problem]:
    problems: list[Problem] = []
    for path in paths:
        for where, row in _rows(Path(path).expanduser()):
            problems.append(_problem(len(problems), where, row, path, data))
    return problems


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, row) for each row of a file."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; data.train_files and data.val_files must name existing files")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}, line {number}", _json_row(line, f"{path}, line {number}")
    else:
        raise ValueError(f"{path}: a data file must end in .jsonl, .jsonl.gz or .parquet")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file ({error})") from error
    with file:
        batches = file.iter_batches(batch_size=1024)
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            yield f"{path}, row {number}", row


def _json_row(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.strip())
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row must be a JSON object, found {type(row).__name__}")
    return row


def _problem(index: int, where: str, row: Mapping[str, Any], path: str, data: DataSection) -> Problem:
    used = [data.messages_key or data.prompt_key, data.answer_key, data.source_key]
    if data.messages_key:
        messages = _messages(_column(row, data.messages_key, "data.messages_key", where), data.messages_key, where)
    else:
        question = _column(row, data.prompt_key, "data.prompt_key", where)
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"{where}: {data.prompt_key!r} (data.prompt_key) must hold some text, found {question!r}")
        messages = ({"role": "user", "content": question},)
    answer = _answer(_column(row, data.answer_key, "data.answer_key", where), where, data) if data.answer_key else None
    name = Path(path).name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".parquet")
    source = str(_column(row, data.source_key, "data.source_key", where)) if data.source_key else name
    extra = {key: value for key, value in row.items() if key not in used}
    nested = extra.pop("extra_info", None)  # verl's column of that name: its fields are what a reward function expects
    if isinstance(nested, Mapping):
        extra |= nested
    elif nested is not None:
        extra["extra_info"] = nested
    return Problem(index, where, messages, answer, source, extra)


def _column(row: Mapping[str, Any], key: str, option: str, where: str) -> Any:
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            near = difflib.get_close_matches(key, list(row), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"found {', '.join(map(repr, row))}"
            raise ValueError(f"{where}: no column {key!r} ({option}): {hint}")
        value = value[part]
    return value


def _messages(value: Any, key: str, where: str) -> tuple[Mapping[str, str], ...]:
    rule = f"{where}: {key!r} (data.messages_key) must be a list of messages with text in 'role' and 'content'"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{rule}, or that as JSON; found text that is not JSON ({error.msg})") from error
    if not isinstance(value, list) or not value:
        raise ValueError(f"{rule}, found {value!r}")
    for message in value:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"{rule}, found {message!r}")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _answer(value: Any, where: str, data: DataSection) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{where}: {data.answer_key!r} (data.answer_key) must be text or a number, found {value!r}")
    answer = str(value).rpartition("####")[2].strip()
    if not answer:
        raise ValueError(f"{where}: {data.answer_key!r} (data.answer_key) must hold an answer, found {value!r}")
    return answer


# ---------------------------------------------------------------- procedural tasks


def _draw_task(data: DataSection, held_out: bool, count: int) -> list[Problem]:
    """The first `count` distinct problems of the wanted kind in the task's stream, or all that can be found."""
    found: dict[str, Problem] = {}
    misses = 0
    for number, entry in _task_entries(data):
        question, answer = entry["question"], entry["answer"]
        problem = Problem(
            index=len(found),
            where=f"{data.task}, problem {number}",
            messages=({"role": "user", "content": question},),
            answer=None if answer is None else str(answer),  # some tasks have many right answers and name none
            source=data.task,
            extra={"entry": entry},
        )
        misses += 1
        if _is_held_out(problem.identity) == held_out and problem.identity not in found:
            found[problem.identity] = problem
            misses = 0
        if len(found) == count:
            return list(found.values())
        if misses > 2000 + 2 * len(found):  # by then few problems are still unseen
            break
    kind, option = ("held-out", "data.val_size") if held_out else ("training", "data.task_size")
    _log.warning("%s: only %d distinct %s problems (%s is %d)", data.task, len(found), kind, option, count)
    return list(found.values())


def _is_held_out(identity: str) -> bool:
    number = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big")
    return number < _HELD_OUT_SHARE * 2**64


def _task_entries(data: DataSection) -> Iterator[tuple[int, dict[str, Any]]]:
    """The task's endless stream of (number, entry): one data set after another, each seeded where the last ended."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if data.task not in DATASETS:
        near = difflib.get_close_matches(data.task, list(DATASETS), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"data.task: reasoning-gym has no task {data.task!r}{hint}")
    if "size" in data.task_config:
        raise ConfigError("data.task_config.size: the number of problems is data.task_size (and data.val_size)")
    options = dict(data.task_config)
    seed = options.pop("seed", data.seed * 1_000_003)  # far apart, so that runs with other seeds see other problems
    start = 0
    while True:
        try:
            dataset = create_dataset(data.task, **options, seed=seed + start, size=_TASK_CHUNK)
        except (TypeError, ValueError, AssertionError, AttributeError) as error:
            raise ConfigError(f"data.task_config: {data.task} refuses {options!r} ({error})") from error
        for i in range(_TASK_CHUNK):
            try:
                entry = dataset[i]
            except IndexError:  # word_ladder: this seed has no more
                break
            yield start + i, entry
        start += _TASK_CHUNK
