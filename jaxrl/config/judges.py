"""What must hold between the options of `reward.judge`, and which fields its template has.

A template is text with `{name}` where the value of a field goes; `{{name}}` stands for `{name}` itself. All other
braces stay as they are, so that JSON and `\\boxed{}` can be written without a thought.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from jaxrl.config.rewards import RewardSection
from jaxrl.mechanisms.judge.options import JudgeSection
from jaxrl.schema.declared import shown

OF_DEVICES = frozenset(
    {
        *("max_prompt_tokens", "dtype", "max_num_seqs", "max_memory_gib"),
        *("resident_layers", "when", "busy_share"),
    }
)
"""Options of `reward.judge` that an endpoint's model does not read: it has a tokenizer and a machine of its own."""
OF_ENDPOINT = frozenset({"requests_per_minute", "max_requests", "request_timeout_s", "max_retries"})
"""Those that a model on the devices does not."""
OF_WORDS = frozenset({"prompt", "score_pattern", "min_score", "max_score", "num_samples", "temperature", "max_tokens"})
"""Those that a reward model does not."""
_URL_RULE = "reward.judge.endpoint must be a URL such as http://localhost:8000/v1"
_FIELD = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")


def template_fields(template: str) -> list[str]:
    """The names of a template's fields, each once, in their order."""
    return list(dict.fromkeys(match[2] for match in _FIELD.finditer(template) if match[2]))


def fill_template(template: str, value_of: Callable[[str], str]) -> str:
    """The template with its fields' values in one pass: braces in a value are text."""
    return _FIELD.sub(lambda match: value_of(match[2]) if match[2] else "{" + match[1] + "}", template)


def template_problem(variables: Mapping[str, Any]) -> str | None:
    """What is wrong with variables for a chat template, as the end of a sentence that begins with their option; None if
    nothing is."""
    for name in ("messages", "add_generation_prompt"):
        if name in variables:
            return f"{name}: the run gives the chat template {name} itself"
    tools = variables.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return f"tools must be a list of JSON schemas, found {shown(tools)}"
    return None


def judge_kind(reward: RewardSection) -> Literal["judge", "model"] | None:
    """The kind of reward that a model on the run's devices gives; None: there is no such model."""
    kinds = {reward.kind, *(domain.kind for domain in reward.domains.values())}
    if "model" in kinds:
        return "model"
    return "judge" if "judge" in kinds and reward.judge.model else None


def judge_problem(judge: JudgeSection, kinds: Collection[str], *, has_answers: bool) -> str | None:
    """Why `reward.judge` cannot score, as a sentence; None if it can.

    Args:
      judge: the section.
      kinds: the kinds of scorers that are asked for, of which `judge` and `model` read the section.
      has_answers: whether prompts have reference answers.
    """
    if "@" in judge.endpoint:  # whatever scores: config.yaml would keep it
        return f"{_URL_RULE}, found one with a name or password in it: give the key by reward.judge.api_key_env"
    if {"judge", "model"} & set(kinds) and (problem := template_problem(judge.apply_chat_template_kwargs)):
        return f"reward.judge.apply_chat_template_kwargs.{problem}"
    if "judge" in kinds:
        return _source_problem(judge) or _text_problem(judge, has_answers)
    if "model" in kinds:
        if not judge.model:
            return "reward.judge.model is missing: reward.kind=model needs a reward model's folder"
        if judge.endpoint:
            return f"reward.judge.endpoint ({judge.endpoint}) needs reward.kind=judge: a reward model is a folder"
    return None


def _source_problem(judge: JudgeSection) -> str | None:
    if bool(judge.model) == bool(judge.endpoint):
        found = "both" if judge.model else "neither"
        return f"reward.kind=judge needs one of reward.judge.model and reward.judge.endpoint, found {found}"
    if judge.model:
        unread = {"endpoint_model": judge.endpoint_model, "api_key_env": judge.api_key_env}
        name = next((name for name, value in unread.items() if value), None)
        return name and f"reward.judge.{name} ({unread[name]}) needs reward.judge.endpoint, which is empty"
    return _endpoint_problem(judge.endpoint) or (
        None
        if judge.endpoint_model
        else "reward.judge.endpoint_model is missing: name the model that the endpoint is asked for"
    )


def _endpoint_problem(endpoint: str) -> str | None:
    try:
        url = urllib.parse.urlsplit(endpoint)
        port_is_right = url.port is None or url.port > 0  # reading the port may raise
    except ValueError as error:
        return f"{_URL_RULE}, found {shown(endpoint)} ({error})"
    is_plain = endpoint.isascii() and endpoint.isprintable() and " " not in endpoint
    if url.scheme not in ("http", "https") or not url.hostname or not port_is_right or not is_plain:
        return f"{_URL_RULE}, found {shown(endpoint)}"
    if url.query or url.fragment:
        return f"{_URL_RULE}, without a query and a fragment, found {shown(endpoint)}"
    if url.path.rstrip("/").endswith("/completions"):
        return f"{_URL_RULE}, without /chat/completions at its end, found {shown(endpoint)}"
    return None


def _text_problem(judge: JudgeSection, has_answers: bool) -> str | None:
    fields = template_fields(judge.prompt)
    if "response" not in fields:
        return f"reward.judge.prompt must have the field {{response}}, found {shown(judge.prompt)}"
    if "answer" in fields and not has_answers:
        return "reward.judge.prompt has the field {answer}, but data.answer_key is empty: write a prompt without it"
    try:
        groups = re.compile(judge.score_pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        return f"reward.judge.score_pattern ({shown(judge.score_pattern)}) is no regular expression: {error}"
    if not groups:
        return (
            f"reward.judge.score_pattern ({shown(judge.score_pattern)}) must have a group: the parentheses that hold "
            "the score"
        )
    if not judge.min_score < judge.max_score:
        return (
            f"reward.judge.min_score ({judge.min_score:g}) must be below reward.judge.max_score ({judge.max_score:g})"
        )
    if judge.num_samples > 1 and judge.temperature == 0:
        return (
            f"reward.judge.num_samples ({judge.num_samples}) needs reward.judge.temperature above 0: greedy verdicts "
            "on a sample are all the same"
        )
    return None
