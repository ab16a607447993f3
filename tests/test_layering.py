"""The project's rules about imports and its top level, checked from the source text. Only here is the table of layers.

`ROWS` is the order: a row may import the rows above it in the list, and never a row below or another unit of its own. A
unit is a package or a single file of `jaxrl`; files of one package may import each other, but never in a circle. What
only a type checker reads (`if TYPE_CHECKING`) is no import.

A mechanism has two units. Its class, with the rules that it decides by, is imported by `config` for its options; the
files that work on a run's devices, processes and reports are far below, and the class imports them inside functions.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS: tuple[frozenset[str], ...] = tuple(
    frozenset(row.split())
    for row in (
        "__init__",
        "types",
        "schema",
        "scheduling kernels sharding",
        "mechanisms.classes",
        "config",
        "data record",
        "models processes",
        "rollout train rewards sim",
        "environments",
        "loop report serving text",
        "mechanisms.parts",
        "runtime",
        "commands",
        "cli",
        "__main__",
    )
)
ROW_OF = {unit: i for i, row in enumerate(ROWS) for unit in row}
AT_RUN_TIME = {
    *("agents", "build", "device", "endpoint", "gradients", "group_rewards"),
    *("pool", "proposer", "report", "simulated", "verdicts"),
}
"""Files of a mechanism's folder that are its part in a run. All else are rules, as pure as `scheduling`."""
IMPURE = {"time", "datetime", "random", "secrets", "logging"}  # what a scheduling rule may not ask
TIMED = {
    *("jaxrl.mechanisms.adaptive_layouts", "jaxrl.mechanisms.stream_trainer"),
    "jaxrl.mechanisms.speculation.index",
}
"""Files of `mechanisms.classes` that measure how long something takes, or log: they have the hooks, not the rules."""
JAX = {"jax", "jaxlib", "optax", "orbax", "grain"}
WITHOUT_JAX = {
    "jaxrl.__main__",
    "jaxrl.cli",
    "jaxrl.commands.score",
    "jaxrl.commands.simulate",
    "jaxrl.commands.train",
    "jaxrl.commands.tune",
    "jaxrl.commands.completion",
    "jaxrl.commands.options",
    "jaxrl.config.files",
    "jaxrl.loop",
    "jaxrl.report.comparison",
    "jaxrl.report.page",
    "jaxrl.rewards.reward_pool",
    "jaxrl.runtime.backend",
    "jaxrl.runtime.rules",
    "jaxrl.runtime.simulation",
    "jaxrl.mechanisms",
}
EXTRAS = {
    *("bm25s", "gin", "gymnasium", "huggingface_hub", "mlflow", "openai", "prometheus_client", "ray"),
    *("starlette", "tensorboardX", "trackio", "uvicorn", "wandb"),
}
"""Packages that come with one of pyproject.toml's extras."""
WITH_EXTRAS = ("jaxrl.serving", "jaxrl.environments.verifiers_", "jaxrl.environments.shipped.openenv")
"""Loaded where the extra is asked for, or under another Python."""
MAX_TOP_MODULES = 6


def read_sources() -> dict[str, str]:
    """Source text by module name; `jaxrl/sharding` and `jaxrl/kernels` are links to folders at the top level."""
    sources = {}
    for folder, package in (("jaxrl", "jaxrl"), ("sharding", "jaxrl.sharding"), ("kernels", "jaxrl.kernels")):
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "jaxrl" and parts[0] in ("sharding", "kernels"):
                continue  # this version's rglob follows links
            sources[".".join((package, *parts)).removesuffix(".__init__")] = file.read_text(encoding="utf-8")
    return sources


SOURCES = read_sources()


def unit_of(module: str) -> str:
    """`jaxrl.scheduling.rounds.round` belongs to `scheduling`, `jaxrl` itself to `__init__`."""
    parts = [*module.split("."), "__init__"]
    if parts[1] != "mechanisms":
        return parts[1]
    return "mechanisms.parts" if len(parts) == 5 and parts[3] in AT_RUN_TIME else "mechanisms.classes"


def has_class(module: str) -> bool:
    """Whether it is a mechanism's class, or their list."""
    parts = module.split(".")
    return parts[1:2] == ["mechanisms"] and len(parts) <= 3


