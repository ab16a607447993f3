"""The options `reward.judge.*`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval

from jaxrl.schema.declared import Cap, Names
from jaxrl.schema.limits import MAX_GIB, MAX_WAIT


@dataclass(frozen=True)
class JudgeSection:
    """A language model that scores (reward.kind=judge), or a reward model with a scalar head (reward.kind=model)."""

    model: Annotated[
        str,
        Names("folder"),
        "The judge's model on the run's devices, as model.path; empty: the endpoint is asked.",
    ] = ""
    endpoint: Annotated[str, "URL of an OpenAI-compatible server, up to `/v1`; empty: the model on the devices."] = ""
    endpoint_model: Annotated[str, "The name of the model that the endpoint is asked for."] = ""
    api_key_env: Annotated[str, "Environment variable that holds the endpoint's key; empty: no key is sent."] = ""
    requests_per_minute: Annotated[float, Ge(0), "The most requests to the endpoint in a minute; 0: no limit."] = 0.0
    max_requests: Annotated[int, Ge(1), Cap(1024, "each is a connection"), "Requests to the endpoint at once."] = 8
    request_timeout_s: Annotated[float, Gt(0), MAX_WAIT, "Seconds until a request to the endpoint is given up."] = 60.0
    max_retries: Annotated[
        int, Ge(0), Cap(100, "an endpoint that fails so often is down"), "Times that a failed request is sent again."
    ] = 4
    system_prompt: Annotated[str, "System message for the judge; empty: none."] = ""
    apply_chat_template_kwargs: Annotated[
        dict[str, Any],
        "Variables for the judge's chat template, such as `{enable_thinking: false}`; an endpoint is sent them as "
        "`chat_template_kwargs`.",
    ] = field(default_factory=dict)
    prompt: Annotated[
        str,
        "What the judge is asked, with `{question}`, `{response}`, `{answer}` and any column of the data in braces; "
        "`{{answer}}` is text.",
    ] = (
        "Judge the response to the question.\n\nQuestion:\n{question}\n\nReference answer:\n{answer}\n\nResponse:\n"
        "{response}\n\nIs the response correct? Give your verdict on a last line of this form: Score: <0 to 10>"
    )
    score_pattern: Annotated[
        str, "A regular expression whose last match in a verdict holds the score in its first group."
    ] = r"[Ss]core:[\s*]*(-?\d+(?:\.\d+)?)"
    min_score: Annotated[float, "The score that becomes reward 0."] = 0.0
    max_score: Annotated[float, "The score that becomes reward 1; scores beyond are not verdicts."] = 10.0
    num_samples: Annotated[
        int, Ge(1), Cap(64, "each is a response of the judge"), "Verdicts per sample; their mean."
    ] = 1
    temperature: Annotated[float, Ge(0), "Of the judge's sampling; 0: greedy."] = 0.0
    max_tokens: Annotated[int, Ge(1), "Tokens of a verdict at most."] = 256
    max_prompt_tokens: Annotated[
        int,
        Ge(1),
        "Tokens that a model on the devices reads; of longer ones the response is cut. An endpoint has its own limit.",
    ] = 4096
    dtype: Annotated[Literal["bfloat16", "float32", "float64"], "Type of the judge's weights on the devices."] = (
        "bfloat16"
    )
    max_num_seqs: Annotated[int, Ge(1), "Verdicts that the judge writes at once."] = 8
    max_memory_gib: Annotated[
        float, Ge(0), MAX_GIB, "GiB per device for the judge: resident layers, buffers and KV; 0: half of its weights."
    ] = 0.0
    resident_layers: Annotated[
        int,
        Ge(-1),
        "Layers that stay on the devices, while the others are streamed; -1: as many as max_memory_gib takes.",
    ] = -1
    when: Annotated[
        Literal["gaps", "after"],
        "When the judge runs; gaps: between plans, once at most busy_share of the rows decode, and after the rollout; "
        "after: once no row decodes.",
    ] = "gaps"
    busy_share: Annotated[
        float, Interval(ge=0, le=1), "The share of the rows that may be busy when the judge takes a turn."
    ] = 0.5
