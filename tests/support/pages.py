"""What the pages hold in fences: blocks, and the shell commands of those that a reader types."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "mechanisms").glob("*.md")),
)
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "cluster")
SHELLS = ("bash", "sh", "console")
_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```[ ]*$", re.M | re.S)
_NAME = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Block:
    """One fence.

    Attributes:
      page: its path from the top of the repository.
      line: of the page, where its text begins, from 1.
      language: as the fence names it.
      text: without the fence.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command, as a shell reads it.

    Attributes:
      place: page and line, where it begins.
      text: without its comment; lines that a backslash joins are one.
      words: what the shell makes of it, without the variables in front.
    """

    place: str
    text: str
    words: tuple[str, ...]


def read_blocks(page: str, text: str) -> list[Block]:
    return [
        Block(page, text[: match.start()].count("\n") + 2, match[2].strip(), match[3])
        for match in _FENCE.finditer(text)
    ]


def blocks(*languages: str) -> list[Block]:
    """Of all pages; of these languages, where any is named."""
    found = []
    for path in PAGES:
        found += read_blocks(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    return [block for block in found if not languages or block.language in languages]


def commands_of(block: Block) -> list[Command]:
    """The commands of a block. In a `console` block only what follows a prompt is one."""
    found: list[Command] = []
    for line, text in _logical_lines(block):
        if block.language == "console":
            if not text.startswith("$ "):
                continue
            text = text[2:]
        text = _without_comment(text)
        words = shlex.split(text)
        while words and _NAME.match(words[0]):
            del words[0]
        if words and words[0] != "export":
            found.append(Command(f"{block.page}:{line}", text, tuple(words)))
    return found


def header_block(path: Path) -> Block:
    """The commands of a configuration's header: what stands behind `Command:`, or on a line of its own."""
    lines, taken = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line[1:]
        begins = re.match(r" (?:Command: +| +)(?=(?:jaxrl|python|export|\./scripts/)\S* ?)", text)
        if begins:
            text = re.split(r" {3,}", text[begins.end() :])[0]  # hardware and date follow on the same line
        lines.append(text.rstrip() if begins else text.removeprefix("   ").rstrip() if taken else "")
        whole = "\n".join(lines)
        taken = bool(lines[-1]) and (lines[-1].endswith("\\") or not _closed(whole))
    return Block(path.relative_to(ROOT).as_posix(), 1, "bash", "\n".join(lines) + "\n")


def page_commands() -> list[Command]:
    """Of all pages and all headers, each once."""
    found: dict[str, Command] = {}
    for block in [*blocks(*SHELLS), *map(header_block, CONFIGS)]:
        for command in commands_of(block):
            found.setdefault(" ".join(command.words), command)
    return list(found.values())


def _logical_lines(block: Block) -> Iterator[tuple[int, str]]:
    """(line of the page, text): a backslash at the end or an open quote takes the next line along."""
    held, began = "", 0
    for i, line in enumerate(block.text.splitlines()):
        if not held:
            began = block.line + i
        held += line
        if _without_comment(held).endswith("\\"):
            held = held[:-1]
        elif _closed(held):
            yield began, held
            held = ""
        else:
            held += "\n"
    assert not held, f"{block.place}: a command does not end: {held}"


def _closed(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def _without_comment(text: str) -> str:
    """What stands before a `#` that begins a word outside quotes."""
    quote = ""
    for i, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and (i == 0 or text[i - 1].isspace()):
            return text[:i].rstrip()
    return text.rstrip()
