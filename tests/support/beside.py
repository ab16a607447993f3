"""transformers, if it is installed: models, tokenizers and chat templates are compared with it."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def without_our_folder() -> Iterator[None]:
    """transformers looks for a package `kernels` on sys.path and would import ours; see kernels/__init__.py."""
    before = list(sys.path)
    sys.path[:] = [entry for entry in before if Path(entry or os.getcwd()).resolve() != ROOT]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.path[:] = before


def import_transformers(*, models: bool = True) -> Any:
    """transformers, or a skip. `models`: not its tokenizers alone, which need no torch."""
    if models:
        pytest.importorskip("torch", reason="torch is not installed: recorded cases stand in")
    with without_our_folder():
        module = pytest.importorskip("transformers", reason="transformers is not installed: recorded cases stand in")
        if models:
            importlib.import_module("transformers.models.auto.modeling_auto")
        of_models = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM") if models else ()
        for name in (*of_models, "AutoTokenizer"):
            getattr(module, name)
    module.utils.logging.set_verbosity_error()
    module.utils.logging.disable_progress_bar()
    return module
