"""Tokenizers from GGUF files: a byte-level BPE, with the rules of the pre-tokenizer that it names.

A GGUF file names its pre-tokenizer but does not hold its rules; the rules below come from the models' tokenizer.json
(SmolLM, Qwen2, Llama 3, GPT-2) and, for `default`, llama.cpp's own (src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from jaxrl.data.chat_template import DEFAULT, ChatTemplate, check_template_name
from jaxrl.data.gguf_file import metadata, open_gguf
from jaxrl.data.tokenizer_files import SPECIAL, TokenizerFiles

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # GGUF token types

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS: dict[str, tuple[str, ...]] = {
    "qwen2": (_WORDS + r"\p{N}" + _REST,),
    "llama-bpe": (_WORDS + r"\p{N}{1,3}" + _REST,),
    "default": (
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ),
}
PRE_TOKENIZERS = ("smollm", "qwen2", "llama-bpe", "gpt-2", "default")


def read_gguf(file: Path) -> TokenizerFiles:
    """The tokenizer of a GGUF file. Raises ValueError for a damaged file, and for an unsupported tokenizer."""
    get = partial(metadata, open_gguf(file), file)
    if (model := get("tokenizer.ggml.model")) != "gpt2":
        raise ValueError(
            f"{file}: tokenizer.ggml.model {model!r} is not supported; supported is 'gpt2' (byte-level BPE), or use "
            "the model's Hugging Face folder"
        )
    tokens, merges = get("tokenizer.ggml.tokens", []), get("tokenizer.ggml.merges", [])
    kinds = get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not tokens or len(kinds) != len(tokens):
        raise ValueError(f"{file}: tokenizer.ggml.tokens and token_type have {len(tokens)} and {len(kinds)} entries")
    special = {}
    for name, key in zip(SPECIAL, ("bos", "eos", "padding", "unknown"), strict=True):
        if (index := _id(get, f"tokenizer.ggml.{key}_token_id", len(tokens), file)) is not None:
            special[name] = tokens[index]
    pre = get("tokenizer.ggml.pre", "default")
    add_bos = get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    bos = special.get("bos_token") if add_bos else None
    fast = _byte_level_bpe(tokens, merges, kinds, pre, bos, str(file))
    eot = _id(get, "tokenizer.ggml.eot_token_id", len(tokens), file)
    return TokenizerFiles(fast, special, str(file), () if eot is None else (eot,), _templates(get, file))


def _templates(get: Callable[..., Any], file: Path) -> dict[str, ChatTemplate]:
    """The default template, and those that `tokenizer.chat_templates` names."""
    keys = {DEFAULT: "tokenizer.chat_template"}
    for name in list(get("tokenizer.chat_templates", [])):
        check_template_name(name, f"{file}: tokenizer.chat_templates")
        keys.setdefault(name, f"tokenizer.chat_template.{name}")
    found: dict[str, ChatTemplate] = {}
    for name, key in keys.items():
        if (template := get(key)) is not None:
            found[name] = ChatTemplate(template, str(file))
    return found


def _id(get: Callable[..., Any], key: str, size: int, file: Path) -> int | None:
    index = get(key)
    if index is not None and (isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < size):
        raise ValueError(f"{file}: {key} must be the id of one of its {size} tokens, found {index!r:.80}")
    return index


def _byte_level_bpe(
    tokens: Sequence[str], merges: Sequence[str], kinds: Sequence[int], pre: str, bos: str | None, file: str
) -> FastTokenizer:
    """The tokenizer. `bos`: the token that begins a text when special tokens are added."""
    vocab = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    try:
        fast = FastTokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file}: tokenizer.ggml.merges do not go with tokenizer.ggml.tokens ({error})") from None
    fast.pre_tokenizer = _pre_tokenizer(pre, file)
    fast.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        fast.normalizer = normalizers.NFC()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(t, special=special, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == kind
        ]
        (fast.add_special_tokens if special else fast.add_tokens)(added)
    if bos is not None:
        fast.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
        )
    return fast


def _pre_tokenizer(pre: str, file: str) -> pre_tokenizers.PreTokenizer:
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        return pre_tokenizers.Sequence(parts)
    if pre in _SPLITS:
        parts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[pre]]
        return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ValueError(
        f"{file}: tokenizer.ggml.pre {pre!r} is not supported; supported are {', '.join(PRE_TOKENIZERS)}, or use the "
        "model's Hugging Face folder"
    )
