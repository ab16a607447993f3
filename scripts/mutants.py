"""Changes the code in small ways, one at a time, and says which changes no test notices (mutation testing).

    pip install -e '.[suite]'
    python scripts/mutants.py losses packing --sample 60 --out out/mutants.jsonl

Cosmic Ray names the mutants: an operator, a comparison, a number, a `not`, a `break` that is another one. Of each area
`--sample` of them are drawn, by a seed; those in annotations are left out, since they change nothing. The tests of the
area run against each, in copies of the tree, until the first failure; a mutant that hangs is noticed too. A survivor is
printed with its diff: either nothing that anyone could see depends on it, or a test is missing.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sabotage import ROOT, copy_tree, variables

AREAS = {
    "rounds": (["jaxrl/scheduling/rounds"], ["tests/scheduling/rounds"]),
    "tokens": (["jaxrl/scheduling/tokens"], ["tests/scheduling/tokens"]),
    "losses": (["jaxrl/train/losses.py"], ["tests/train/test_losses.py", "tests/train/test_verl.py"]),
    "advantages": (
        ["jaxrl/train/advantages.py"],
        ["tests/train/test_advantages.py", "tests/train/test_gae.py", "tests/train/test_verl.py"],
    ),
    "packing": (["jaxrl/train/packing.py"], ["tests/train/test_packing.py"]),
    "checkpoint": (
        ["jaxrl/train/checkpoint.py", "jaxrl/train/manifest.py", "jaxrl/train/steps.py"],
        [
            "tests/train/test_checkpoint.py",
            "tests/train/test_damage.py",
            "tests/refusals/test_checkpoints.py",
            "tests/runtime/test_beginnings.py",
            "tests/commands/test_critic_runs.py",
        ],
    ),
}
"""Names, the files that are changed, and the tests that must notice."""


def annotated(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where the annotations of a module begin and end, as (line from 1, column) each."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node.returns)
    ends = ((n.lineno, n.col_offset, n.end_lineno, n.end_col_offset) for n in found if n is not None)
    return [((line, column), (end_line or line, end_column or column)) for line, column, end_line, end_column in ends]


def mutants(paths: list[str]) -> Iterator[Any]:
    """Cosmic Ray's mutations (`MutationSpec`) of the files, their paths relative to the root."""
    from cosmic_ray.commands.init import init  # pyright: ignore[reportMissingImports]
    from cosmic_ray.work_db import use_db  # pyright: ignore[reportMissingImports]

    files = [file for path in paths for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).glob("*.py"))]
    with tempfile.TemporaryDirectory() as folder, use_db(str(Path(folder, "session"))) as session:
        init(sorted(files), session, {})
        for item in session.work_items:
            (mutation,) = item.mutations
            places = annotated(mutation.module_path.read_text())
            if not any(start <= mutation.start_pos < end for start, end in places):
                yield mutation


class Trees:
    """Copies of the tree, one for each process that tests at a time."""

    def __init__(self, stack: ExitStack, count: int, tests: list[str]) -> None:
        self.free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for _ in range(count):
            tree = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-")))
            copy_tree(tree)
            self.free.put(tree)
        self.tests = " ".join(tests)
        self.limit_s = 900.0

    def command(self, tree: Path) -> str:
        pytest = "-m pytest -x -q --tb=line --hypothesis-seed=0 -p no:cacheprovider -p no:randomly"
        own = " ".join(f"{name}={value}" for name, value in variables(tree).items())
        return f"env -C {tree} {own} {sys.executable} {pytest} {self.tests}"

    def baseline_s(self) -> float:
        """How long the tests take where nothing is wrong. Raises ValueError where they fail there."""
        tree = self.free.get()
        started = time.monotonic()
        ran = subprocess.run(self.command(tree).split(), capture_output=True, text=True, check=False)
        self.free.put(tree)
        if ran.returncode != 0:
            raise ValueError(f"{self.tests} fail without a mutant:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
        return time.monotonic() - started

    def outcome(self, mutation: Any) -> dict[str, Any]:
        """What the tests say of a mutant: `killed` (a failure, or no end) or `survived`, with its diff."""
        from attrs import evolve  # pyright: ignore[reportMissingImports]
        from cosmic_ray.mutating import mutate_and_test  # pyright: ignore[reportMissingImports]

        tree = self.free.get()
        try:
            place = mutation.module_path.relative_to(ROOT)
            started = time.monotonic()
            result = mutate_and_test((evolve(mutation, module_path=tree / place),), self.command(tree), self.limit_s)
            assert result.test_outcome is not None, result
            return {
                "file": str(place),
                "line": mutation.start_pos[0],
                "in": mutation.definition_name,
                "operator": mutation.operator_name.removeprefix("core/"),
                "outcome": "survived" if result.test_outcome == "survived" else "killed",
                "seconds": round(time.monotonic() - started, 1),
                "diff": [
                    line
                    for line in (result.diff or "").splitlines()
                    if line[:1] in "+-" and line[:3] not in ("+++", "---")
                ],
            }
        finally:
            self.free.put(tree)


def run_area(name: str, sample: int, seed: int, processes: int, out: Path | None) -> None:
    paths, tests = AREAS[name]
    found = list(mutants(paths))
    drawn = random.Random(seed).sample(found, min(sample, len(found)))
    with ExitStack() as stack:
        trees = Trees(stack, processes, tests)
        whole_s = trees.baseline_s()
        trees.limit_s = 3 * whole_s + 30
        with ThreadPoolExecutor(processes) as threads:
            outcomes = list(threads.map(trees.outcome, drawn))
    survivors = [each for each in outcomes if each["outcome"] == "survived"]
    for each in survivors:
        print(f"survived: {each['file']}:{each['line']} ({each['in']})", *each["diff"], sep="\n    ")
    killed = len(outcomes) - len(survivors)
    print(
        f"{name}: {killed} of {len(outcomes)} killed ({killed / max(len(outcomes), 1):.0%}), of {len(found)} mutants, "
        f"seed {seed}; the tests take {whole_s:.0f} s",
        flush=True,
    )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.writelines(json.dumps({"area": name, "seed": seed} | each) + "\n" for each in outcomes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", default=[*AREAS], choices=[*AREAS], metavar="AREA", help=", ".join(AREAS))
    parser.add_argument("--sample", type=int, default=60, help="mutants of each area")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 4), help="tests at a time")
    parser.add_argument("--out", type=Path, help="a file of JSON lines that gets every outcome")
    arguments = parser.parse_args()
    for area in arguments.areas:
        run_area(area, arguments.sample, arguments.seed, arguments.processes, arguments.out)
