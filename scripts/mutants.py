"""Changes the code in small ways, one at a time, and says which changes no test notices (mutation testing).

    pip install -e '.[suite]'
    python scripts/mutants.py losses packing --sample 60

Cosmic Ray names the mutants of each area and runs the area's tests against each, in a copy of the tree. Of them
`--sample` are drawn, by a seed; the `|` of annotations, whose change changes nothing, is left out. A survivor is
printed with its diff: either nothing that anyone could see depends on it, or a test is missing.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sabotage import copy_tree, variables

TRAIN = "tests/training/test_"
AREAS = {
    "rounds": (["jaxrl/scheduling/rounds"], "tests/scheduling/rounds tests/test_compositions.py"),
    "tokens": (
        ["jaxrl/scheduling/tokens"],
        "tests/scheduling/tokens tests/test_compositions.py tests/rollout/test_windows.py",
    ),
    "losses": (["jaxrl/training/losses.py"], f"{TRAIN}losses.py {TRAIN}verl.py"),
    "advantages": (["jaxrl/training/advantages.py"], f"{TRAIN}advantages.py {TRAIN}verl.py"),
    "packing": (["jaxrl/training/packing.py"], f"{TRAIN}packing.py"),
    "checkpoint": (
        ["jaxrl/training/checkpoint.py", "jaxrl/training/manifest.py", "jaxrl/training/steps.py"],
        f"{TRAIN}checkpoint.py {TRAIN}damage.py tests/refusals/test_refused.py",
    ),
}
"""Names, what is changed, and the tests that must notice."""


def run_area(name: str, sample: int, seed: int) -> None:
    from cosmic_ray.work_db import WorkDB, use_db  # pyright: ignore[reportMissingImports]
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult  # pyright: ignore[reportMissingImports]

    paths, tests = AREAS[name]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        environment = variables(tree)

        def call(*words: str) -> None:
            subprocess.run([sys.executable, "-m", *words], cwd=tree, env=environment, check=True, stdout=2)

        pytest = f"pytest -x -q --hypothesis-seed=0 -p no:cacheprovider -p no:randomly {tests}"
        began = time.monotonic()
        call(*pytest.split())  # without a mutant they pass
        limit_s = 3 * (time.monotonic() - began) + 30
        settings = {"module-path": paths, "timeout": limit_s, "test-command": f"{sys.executable} -m {pytest}"}
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        text = ["[cosmic-ray]", *lines, "excluded-modules = []", "[cosmic-ray.distributor]", 'name = "local"']
        (tree / "mutants.toml").write_text("\n".join(text))
        call("cosmic_ray.cli", "init", "mutants.toml", "mutants.sqlite")
        with use_db(str(tree / "mutants.sqlite"), WorkDB.Mode.open) as session:
            known = [item for item in session.pending_work_items if "BitOr" not in item.mutations[0].operator_name]
            drawn = {item.job_id for item in random.Random(seed).sample(known, min(sample, len(known)))}
            for item in list(session.pending_work_items):
                if item.job_id not in drawn:
                    session.set_result(item.job_id, WorkResult(WorkerOutcome.SKIPPED))
        call("cosmic_ray.cli", "exec", "mutants.toml", "mutants.sqlite")
        with use_db(str(tree / "mutants.sqlite"), WorkDB.Mode.open) as session:
            results = [result for _, result in session.completed_work_items]
        survivors = [each.diff for each in results if each.test_outcome == TestOutcome.SURVIVED]
        print(*survivors, sep="\n")
        print(f"{name}: {len(drawn) - len(survivors)} of {len(drawn)} killed, of {len(known)} mutants, seed {seed}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", default=[*AREAS], choices=[*AREAS], metavar="AREA", help=", ".join(AREAS))
    parser.add_argument("--sample", type=int, default=60, help="mutants of each area")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    arguments = parser.parse_args()
    for area in arguments.areas:
        run_area(area, arguments.sample, arguments.seed)
