"""What a process was given and what it runs on, as texts by name, to be compared with other processes'.

Everything from which two processes would compile different programs, or go different ways between two of them: options,
versions, the source of this package, the contents of the files that options name, jax's settings and the variables that
change what XLA and the collectives compute, and the devices. What is a host's own is left out: where its files lie, how
it reaches the others, its compilation cache.

Files count by content. Data and Python files are hashed whole. Of a file of more than `WHOLE_BYTES` in a model's folder
only the size and samples are: the first 8 MiB (a safetensors header, or GGUF's), the last MiB and `NUM_SAMPLES` ranges
between them. That finds another model, another training step of it, and a file that was cut off; a single changed byte
it may miss. What a custom reward file imports besides is not looked at.
"""

from __future__ import annotations

import copy
import hashlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

import jaxrl
from jaxrl.config import Config, to_mapping
from jaxrl.config.mapping import flatten
from jaxrl.data.hub import data_paths, data_set_name, hub_name, used_files
from jaxrl.models.loading import RANDOM, resolve_path
from jaxrl.record.run_dir import versions
from jaxrl.runtime.hosts.environment import COUNT_FLAG, FLAGS
from jaxrl.schema.declared import declared, walk
from jaxrl.sharding.mesh import platform_of

WHOLE_BYTES = 2**26
NUM_SAMPLES = 64
_HEAD_BYTES, _TAIL_BYTES, _SAMPLE_BYTES = 2**23, 2**20, 2**18
_MOST_FILES = 64  # of a folder that has a fact for each
_MODELS = ("model.path", "reward.judge.model")
_OWN_OPTIONS = (
    *("hosts.coordinator", "hosts.address", "trainer.run_dir", "trainer.compilation_cache_dir", "data.cache_dir"),
)
_SETTINGS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable"),
    *("jax_use_shardy_partitioner", "jax_disable_most_optimizations", "jax_disable_jit", "jax_debug_nans"),
)
_VARIABLES = (
    *(FLAGS, "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS"),
    *("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE"),
)
_OWN_FLAGS = ("--xla_dump", COUNT_FLAG, "--xla_gpu_per_fusion_autotune_cache_dir")


def fingerprint(config: Config, devices: Sequence[Any]) -> dict[str, str]:
    """The facts by name, those first that explain others.

    Args:
      devices: of this process.
    """
    return (
        _versions()
        | {"the source of jaxrl": _source()}
        | {f"the option {name}": value for name, value in _options(config).items()}
        | _contents(config)
        | {f"the setting {name}": str(getattr(jax.config, name, None)) for name in _SETTINGS}
        | {f"the variable {name}": _flags(os.environ.get(name, "")) for name in _VARIABLES}
        | {
            "the kind of devices": f"{platform_of(devices[0])} {devices[0].device_kind}",
            "the platform's version": " ".join(devices[0].client.platform_version.split()),
        }
    )


def _versions() -> dict[str, str]:
    found = versions() | {"jaxrl": jaxrl.__version__, "python": ".".join(platform.python_version_tuple()[:2])}
    return {f"the version of {name}": version for name, version in found.items()}


def _source() -> str:
    """Of every Python file of the package, wherever its links lead."""
    root = Path(jaxrl.__file__).parent
    found = []
    for folder, _, names in os.walk(root, followlinks=True):
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    digest = hashlib.sha256()
    for file in sorted(found, key=lambda file: file.relative_to(root).parts):
        digest.update(f"{file.relative_to(root).as_posix()}\0{_hash(file)}\0".encode())
    return digest.hexdigest()[:16]


def _flags(text: str) -> str:
    """A variable's flags in alphabetical order, without those that say where something lies."""
    return " ".join(sorted(each for each in text.split() if not each.startswith(_OWN_FLAGS)))


