"""The parts of the battery, in order of worth: is it right, how near is it to the roofline, and then the rest.

Each part is one benchmark as anyone may run it, or one module of this folder. `seconds` are what an H200 took with an
empty compilation cache and 16 cores, and guesses where a part has not run yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpu.frame import FOLDER, Part, python

SCRIPTS = Path(__file__).resolve().parents[1]
SMALL, LARGE = "Qwen2.5-1.5B", "Qwen2.5-7B"
BFLOAT16 = ("--dtypes", "bfloat16")
INVARIANT = ("--numerics", "invariant")
JSON = ("--json", FOLDER)
CONTEXTS = ("1024", "8192")
MIXED_ROWS, LONGEST = (64, 256), 32768
"""One row of so many tokens among so many rows, the others at 1k."""
PROMPT = 128
"""Tokens of a prompt in training and in the whole step."""

SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Of a part whose processes share the device."""
TRIAL_S = 150
"""For each part of a trial, however busy the machine is."""


def parts() -> list[Part]:
    """Those for a GPU."""
    return [
        Part("ceilings", 50, _bench("ceilings", "--shape", SMALL, "--rows", "16", "64", "256")),
        Part("tests", 240, python("-m", "gpu.tests", *JSON), SHARED),
        Part("check", 120, python("-m", "gpu.check", *JSON, "--attention", "auto", "reference"), SHARED),
        *_decode("64", 40, "--profile"),
        _train("train", 50, 16, 1024, "--profile"),
        _train("train-row", 50, 1, 8192, "--profile"),
        Part("step", 100, _step()),
        Part("rules", 90, _rules()),
        Part("sync", 15, _bench("sync", "--shape", SMALL)),
        Part("attention", 75, _attention()),
        Part("decode-1.5b-rows", 60, _points(SMALL, "1", "16", "256")),
        Part("decode-7b-rows", 80, _points(LARGE, "1", "16", "256")),
        Part("decode-1.5b-mixed", 60, _mixed(SMALL)),
        Part("decode-7b-mixed", 80, _mixed(LARGE)),
        Part("decode-1.5b-invariant", 60, _points(SMALL, "64", *INVARIANT)),
        Part("decode-7b-invariant", 80, _points(LARGE, "64", *INVARIANT)),
        Part("train-invariant", 75, _train_command(16, 1024, *INVARIANT)),
        Part("train-torch", 75, _train_command(16, 1024, torch=True)),
        Part("train-row-torch", 90, _train_command(1, 8192, torch=True)),
    ]


def trial_parts() -> list[Part]:
    """The same with tiny shapes, on a CPU: does every command run, and does the page find every key?"""
    quick = ("--quick", *JSON)
    tiny = ("--repetitions", "1", "--warmup", "1")
    at = python(str(SCRIPTS / "bench_decode.py"), "--at-context", "32", "--rows", "2", "--profile", *quick)
    step = ("--without-trl", "--fresh-cache", "--train-tokens", "64")
    return [
        Part("ceilings", TRIAL_S, python(str(SCRIPTS / "bench_ceilings.py"), *quick)),
        Part("tests", TRIAL_S, python("-m", "gpu.tests", *JSON)),
        Part("check", TRIAL_S, python("-m", "gpu.check", *JSON, "--prompts", "1", "--layers", "1")),
        Part("decode-1.5b", TRIAL_S, at),
        Part("train", TRIAL_S, python(str(SCRIPTS / "bench_train.py"), *quick, *tiny, "--profile", "--without-torch")),
        Part("step", TRIAL_S, python(str(SCRIPTS / "bench_step.py"), *quick, *tiny, *step)),
        Part("rules", TRIAL_S, python(str(SCRIPTS / "bench_rules.py"), *quick)),
        Part("sync", TRIAL_S, python(str(SCRIPTS / "bench_sync.py"), *quick)),
        Part("attention", TRIAL_S, python(str(SCRIPTS / "bench_attention.py"), *quick)),
    ]


def _bench(name: str, *words: str) -> tuple[str, ...]:
    return python(str(SCRIPTS / f"bench_{name}.py"), *words, *BFLOAT16, *JSON)


def _points(shape: str, *words: str) -> tuple[str, ...]:
    return _bench("decode", "--shape", shape, "--at-context", *CONTEXTS, "--rows", *words)


def _mixed(shape: str) -> tuple[str, ...]:
    rows = ("--at-context", "1024", "--longest", str(LONGEST), "--rows", *map(str, MIXED_ROWS))
    return _bench("decode", "--shape", shape, *rows)


def _decode(rows: str, seconds: int, *words: str) -> Iterator[Part]:
    for name, shape in (("decode-1.5b", SMALL), ("decode-7b", LARGE)):
        yield Part(name, seconds, _points(shape, rows, *words))
        seconds = seconds * 3 // 2


def _train_command(rows: int, tokens: int, *words: str, torch: bool = False) -> tuple[str, ...]:
    sizes = ("--rows", str(rows), "--tokens", str(tokens), "--response", str(tokens - PROMPT))
    peer = ("--one-at-a-time",) if torch else ("--without-torch",)
    return _bench("train", "--shape", SMALL, *sizes, "--microbatches", "2", "--repetitions", "3", *peer, *words)


def _train(name: str, seconds: int, rows: int, tokens: int, *words: str) -> Part:
    return Part(name, seconds, _train_command(rows, tokens, *words))


def _step() -> tuple[str, ...]:
    sizes = ("--prompts", "8", "--samples", "8", "--prompt-tokens", str(PROMPT), "--new", "512")
    rest = ("--train-tokens", "16384", "--repetitions", "3", "--warmup", "2", "--without-trl", "--fresh-cache")
    return _bench("step", "--shape", SMALL, *sizes, *rest)


def _attention() -> tuple[str, ...]:
    paged, packed = ("--rows", "64", "--contexts", *CONTEXTS), ("--packed", "16x1024", "1x8192")
    return _bench("attention", "--shape", SMALL, *paged, *packed)


def _rules() -> tuple[str, ...]:
    sizes = ("--prompts", "16", "--samples", "8", "--prompt", "32", "--median-length", "128", "--max-length", "1024")
    return _bench("rules", "--shape", SMALL, *sizes, "--repetitions", "8")
