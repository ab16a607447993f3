"""What the site shows that is written nowhere else: the API of each room, and the options.

Two directives. `.. room:: jaxrl.training` documents every module of a package, found by looking, so that a module
that is added or renamed needs no edit here. `.. options::` lists every option of the configuration. Besides, links are
mended: a link to one of our Python files leads to its module's part of the API pages, and links of an included page
count from where that page stands.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from jaxrl.config.reference import OptionDoc, options, sections

ROOT = Path(__file__).resolve().parents[1]


def modules_of(package: str) -> list[str]:
    """A package and all that is in it, or a single module."""
    path = ROOT.joinpath(*package.split("."))
    if not path.is_dir():
        return [package]
    names = []
    for file in sorted(path.rglob("*.py")):
        parts = file.relative_to(path).with_suffix("").parts
        names.append(".".join((package, *parts)).removesuffix(".__init__"))
    return sorted(names)


class Room(SphinxDirective):
    """`.. room:: jaxrl.training`: a section for each module, with its docstring and all that is public in it."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for module in modules_of(self.arguments[0]):
            lines += [f"``{module}``", "-" * (len(module) + 4), "", f".. automodule:: {module}", ""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


class Options(SphinxDirective):
    """`.. options::`: a section for each part of the configuration, with its docstring and a table of its options."""

    def run(self) -> list[nodes.Node]:
        rows: dict[str, list[OptionDoc]] = {}
        for option in options():
            rows.setdefault(option.path.rpartition(".")[0], []).append(option)
        found: list[nodes.Node] = []
        for name, text in sections().items():
            section = nodes.section("", nodes.title(name, name), ids=[name.replace(".", "-")], names=[name])
            self.state.document.note_explicit_target(section)
            section += self.parse_text_to_nodes(text)
            if name in rows:
                section += self._table(rows[name])
            found.append(section)
        return found

    def _table(self, options: list[OptionDoc]) -> nodes.table:
        """One row for each option, which can be linked to by the option's name: `#rollout-n`."""
        group = nodes.tgroup(cols=3)
        group += [nodes.colspec(colwidth=width) for width in (30, 20, 50)]
        titles = [nodes.entry("", nodes.paragraph(title, title)) for title in ("option", "default", "meaning")]
        group += nodes.thead("", nodes.row("", *titles))
        body = nodes.tbody()
        for option in options:
            default = option.default if isinstance(option.default, str) else json.dumps(option.default)
            if option.default in ("", [], {}):
                default = "empty"
            most = f"at most {option.cap}" if option.cap else ""
            allowed = ", ".join(filter(None, (option.type, option.bounds, most)))
            body += nodes.row(
                "",
                nodes.entry("", nodes.paragraph("", "", nodes.literal(option.path, option.path))),
                nodes.entry("", nodes.paragraph("", "", nodes.literal(default, default))),
                nodes.entry(
                    "",
                    *self.parse_text_to_nodes(option.doc),
                    nodes.paragraph("", "", nodes.emphasis(allowed, allowed)),
                ),
                ids=[nodes.make_id(option.path)],
            )
        group += body
        return nodes.table("", group)


def link_modules(app: Sphinx, doctree: nodes.document) -> None:
    """Links to Python files of the package lead to the module's API page, not to a copy of the file."""
    folder = Path(app.srcdir)
    for node in list(doctree.findall(addnodes.download_reference)):
        path = (folder / Path(app.env.docname).parent / node["reftarget"]).resolve()
        module = module_of(path)
        if module is None:
            continue
        link = addnodes.pending_xref(
            "", refdomain="py", reftype="mod", reftarget=module, refdoc=app.env.docname, refwarn=True, refexplicit=True
        )
        link += node.children
        node.replace_self(link)


def relink(app: Sphinx, path: Path, docname: str, content: list[str]) -> None:
    """README, CHANGELOG and CONTRIBUTING are included from the top level: their links count from there."""
    if path.parent == Path(".."):
        text = re.sub(r"\]\((?!https?:|#)(docs/)?", lambda link: "](" if link[1] else "](../", content[0])
        content[0] = re.sub(r"\]\(\.\./(CHANGELOG|CONTRIBUTING)\.md", lambda link: f"]({link[1].lower()}.md", text)


def look_up_exactly(app: Sphinx, doctree: nodes.document) -> None:
    """Names in signatures are whole: a search among the last parts of all names finds wrong ones, and takes long."""
    for node in doctree.findall(addnodes.pending_xref):
        if node.get("refspecific") is False:
            del node["refspecific"]


def is_unwanted(app: Sphinx, what: str, name: str, thing: object, skip: bool, options: object) -> bool | None:
    """Fields of named tuples stand in their class's docstring; Python documents each as "Alias for field number 0"."""
    return True if (getattr(thing, "__doc__", None) or "").startswith("Alias for field number") else None


def keep_as_text(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """The docstring of a constant or property is prose; napoleon takes what stands before its first colon for a type,
    unless the first line has none. An escaped space shows as nothing."""
    if what in ("data", "attribute", "property"):
        lines.insert(0, "\\ ")


def readable_defaults(
    app: Sphinx, what: str, name: str, thing: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """A dataclass's `<factory>` is no Python, and the whole signature would be shown as it is written inside Sphinx."""
    return (signature and signature.replace("<factory>", "...")), returns


def module_of(path: Path) -> str | None:
    """The name of the module that a file of the package holds; sharding and kernels stand at the top level as well."""
    if path.suffix != ".py" or not path.is_relative_to(ROOT):
        return None
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in ("sharding", "kernels"):
        parts = ("jaxrl", *parts)
    return ".".join(parts).removesuffix(".__init__") if parts[0] == "jaxrl" else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("room", Room)
    app.add_directive("options", Options)
    app.connect("include-read", relink)
    app.connect("doctree-read", link_modules)
    app.connect("doctree-read", look_up_exactly)
    app.connect("autodoc-skip-member", is_unwanted)
    app.connect("autodoc-process-docstring", keep_as_text, priority=400)  # before napoleon's
    app.connect("autodoc-process-signature", readable_defaults)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
