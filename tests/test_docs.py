"""The documentation: the site builds without a warning, and the names on its pages exist.

A build takes a minute, so it is for --slow. By default what it stops at is looked for without it: docstrings that
reStructuredText cannot read, modules that no page has, and links into pages that lead nowhere.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlparse

import pytest

from jaxrl.config.reference import options, sections

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/mechanisms/*.md")})
FOLDERS = ("jaxrl", "sharding", "kernels", "configs", "docs", "examples", "scripts", "tests")
ENDINGS = ("py", "sh", "md", "rst", "yaml", "toml", "svg", "png")
MADE_UP = ("box.py", "my_reward.py", "my_tools.py", "my_rule", "tail_share.py", "run.yaml", "config.yaml")
MADE_UP += ("checkpoints", "site", "inputs", "reward.py")
"""What the reader, a run or the build of the site makes."""


# ---------------------------------------------------------------- the site


def modules() -> dict[str, Path]:
    return {
        ".".join((package, *file.relative_to(ROOT / folder).with_suffix("").parts)).removesuffix(".__init__"): file
        for folder, package in (("jaxrl", "jaxrl"), ("sharding", "jaxrl.sharding"), ("kernels", "jaxrl.kernels"))
        for file in (ROOT / folder).rglob("*.py")
    }


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path):
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


# ---------------------------------------------------------------- what the pages name


def tree() -> frozenset[str]:
    found = {path.name for path in ROOT.glob("*.*")}
    for folder in FOLDERS:
        found |= {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*")} | {folder}
    return frozenset(found)


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
    """Paths that a page names and that do not exist; a path may leave out its first folders (`rounds/round.py`)."""
    return sorted(
        name for name in named_paths(text) if not any(file == name or file.endswith(f"/{name}") for file in files)
    )


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
    assert missing_options(text) == []
    assert missing_links(page, text) == []