def _options(config: Config) -> dict[str, str]:
    """Every option of a real run by its path, paths of files left out."""
    values = copy.deepcopy(to_mapping(config))
    del values["simulate"]
    for option, holder, name, _ in _paths(values):
        if option not in _OWN_OPTIONS:
            holder[name] = ""
    flat = flatten(values)
    return {name: repr(value) for name, value in flat.items() if name not in _OWN_OPTIONS}


def _paths(values: dict[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
    """Every path in a configuration's values: the option, what holds it and under which name, and the path."""
    for option, found in walk(Config):
        section, _, name = option.rpartition(".")
        if option.startswith("simulate."):
            continue
        holder = values
        for part in filter(None, section.split(".")):
            holder = holder[part]
        if found.names in ("file", "folder"):
            if isinstance(holder[name], list):
                for i, path in enumerate(holder[name]):
                    yield f"{option}[{i}]", holder[name], i, path
            elif holder[name]:
                yield option, holder, name, holder[name]
        elif found.named_section is not None:
            for key, inner in holder[name].items():
                for field, each in declared(found.named_section).items():
                    if each.names in ("file", "folder") and inner[field]:
                        yield f"{option}.{key}.{field}", inner, field, inner[field]


def _contents(config: Config) -> dict[str, str]:
    """A hash of each file that an option names, and of each in a folder that one names."""
    files: dict[str, tuple[Path, bool]] = {}
    many: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    for option, _, _, text in _paths(copy.deepcopy(to_mapping(config))):
        name = f"the content of {option}"
        if option.startswith("data.") and (on_hub := data_set_name(text)) is not None:
            files |= {f"{name}/{file.name}": (file, False) for file in data_paths(on_hub, option)}
            continue
        is_model, random_init = option in _MODELS, config.model.random_init and option == "model.path"
        found = resolve_path(text, option, weights=not random_init) if is_model else os.path.expanduser(text)
        path = Path(found.removeprefix(RANDOM))
        if path.is_dir():
            # the cache of the Hub may have more of a model here than there
            inside = used_files(path) if is_model and hub_name(text.removeprefix(RANDOM)) else _files_in(path)
            files |= {f"{name}/{file.relative_to(path).as_posix()}": (file, True) for file in inside}
            if len(inside) > _MOST_FILES:
                many[name] = [f"{name}/{file.relative_to(path).as_posix()}" for file in inside]
        elif path.is_file():
            files[name] = path, path.suffix == ".gguf"
        else:
            missing[name] = "not there"
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        hashes = dict(zip(files, pool.map(lambda each: _described(*each), files.values()), strict=True))
    for name, parts in many.items():
        hashed = "\0".join(f"{part}\0{hashes.pop(part)}" for part in parts)
        missing[name] = f"{hashlib.sha256(hashed.encode()).hexdigest()[:16]} of {len(parts)} files"
    return hashes | missing


def _files_in(folder: Path) -> list[Path]:
    """The files of a folder in order, hidden ones left out."""
    found = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(file for file in found if file.is_file())


def _described(file: Path, is_model: bool) -> str:
    size = file.stat().st_size
    sampled = is_model and size > WHOLE_BYTES
    return f"{(_sampled_hash if sampled else _hash)(file)[:16]} ({size:,} bytes)"


def _hash(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sampled_hash(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8))
    step = (size - _HEAD_BYTES - _TAIL_BYTES) // NUM_SAMPLES
    ranges = [(0, _HEAD_BYTES), *((_HEAD_BYTES + i * step, _SAMPLE_BYTES) for i in range(NUM_SAMPLES))]
    with open(file, "rb") as opened:
        for start, length in (*ranges, (size - _TAIL_BYTES, _TAIL_BYTES)):
            opened.seek(start)
            digest.update(opened.read(length))
    return digest.hexdigest()


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """(mine, theirs) of the facts that are not the same, in order; a fact that one side lacks is `not there`."""
    names = list(dict.fromkeys((*theirs, *mine)))
    found = {name: (mine.get(name, "not there"), theirs.get(name, "not there")) for name in names}
    return {name: values for name, values in found.items() if values[0] != values[1]}
