"""What a decoder looks like: `ModelConfig`, read from and written as a Hugging Face `config.json`.

Three families share one decoder: Llama (also SmolLM2 and the like), Qwen2 (biases on q, k and v) and Qwen3 (norms on q
and k). Anything that the decoder does not compute (biases elsewhere, a sliding window that is switched on, another
activation, another kind of rope) is refused when the file is read, never ignored.

Rope scaling: linear; llama3 (Llama 3.1 model card); yarn (Peng et al., 2023, arXiv:2309.00071).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, cast, get_args

from jaxrl.data.fit import token_ids
from jaxrl.models.weights import leaves, weights

Family = Literal["llama", "qwen2", "qwen3"]
ARCHITECTURES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Defaults for what a family's config.json leaves out.
_DEFAULT_EPS = 1e-6
_DEFAULT_THETA = 10_000.0
_DEFAULT_MAX_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
_DEFAULT_HEAD_DIM = {"qwen3": 128}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched to contexts longer than those seen in pretraining.

    `attention_factor` multiplies cos and sin (yarn only); it is resolved when a file is read, so that `mscale` and its
    kin need no fields here.
    """

    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def to_hf(self) -> dict[str, Any]:
        """The `rope_scaling` entry of config.json, in the words of transformers."""
        names: dict[str, tuple[str, ...]] = {
            "none": (),
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": (
                "factor",
                "original_max_position_embeddings",
                "beta_fast",
                "beta_slow",
                "attention_factor",
                "truncate",
            ),
        }
        kind = "default" if self.kind == "none" else self.kind
        return {"rope_type": kind} | {name: getattr(self, name) for name in names[self.kind]}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of a decoder. Hashable, so that compiled functions can be cached by it.

    Example::

        config = ModelConfig(
            family="llama", vocab_size=128, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
            num_kv_heads=2, head_dim=16,
        )
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = _DEFAULT_THETA
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rms_norm_eps: float = _DEFAULT_EPS
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even: rope rotates pairs")

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face folder (config.json and, where there is one, generation_config.json) or a dict."""
        if isinstance(source, Mapping):
            return _Reader(source, "config").read(generation={})
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        generation_path = path.with_name("generation_config.json")
        generation = read_json(generation_path) if generation_path.exists() else {}
        return _Reader(read_json(path), str(path)).read(generation)

    def to_hf(self) -> dict[str, Any]:
        """The content of config.json, readable by transformers 4 and 5."""
        if (self.qkv_bias, self.qk_norm) != (self.family == "qwen2", self.family == "qwen3"):
            raise ValueError(
                f"a {self.family} model with qkv_bias={self.qkv_bias} and qk_norm={self.qk_norm} has no Hugging Face "
                "name: qkv_bias belongs to qwen2 and qk_norm to qwen3"
            )
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        rope = self.rope_scaling.to_hf()
        out = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling.kind == "none" else rope,
            "rope_parameters": {"rope_theta": self.rope_theta, **rope},
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": 0.02,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if eos and len(eos) == 1 else eos,
        }
        if self.family != "llama":
            out["use_sliding_window"] = False
        if self.family != "qwen2":
            out["attention_bias"] = False
        return out

    @property
    def max_positions(self) -> int:
        """The longest sequence that the model was made for, prompt and response together, rope scaling included.

        Linear scaling multiplies `max_position_embeddings`, yarn the context that it started from (files of yarn models
        give the stretched length there, or leave the old one); llama3 is part of the number already.
        """
        scaling, given = self.rope_scaling, self.max_position_embeddings
        match scaling.kind:
            case "linear":
                return max(given, round(given * scaling.factor))
            case "yarn":
                return max(given, round(scaling.original_max_position_embeddings * scaling.factor))
            case _:
                return given

    def weights(self) -> dict[str, Any]:
        """The table of weights (`jaxrl.models.weights`)."""
        return weights(self)

    def num_params(self) -> int:
        """How many numbers the weights hold; tied embeddings count once."""
        return sum(math.prod(weight.shape) for weight in leaves(self.weights()))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError with one sentence otherwise."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; a model folder needs config.json") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


class _Reader:
    """Reads one config.json; keeps the file's name for messages."""

    def __init__(self, raw: Mapping[str, Any], file: str) -> None:
        self.raw = raw
        self.file = file

    def refuse(self, what: str, supported: str) -> NoReturn:
        raise ValueError(f"{self.file}: {what} is not supported; {supported}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.file}: {name} ({value!r}) must be a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{self.file}: {name} ({value!r}) must be a positive number")
        return float(value)

    def family(self) -> Family:
        named = self.raw.get("architectures") or []
        kind = self.raw.get("model_type")
        family = {name: kind for kind, name in ARCHITECTURES.items()}.get(named[0]) if named else kind
        if family not in get_args(Family):
            value = f"architectures {named!r}" if named else f"model_type {kind!r}"
            self.refuse(value, f"supported are {', '.join(ARCHITECTURES.values())}")
        return cast(Family, family)

    def check(self, family: Family) -> None:
        """Refuse what the decoder would otherwise silently leave out."""
        raw = self.raw
        if (act := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
            self.refuse(f"hidden_act {act!r}", "the MLP's activation must be 'silu'")
        if raw.get("attention_bias") and family != "qwen2":
            self.refuse(f"attention_bias true with model_type {family!r}", "only qwen2 has biases, on q, k and v")
        if raw.get("mlp_bias"):
            self.refuse("mlp_bias true", "the MLP must have no biases")
        if "quantization_config" in raw:
            self.refuse("quantization_config", "weights must be float32, float16 or bfloat16 (or use a GGUF file)")
        window = raw.get("sliding_window")
        if family != "llama" and raw.get("use_sliding_window") and window is not None:
            first, last = raw.get("max_window_layers", 28), self.integer("num_hidden_layers", 32)
            kinds = raw.get("layer_types")
            active = "sliding_attention" in kinds if kinds else first < last
            if active:
                self.refuse(f"use_sliding_window true (sliding_window {window})", "attention must be full everywhere")

    def rope(self, max_position_embeddings: int) -> tuple[float, RopeScaling]:
        """(theta, scaling) from `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`."""
        for name in ("rope_parameters", "rope_scaling"):
            if not isinstance(self.raw.get(name) or {}, Mapping):
                self.refuse(f"{name} {self.raw[name]!r}", "it must be an object")
        rope: dict[str, Any] = {**(self.raw.get("rope_scaling") or {}), **(self.raw.get("rope_parameters") or {})}
        reader = _Reader({"rope_theta": self.raw.get("rope_theta")} | rope, self.file)
        theta = reader.number("rope_theta", _DEFAULT_THETA)
        for partial in (rope.get("partial_rotary_factor"), self.raw.get("partial_rotary_factor")):
            if partial not in (None, 1, 1.0):
                self.refuse(f"partial_rotary_factor {partial}", "rope must rotate the whole head")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return theta, RopeScaling()
        if kind not in ("linear", "llama3", "yarn"):
            self.refuse(f"rope_type {kind!r}", "supported are 'default', 'linear', 'llama3' and 'yarn'")
        original = reader.integer("original_max_position_embeddings", max_position_embeddings)
        if kind == "yarn" and rope.get("factor") is None:
            rope["factor"] = max_position_embeddings / original
        if rope.get("factor") is None:
            raise ValueError(f"{self.file}: rope scaling {kind!r} needs a factor")
        factor = reader.number("factor", rope["factor"])
        if kind == "linear":
            return theta, RopeScaling("linear", factor)
        if kind == "llama3":
            low, high = reader.number("low_freq_factor", 1.0), reader.number("high_freq_factor", 4.0)
            return theta, RopeScaling("llama3", factor, original, low, high)
        return theta, RopeScaling(
            "yarn",
            factor,
            original,
            beta_fast=reader.number("beta_fast", 32.0),
            beta_slow=reader.number("beta_slow", 1.0),
            attention_factor=reader.number("attention_factor", yarn_attention_factor(factor, rope)),
            truncate=bool(rope.get("truncate", True)),
        )

    def read(self, generation: Mapping[str, Any]) -> ModelConfig:
        family = self.family()
        self.check(family)
        heads = self.integer("num_attention_heads", 32)
        hidden = self.integer("hidden_size")
        max_positions = self.integer("max_position_embeddings", _DEFAULT_MAX_POSITIONS[family])
        theta, scaling = self.rope(max_positions)
        eos = generation.get("eos_token_id")
        eos = self.raw.get("eos_token_id") if eos is None else eos
        bos = token_ids(self.raw.get("bos_token_id"), f"{self.file}: bos_token_id")
        try:
            return ModelConfig(
                family=family,
                vocab_size=self.integer("vocab_size"),
                hidden_size=hidden,
                intermediate_size=self.integer("intermediate_size"),
                num_layers=self.integer("num_hidden_layers"),
                num_heads=heads,
                num_kv_heads=self.integer("num_key_value_heads", heads),
                head_dim=self.integer("head_dim", _DEFAULT_HEAD_DIM.get(family, hidden // heads)),
                rope_theta=theta,
                rope_scaling=scaling,
                rms_norm_eps=self.number("rms_norm_eps", _DEFAULT_EPS),
                tie_word_embeddings=bool(self.raw.get("tie_word_embeddings", False)),
                qkv_bias=family == "qwen2",
                qk_norm=family == "qwen3",
                max_position_embeddings=max_positions,
                bos_token_id=bos[0] if bos else None,
                eos_token_ids=token_ids(eos, f"{self.file}: eos_token_id"),
            )
        except ValueError as error:
            if str(error).startswith(self.file):
                raise
            raise ValueError(f"{self.file}: {error}") from None


def yarn_attention_factor(factor: float, rope: Mapping[str, Any]) -> float:
    """The factor on cos and sin that yarn implies where the file does not give one."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = rope.get("mscale"), rope.get("mscale_all_dim")
    if numerator and denominator:
        return mscale(numerator) / mscale(denominator)
    return mscale(1.0)
