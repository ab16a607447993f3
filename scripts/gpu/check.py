#!/usr/bin/env python3
"""Is what a device draws and differentiates right? The engine and the trainer against float32 and float64 of a CPU.

    python -m gpu.check [--json FOLDER] [--prompts N]

A process that sees no GPU makes the reference first (`gpu.reference`). Then, for float32
(as jaxrl's programs make it: in full precision) and bfloat16:

- engine: responses unlike the CPU's, per thousand tokens; the error of each drawn token's log-probability, against
  float64 on the CPU with weights of that dtype, worst and mean; responses of a second run that are not equal bit for
  bit, tokens and log-probabilities; responses that differ where few rows decode at once and
  sequences are preempted.
- trainer: the error of the gradient, as a share of its norm, against float64; how many of a second trainer's gradient
  arrays are not equal bit for bit.

Each dtype of each is a process of its own, and they run side by side: compiling is what takes the time.

What is no number counts as infinitely wrong (1e300 in the records). Bars are the page's matter: the exit status says
only that everything ran.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench import records
from bench.measure import num_cores, say

from gpu import reference
from gpu.reference import Task
from jaxrl.types import Sample

WRONG = 1e300
DTYPES = ("float32", "bfloat16")

Case = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="append a dated record to a file in FOLDER")
    parser.add_argument("--prompts", type=int, default=Task().prompts, help=f"({Task().prompts})")
    parser.add_argument("--layers", type=int, default=Task().layers, help=f"of the small model ({Task().layers})")
    parser.add_argument("--attention", nargs="+", default=["auto"], help="actor.attention of the trainers (auto)")
    options = parser.parse_args(arguments)
    head = records.header(
        "check", records.describe_devices(jax.devices()[:1]), records.versions(), records.command(arguments)
    )
    records.print_header(head, say)
    task = Task(options.prompts, options.layers)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reference.npz"
        _make_reference(file, task)
        samples, gradient = reference.load(file, task.requests())
    cases = list(_side_by_side(task, samples, gradient, options.attention))
    if options.json is not None:
        records.append_record(options.json, head | {"results": {"cases": cases}})
    return 0


def _make_reference(file: Path, task: Task) -> None:
    sizes = ["--prompts", str(task.prompts), "--layers", str(task.layers)]
    command = [sys.executable, "-m", "gpu.reference", str(file), *sizes]
    subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}, check=True)


def _side_by_side(
    task: Task, samples: Sequence[Sample], gradient: dict[str, np.ndarray], kinds: Sequence[str]
) -> Iterator[Case]:
    """All cases, in order; each is printed as soon as it is known."""
    asked = [partial(engine_case, task, samples, dtype) for dtype in DTYPES]
    asked += [partial(trainer_case, task, samples, gradient, kind, dtype) for kind in kinds for dtype in DTYPES]
    processes = max(1, min(len(asked), num_cores() // 2))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(case) for case in asked]
        for done in as_completed(running):
            say("  ".join(f"{key} {_short(value)}" for key, value in done.result().items()))
        yield from (each.result() for each in running)


def _short(value: Any) -> str:
    return f"{value:.2e}" if isinstance(value, float) else str(value)


# -- engine ------------------------------------------------------------------------------------------------------------


def engine_case(task: Task, expected: Sequence[Sample], dtype: str) -> Case:
    """Two runs in a dtype; in float32 one more with few rows."""
    params, wanted, device = task.weights(), task.requests(), jax.devices()[0]
    drawn, again = (task.generate(params, wanted, device, dtype) for _ in range(2))
    case = _engine_figures(task, expected, drawn, again, dtype)
    if dtype == "float32":  # what few rows draw is promised there alone
        few = task.generate(params, wanted, device, dtype, slots=max(2, len(wanted) // 8))
        case["few_rows_unlike_per_thousand_tokens"] = _unlike(drawn, few) / case["tokens"] * 1000
    return case


def _engine_figures(
    task: Task, expected: Sequence[Sample], drawn: Sequence[Sample], again: Sequence[Sample], dtype: str
) -> Case:
    exact = task.exact_logprobs(task.weights(), task.requests(), drawn, dtype)
    errors = np.concatenate([np.abs(a - s.rollout_logprobs) for a, s in zip(exact, drawn, strict=True)])
    tokens = sum(len(sample) for sample in drawn)
    return {
        "case": "engine",
        "dtype": dtype,
        "responses": len(drawn),
        "tokens": tokens,
        "unlike_per_thousand_tokens": _unlike(expected, drawn) / tokens * 1000,
        "worst_error": size(errors.max()),
        "mean_error": size(errors.mean()),
        "again_unlike": _unlike(drawn, again, values=True),
    }


def _unlike(some: Sequence[Sample], others: Sequence[Sample], *, values: bool = False) -> int:
    """Responses whose tokens differ (with `values`: or whose log-probabilities do)."""
    return sum(
        not np.array_equal(a.token_ids, b.token_ids)
        or (values and not np.array_equal(a.rollout_logprobs, b.rollout_logprobs))
        for a, b in zip(some, others, strict=True)
    )


# -- trainer -----------------------------------------------------------------------------------------------------------


def trainer_case(task: Task, samples: Sequence[Sample], expected: dict[str, np.ndarray], kind: str, dtype: str) -> Case:
    """Two trainers with a kind of attention, in a dtype."""
    params, wanted, device = task.weights(), task.requests(), jax.devices()[0]
    batch = reference.batch_of(wanted, samples)
    found, again = (reference.flat(task.gradients(params, batch, device, dtype, kind)) for _ in range(2))
    return {
        "case": "trainer",
        "dtype": dtype,
        "attention": kind,
        "gradient_error": relative(found, expected),
        "again_unlike": sum(not np.array_equal(found[path], again[path]) for path in found),
    }


def relative(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The norm of the difference of two gradients over that of the second."""
    assert found.keys() == expected.keys()
    off = sum(float(np.sum((found[path] - expected[path]) ** 2)) for path in expected)
    return size(np.sqrt(off / sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in expected.values())))


def size(value: Any) -> float:
    """The value; what is no number, as the largest."""
    return float(value) if np.isfinite(value) else WRONG


if __name__ == "__main__":
    sys.exit(main())
