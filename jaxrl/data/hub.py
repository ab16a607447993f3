"""Models and data sets of the Hugging Face Hub, by their names: `Qwen/Qwen2.5-0.5B-Instruct`, `org/name@revision`, and
`openai/gsm8k:main/train-*.parquet` for files of one.

A name becomes the path of a folder or of files in the Hub's own cache on this machine (`HF_HOME`), through
`huggingface_hub`, an optional package. The cache is used without a request to the network. Missing files are fetched,
of the commit that is in the cache already if there is one, so a branch does not move by itself: `hf download org/name`
moves it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl.config.inputs import one_line

_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*?)(?:@([\w./-]+))?(?::(.+))?", re.ASCII)
_SMALL = (  # of a model: its configuration, tokenizer and chat templates
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja"),
)
_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
_WEIGHTS = (_INDEX, "model*.safetensors")
_PATIENCE_S = 10.0  # for the Hub to answer at all


@dataclass(frozen=True, slots=True)
class HubName:
    """A name of the Hub, in its parts."""

    repository: str  # `org/name`
    revision: str = ""  # a branch, a tag or a commit; empty: `main`
    file: str = ""  # a file in it, or a pattern of files

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "")


def hub_name(text: str) -> HubName | None:
    """The parts of a Hub name. None for any other text, and for a path that begins with a folder of this machine."""
    found = _NAME.fullmatch(text)
    if found is None or Path(text).exists() or Path(found[1]).parent.is_dir():
        return None
    return HubName(found[1], found[2] or "", found[3] or "")


def model_path(name: HubName, option: str, *, weights: bool = False) -> Path:
    """The folder of a model, or its file where the name has one (`.gguf`). With `weights` fetches the weights too,
    not only small files. Raises ValueError, which names the option, if it is not in the cache and cannot be fetched."""
    if name.file:
        folder = _snapshot(name, "model", (name.file,), option, lambda folder: (folder / name.file).is_file())
        if not (folder / name.file).is_file():
            raise ValueError(f"{option}: the model {name} of the Hugging Face Hub has no file {name.file}")
        return folder / name.file
    wanted = _SMALL + _WEIGHTS if weights else _SMALL
    return _snapshot(name, "model", wanted, option, _has_weights if weights else _has_config)


def data_paths(name: HubName, option: str) -> list[Path]:
    """The files of a data set that a name's pattern fits. Raises ValueError if there is none, or if they cannot be
    fetched."""
    if not name.file:
        raise ValueError(
            f"{option}: there is no file {name} on this machine; of a data set of the Hugging Face Hub files must be "
            f"named, as in {name}:train*.parquet"
        )
    fitting = partial(_fitting, pattern=name.file)
    found = fitting(_snapshot(name, "dataset", (name.file,), option, lambda folder: bool(fitting(folder))))
    if not found:
        raise ValueError(f"{option}: no file of the data set {name} fits {name.file}")
    return found


def _fitting(folder: Path, pattern: str) -> list[Path]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return sorted(file for file in files if fnmatch(file.relative_to(folder).as_posix(), pattern))


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _has_weights(folder: Path) -> bool:
    """Whether a model's folder is complete, by its index."""
    if not _has_config(folder):
        return False
    if (folder / _WHOLE).is_file():
        return True
    try:
        files = set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / file).is_file() for file in files)


def _snapshot(name: HubName, kind: str, wanted: Sequence[str], option: str, complete: Callable[[Path], bool]) -> Path:
    """The folder of a repository in the cache, after fetching the files of the wanted patterns that it lacks."""
    try:
        import huggingface_hub as hub
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ModuleNotFoundError:
        raise ValueError(
            f"{option}: there is no {name} on this machine; names of the Hugging Face Hub need: pip install "
            "'jaxrl[hub]'"
        ) from None
    own: dict[str, Any] = {"repo_type": kind, "allow_patterns": list(wanted)}
    commit = name.revision or None
    try:
        cached = Path(hub.snapshot_download(name.repository, revision=commit, local_files_only=True, **own))
        if complete(cached):
            return cached
        commit = cached.name
    except LocalEntryNotFoundError as error:
        there = getattr(error, "snapshot_path", None)  # of a snapshot that lacks files
        commit = Path(there).name if there else commit
    try:
        # tells at once what keeps the Hub away; a download would try again for half a minute
        hub.HfApi().repo_info(name.repository, revision=commit or "main", repo_type=kind, timeout=_PATIENCE_S)
        return Path(hub.snapshot_download(name.repository, revision=commit, **own))
    except Exception as error:  # of the HTTP library behind it, which has changed
        raise ValueError(
            f"{option}: there is no {name} on this machine, and the cache of the Hugging Face Hub (HF_HOME) has not "
            f"all of its files; as a {kind} of the Hub it cannot be had: {one_line(str(error) or type(error).__name__)}"
        ) from None
