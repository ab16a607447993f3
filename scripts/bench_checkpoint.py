#!/usr/bin/env python3
"""What a checkpoint costs: of weights, by the processes that write it, and of responses that wait for a later step.

    python scripts/bench_checkpoint.py [--gigabytes 2] [--processes 1 2] [--responses 512] [--tokens 32768]
        [--text FILE] [--repetitions 3] [--json]

Weights: so many gigabytes of random float32, split over processes of this machine that meet over loopback. Responses:
`--responses` scored samples of `--tokens` tokens each, 16 a prompt, as a batch of one-step-off waits in a checkpoint;
their words are drawn from `--text` (any file of text; without it, made up). Folders are made below `--folder`.

- blocked: seconds for which a save keeps the training loop. written: until the step has its name, from the same moment.
- checked, restored: seconds of comparing the step with its checksums, and of reading it after that.
- pack: seconds of the loop before a save, once more in every step: what to go back to if that is stopped.
- samples.jsonl: seconds of the loop for a step's lines in that file, their bytes, and seconds of reading them.

Medians; all processes but the first say nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench import records
from bench.frame import Benchmark, Record, Session
from bench.measure import say

from jaxrl.record.files import read_lines
from jaxrl.record.samples import SampleLog
from jaxrl.record.state import join_arrays, split_arrays
from jaxrl.runtime.host import NoGroup
from jaxrl.runtime.host_actor import HostGroup
from jaxrl.scheduling.rounds.carried import pack_groups, unpack_samples
from jaxrl.train.checkpoint import Checkpointer, HostState
from jaxrl.types import Group, Prompt, Sample, SampleKey

QUICK = {"gigabytes": 0.02, "processes": [1], "responses": 32, "tokens": 500, "repetitions": 1}
_LEAF_BYTES = 2**26
_GROUP = 16


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--gigabytes", type=float, default=2.0, help="of weights (2)")
    made.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="that write and read them (1 2)")
    made.add_argument("--responses", type=int, default=512, help="samples that wait, 16 a prompt (512)")
    made.add_argument("--tokens", type=int, default=32768, help="of each (32768)")
    made.add_argument("--text", type=Path, metavar="FILE", help="what responses are made of")
    made.add_argument("--repetitions", type=int, default=3, help="(3)")
    made.add_argument("--folder", type=Path, help="on the disk to measure (the system's temporary one)")


def _check(options: argparse.Namespace) -> None:
    if options.responses % _GROUP:
        raise ValueError(f"--responses ({options.responses}) must be a multiple of {_GROUP}")


def _measure(options: argparse.Namespace, session: Session) -> Record:
    found: dict[str, Any] = {"weights": {}}
    with session.on(records.describe_host(), is_timed=False):
        for num in options.processes:
            found["weights"][str(num)] = case = _weights(options, num)
            say(
                f"{options.gigabytes:g} GB, {num} processes: blocked {case['blocked_s']:.2f} s, written "
                f"{case['written_s']:.1f} s, checked {case['checked_s']:.2f} s, restored {case['restored_s']:.1f} s"
            )
        found["responses"] = case = _responses(options)
        say(
            f"{options.responses} responses of {options.tokens} tokens: pack {case['pack_s']:.2f} s, blocked "
            f"{case['blocked_s']:.2f} s, written {case['written_s']:.1f} s, checked {case['checked_s']:.2f} s, "
            f"restored {case['restored_s']:.1f} s; {case['array_bytes'] / 1e6:.1f} MB as "
            f"{case['file_bytes'] / 1e6:.1f} MB\nsamples.jsonl: {case['samples_bytes'] / 1e6:.2f} MB a step, "
            f"written in {case['samples_s']:.3f} s, read in {case['samples_read_s']:.3f} s"
        )
    return session.record(found, **{name: getattr(options, name) for name in ("gigabytes", "responses", "tokens")})


def _medians(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: statistics.median(each[name] for each in found) if isinstance(value, int | float) else value
        for name, value in found[-1].items()
    }


# -- weights -----------------------------------------------------------------------------------------------------------


def _weights(options: argparse.Namespace, num: int) -> dict[str, Any]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listens:
        port = listens.getsockname()[1]
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        arguments = folder, options.gigabytes, options.repetitions, theirs
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=weights, args=(i, num, port, *arguments)) for i in range(num)]
        for process in processes:
            process.start()
        theirs.close()
        try:
            return _medians(ours.recv())
        except EOFError:
            raise ValueError(f"--processes: one of {num} has failed") from None
        finally:
            for process in processes:
                process.join()


def weights(
    process: int, num: int, port: int, folder: str, gigabytes: float, repetitions: int, told: Connection
) -> None:
    """One of `num` processes, which save and restore together; the first sends what it has measured, by repetition."""
    jax.config.update("jax_platforms", "cpu")
    group: NoGroup = NoGroup()
    if num > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", num, process)
        group = HostGroup()
    own_devices = {device.process_index: device for device in jax.devices()}  # one of each process
    sharding = jax.NamedSharding(jax.sharding.Mesh(np.asarray([own_devices[i] for i in range(num)]), "x"), jax.P("x"))
    shape = (num, _LEAF_BYTES // 4 // num)
    draw = jax.jit(lambda key: jax.random.normal(key, shape), out_shardings=sharding)
    state = {f"w{i:04}": draw(jax.random.key(i)) for i in range(max(round(gigabytes * 1e9 / _LEAF_BYTES), 1))}
    jax.block_until_ready(state)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    found: list[dict[str, Any]] = []
    for repetition in range(repetitions):
        own = Path(folder) / str(repetition)
        with Checkpointer(own) as checkpoints:
            group.meet(f"save {repetition}")
            began = time.perf_counter()
            checkpoints.save(1, state)
            blocked = time.perf_counter() - began
            checkpoints.wait()
            written = time.perf_counter() - began
        group.meet(f"check {repetition}")
        began = time.perf_counter()
        with Checkpointer(own, first=group.first) as checkpoints:
            checked = time.perf_counter() - began
            checkpoints.restore(abstract)
            restored = time.perf_counter() - began - checked
        group.meet(f"restored {repetition}")
        times = {"blocked_s": blocked, "written_s": written, "checked_s": checked, "restored_s": restored}
        found.append(times)
    if process == 0:
        told.send(found)
    if num > 1:
        jax.distributed.shutdown()


# -- responses ---------------------------------------------------------------------------------------------------------


def batch_of(responses: int, tokens: int, text: str) -> list[Group]:
    """Scored samples of a batch: pieces of `text`, a token for a word or a sign, numbered by how often they come."""
    random = np.random.default_rng(0)
    pieces = re.findall(r"\s?\w+|\W", text)
    while len(pieces) <= tokens:
        pieces += pieces
    rank = {piece: number for number, (piece, _) in enumerate(Counter(pieces).most_common())}
    ids = np.asarray([rank[piece] for piece in pieces], np.int32)

    def sample(number: int) -> Sample:
        start = int(random.integers(len(ids) - tokens))
        is_sure = random.random(tokens) < 0.6  # most tokens of a response have a probability of nearly 1
        logprobs = np.where(is_sure, 0, -random.exponential(1.0, tokens)).astype(np.float32)
        key = SampleKey(0, number // _GROUP, number % _GROUP)
        drawn = ids[start : start + tokens], logprobs, logprobs.copy(), np.zeros(tokens, np.int32)
        return Sample(key, *drawn, "length", "".join(pieces[start : start + tokens]), float(number % 2), {"acc": 1.0})

    samples = [sample(number) for number in range(responses)]
    prompts = [Prompt(0, i, tuple(ids[:200].tolist()), "".join(pieces[:200]), "7") for i in range(responses // _GROUP)]
    return [Group(prompt, samples[i * _GROUP : (i + 1) * _GROUP]) for i, prompt in enumerate(prompts)]


def _responses(options: argparse.Namespace) -> dict[str, Any]:
    random = np.random.default_rng(1)
    words = ["".join(map(chr, random.integers(97, 123, random.integers(1, 9)))) for _ in range(5000)]
    made_up = " ".join(words[min(rank, len(words)) - 1] for rank in random.zipf(1.2, 100_000))
    text = made_up if options.text is None else options.text.read_text(encoding="utf-8", errors="replace")
    groups = batch_of(options.responses, options.tokens, text)
    return _medians([_trial(groups, options.folder) for _ in range(options.repetitions)])


def _trial(groups: Sequence[Group], below: Path | None) -> dict[str, float]:
    state, abstract = {"p": np.zeros(1)}, {"p": jax.ShapeDtypeStruct((1,), np.float64)}
    with tempfile.TemporaryDirectory(dir=below) as folder:
        began = time.perf_counter()
        values, arrays = split_arrays({"ahead": pack_groups(groups)})
        packed = time.perf_counter()
        with Checkpointer(folder) as checkpoints:
            saved = time.perf_counter()
            checkpoints.save(1, state, HostState(values, arrays))
            blocked = time.perf_counter() - saved
            checkpoints.wait()
            written = time.perf_counter() - saved
        files = [path for path in (Path(folder) / "1").rglob("*") if path.is_file() and "state" not in path.parts]
        file_bytes = sum(path.stat().st_size for path in files)
        checking = time.perf_counter()
        with Checkpointer(folder) as checkpoints:
            checked = time.perf_counter()
            host = checkpoints.restore(abstract)[1]
            found = unpack_samples(join_arrays(host.values, host.arrays)["ahead"]["samples"])
        restored = time.perf_counter()
        first = groups[0].samples[0]
        assert (found[0].text, found[0].token_ids.tolist()) == (first.text, first.token_ids.tolist())
        log = SampleLog(Path(folder) / "samples.jsonl", 0)
        writing = time.perf_counter()
        log.write(1, groups)
        logged = time.perf_counter()
        log.close()
        read_lines(Path(folder) / "samples.jsonl")
        return {
            "pack_s": packed - began,
            "blocked_s": blocked,
            "written_s": written,
            "checked_s": checked - checking,
            "restored_s": restored - checked,
            "array_bytes": sum(array.nbytes for array in arrays.values()),
            "file_bytes": file_bytes,
            "samples_s": logged - writing,
            "samples_read_s": time.perf_counter() - logged,
            "samples_bytes": (Path(folder) / "samples.jsonl").stat().st_size,
        }


COUNTS = ("processes", "responses", "tokens", "repetitions")
BENCHMARK = Benchmark("checkpoint", __doc__, _measure, _options, QUICK, COUNTS, _check, has_model=False)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
