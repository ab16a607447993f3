"""Problems from files and procedural tasks -> `Prompt`, in an order that resumes.

Three steps, each usable alone: read (`load_train`, `load_validation`: nothing is tokenised), render and tokenise
(`PromptSource`, `validation_prompts`), and walk (`PromptSource.next`; its whole state is one integer).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from jaxrl.config import Config, ConfigError
from jaxrl.config.domains import source_problem
from jaxrl.data.problems import Problem, checked_messages, read_problems
from jaxrl.data.rendered import Environments, Rendered
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.types import Prompt

_log = logging.getLogger(__name__)

_STATE_VERSION = 1
_SAME = {
    "data": "the files, templates, tokenizer and data.max_prompt_length",
    "order": "data.seed, data.shuffle, data.source_quotas and the version of grain",
}
_HELD_OUT = 1_000_000_000  # the first held-out problem of an environment's own, which number them


Problems = Sequence[Problem]


def load_train(config: Config, environments: Environments | None = None) -> Problems:
    """The training problems of `data.train_files` or `data.task`, or of the environment's own."""
    data = config.data
    if data.task:
        from jaxrl.data.tasks import draw_task

        return draw_task(data, held_out=False, count=data.task_size)
    if not data.train_files:
        if environments is not None:
            return _own(config, environments, 0, config.environment.num_problems)
        raise ConfigError("data.train_files is missing: give files, or name a reasoning-gym task in data.task")
    return list(read_problems(data.train_files, "data.train_files", data))


def _own(config: Config, environments: Environments, first: int, count: int) -> list[Problem]:
    source = config.environment.id or Path(config.environment.path).stem
    found: list[Problem] = []
    for number, (row, messages) in enumerate(environments.problems(first, first + count, config.data.seed), first):
        answer = row.get("answer")
        where = f"{source}, problem {number}"
        answer = None if answer is None else str(answer)
        found.append(Problem(number - first, where, checked_messages(messages, where), answer, source, row))
    return found


def load_validation(
    config: Config, train: Problems | None = None, environments: Environments | None = None
) -> Problems:
    """The held-out problems: from `data.val_files` if given, without those that are in the training data, else from
    `data.task`, else the environment's own, else none. `train`: the training problems, read again if not given."""
    data = config.data
    if not data.val_files:
        if data.task and data.val_size:
            from jaxrl.data.tasks import draw_task

            return draw_task(data, held_out=True, count=data.val_size)
        return [] if data.train_files or environments is None else _own(config, environments, _HELD_OUT, data.val_size)
    problems = list(read_problems(data.val_files, "data.val_files", data))
    if train is None:
        train = load_train(config) if data.task or data.train_files else []
    seen = {problem.identity for problem in train}
    kept = [problem for problem in problems if problem.identity not in seen]
    if len(kept) < len(problems):
        _log.warning(
            "dropped %d of %d validation problems: in the training set", len(problems) - len(kept), len(problems)
        )
    if problems and not kept:
        option = "data.task" if data.task else "data.train_files"
        raise ValueError(
            f"{', '.join(data.val_files)}: all {len(problems)} problems of data.val_files are in the training set as "
            f"well ({option}): keep some rows out of it, in a file for data.val_files alone, or leave data.val_files "
            "empty"
        )
    return kept[: data.val_size] if data.val_size else kept


def refuse_sources(config: Config, train: Problems, held_out: Problems | None = None) -> None:
    """Raises ValueError if `reward.domains` names a source that no problem has, or `data.source_quotas` does not fit
    the training problems. `held_out` is read if it is not given and the training problems do not have all sources."""
    if train and config.data.source_quotas:
        from jaxrl.data.quotas import SourceQuotas

        SourceQuotas(config.data.source_quotas, [problem.source for problem in train])
    sources = {problem.source for problem in train}
    if held_out is None and config.data.val_files and not sources.issuperset(config.reward.domains):
        held_out = list(read_problems(config.data.val_files, "data.val_files", config.data))
    problem = source_problem(config, sources.union(problem.source for problem in held_out or ()))
    if problem is not None:
        raise ConfigError(problem)


def validation_prompts(
    config: Config, tokenizer: Tokenizer, held_out: Problems | None = None, environments: Environments | None = None
) -> list[Prompt]:
    """The held-out prompts for evaluation, in file order (epoch 0). `held_out`: the result of `load_validation`, which
    is called if it is not given."""
    problems = load_validation(config, environments=environments) if held_out is None else held_out
    rendered = Rendered(problems, tokenizer, config.data, environments)
    if problems and not len(rendered):
        limit = config.data.max_prompt_length
        raise ValueError(
            f"no held-out prompts: all {len(problems)} are longer than data.max_prompt_length ({limit} tokens)"
        )
    return [rendered.prompt(row, epoch=0) for row in range(len(rendered))]


