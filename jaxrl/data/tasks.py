"""Problems of procedural tasks, from reasoning-gym.

Another seed does not separate training and held-out problems: reasoning-gym draws problem i from `Random(seed + i)`, so
neighbouring seeds share nearly all problems. So the hash of a question's text decides: one in ten is held out, for
every seed and size. Both sets hold distinct questions; two wordings of the same sum are two.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
from collections.abc import Iterator
from typing import Any

from jaxrl.config import ConfigError, DataSection
from jaxrl.data.files import first_line
from jaxrl.data.problems import Problem
from jaxrl.schema.declared import shown

_log = logging.getLogger(__name__)

_HELD_OUT_SHARE = 0.1  # of a task's questions
_TASK_CHUNK = 1000  # problems per reasoning-gym data set: some refuse, or prepare, large ones


def draw_task(data: DataSection, held_out: bool, count: int) -> list[Problem]:
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
        hashed = int.from_bytes(hashlib.sha256(problem.identity.encode()).digest()[:8], "big")
        if (hashed < _HELD_OUT_SHARE * 2**64) == held_out and problem.identity not in found:
            found[problem.identity] = problem
            misses = 0
        if len(found) == count:
            return list(found.values())
        if misses > 2000 + 2 * len(found):  # by then few problems are still unseen
            break
    kind, option = ("held-out", "data.val_size") if held_out else ("training", "data.task_size")
    _log.warning("%s: only %d distinct %s problems (%s is %d)", data.task, len(found), kind, option, count)
    return list(found.values())


def _task_entries(data: DataSection) -> Iterator[tuple[int, dict[str, Any]]]:
    """The task's endless stream of (number, entry): one data set after another, each seeded where the last ended."""
    from reasoning_gym import factory  # not from `factory` itself: it is there, and empty, after an import that failed

    if data.task not in factory.DATASETS:
        near = difflib.get_close_matches(data.task, list(factory.DATASETS), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"data.task: reasoning-gym has no task {data.task!r}{hint}")
    if "size" in data.task_config:
        raise ConfigError("data.task_config.size: the number of problems is data.task_size (and data.val_size)")
    options = dict(data.task_config)
    seed = options.pop("seed", data.seed * 1_000_003)  # far apart, so that runs with other seeds see other problems
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"data.task_config.seed must be a whole number, found {shown(seed)}")
    start = 0
    while True:
        drawn = 0
        try:
            dataset = factory.create_dataset(data.task, **options, seed=seed + start, size=_TASK_CHUNK)
            for drawn in range(_TASK_CHUNK):
                try:
                    entry = dataset[drawn]
                except IndexError:  # word_ladder: this seed has no more
                    break
                yield start + drawn, entry
        except Exception as error:  # whatever a task raises, it is about the options that it was given
            said = f"{data.task} refuses {shown(options)} ({first_line(error)})"
            raise ConfigError(f"data.task_config: {said}") from error
        if not drawn:
            raise ConfigError(f"data.task: {data.task} has no problems with {shown(options)} and seed {seed}")
        start += _TASK_CHUNK