def mechanism_of(module: str) -> str | None:
    """The mechanism that a module belongs to; None: to none."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["mechanisms"] and len(parts) > 2 else None


def imported(sources: Mapping[str, str], module: str, *, at_import: bool = False) -> Iterator[str]:
    """Names of the modules that a module's text imports, at any depth of it but under `if TYPE_CHECKING`.

    Args:
      at_import: only what importing the module runs, which is nothing inside functions.
    """
    is_package = any(name.startswith(f"{module}.") for name in sources)
    package = module if is_package else module.rpartition(".")[0]
    for node in import_statements(sources[module], at_import):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                full = f"{origin}.{alias.name}"
                yield full if full in sources else origin


@cache
def import_statements(text: str, at_import: bool) -> list[ast.Import | ast.ImportFrom]:
    """Those of a module's text, as `imported` wants them; each text is parsed once for all rules."""
    found: list[ast.Import | ast.ImportFrom] = []
    pending: list[ast.AST] = [ast.parse(text)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending.extend(node.orelse)
        else:
            pending.extend(each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr))
    return found


def needed(sources: Mapping[str, str], module: str) -> set[str]:
    """What a module imports, but for what a mechanism's class imports inside functions, to build its part in a run."""
    return set(imported(sources, module, at_import=has_class(module)))


def layer_violations(sources: Mapping[str, str]) -> list[str]:
    """One sentence for each import that does not go down, and for each module without a row."""
    found = []
    for module in sources:
        unit = unit_of(module)
        if unit not in ROW_OF:
            found.append(f"{module} has no row in tests/test_layering.py")
            continue
        for name in sorted(needed(sources, module)):
            target = unit_of(name)
            if name.split(".")[0] != "jaxrl" or target == unit:
                continue
            if ROW_OF.get(target, len(ROWS)) >= ROW_OF[unit]:
                found.append(f"{module} imports {name}, which is not below it")
    return found


def mechanism_violations(sources: Mapping[str, str]) -> list[str]:
    """No mechanism knows another."""
    return [
        f"{module} imports {name}, which is another mechanism's"
        for module in sources
        if mechanism_of(module) is not None
        for name in sorted(set(imported(sources, module)))
        if mechanism_of(name) not in (None, mechanism_of(module))
    ]


def scheduling_violations(sources: Mapping[str, str]) -> list[str]:
    """`jaxrl.scheduling` and the rules of mechanisms may import numpy, our types, and the standard library but clock,
    chance and log."""
    allowed = (sys.stdlib_module_names | {"annotated_types", "numpy"}) - IMPURE
    pure = ("scheduling", "mechanisms.classes")

    def fits(module: str, name: str) -> bool:
        root = name.split(".")[0]
        if root == "jaxrl":
            return unit_of(name) in ("types", "schema", *pure)
        return root in allowed or (root in ("logging", "time") and module in TIMED)

    return [
        f"{module} imports {name}"
        for module in sources
        if unit_of(module) in pure
        for name in sorted(needed(sources, module))
        if not fits(module, name)
    ]


def ray_violations(sources: Mapping[str, str]) -> list[str]:
    """Only the host of a pool over ray imports it, and the controller and the actors of a run."""
    return [
        f"{module} imports {name}"
        for module in sources
        if module not in ("jaxrl.rewards.ray_host", "jaxrl.runtime.cluster", "jaxrl.runtime.host_actor")
        for name in imported(sources, module)
        if name.split(".")[0] == "ray"
    ]


def circles(sources: Mapping[str, str]) -> list[str]:
    """Modules with imports that lead back to them; one sentence for each circle that is found."""
    imports = {m: sorted({n for n in needed(sources, m) if n in sources} - {m}) for m in sources}
    found: list[str] = []
    done: set[str] = set()

    def follow(module: str, path: list[str]) -> None:
        if module in path:
            found.append(" imports ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for name in imports[module]:
                follow(name, [*path, module])
            done.add(module)

    for module in sources:
        follow(module, [])
    return found


def top_violations(sources: Mapping[str, str]) -> list[str]:
    """A top level that holds more modules than a reader wants to meet."""
    top = {m.split(".")[1] for m in sources if m.count(".") == 1}
    top -= {m.split(".")[1] for m in sources if m.count(".") > 1}
    if len(top) <= MAX_TOP_MODULES:
        return []
    return [f"jaxrl has {len(top)} modules at its top, above {MAX_TOP_MODULES}: {', '.join(sorted(top))}"]


def closure(sources: Mapping[str, str], module: str) -> set[str]:
    """Every module that importing `module` runs, as far as our own modules lead to it."""
    seen: set[str] = set()
    pending = [module]
    while pending:
        name = pending.pop()
        parents = [name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)]
        for each in (name, *parents):
            if each not in seen:
                seen.add(each)
                if each in sources:
                    pending.extend(imported(sources, each, at_import=True))
    return seen


