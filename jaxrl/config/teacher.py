"""Options of a teacher: a model whose log-probabilities of the sampled tokens are learnt (`algorithm.teacher`)."""

from collections.abc import Iterator
from typing import Annotated, Any

from annotated_types import Ge, Interval

from jaxrl.schema.declared import Cap, Names, shown
from jaxrl.schema.endpoint import PACE, EndpointOptions, endpoint_problem
from jaxrl.schema.limits import MAX_LENGTH, OpenFloatType


class TeacherSection(EndpointOptions):
    """On-policy distillation: each sampled token's advantage has what a teacher thinks of it."""

    path: Annotated[
        str,
        Names("folder"),
        "The teacher, as model.path; it must have the policy's tokenizer; empty: none, or the one at the endpoint.",
    ] = ""
    coef: Annotated[
        float,
        Ge(0),
        "Weight of the KL to the teacher: a token's advantage loses this times log π_old - log π_teacher; with "
        "top_k, of the divergence in the loss.",
    ] = 1.0
    top_k: Annotated[
        int,
        Ge(0),
        Cap(4096, "that many ids and numbers are kept of each token"),
        "The teacher's likeliest tokens at each position, over which, with all others as one, the loss has a "
        "divergence; 0: advantages have the KL of the tokens that were drawn.",
    ] = 0
    beta: Annotated[
        float,
        Interval(ge=0, le=1),
        "Of the generalised Jensen-Shannon divergence; 0: KL(teacher || policy), 1: KL(policy || teacher).",
    ] = 0.5
    dtype: Annotated[
        OpenFloatType, "Type of its weights and of its forward pass; auto: bfloat16 on GPUs and TPUs, float32 on CPUs."
    ] = "auto"
    offload: Annotated[
        bool, "Keep its layers in the host's memory, from where each comes while the one before computes."
    ] = False
    context_key: Annotated[
        str, "Column of what the teacher reads besides, such as a solution, or data.answer_key; empty: nothing."
    ] = ""
    context_template: Annotated[
        str, "The question as the teacher reads it, with `{context}` and `{question}` where those go."
    ] = "{question}\n\n{context}"
    max_context_length: Annotated[
        int, Ge(1), MAX_LENGTH, "Tokens by which the teacher's prompt may be longer than data.max_prompt_length."
    ] = 512

    def problems(self, config: Any) -> Iterator[str]:
        if config.algorithm.adv_estimator == "none" and not config.has_teacher:
            yield (
                "algorithm.adv_estimator=none needs algorithm.teacher.path or algorithm.teacher.endpoint: no reward is "
                "learnt from, so nothing but a teacher says what to learn"
            )
        if config.algorithm.adv_estimator == "none" and config.algorithm.use_kl_in_reward:
            yield (
                "algorithm.use_kl_in_reward and algorithm.adv_estimator=none exclude each other: no reward is learnt "
                "from; use actor.use_kl_loss"
            )
        if self.endpoint and (problem := self._endpoint_problem(config)):
            yield problem
        if not config.has_teacher or not self.context_key:
            return
        if missing := [field for field in ("{context}", "{question}") if field not in self.context_template]:
            yield f"algorithm.teacher.context_template must contain {missing[0]}, found {shown(self.context_template)}"
        longest = config.max_model_length + self.max_context_length
        if self.path and config.max_row_length < longest:
            yield (
                f"{config.row_budget} must hold the teacher's longest sequence: "
                f"data.max_prompt_length + data.max_response_length + algorithm.teacher.max_context_length = {longest} "
                "tokens; actor.context_parallel_size parts it among devices"
            )

    def _endpoint_problem(self, config: Any) -> str | None:
        section, temperature = "algorithm.teacher", config.rollout.temperature
        if self.path:
            return f"{section}.path ({self.path}) and {section}.endpoint exclude each other: there is one teacher"
        if temperature != 1:
            return (
                f"{section}.endpoint needs rollout.temperature=1, found {temperature:g}: an endpoint gives the "
                "log-probabilities of its model as it is"
            )
        return endpoint_problem(section, self)

    def excludes_hosts(self, config: Any) -> tuple[str, str] | None:
        if self.path and self.offload:
            return (
                "algorithm.teacher.offload",
                "a host reads a layer as a whole, and keeps only its own part of it; leave it off, and the weights are "
                "split over the devices of all hosts",
            )
        return None

    def unread(self, config: Any) -> Iterator[tuple[frozenset[str], str]]:
        if not self.path:
            yield frozenset({"dtype", "offload"}), "algorithm.teacher.path is empty"
        if not self.endpoint:
            yield PACE | {"endpoint_model", "api_key_env"}, "algorithm.teacher.endpoint is empty"
        if not config.has_teacher:
            names = frozenset({"coef", "top_k", "beta", "context_key"})
            yield names, "algorithm.teacher.path and algorithm.teacher.endpoint are empty"
        elif not self.top_k:
            yield frozenset({"beta"}), "algorithm.teacher.top_k is 0"
        if not config.has_teacher or not self.context_key:
            names = frozenset({"context_template", "max_context_length"})
            yield names, "algorithm.teacher.context_key is empty"
