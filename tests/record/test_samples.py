"""The sample log: a few per step, and what of them is kept. `test_run_record.py` has what a resumed run drops."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxrl.record.samples import (
    GROUPS_PER_STEP,
    MAX_INFO,
    MAX_VALUE,
    SAMPLES_PER_GROUP,
    RecordedSample,
    SampleLog,
    read_sample,
)
from jaxrl.types import ENVIRONMENT, Episode, Group, Prompt, Sample, SampleKey, Turn


def make_groups(num_groups: int = 4, size: int = 3) -> list[Group]:
    def one(p: int, s: int) -> Sample:
        ids, zeros = np.asarray([5, 6], np.int32), np.zeros((2,), np.float32)
        versions = np.zeros((2,), np.int32)
        return Sample(SampleKey(0, p, s), ids, zeros, zeros, versions, "stop", text=f"é{p}{s}\n", reward=0.5)

    return [
        Group(Prompt(0, p, (1,), f"prompt {p}", "src", "7"), [one(p, s) for s in range(size)])
        for p in range(num_groups)
    ]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_few_samples_of_each_step(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    log = SampleLog(path, last_step=-1)
    log.write(1, make_groups())
    log.write(2, make_groups(num_groups=1, size=1))
    found = read(path)  # no close: each line is on its way at once
    assert [line["step"] for line in found] == [1] * GROUPS_PER_STEP * SAMPLES_PER_GROUP + [2]
    assert found[0] == {
        "step": 1,
        "key": "0-0-0",
        "prompt": "prompt 0",
        "response": "é00\n",
        "answer": "7",
        "reward": 0.5,
        "length": 2,
        "finish_reason": "stop",
        "source": "src",
        "ids": {"prompt": [1], "response": [[0, [5, 6]]]},
    }
    log.close()


def test_a_sample_is_found_by_its_key(tmp_path: Path):
    """With its tokens, span by span: of several versions, and of an environment."""
    groups = make_groups()
    versions = [0, 3, 3, ENVIRONMENT, ENVIRONMENT, 3, 4]
    wanted = replace(
        groups[1].samples[1],
        key=SampleKey(2, 1, 1, 5),
        token_ids=np.arange(7, dtype=np.int32),
        versions=np.asarray(versions, np.int32),
    )
    groups[1].samples[1] = wanted
    with closing(SampleLog(tmp_path / "samples.jsonl", last_step=-1)) as log:
        log.write(7, groups)
    spans = (0, (0,)), (3, (1, 2)), (ENVIRONMENT, (3, 4)), (3, (5,)), (4, (6,))
    assert read_sample(tmp_path, "2-1-1-5") == RecordedSample(wanted.key, 7, (1,), spans)
    assert read_sample(tmp_path, "0-0-1") == RecordedSample(SampleKey(0, 0, 1), 7, (1,), ((0, (5, 6)),))
    with pytest.raises(ValueError, match=r"no sample '2-1-1': the last ones are 0-0-0, 0-0-1, 0-1-0, 2-1-1-5"):
        read_sample(tmp_path, "2-1-1")
    with pytest.raises(ValueError, match="it has no sample"):
        read_sample(tmp_path / "other", "0-0-0")


def test_what_a_scorer_said_is_kept_and_bounded(tmp_path: Path):
    (group,) = make_groups(1, 1)
    said = {"found": "é", "cases": [True, {"n": None}], "log": "x" * 100_000, "numbers": list(range(2_000))}
    group.samples[0].reward_info = {"error": "no", **said, "i": np.int64(3)}
    group.samples[0].failure = "no"
    with closing(SampleLog(tmp_path / "samples.jsonl", last_step=-1)) as log:
        log.write(1, [group])
        group.samples[0].reward_info = {f"{i:04}": "y" * 500 for i in range(1_000)}
        log.write(2, [group])
        group.samples[0].failure, group.samples[0].reward_info = "", {"error": "the user's own"}
        log.write(3, [group])
    line, many, scored = read(tmp_path / "samples.jsonl")
    assert line["error"] == "no"
    assert ("error" in scored, scored["info"]) == (False, {"error": "the user's own"})
    info = line["info"]
    assert list(info) == ["found", "cases", "log", "numbers", "i"]
    assert (info["found"], info["cases"], info["i"]) == ("é", [True, {"n": None}], "3")
    assert info["log"] == "x" * MAX_VALUE + f"... and {100_000 - MAX_VALUE} more characters"
    assert info["numbers"].startswith("[0, 1, 2, 3")
    kept = MAX_INFO // 504
    assert many["info"] == {f"{i:04}": "y" * 500 for i in range(kept)} | {"...": f"{1_000 - kept} more"}


def test_a_conversation_is_kept_turn_by_turn(tmp_path: Path):
    (group,) = make_groups(1, 1)
    answer = ({"role": "user", "content": "y" * 3_000},)
    turns = (Turn(2, "ab", answer, 0.5, 1.23456), Turn(5, "c", reward=1.0))
    group.samples[0] = replace(
        group.samples[0],
        token_ids=np.arange(5, dtype=np.int32),
        rollout_logprobs=np.array([-0.5, -2.25, 0, 0, -1], np.float32),
        versions=np.array([1, 1, ENVIRONMENT, ENVIRONMENT, 1], np.int32),
        episode=Episode(turns, stop="done"),
    )
    for name, pieces_of in (("without", None), ("with", lambda ids: [f"<{i}>" for i in ids])):
        with closing(SampleLog(tmp_path / name, last_step=-1, pieces_of=pieces_of)) as log:
            log.write(1, [group])
    (line,), (with_tokens,) = read(tmp_path / "without"), read(tmp_path / "with")
    first, last = line["turns"]
    assert (first["text"], first["reward"], first["seconds"], "tokens" in first) == ("ab", 0.5, 1.235, False)
    assert first["answer"] == [{"role": "user", "content": "y" * MAX_VALUE}]
    assert last == {"text": "c", "reward": 1.0, "seconds": 0.0, "answer": []}
    found = [turn["tokens"] for turn in with_tokens["turns"]]
    assert found == [[["<0>", -0.5], ["<1>", -2.25]], [["<4>", -1.0]]], "an answer's have no log-probability"
