"""The project's rules about imports and its top level, checked from the source text. Only here is the table of layers.

`ROWS` is the order: a row may import the rows above it in the list, and never a row below or another unit of its own. A
unit is a package or a single file of `jaxrl`; files of one package may import each other, but never in a circle. What
only a type checker reads (`if TYPE_CHECKING`) is no import.

A mechanism has two units. Its class, with the rules that it decides by, is imported by `config` for its options; the
files that work on a run's devices, processes and reports are far below, and the class imports them inside functions.
"""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
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
        "rollout training rewards sim",
        "environments",
        "loop report serving text",
        "mechanisms.parts",
        "run",
        "commands",
        "cli api",
        "__main__",
    )
)
ROW_OF = {unit: i for i, row in enumerate(ROWS) for unit in row}
AT_RUN_TIME = {
    *("agents", "device", "endpoint", "gradients", "group_rewards"),
    *("pool", "proposer", "report", "session", "verdicts"),
}
"""Files of a mechanism's folder that are its part in a run. All else are rules, as pure as `scheduling`."""
IMPURE = {"time", "datetime", "random", "secrets", "logging"}  # what a scheduling rule may not ask
TIMED = {"jaxrl.mechanisms.speculation.index"}
"""Files of `mechanisms.classes` that measure how long something takes."""
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
    "jaxrl.run.backend",
    "jaxrl.run.run",
    "jaxrl.run.simulation",
    "jaxrl.mechanisms",
}
EXTRAS = {
    *("bm25s", "gin", "gymnasium", "huggingface_hub", "mlflow", "openai", "prometheus_client", "ray"),
    *("starlette", "tensorboardX", "trackio", "uvicorn", "wandb"),
}
"""Packages that come with one of pyproject.toml's extras."""
WITH_EXTRAS = (
    "jaxrl.serving",
    "jaxrl.rollout.jetstream",
    "jaxrl.environments.verifiers_",
    "jaxrl.environments.shipped.openenv",
)
"""Loaded where the extra is asked for, or under another Python."""


Rule = Callable[[Mapping[str, str]], list[str]]


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
        return root in allowed or (root == "time" and module in TIMED)

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
        if module not in ("jaxrl.rewards.ray_host", "jaxrl.run.cluster", "jaxrl.run.host_actor")
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


RULES = (layer_violations, mechanism_violations, scheduling_violations, ray_violations, circles)


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps_its_rules(rule: Rule):
    assert {"jaxrl.scheduling.tokens.engine", "jaxrl.sharding.rules", "jaxrl.kernels.packed"} <= set(SOURCES)
    assert rule(SOURCES) == []


IMPORT_ALL = """
import importlib, sys
blocked, *names = sys.argv[1:]
sys.modules |= dict.fromkeys(blocked.split(","))
for name in names:
    importlib.import_module(name)
"""


@pytest.mark.parametrize(
    ("names", "blocked"),
    [
        (["jaxrl", *sorted(WITHOUT_JAX)], JAX | {"ray", "torch"}),
        ([name for name in SOURCES if not name.startswith(WITH_EXTRAS) and not name.endswith("__main__")], EXTRAS),
    ],
    ids=["without jax", "without extras"],
)
def test_modules_are_imported_without(names: list[str], blocked: set[str]):
    words = [sys.executable, "-c", IMPORT_ALL, ",".join(sorted(blocked)), *names]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
