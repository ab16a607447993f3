"""What clients send, checked: the bodies of OpenAI's completions and chat completions, and of tokens in, tokens out.

A name that is not listed is refused, and so is a value that would change what is drawn and that this server does not
know: a client is never answered as if it had asked for something else. What changes nothing here (`user`, `metadata`)
is taken and ignored.

Source: OpenAI's API reference; vLLM's names for what it adds (`top_k`, `min_p`, `return_token_ids`,
`chat_template_kwargs`) and its route `/inference/v1/generate`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from jaxrl.types import SamplingParams

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
"""As OpenAI's API has it."""
MIN_TEMPERATURE = 1e-4
MAX_SEED = 2**63 - 1

Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(max_length=1 << 22)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Neutral = Literal[0] | None


class Strict(BaseModel):
    """A mapping with these names and no others."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    """`include_usage`: a last chunk with the number of tokens."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class Sampling(Strict):
    """How to draw, by the names that all routes share."""

    temperature: float | None = Field(default=1.0, ge=0, le=1000)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=0, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(default=0.0, ge=0, lt=1)
    seed: int | None = Field(default=None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOPS)] | None = None
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
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_top(self) -> int:
        """How many of the likeliest tokens are told of each place."""
        return 0

    def params(self, max_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """As the engine takes them. `stop_token_ids`: those of the model."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=self.top_p or 1.0,
            min_p=self.min_p or 0.0,
            max_tokens=max_tokens,
            stop_token_ids=tuple(dict.fromkeys((*(self.stop_token_ids or ()), *stop_token_ids))),
            stop_strings=self.stops,
            top_logprobs=self.num_top,
        )


class Asked(Sampling):
    """What both of OpenAI's routes take."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    # change nothing here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _only_with_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream=true")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


Tokens = Annotated[list[Token], Field(min_length=1)]


class CompletionBody(Asked):
    """`POST /v1/completions`: text, or token ids, or a list of either."""

    prompt: (
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _best_is_all(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must equal n: every response is returned")
        return self

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


class Function(Strict):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class Part(Strict):
    """A piece of a message; text alone."""

    type: Literal["text"]
    text: Text


class Called(BaseModel):
    """A function that the model has called, in an earlier turn."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: str = "{}"


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="ignore")

    id: str | None = None
    type: Literal["function"] = "function"
    function: Called


class Message(BaseModel):
    """A turn of the conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ResponseFormat(Strict):
    """Text alone: what is drawn is not held to a grammar."""

    type: Literal["text"]


class ChatBody(Asked):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=MAX_CHOICES)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Literal[True] | None = None
    modalities: list[Literal["text"]] | None = None

    @property
    def num_top(self) -> int:
        return self.top_logprobs or 0

    @property
    def callable_tools(self) -> list[Tool]:
        """Tools that a response may call."""
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
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None

    @property
    def num_top(self) -> int:
        return self.logprobs or 0


class GenerateBody(Strict):
    """`POST /inference/v1/generate`: token ids in, token ids out."""

    model: str | None = None
    token_ids: Tokens
    sampling_params: GenerateSampling = GenerateSampling()
    request_id: str | None = Field(default=None, max_length=200)
    cache_salt: str | None = None
    priority: Literal[0] | None = None
    stream: Literal[False] | None = None
