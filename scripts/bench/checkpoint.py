"""What a checkpoint costs: of weights, and of responses that wait for a later step.

    python scripts/bench.py checkpoint [--gigabytes 2] [--responses 512] [--tokens 32768] [--folder FOLDER] [--json]

`weights`: so many gigabytes of random float32. `responses`: scored samples of `--tokens` tokens each, 16 a prompt, as a
batch of one-step-off waits in a checkpoint. Folders are made below `--folder`.

- blocked_s: for which a save keeps the training loop. written_s: until the step has its name, from the same moment.
- checked_s, restored_s: of comparing the step with its checksums, and of reading it after that.
- pack_s: of the loop before a save, once more in every step: what to go back to if that is stopped.
- samples_s, samples_read_s: of the loop for a step's lines in samples.jsonl, and of reading them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench.harness import Bench, Case, Values

from jaxrl.record.files import read_lines
from jaxrl.record.samples import SampleLog
from jaxrl.record.state import join_arrays, split_arrays
from jaxrl.scheduling.rounds.carried import pack_groups, unpack_samples
from jaxrl.train.checkpoint import Checkpointer, HostState
from jaxrl.types import Group, Prompt, Sample, SampleKey

_LEAF_BYTES, _GROUP = 2**26, 16


def _check(options: argparse.Namespace) -> None:
    if options.responses % _GROUP:
        raise ValueError(f"--responses ({options.responses}) must be a multiple of {_GROUP}")


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    draw = jax.jit(lambda key: jax.random.normal(key, (_LEAF_BYTES // 4,)))
    state = {f"w{i:04}": draw(jax.random.key(i)) for i in range(max(round(options.gigabytes * 1e9 / _LEAF_BYTES), 1))}
    groups = batch_of(options.responses, options.tokens)
    yield [
        Case({"case": "weights", "gigabytes": options.gigabytes}, lambda turn: _saved(options.folder or None, state, {}, [])),
        Case({"case": "responses", "tokens": options.tokens}, lambda turn: _packed(options.folder or None, groups)),
    ]


def _saved(below: str | None, state: dict[str, Any], values: dict[str, Any], arrays: Any) -> Values:
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    with tempfile.TemporaryDirectory(dir=below) as folder:
        with Checkpointer(folder) as checkpoints:
            began = time.perf_counter()
            checkpoints.save(1, state, HostState(values, arrays)) if values else checkpoints.save(1, state)
            blocked = time.perf_counter() - began
            checkpoints.wait()
            written = time.perf_counter() - began
        files = [path.stat().st_size for path in (Path(folder) / "1").rglob("*") if path.is_file()]
        began = time.perf_counter()
        with Checkpointer(folder) as checkpoints:
            checked = time.perf_counter() - began
            host = checkpoints.restore(abstract)[1]
            if values:
                unpack_samples(join_arrays(host.values, host.arrays)["ahead"]["samples"])
        restored = time.perf_counter() - began - checked
    found = {"blocked_s": blocked, "written_s": written, "checked_s": checked, "restored_s": restored}
    return {"seconds": blocked + written + checked + restored, **found, "file_bytes": float(sum(files))}


def _packed(below: str | None, groups: Sequence[Group]) -> Values:
    began = time.perf_counter()
    values, arrays = split_arrays({"ahead": pack_groups(groups)})
    packed = time.perf_counter() - began
    found = _saved(below, {"p": np.zeros(1)}, values, arrays)
    with tempfile.TemporaryDirectory(dir=below) as folder:
        log = SampleLog(Path(folder) / "samples.jsonl", 0)
        began = time.perf_counter()
        log.write(1, groups)
        logged = time.perf_counter() - began
        log.close()
        read_lines(Path(folder) / "samples.jsonl")
        read = time.perf_counter() - began - logged
    return found | {"pack_s": packed, "samples_s": logged, "samples_read_s": read}


def batch_of(responses: int, tokens: int) -> list[Group]:
    """Scored samples whose tokens are as often as words are, by Zipf."""
    random = np.random.default_rng(0)

    def sample(number: int) -> Sample:
        ids = np.minimum(random.zipf(1.2, tokens), 50_000).astype(np.int32)
        is_sure = random.random(tokens) < 0.6  # most tokens of a response have a probability of nearly 1
        logprobs = np.where(is_sure, 0, -random.exponential(1.0, tokens)).astype(np.float32)
        key = SampleKey(0, number // _GROUP, number % _GROUP)
        drawn = ids, logprobs, logprobs.copy(), np.zeros(tokens, np.int32)
        text = " ".join(map(str, ids.tolist()))
        return Sample(key, *drawn, "length", text, float(number % 2), {"acc": 1.0})

    samples = [sample(number) for number in range(responses)]
    prompts = [Prompt(0, i, tuple(range(200)), f"prompt {i}", "7") for i in range(responses // _GROUP)]
    return [Group(prompt, samples[i * _GROUP : (i + 1) * _GROUP]) for i, prompt in enumerate(prompts)]


OPTIONS = {
    "repetitions": (3, "runs of each case, in turns"),
    "gigabytes": (2.0, "of weights"),
    "responses": (512, "samples that wait, 16 a prompt"),
    "tokens": (32768, "of each"),
    "folder": ("", "on the disk to measure (the system's temporary one)"),
}
QUICK = {"gigabytes": 0.02, "responses": 32, "tokens": 500, "repetitions": 1}
BENCH = Bench(__doc__, cases, OPTIONS, QUICK, warm_up=0, has_model=False, check=_check)
