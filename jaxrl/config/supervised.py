"""Options of `jaxrl sft` and `jaxrl dpo`, beside those of sections that they share with `jaxrl train`."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Gt, Interval

from jaxrl.schema.section import Section


class SftSection(Section):
    """What `jaxrl sft` learns from: conversations, or prompts with their completions."""

    messages_key: Annotated[
        str, "Column of a whole conversation (a list of messages, or a JSON string); a row without it has a prompt."
    ] = "messages"
    prompt_key: Annotated[str, "Column of the prompt: text, or a list of messages."] = "prompt"
    completion_key: Annotated[str, "Column of what is to be said: text, or a list of messages."] = "completion"
    train_on: Annotated[
        Literal["all", "last"],
        "Which of the assistant's turns are learnt from; all, or the last one of each conversation.",
    ] = "all"


class DpoSection(Section):
    """What `jaxrl dpo` learns from, pairs of which one was preferred, and how."""

    prompt_key: Annotated[
        str,
        "Column of the prompt: text, or a list of messages; a row without it has the prompt at the beginning of both "
        "conversations.",
    ] = "prompt"
    chosen_key: Annotated[str, "Column of what was preferred: text, or a list of messages."] = "chosen"
    rejected_key: Annotated[str, "Column of what was not."] = "rejected"
    loss_type: Annotated[
        Literal["sigmoid", "robust", "ipo"],
        "The loss of a pair; sigmoid: the negative log-likelihood of the preference, robust: the same, corrected for "
        "pairs that are the wrong way round, ipo: the squared distance of the mean log-ratios' difference from "
        "1 / (2 beta).",
    ] = "sigmoid"
    beta: Annotated[float, Gt(0), "How strongly the policy is held to the reference."] = 0.1
    label_smoothing: Annotated[
        float, Interval(ge=0, lt=0.5), "The share of pairs that are taken to be the wrong way round."
    ] = 0.0
    precompute_ref_log_probs: Annotated[
        bool,
        "Compute the reference's log-likelihoods of all pairs before the first step, and keep no copy of its weights.",
    ] = False

    def problems(self, config: Any) -> Iterator[str]:
        if self.chosen_key == self.rejected_key:
            yield f"dpo.chosen_key and dpo.rejected_key must name two columns, found {self.chosen_key!r} twice"

    def unread(self, config: Any) -> Iterator[tuple[frozenset[str], str]]:
        if self.loss_type == "ipo":
            yield frozenset({"label_smoothing"}), f"dpo.loss_type is {self.loss_type}"
