"""Bad inputs of the class "models": GGUF files. `test_models.py` has the rest of the class.

Each is refused with one sentence that names the file, before anything of its size is allocated, and nothing is written.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from refusals import Refusal

Prepare = Callable[[Path], object]


@functools.cache
def gguf_bytes(**metadata: Any) -> bytes:
    """A small GGUF file that is whole but for the metadata given; it has one tensor too few to be a model."""
    with tempfile.TemporaryDirectory() as name:
        writer = GGUFWriter(f"{name}/m.gguf", metadata.pop("architecture", "qwen2"))
        numbers = {
            "context_length": 512, "embedding_length": 32, "feed_forward_length": 48, "block_count": 2,
            "attention.head_count": 4, "attention.head_count_kv": 2,
        } | metadata  # fmt: skip
        for key, each in numbers.items():
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint64}[type(each)]
            add(key if key.startswith("tokenizer") else f"qwen2.{key}", each)
        if "attention.layer_norm_rms_epsilon" not in metadata:
            writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
        writer.add_tensor("token_embd.weight", np.zeros((64, 32), np.float32))
        writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Path(f"{name}/m.gguf").read_bytes()


def gguf(change: Callable[[bytes], bytes] = lambda content: content, **metadata: Any) -> Prepare:
    return lambda folder: (folder / "m.gguf").write_bytes(change(gguf_bytes(**metadata)))


def at(offset: int, number: int, count: int = 8) -> Callable[[bytes], bytes]:
    return lambda content: content[:offset] + number.to_bytes(count, "little") + content[offset + count :]


def after(name: bytes, offset: int, number: int, count: int = 8) -> Callable[[bytes], bytes]:
    """Changes the number that stands `offset` bytes behind a name."""
    return lambda content: at(content.index(name) + len(name) + offset, number, count)(content)


def in_gguf(sentence: str, prepare: Prepare, command: str = "explain-layout") -> Refusal:
    arguments = ("export", "{tmp}/m.gguf", "{tmp}/out") if command == "export" else (command, "--model", "{tmp}/m.gguf")
    return Refusal(arguments, f"{{tmp}}/m.gguf: {sentence}", prepare)


GGUFS = (
    in_gguf("truncated or not a GGUF file (cannot mmap an empty file)", gguf(lambda content: b"")),
    in_gguf("truncated or not a GGUF file (GGUF magic invalid)", gguf(lambda content: b"PK\3\4" + content)),
    in_gguf(
        "truncated or not a GGUF file (Sorry, file appears to be version 7 which we cannot handle)", gguf(at(4, 7, 4))
    ),
    in_gguf(
        "truncated or not a GGUF file (index 0 is out of bounds for axis 0 with size 0)",
        gguf(at(16, 2**63)),  # pairs of metadata
    ),
    in_gguf(
        "truncated or not a GGUF file (np.uint32(99) is not a valid GGUFValueType)",
        gguf(after(b"qwen2.context_length", 0, 99, 4)),
    ),
    in_gguf(
        "truncated or not a GGUF file (cannot reshape array of size 2047 into shape (64,32))",
        gguf(lambda content: content[:8700]),
    ),
    in_gguf(
        "general.architecture 'gemma' is not supported; use llama, qwen2, qwen3, olmo2, smollm3, phi3, "
        "granite, gemma2, gemma3, qwen3moe, gpt-oss, olmoe, granitemoe",
        gguf(architecture="gemma"),
    ),
    in_gguf("metadata qwen2.block_count ('two') must be a whole number from 1 to 10000", gguf(block_count="two")),
    in_gguf(
        "metadata qwen2.block_count (1000000000000000000) must be a whole number from 1 to 10000",
        gguf(block_count=10**18),
    ),
    in_gguf(
        "metadata qwen2.attention.layer_norm_rms_epsilon (nan) must be a number above 0, and at most 1",
        gguf(**{"attention.layer_norm_rms_epsilon": float("nan")}),
    ),
    in_gguf(
        "metadata tokenizer.ggml.eos_token_id (64) must be a whole number from 0 to 63",
        gguf(**{"tokenizer.ggml.eos_token_id": 64}),
    ),
    in_gguf("tensor blk.0.attn_norm.weight of shape (32,) is missing", gguf(), "export"),
)


def test_refused(refused: Callable[[Iterable[Refusal]], None]):
    refused(GGUFS)
