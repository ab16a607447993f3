"""Damaged model files: whatever is wrong, a load ends at once, with a whole model or with a sentence that names a file.

Random damage from a seed: bits turned, bytes cut off, taken out or doubled, values of JSON and of headers swapped for
wrong ones. `--slow` tries many more.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import decoder
from jaxrl.models.loading import config_of, load_model
from jaxrl.models.safetensors import export_hf

from .conftest import lively, tiny_config
from .test_gguf import write as write_gguf

MAX_S, MAX_GROWN_KIB = 10.0, 300_000
WRONG: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 7, 10**9, 10**18, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e-320, 1e308, 2.5,
    "", "x", "0", "F32", "BF16", "I64", "../elsewhere", "/etc/passwd", "model.safetensors", "yarn", "llama3", "linear",
    [], {}, [1], [0, 0], [-1, 5], [2, 1], ["a"], [[1]], [10**18, 10**18], {"a": 1}, {"rope_type": "yarn"},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}, {"rope_type": "linear", "factor": -2},
)  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in a folder with one file, in a folder with an index, and in a GGUF file."""
    found = {kind: tmp_path_factory.mktemp(kind) for kind in ("single", "indexed", "gguf")}
    config = tiny_config("qwen2", "yarn", hidden_size=32, num_heads=4, num_kv_heads=2, intermediate_size=32)
    params = lively(config)
    export_hf(params, config, found["single"], dtype=jnp.float32)
    export_hf(params, config, found["indexed"], dtype=jnp.bfloat16, max_file_bytes=15_000)
    write_gguf(found["gguf"] / "m.gguf", config, params)
    return found


def turn_bits(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    # headers are short beside the tensors, and matter more
    end = len(content) if chance.random() < 0.3 else min(len(content), 3000)
    for _ in range(chance.choice([1, 1, 2, 8])):
        changed[chance.randrange(end)] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.choice([0, 1, 7, 8, 9, chance.randrange(len(content)), len(content) - 1])]


def splice(content: bytes, chance: random.Random) -> bytes:
    at, count = chance.randrange(min(len(content), 3000)), chance.choice([1, 4, 8, 100])
    return content[:at] + chance.choice([b"", content[at : at + count] * 2, b"\0" * count]) + content[at + count :]


def large_number(content: bytes, chance: random.Random) -> bytes:
    """Eight bytes of a binary header become a huge or a small number."""
    at = chance.choice([0, 4, 8, 16, chance.randrange(min(len(content) - 8, 3000))])
    value = chance.choice([0, 1, 255, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1])
    return content[:at] + value.to_bytes(8, "little") + content[at + 8 :]


def swap(value: Any, chance: random.Random) -> Any:
    """The JSON value with one of its parts, at any depth, replaced, removed or under another name."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.1:
        return chance.choice(WRONG)
    if isinstance(value, list):
        at = chance.randrange(len(value))
        return [*value[:at], *([] if chance.random() < 0.2 else [swap(value[at], chance)]), *value[at + 1 :]]
    key = chance.choice(list(value))
    rest = {name: each for name, each in value.items() if name != key}
    if (kind := chance.random()) < 0.1:
        return rest
    return rest | ({f"{key}s": value[key]} if kind < 0.2 else {key: swap(value[key], chance)})


def swap_json(content: bytes, chance: random.Random) -> bytes:
    text = json.dumps(swap(json.loads(content), chance))
    if chance.random() < 0.1:
        text = chance.choice([text.replace("{", '{"vocab_size": 1, ', 1), "[" * 100_000, "\ufeff" + text, text + "}"])
    return text.encode(chance.choice(["utf-8"] * 9 + ["utf-16"]))


def swap_header(content: bytes, chance: random.Random) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = swap_json(content[8 : 8 + length], chance)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def damage(folder: Path, chance: random.Random) -> str:
    """Changes one file of a model's folder; says what was done."""
    file = chance.choice(sorted(folder.iterdir()))
    kinds: list[Callable[[bytes, random.Random], bytes]] = [turn_bits, cut, splice]
    if file.suffix == ".json":
        kinds += [swap_json] * 6
    else:
        kinds += [large_number]
        kinds += [swap_header] * 4 if file.suffix == ".safetensors" else [turn_bits, large_number, large_number]
    kind = chance.choice(kinds)
    file.write_bytes(kind(file.read_bytes(), chance))
    return f"{file.name}, {kind.__name__}"


def outcome(folder: Path) -> str:
    """`loaded`, or the sentence of the refusal."""
    source = next(folder.glob("*.gguf"), folder)
    try:
        config, _ = load_model(source)
    except (ValueError, OSError) as error:
        sentence = str(error)
        assert str(folder) in sentence, sentence
        assert "\n" not in sentence
        assert len(sentence) < 600, sentence
        return sentence
    assert config_of(source) == config
    assert np.isfinite(decoder.rope_frequencies(config)).all()
    return "loaded"


def try_damage(kind: str, originals: dict[str, Path], folder: Path, seeds: range) -> list[str]:
    outcomes = []
    for seed in seeds:
        chance = random.Random(f"{kind} {seed}")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(originals[kind], folder)
        done = damage(folder, chance)
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        try:
            outcomes.append(outcome(folder))
        except Exception as error:
            raise AssertionError(f"{kind} {seed} ({done}): {type(error).__name__}: {error}") from error
        assert time.monotonic() - start < MAX_S, f"{kind} {seed} ({done})"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < MAX_GROWN_KIB, f"{kind} {seed} ({done})"
    return outcomes


@pytest.mark.parametrize("kind", ["single", "indexed", "gguf"])
def test_damaged_files_are_refused_by_name_or_load(kind, originals, tmp_path):
    outcomes = try_damage(kind, originals, tmp_path / "model", range(50))
    assert len(set(outcomes)) > 15, "the damage is of many kinds"
