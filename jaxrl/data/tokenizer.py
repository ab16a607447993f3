"""Text to token ids and back, and chat templates, on the `tokenizers` library and jinja2 (no transformers at run time).

Reads Hugging Face folders (tokenizer.json, tokenizer_config.json, chat_template.jinja) and GGUF files with a byte-level
BPE. A GGUF file names its pre-tokenizer but does not hold its rules; the rules below are those of the models'
tokenizer.json (SmolLM, Qwen2, Llama 3, GPT-2) and, for `default`, llama.cpp's own (src/llama-vocab.cpp).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from jaxrl.data.gguf_file import open_gguf

END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
"""Special tokens that end a turn or a text in one family or another; those that a vocabulary has stop generation."""

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
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


class Tokenizer:
    """A byte-level tokenizer with its special tokens and chat template. Can be pickled.

    Example::

        tokenizer = Tokenizer.from_path("SmolLM2-135M-Instruct.Q4_1.gguf")
        text = tokenizer.apply_chat_template([{"role": "user", "content": "2+2="}])
        token_ids = tokenizer.encode(text)

    Attributes:
      special_tokens: `bos_token`, `eos_token`, `pad_token`, `unk_token` where there is one, as text.
      eos_token_ids: ids that end a response: the eos token and what generation_config.json adds.
      chat_template: jinja source, or None.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
        eos_token_ids: Iterable[int] = (),
        config: Mapping[str, Any] | None = None,
        name: str = "tokenizer",
    ) -> None:
        self._fast = fast
        self._config = dict(config or {})
        self._name = name
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        eos = [self._id("eos_token"), *eos_token_ids]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in eos if i is not None))

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder or a GGUF file."""
        path = Path(path)
        if path.suffix == ".gguf":
            return _from_gguf(path)
        if path.is_dir():
            return _from_folder(path)
        raise ValueError(f"{path}: a tokenizer must be a Hugging Face folder or a .gguf file")

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids; special tokens written in the text always become their ids."""
        return self._fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become replacement characters."""
        return self._fast.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The rendered conversation. `variables` reach the template (`tools`, `enable_thinking` ...)."""
        if self.chat_template is None:
            raise ValueError(
                f"{self._name}: has no chat template; give prompts as text (data.apply_chat_template=false)"
            )
        context = {"tools": None, "documents": None, **self.special_tokens, **variables}
        try:
            return _compiled(self.chat_template).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **context,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"{self._name}: the chat template refuses these messages: {error}") from None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """`eos_token_ids` and the vocabulary's other tokens that end a turn or a text."""
        special = {token.content for token in self._fast.get_added_tokens_decoder().values() if token.special}
        ends = (self._fast.token_to_id(token) for token in END_TOKENS if token in special)
        return tuple(dict.fromkeys([*self.eos_token_ids, *(i for i in ends if i is not None)]))

    @property
    def bos_id(self) -> int | None:
        """The id of the token that begins a text, if there is one."""
        return self._id("bos_token")

    @property
    def pad_id(self) -> int:
        """The id that fills up rows: the pad token, or else the first eos, or else 0."""
        pad = self._id("pad_token")
        return pad if pad is not None else (*self.eos_token_ids, 0)[0]

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id (the model's vocabulary may be padded beyond it)."""
        return max(self._fast.get_vocab(with_added_tokens=True).values()) + 1

    def save(self, folder: str | Path) -> list[Path]:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; returns the files."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
        self._fast.save(str(files[0]))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self._config,
            **self.special_tokens,
        }
        config.pop("chat_template", None)
        files[1].write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if self.chat_template is not None:
            files.append(folder / "chat_template.jinja")
            files[2].write_text(self.chat_template, encoding="utf-8")
        return files

    def _id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._fast.token_to_id(token)


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training masks; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """A chat template, compiled in the jinja environment that templates on the Hub expect."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # jinja2's own filter escapes HTML, which would change what the model reads.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(source)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ValueError(f"{folder}: holds no tokenizer.json, which is the one tokenizer format that is read")
    try:
        fast = FastTokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file}: not a tokenizer of the tokenizers library ({error})") from None
    fast.no_padding()
    fast.no_truncation()
    config = _read_json(folder / "tokenizer_config.json")
    tokens = {**_read_json(folder / "special_tokens_map.json"), **config}
    special: dict[str, str] = {}
    for name in _SPECIAL:
        token = tokens.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            special[name] = token
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    if (jinja_file := folder / "chat_template.jinja").exists():
        template = jinja_file.read_text(encoding="utf-8")
    eos = _read_json(folder / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = _read_json(folder / "config.json").get("eos_token_id")
    eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return Tokenizer(
        fast,
        special_tokens=special,
        chat_template=template,
        eos_token_ids=eos_ids,
        config=config,
        name=str(folder),
    )


def _from_gguf(file: Path) -> Tokenizer:
    reader = open_gguf(file)

    def get(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    if (model := get("tokenizer.ggml.model")) != "gpt2":
        raise ValueError(
            f"{file}: tokenizer.ggml.model {model!r} is not supported; supported is 'gpt2' (byte-level BPE), or use "
            "the model's Hugging Face folder"
        )
    tokens, merges = get("tokenizer.ggml.tokens", []), get("tokenizer.ggml.merges", [])
    kinds = get("tokenizer.ggml.token_type", [1] * len(tokens))
    special = {}
    for name, key in zip(_SPECIAL, ("bos", "eos", "padding", "unknown"), strict=True):
        if (index := get(f"tokenizer.ggml.{key}_token_id")) is not None:
            special[name] = tokens[index]
    pre = get("tokenizer.ggml.pre", "default")
    add_bos = get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    bos = special.get("bos_token") if add_bos else None
    fast = _byte_level_bpe(tokens, merges, kinds, pre, bos, str(file))
    eot = get("tokenizer.ggml.eot_token_id")
    return Tokenizer(
        fast,
        special_tokens=special,
        chat_template=get("tokenizer.chat_template"),
        eos_token_ids=[] if eot is None else [eot],
        name=str(file),
    )


def _byte_level_bpe(
    tokens: Sequence[str], merges: Sequence[str], kinds: Sequence[int], pre: str, bos: str | None, file: str
) -> FastTokenizer:
    """The tokenizer that a GGUF file describes. `bos`: the token that encoding with special tokens begins with."""
    vocab = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
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
