"""Clients' requests, checked: the bodies of OpenAI's completions and chat completions, and of tokens in, tokens out.

A name that is not listed is refused, and so is a value that would change what is sampled and that this server does not
know. A body with a million mistakes costs no more than one with a single mistake: lists end at their first wrong item.

Source: OpenAI's API reference; vLLM's names for what it adds (`top_k`, `min_p`, `return_token_ids`,
`chat_template_kwargs`) and its route `/inference/v1/generate`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from jaxrl.data.chat_template import THINKING
from jaxrl.data.tool_calls import arguments_of
from jaxrl.types import SamplingParams

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
"""As OpenAI's API has it."""
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
IGNORED += ("detokenize", "skip_special_tokens", "cache_salt")
"""Names that change nothing here."""
MIN_TEMPERATURE = 1e-4
MAX_SEED = 2**63 - 1

Item = TypeVar("Item")
Many = Annotated[list[Item], Field(fail_fast=True)]
Token = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(max_length=1 << 22)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Neutral = Literal[0] | None


class LenientBody(BaseModel):
    """A mapping; a name whose value is null counts as left out."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _asked_for(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError("Input should be an object")
        known = cls.model_fields if cls.model_config.get("extra") == "forbid" else value
        passed = {*known, *IGNORED}
        unknown = (name for name, each in value.items() if each is not None and name not in passed)
        asked = [*known, *itertools.islice(unknown, 1)]  # one is enough for a refusal
        return {name: value[name] for name in asked if value.get(name) is not None}


class StrictBody(LenientBody):
    """A mapping with these names and no others, but for `IGNORED`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamOptions(StrictBody):
    """`include_usage`: a last chunk with the number of tokens."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class Sampling(StrictBody):
    """How to draw, by the names that all routes share."""

    temperature: float | None = Field(default=1.0, ge=0, le=1000)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=0, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(default=0.0, ge=0, lt=1)
    seed: int | None = Field(default=None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: Stop | Annotated[Many[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[Many[Token], Field(max_length=MAX_STOPS)] | None = None
    n: int | None = Field(default=1, ge=1, le=MAX_CHOICES)
    # of a distribution that is not the model's: known, and not done
    frequency_penalty: Neutral = None
    presence_penalty: Neutral = None
    repetition_penalty: Literal[1] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    @field_validator("temperature")
    @classmethod
    def _not_nearly_zero(cls, value: float | None) -> float | None:
        if value and value < MIN_TEMPERATURE:  # logits over it would be no numbers
            raise ValueError(f"must be 0 (the likeliest token) or at least {MIN_TEMPERATURE}")
        return value

    @property
    def num_top(self) -> int:
        return 0

    def params(self, max_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=self.top_p or 1.0,
            min_p=self.min_p or 0.0,
            max_tokens=max_tokens,
            stop_token_ids=tuple(dict.fromkeys((*(self.stop_token_ids or ()), *stop_token_ids))),
            stop_strings=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            top_logprobs=self.num_top,
        )


class GenerationRequest(Sampling):
    """The fields of both OpenAI routes."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False

    @model_validator(mode="after")
    def _only_with_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream=true")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


Tokens = Annotated[Many[Token], Field(min_length=1, max_length=1 << 20)]


class CompletionBody(GenerationRequest):
    """`POST /v1/completions`: text, or token ids, or a list of either."""

    prompt: (
        Text
        | Tokens
        | Annotated[Many[Text], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[Many[Tokens], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None

    @property
    def num_top(self) -> int:
        return self.logprobs or 0

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return self.prompt  # pyright: ignore[reportReturnType]


class Function(StrictBody):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictBody):
    type: Literal["function"]
    function: Function


class TextPart(StrictBody):
    """A piece of a message; text alone."""

    type: Literal["text"]
    text: Text

    @field_validator("type", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "text":
            raise ValueError("must be 'text': this server takes no images, sound or files")
        return value


Arguments = Annotated[dict[str, Any], BeforeValidator(arguments_of)]


class FunctionCall(LenientBody):
    """A function that the model has called, in an earlier turn. Templates write the arguments as JSON themselves."""

    name: str
    arguments: Arguments = {}


class ToolCall(LenientBody):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(LenientBody):
    """A turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Many[TextPart] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: Text | None = Field(default=None, validation_alias=AliasChoices(*THINKING))
    function_call: None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @property
    def given(self) -> dict[str, Any]:
        """As chat templates take it. They ask what is defined, so what is None is left out."""
        calls = [
            ({} if call.id is None else {"id": call.id}) | {"type": call.type, "function": dict(call.function)}
            for call in self.tool_calls or ()
        ]
        beside = {"name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": calls or None}
        beside[THINKING[0]] = self.reasoning
        found = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        return found | {name: value for name, value in beside.items() if value is not None}


class ResponseFormat(StrictBody):
    """Text alone: what is drawn is not held to a grammar."""

    type: Literal["text"]


class ChatBody(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[Many[Message], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[Many[Tool], Field(max_length=MAX_CHOICES)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Literal[True] | None = None
    modalities: Many[Literal["text"]] | None = None

    @property
    def num_top(self) -> int:
        return self.top_logprobs or 0

    @property
    def callable_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []

    @field_validator("chat_template_kwargs")
    @classmethod
    def _not_the_conversation(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if taken := sorted({"self", "messages", "tools", "add_generation_prompt"} & set(value or ())):
            raise ValueError(f"{taken[0]!r} is none of the template's own variables")
        return value

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs=true")
        return self


class GenerateSampling(Sampling):
    """`sampling_params` of tokens in, tokens out."""

    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def num_top(self) -> int:
        return self.logprobs or 0


class GenerateBody(StrictBody):
    """`POST /inference/v1/generate`: token ids in, token ids out."""

    model: str | None = None
    token_ids: Tokens
    sampling_params: GenerateSampling = GenerateSampling()
    request_id: str | None = Field(default=None, max_length=200)
    priority: Literal[0] | None = None
    stream: Literal[False] | None = None


def first_mistake(error: ValidationError, sent: Any) -> tuple[str, str]:
    """(a place in what was sent, or "", and what is wrong there). Of a union, the alternative that got furthest counts,
    and among those one whose kind is that of what was sent."""

    def found(each: Any) -> tuple[tuple[list[int], bool], str, str]:
        path: list[Any] = []
        value: Any = sent
        for step in each["loc"]:  # names of a union's alternatives are among them
            if isinstance(value, dict) and (step in value or each["type"] == "missing"):
                path, value = [*path, step], value.get(step)
            elif isinstance(value, list) and isinstance(step, int):
                path, value = [*path, step], value[step]
        has_kind = not each["type"].endswith("_type")
        said = each["msg"].removeprefix("Value error, ")
        if path and isinstance(each["input"], str | int | float):
            said += f", found {shortened(each['input'])}"
        progress = [step if isinstance(step, int) else 0 for step in path]
        progress += [len(value)] if each["type"] == "too_long" else []  # its items are right
        return (progress, has_kind), ".".join(map(str, path)), said

    return max(map(found, error.errors(include_url=False, include_context=False)), key=lambda each: each[0])[1:]
