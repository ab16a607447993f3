"""Pages and docstrings stay in plain English: short sentences, none of the phrases that readers stumbled over."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("docs/mechanisms/*.md"),
    *ROOT.glob("docs/recipes/*.md"),
]
MODULES = [file for folder in ("jaxrl", "sharding", "kernels") for file in (ROOT / folder).rglob("*.py")]
MAX_WORDS = 30
PHRASES = re.compile(
    r"\b(goes on|go on with|(is|are) told|told of|handed|what it has|those of the|comes to|so many|looked after)\b",
    re.I,
)


def sentences(page: str) -> Iterator[str]:
    """A table's cells and a list's items are sentences of their own; code is none."""
    page = re.sub(r"^( *)(```|~~~).*?^\1\2", "\n", page, flags=re.M | re.S)
    page = re.sub(r"^( *#.*|\|[-: |]+\|| {4,}.*)$", "\n", page, flags=re.M)
    page = re.sub(r"^ *(- |\d+\. |\|)", "\n\n", page, flags=re.M)
    for block in re.split(r"\n\s*\n| \| ", page):
        yield from re.split(r"(?<=[.;:?!])[)*]* (?=\S)", " ".join(block.split()))


def words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page(path: Path):
    found = list(sentences(path.read_text(encoding="utf-8")))
    assert not [each for each in found if words(each) > MAX_WORDS]
    assert not [each for each in found if PHRASES.search(each)]


def test_docstrings():
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {phrase[0]}"
        for file in MODULES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, kinds) and (phrase := PHRASES.search(ast.get_docstring(node) or ""))
    ]
    assert not found


def test_what_is_found():
    page = "One two. Three (four).\n\n- five\n- six seven\n\n| a b | c |\n"
    assert [words(each) for each in sentences(page) if each] == [2, 2, 1, 2, 2, 1]
    assert PHRASES.search("The rule is told.")
    assert not PHRASES.search("The rule resumes.")
