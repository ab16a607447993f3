"""Quotas of sources: every batch has them, no prompt is lost, and one integer resumes the order."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jaxrl.config import Config, SimulatedTask, from_mapping
from jaxrl.data.prompts import PromptSource, load_train
from jaxrl.data.quotas import dealt
from jaxrl.sim.prompts import SimulatedPrompts
from jaxrl.sim.workload import ModelledWorkload
from jaxrl.types import Prompt

from .test_prompts import Characters

SIZES = {"easy": 3, "hard": 10, "other": 4}
QUOTAS = {"hard": 5, "easy": 3, "other": 0}


def config(folder: Path, quotas: dict[str, Any], **data: Any) -> Config:
    files = []
    for name, count in SIZES.items():
        files.append(str(folder / f"{name}.jsonl"))
        Path(files[-1]).write_text(
            "".join(json.dumps({"question": f"{name}{i}", "answer": f"{i}"}) + "\n" for i in range(count))
        )
    return from_mapping({"model": {"path": "x"}, "data": {"train_files": files, "source_quotas": quotas, **data}})


def source(folder: Path, quotas: dict[str, Any], **data: Any) -> PromptSource:
    own = config(folder, quotas, **data)
    return PromptSource(load_train(own), Characters(), own)


def simulated(quotas: dict[str, int]) -> SimulatedPrompts:
    tasks = tuple(
        SimulatedTask(name=name, weight=weight) for name, weight in (("easy", 1.0), ("hard", 2.0), ("other", 1.0))
    )
    return SimulatedPrompts(ModelledWorkload(0, tasks, 100), 40, 64, 3, quotas=quotas)


def check(prompts: list[Prompt], sizes: dict[str, int]) -> None:
    """Batches of eight have their quotas, keys are unique, and each source is walked epoch by epoch."""
    for start in range(0, len(prompts), 8):
        assert Counter(p.source for p in prompts[start : start + 8]) == {"hard": 5, "easy": 3}
    assert len({p.key for p in prompts}) == len(prompts)
    for name in ("easy", "hard"):
        own = [p for p in prompts if p.source == name]
        for epoch in range(len(own) // sizes[name]):
            passed = own[epoch * sizes[name] : (epoch + 1) * sizes[name]]
            assert {p.epoch for p in passed} == {epoch}
            assert len({p.index for p in passed}) == sizes[name], "every prompt once, though the epoch ends in a batch"


def test_every_batch_has_its_quota_and_no_prompt_is_lost(tmp_path: Path):
    prompts = source(tmp_path, QUOTAS).next(8 * 20)
    check(prompts, SIZES)
    assert max(p.epoch for p in prompts if p.source == "easy") == 19, "a small source goes on in epochs of its own"
    assert max(p.epoch for p in prompts if p.source == "hard") == 9
    assert source(tmp_path, QUOTAS).num_prompts == 13


def test_the_cursor_resumes_in_the_middle_of_a_batch_and_of_an_epoch(tmp_path: Path):
    for make in (lambda: source(tmp_path, QUOTAS), lambda: simulated(QUOTAS)):
        whole = make().next(60)
        first = make()
        begun = first.next(21)
        again = make()
        again.load_state(json.loads(json.dumps(first.state())))
        assert [p.key for p in begun + again.next(39)] == [p.key for p in whole]
        assert again.get(*whole[0].key) == whole[0]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_places_are_dealt_evenly(counts: list[int]):
    quotas = {f"s{i}": count for i, count in enumerate(counts)}
    order = dealt(quotas)
    assert Counter(order) == quotas
    assert order == dealt(dict(reversed(quotas.items()))), "the order of a mapping in a file says nothing"
    for place in range(1, len(order) + 1):
        for name, quota in quotas.items():
            assert abs(order[:place].count(name) - place * quota / len(order)) < len(quotas)
