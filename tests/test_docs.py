"""The documentation: the site builds without a warning, and the names on its pages exist.

A build takes a minute, so it is for --slow. By default what it stops at is looked for without it: docstrings that
reStructuredText cannot read, modules that no page has, and links into pages that lead nowhere.
"""

import ast
import functools
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlparse

import pytest

from jaxrl.config.reference import options, sections
from jaxrl.mechanisms import MECHANISMS
from jaxrl.scheduling.mechanism import Mechanism

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/mechanisms/*.md")})
FOLDERS = ("jaxrl", "sharding", "kernels", "configs", "docs", "examples", "scripts", "tests")
ENDINGS = ("py", "sh", "md", "rst", "yaml", "toml", "svg", "png")
MADE_UP = ("box.py", "my_reward.py", "my_tools.py", "my_rule", "tail_share.py", "run.yaml", "config.yaml")
MADE_UP += ("checkpoints", "site", "inputs", "reward.py")
"""What the reader, a run or the build of the site makes."""


# ---------------------------------------------------------------- the site


def modules() -> dict[str, Path]:
    """The file of each module of ours."""
    return {
        ".".join((package, *file.relative_to(ROOT / folder).with_suffix("").parts)).removesuffix(".__init__"): file
        for folder, package in (("jaxrl", "jaxrl"), ("sharding", "jaxrl.sharding"), ("kernels", "jaxrl.kernels"))
        for file in (ROOT / folder).rglob("*.py")
    }


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path):
    """As `scripts/docs.sh` builds it."""
    pytest.importorskip("sphinx")
    script = (ROOT / "scripts" / "docs.sh").read_text(encoding="utf-8")
    (line,) = re.findall(r'"\$venv_python" -m (sphinx .*)', script)
    command = line.replace('"$@" ', "").replace("site/.doctrees", str(tmp_path / ".doctrees")).split()
    assert command[-2:] == ["docs", "site"]
    words = [sys.executable, "-m", *command[:-1], str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_module_is_in_a_room_of_the_site():
    """The directive documents all that is in a room (docs/site_parts.py)."""
    texts = (page.read_text(encoding="utf-8") for page in ROOT.glob("docs/api/*.rst"))
    rooms = [room for text in texts for room in re.findall(r"^\.\. room:: (\S+)$", text, re.M)]
    assert len(rooms) == len(set(rooms))
    missing = {name for name in modules() if not any(f"{name}.".startswith(f"{room}.") for room in rooms)}
    assert missing == {"jaxrl", "jaxrl.__main__"}


# ---------------------------------------------------------------- what the pages must list


SECTIONS = ("What it goes with", "Metrics", "Departures from the paper", "Its files", "Tests", "Figures")
SUPPLIED = {"phase_order", "gradient_source", "score_limits", "parking", "device_user", "group_rewards"}
NO_PAPER = "Source: none published."
"""A page that says so has no departures from a paper."""
COMMON = {"__init__", "attach", "round_begins", "round_ends", "round_cancelled", "state_dict", "load_state_dict"}


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda each: each.__name__)
def test_a_mechanism_has_a_page_with_its_files_and_hooks(mechanism: type[Mechanism]):
    """But for the hooks that nearly all have (docs/mechanisms.md)."""
    name, file = mechanism.__module__.rpartition(".")[2], Path(inspect.getfile(mechanism))
    text = (ROOT / "docs" / "mechanisms" / f"{name}.md").read_text(encoding="utf-8")
    assert f"(mechanisms/{name}.md)" in (ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")
    titles = [title for title in SECTIONS if NO_PAPER not in text or not title.startswith("Departures")]
    assert [title for title in titles if f"\n## {title}" not in text] == []
    wanted = {each.name for each in file.parent.glob("*.py")} if file.name == "__init__.py" else {file.name}
    hooks = {hook for hook, of in vars(Mechanism).items() if inspect.isfunction(of)}
    wanted |= hooks & vars(mechanism).keys()
    wanted |= set(re.findall(r"self\.(\w+) = ", file.read_text(encoding="utf-8"))) & SUPPLIED
    wanted -= COMMON | {"__init__.py"}
    assert {each for each in wanted if f"`{each}`" not in text} == set()


# ---------------------------------------------------------------- what the pages name


def tree() -> frozenset[str]:
    """Files and folders of the repository, from its top."""
    found = {path.name for path in ROOT.glob("*.*")}
    for folder in FOLDERS:
        found |= {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*")} | {folder}
    return frozenset(found)


def module_texts() -> dict[str, str]:
    """The text of each module of ours."""
    names = dict.fromkeys(("jaxrl", "jaxrl.sharding", "jaxrl.kernels"), "")  # not all have an init file
    return names | {name: file.read_text(encoding="utf-8") for name, file in modules().items()}


NAMED = re.compile(
    rf"(?:\./)?((?:[\w.-]+/)*[\w-]+\.(?:{'|'.join(ENDINGS)})|(?:{'|'.join(FOLDERS)})/[\w./-]*|(?:[\w-]+/)+)"
)


def named_paths(text: str) -> set[str]:
    """Files and folders that a page names in backticks: words with one of our endings, in one of our folders, or with a
    slash at the end. Of a command, each word counts."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    words = {word.rstrip(",;:") for code in re.findall(r"`([^`\n]+)`", prose) for word in code.split()}
    found = {match[1].rstrip("/") for word in words if (match := NAMED.fullmatch(word))}
    return {name for name in found if not set(name.split("/")[-2:]) & set(MADE_UP)}


def missing_paths(text: str, files: frozenset[str]) -> list[str]:
    """Paths that a page names and that do not exist; a path may leave out its first folders (`rounds/race.py`)."""
    return sorted(
        name for name in named_paths(text) if not any(file == name or file.endswith(f"/{name}") for file in files)
    )


def defined(body: Iterable[ast.AST]) -> dict[str, ast.AST]:
    """What statements define, by name; not what stands inside their functions and classes."""
    found: dict[str, ast.AST] = {}
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found[node.name] = node
            case ast.alias():
                found[node.asname or node.name] = node
            case ast.Name(id=name, ctx=ast.Store()):
                found[name] = node
            case _:
                found |= defined(ast.iter_child_nodes(node))
    return found


@functools.cache
def defined_in(text: str) -> dict[str, ast.AST]:
    return defined(ast.parse(text).body)


def members(of: ast.ClassDef) -> set[str]:
    """Methods and fields, also those that methods set."""
    own = {node.attr for node in ast.walk(of) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return own | defined(of.body).keys()


def missing_modules(text: str, modules: dict[str, str]) -> list[str]:
    """Dotted names of ours (`jaxrl.text.TextEngine.stream`) without such a module, such a name in it, or such a member
    of that class."""
    missing = []
    for name in sorted(set(re.findall(r"`(jaxrl(?:\.\w+)+)`", text))):
        module = max((m for m in modules if f"{name}.".startswith(f"{m}.")), key=len)
        first, *rest = name[len(module) :].strip(".").split(".")
        found = defined_in(modules[module])
        of = found.get(first)
        if first and (of is None or (rest and isinstance(of, ast.ClassDef) and rest[0] not in members(of))):
            missing.append(name)
    return missing


def missing_options(text: str) -> list[str]:
    """Options that a page names in backticks and the configuration does not have; `my_...` and the toy are made up."""
    known = {option.path for option in options()} | set(sections())
    top = "|".join(name for name in sections() if "." not in name)
    names = set(re.findall(rf"`[^`\n]*?(?<![\w/])((?:{top})\.[a-z_.]*[a-z_])(?=[=`\s,])", text))
    return sorted(name for name in names - known if not any(each in name for each in (".my_", ".tail_share")))


def missing_links(page: Path, text: str) -> list[str]:
    """Links to files that are not there, and into pages that have no such heading."""
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not urlparse(link).scheme and not (target.exists() and (not anchor or anchor in anchors_of(target))):
            missing.append(link)
    return missing


@functools.cache
def anchors_of(page: Path) -> set[str]:
    """Of the headings of a page in Markdown, as GitHub makes them and as docutils does; of options, by their names."""
    text = page.read_text(encoding="utf-8")
    if page.name == "options.rst":
        names = [*sections(), *(option.path for option in options())]
        return {name.replace(".", "-").replace("_", "-").lower() for name in names}
    included = set(re.findall(r"^```\{include\} (\S+)$", text, re.M))
    titles = re.findall(r"^#+ +(.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    github = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    own = github | {re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") for title in titles}
    return own.union(*(anchors_of(page.parent / name) for name in included))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    assert missing_paths(text, tree()) == []
    assert missing_modules(text, module_texts()) == []
    assert missing_options(text) == []
    assert missing_links(page, text) == []


def test_what_docstrings_and_comments_name_is_there():
    texts = module_texts()
    found = {module: missing_modules(text, texts) for module, text in texts.items()}
    assert {module: missing for module, missing in found.items() if missing} == {}
