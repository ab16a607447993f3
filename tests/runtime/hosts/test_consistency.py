"""How hosts compare what they were given: with threads for processes, and facts made up."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from stores import Hosts

from jaxrl.config import Config
from jaxrl.runtime.hosts.consistency import check_consistency
from jaxrl.runtime.hosts.key_value_store import Disagreement
from jaxrl.runtime.hosts.liveness import PhaseBarrier

FACTS = {"the version of jax": "1", "the option rollout.n": "8", "the content of model.path": "abc"}


class Device:
    """One that tells of its memory."""

    def __init__(self, memory: int | None) -> None:
        self._memory = memory

    def memory_stats(self) -> dict[str, int] | None:
        return None if self._memory is None else {"bytes_limit": self._memory}


def config(run_dir: Path | str) -> Config:
    empty = Config()
    return dataclasses.replace(empty, trainer=dataclasses.replace(empty.trainer, run_dir=str(run_dir)))


def compare(
    facts: list[dict[str, str]],
    run_dirs: list[Any],
    memory: list[int | None] | None = None,
) -> tuple[list[str], list[int | None]]:
    """What the hosts said, and what they have in common; all of one or all of the other."""
    hosts = Hosts(num=len(facts))
    memory = memory or [None] * len(facts)

    def does(barrier: PhaseBarrier) -> int | str | None:
        i = barrier.store.process
        try:
            return check_consistency(barrier, config(run_dirs[i]), [Device(memory[i])], facts[i], seen_within_s=0.3)
        except Disagreement as error:
            return str(error)

    returned = hosts.run(does)
    hosts.close()
    found = [returned[i] for i in range(len(facts))]
    return [each for each in found if isinstance(each, str)], [each for each in found if not isinstance(each, str)]


def test_they_agree(tmp_path: Path):
    said, agreed = compare([FACTS] * 3, [tmp_path] * 3)
    assert (said, agreed) == ([], [None] * 3)
    assert list(tmp_path.iterdir()) == []


def test_the_least_memory_counts(tmp_path: Path):
    assert compare([FACTS] * 3, [tmp_path] * 3, [80, 40, 60]) == ([], [40] * 3)
    assert compare([FACTS] * 2, [tmp_path] * 2, [80, None]) == ([], [None] * 2), "one does not tell"
    assert compare([FACTS], [tmp_path], [7]) == ([], [7])


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        (
            [{"the option rollout.n": "4"}, {}],
            "the hosts must agree on the option rollout.n: 8 on process 0 (host-a), 4 on process 1 (host-b)",
        ),
        (
            [{}, {"the option rollout.n": "4", "the content of model.path": "xyz"}],
            "the hosts must agree on the option rollout.n: 8 on process 0 (host-a), 4 on process 2 (host-c); "
            "1 more differ, the content of model.path the first of them",
        ),
        (
            [{"the option rollout.n": "4"}, {"the option rollout.n": "5"}],
            "the hosts must agree on the option rollout.n: 8 on process 0 (host-a), 4 on process 1 (host-b), "
            "5 on process 2 (host-c)",
        ),
        (
            [{"the option rollout.n": "4"}, {"the option rollout.n": "4"}],
            "the hosts must agree on the option rollout.n: 8 on process 0 (host-a), 4 on process 1 (host-b) and 1 more",
        ),
        (
            [{"the version of jax": ""}, {}],
            "the hosts must agree on the version of jax: 1 on process 0 (host-a), nothing on process 1 (host-b)",
        ),
        (
            [{"the content of reward.path": "q" * 400}, {}],
            "the hosts must agree on the content of reward.path: not there on process 0 (host-a), "
            + "q" * 300
            + "… on process 1 (host-b)",
        ),
    ],
    ids=["one", "the-first-of-two", "three-values", "two-alike", "empty", "one-side-only"],
)
def test_one_sentence_on_all(tmp_path: Path, others: list[dict[str, str]], sentence: str):
    said, agreed = compare([FACTS, *(FACTS | each for each in others)], [tmp_path] * 3)
    assert (said, agreed) == ([sentence] * 3, [])
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_is_not_shared(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    said, _ = compare([FACTS] * 3, [tmp_path, tmp_path / "mine", tmp_path / "mine"])
    assert (
        said
        == [
            f"all hosts must share the folder trainer.run_dir ({tmp_path} on process 0 (host-a)): on process 1 "
            f"(host-b) {tmp_path / 'mine'} does not show what process 0 has written there (and 1 more processes)"
        ]
        * 3
    )
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_a_run_directory_by_another_name(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert compare([FACTS] * 2, [tmp_path / "run", tmp_path / "link"])[0] == []


def test_a_run_directory_that_is_not_there_yet(tmp_path: Path):
    """It is made for the comparison, and goes away with it."""
    folder = tmp_path / "new" / "run"
    assert compare([FACTS] * 2, [folder] * 2)[0] == []
    assert list(tmp_path.iterdir()) == []
