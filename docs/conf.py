"""Sphinx's settings for the site that `scripts/docs.sh` builds from these pages and the docstrings."""

import sys
from pathlib import Path

from pygments.lexers.configs import IniLexer
from sphinx.highlighting import lexers

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]  # `site_parts`, and the working tree's jaxrl rather than another's

project = "jaxrl"
author = "the jaxrl authors"
html_title = "jaxrl"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "site_parts",
]
exclude_patterns = ["**/__pycache__"]

# `single backticks` are names: a link where the name is one of ours, else code
default_role = "py:obj"
add_module_names = False
python_use_unqualified_type_names = True
autodoc_default_options = {"members": True, "ignore-module-all": True}  # each thing once, where it is defined
autodoc_member_order = "bysource"
toc_object_entries = False  # modules are enough for the side bar, and every page would be made twice as slowly
autodoc_typehints_format = "short"
# of optional extras, and of an environment of its own
autodoc_mock_imports = ["jetstream", "openai", "openenv", "verifiers"]
napoleon_numpy_docstring = False
viewcode_follow_imported_members = False  # what is assigned (a union of types) would count as part of `builtins`

myst_heading_anchors = 3

html_theme = "furo"
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "native"
lexers["gin"] = IniLexer()  # Pygments has none of gin's own