def jax_violations(sources: Mapping[str, str]) -> list[str]:
    """`loop`, `cli`, the reward workers and the simulator load without jax; `loop` and `sim` never name it at all."""
    pure = [module for module in sources if unit_of(module) in ("sim", "loop")]
    found = [f"{m} imports {n}" for m in pure for n in imported(sources, m) if n.split(".")[0] in JAX]
    for module in sorted({*pure, *WITHOUT_JAX} & set(sources)):
        reached = {name.split(".")[0] for name in closure(sources, module)} & JAX
        found += [f"importing {module} loads {name}" for name in sorted(reached)]
    return found


def extra_violations(sources: Mapping[str, str]) -> list[str]:
    """An installation without extras loads all but what an extra is for."""
    return [
        f"importing {module} loads {name}"
        for module in sources
        if not module.startswith(WITH_EXTRAS)
        for name in sorted({name.split(".")[0] for name in closure(sources, module)} & EXTRAS)
    ]


RULES = (
    layer_violations,
    mechanism_violations,
    scheduling_violations,
    ray_violations,
    jax_violations,
    extra_violations,
    circles,
    top_violations,
)


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps_its_rules(rule):
    assert rule(SOURCES) == []


def test_every_source_file_is_read():
    known = {"jaxrl", "jaxrl.cli", "jaxrl.scheduling.tokens.engine", "jaxrl.sharding.rules", "jaxrl.kernels.packed"}
    assert known <= set(SOURCES)
    assert set(WITHOUT_JAX) <= set(SOURCES)
    missing = {unit for unit in ROW_OF if unit != "__init__"} - {unit_of(module) for module in SOURCES}
    assert not missing, "rows name units that do not exist"