class PromptSource:
    """Training prompts without end: a new deterministic order in each epoch, batches crossing epoch ends.

    The p-th prompt since the beginning is a pure function of (problems, configuration, p), so the cursor is a position.
    """

    def __init__(
        self, problems: Problems, tokenizer: Tokenizer, config: Config, environments: Environments | None = None
    ):
        data = config.data
        self._rendered = Rendered(problems, tokenizer, data, environments)
        if not len(self._rendered):
            found = f"all {len(problems)} are longer than data.max_prompt_length ({data.max_prompt_length} tokens)"
            raise ValueError(f"no training prompts: {found if problems else 'the training data holds no problems'}")
        self._quotas = None
        if data.source_quotas:
            from jaxrl.data.quotas import SourceQuotas

            self._quotas = SourceQuotas(data.source_quotas, self._rendered.sources)
        self._seed = data.seed if data.shuffle else None
        self.position = 0  # prompts returned so far, over all epochs
        # part of the fingerprint: another version of grain, or another seed, may order the same prompts differently
        first = [self._place(i)[0] for i in range(min(1000, 2 * len(self._rendered)))]
        self._fingerprints = {
            "data": self._rendered.fingerprint,
            "order": hashlib.sha256(json.dumps(first).encode()).hexdigest()[:16],
        }

    def _place(self, position: int) -> tuple[int, int]:
        if self._quotas is None:
            return nth(len(self._rendered), self._seed, position), position // len(self._rendered)
        source, count = self._quotas.at(position)
        rows = self._quotas.members[source]
        return rows[nth(len(rows), self._seed, count)], count // len(rows)

    @property
    def num_prompts(self) -> int:
        """Prompts per epoch; with quotas, those of all sources with a quota."""
        return len(self._rendered) if self._quotas is None else self._quotas.num_prompts

    @property
    def num_filtered(self) -> int:
        return self._rendered.num_filtered

    @property
    def epoch(self) -> int:
        """The epoch of the next prompt, from 0; with quotas, of its source."""
        return self._place(self.position)[1]

    def next(self, num_prompts: int) -> list[Prompt]:
        positions = range(self.position, self.position + num_prompts)
        self.position += num_prompts
        return [self._rendered.prompt(*self._place(p)) for p in positions]

    def get(self, epoch: int, index: int) -> Prompt:
        """A prompt that was returned before, by its key. Raises ValueError if the data does not contain it."""
        return self._rendered.prompt(self._rendered.row_of(index), epoch)

    def state(self) -> dict[str, Any]:
        """The cursor, as JSON values. The caller saves the prompts that were returned and not yet consumed."""
        own = {"version": _STATE_VERSION, "position": self.position, "num_prompts": self.num_prompts}
        return own | self._fingerprints

    def differs(self, state: Mapping[str, Any]) -> Literal["", "data", "order"]:
        """The difference between a saved cursor's prompts and these; empty: none."""
        now = self.state()
        if (state["data"], state["num_prompts"]) != (now["data"], now["num_prompts"]):
            return "data"
        return "order" if state["order"] != now["order"] else ""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a saved cursor. Raises ValueError if it was taken on other data or in another order."""
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"data cursor: version {state.get('version')!r} is not {_STATE_VERSION}, the one known here"
            )
        if differs := self.differs(state):
            raise ValueError(
                f"data cursor: saved with {state['num_prompts']} prompts ({state[differs]}), found {self.num_prompts} "
                f"({self._fingerprints[differs]}): {_SAME[differs]} of a resumed run must be what they were"
            )
        self.position = int(state["position"])


@lru_cache(maxsize=1 << 14)  # of few prompts grain takes ten milliseconds for each
def nth(count: int, seed: int | None, position: int) -> int:
    """The row at a position of the endless order of `count` rows: grain's deterministic shuffle, another one in each
    epoch; without a seed rows keep their order."""
    row = _endless(count, seed)[position]
    assert row is not None  # grain writes None for an element that a filter removed; nothing here filters
    return row


@lru_cache(maxsize=128)  # one for each source
def _endless(count: int, seed: int | None) -> Any:
    import grain  # which imports jax

    order = grain.MapDataset.range(count)
    return (order if seed is None else order.shuffle(seed=seed)).repeat()