BROKEN = {
    "upward": (
        layer_violations,
        {"jaxrl.types": "", "jaxrl.cli": "", "jaxrl.data.prompts": "def f():\n  import jaxrl.cli"},
    ),
    "sibling files": (
        layer_violations,
        {"jaxrl.data.prompts": "from jaxrl.record import metrics", "jaxrl.record.metrics": ""},
    ),
    "sibling packages": (layer_violations, {"jaxrl.train.a": "", "jaxrl.rollout.b": "from jaxrl.train.a import x"}),
    "relative": (layer_violations, {"jaxrl.types": "from . import cli", "jaxrl.cli": "", "jaxrl": ""}),
    "sibling mechanisms": (
        mechanism_violations,
        {"jaxrl.mechanisms.a": "def f():\n  from jaxrl.mechanisms.b.rule import X", "jaxrl.mechanisms.b.rule": ""},
    ),
    "a part at import": (
        layer_violations,
        {"jaxrl.mechanisms.a": "from jaxrl.mechanisms.a.pool import X", "jaxrl.mechanisms.a.pool": ""},
    ),
    "a class over config": (layer_violations, {"jaxrl.mechanisms.a": "import jaxrl.config", "jaxrl.config": ""}),
    "a rule with its part": (
        layer_violations,
        {"jaxrl.mechanisms.a.rule": "def f():\n  import jaxrl.mechanisms.a.pool", "jaxrl.mechanisms.a.pool": ""},
    ),
    "a class in a circle": (
        circles,
        {"jaxrl.mechanisms.a": "import jaxrl.mechanisms.a.b", "jaxrl.mechanisms.a.b": "import jaxrl.mechanisms.a"},
    ),
    "impure rules": (scheduling_violations, {"jaxrl.mechanisms.a.rule": "import random"}),
    "an impure class": (scheduling_violations, {"jaxrl.mechanisms.stream_trainer": "import random\nimport time"}),
    "a class with jax": (scheduling_violations, {"jaxrl.mechanisms.a": "import jax"}),
    "no row": (layer_violations, {"jaxrl.utils": ""}),
    "impure": (scheduling_violations, {"jaxrl.scheduling.a": "from time import monotonic"}),
    "not numpy": (scheduling_violations, {"jaxrl.scheduling.a": "import jax.numpy as np"}),
    "scheduling reads files": (scheduling_violations, {"jaxrl.scheduling.a": "from jaxrl.config import load"}),
    "circle": (
        circles,
        {"jaxrl.a": "def f():\n  import jaxrl.b", "jaxrl.b": "from jaxrl.c import x", "jaxrl.c": "import jaxrl.a"},
    ),
    "full top": (top_violations, {f"jaxrl.{name}": "" for name in "abcdefg"}),
    "ray": (ray_violations, {"jaxrl.runtime.backend": "def f():\n  import ray.util"}),
    "jax by name": (jax_violations, {"jaxrl.sim.a": "def f():\n  from jax import numpy"}),
    "jax by way of": (jax_violations, {"jaxrl.loop": "import jaxrl.train.b", "jaxrl.train": "import jax"}),
    "an extra's package": (
        extra_violations,
        {"jaxrl.mechanisms.a.pool": "import jaxrl.serving.b", "jaxrl.serving.b": "import starlette"},
    ),
    "jax in a class body": (jax_violations, {"jaxrl.cli": "class A:\n  try:\n    import optax\n  finally: ..."}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(name):
    rule, sources = BROKEN[name]
    assert len(rule(sources)) == 1, rule(sources)


def test_what_is_allowed_is_not_found():
    sources = {
        "jaxrl": "__version__ = ''",
        "jaxrl.types": "import numpy",
        "jaxrl.scheduling.a": "import heapq\nfrom numpy import ndarray\nfrom jaxrl.scheduling.b import x",
        "jaxrl.scheduling.b": "if TYPE_CHECKING:\n  from jaxrl.config import Config\nfrom jaxrl.types import Sample",
        "jaxrl.mechanisms": "from jaxrl.mechanisms.a import A\ndef f():\n  import jaxrl.config",
        "jaxrl.mechanisms.a": "import jaxrl.mechanisms.a.rule\ndef f():\n  import jaxrl.mechanisms.a.pool",
        "jaxrl.mechanisms.a.rule": "from numpy import ndarray\nfrom jaxrl.scheduling.b import x",
        "jaxrl.mechanisms.a.pool": "import jax\nimport jaxrl.config\nfrom jaxrl.mechanisms.a import A",
        "jaxrl.config": "import difflib",
        "jaxrl.loop": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from jaxrl.train.a import Trainer",
        "jaxrl.train.a": "import jax",
        "jaxrl.cli": "from jaxrl import __version__\ndef f():\n  from jaxrl.train import a\n  import jax",
    }
    for rule in RULES:
        assert rule(sources) == []


IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded = sorted({"jax", "jaxlib", "ray", "torch"} & set(sys.modules))
    assert not loaded, f"importing {name} loads {loaded}"
"""


def test_importing_loads_no_heavy_package():
    """The same from outside, so that other packages' imports count as well: one after another in one process."""
    names = ["jaxrl", *sorted(WITHOUT_JAX)]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


PROBE = """
import importlib.metadata, importlib.util, sys
for name in sys.argv[1:]:
    found = importlib.util.find_spec(name)
    version = getattr(importlib.import_module(name), "__version__", None) if found else None
    print(version or (found and found.origin))
import jaxrl.kernels.attention, jaxrl.sharding.layout
"""
"""As transformers looks for the distribution called `kernels`: what has neither a version nor a file is none."""


@pytest.mark.parametrize("installed", [False, True])
def test_a_bare_name_is_no_package_of_ours(installed, tmp_path):
    """Nobody who looks for another distribution of that name finds our folder, and a real one is found behind it."""
    names = "sharding", "kernels"
    for name in names if installed else ():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text('__version__ = "1.2.3"')
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *names], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.split()) == (0, ["1.2.3" if installed else "None"] * 2), done.stderr
