"""Dynamic sampling: prompts that teach nothing are left out and replaced by others.

A round asks the mechanism which groups count, and how many prompts to launch ahead of that. Those count in
which a metric differs, or those that a function of the user's keeps.

**Launching ahead.** Replacements that start when a verdict has come in start late: with most groups left out, a round
becomes a chain of generations. So a round launches ahead of verdicts: if a share s of the groups is filtered, `missing`
groups that count need missing / (1 - s) in flight, and some more for chance. The estimate of s changes with verdicts in
the order in which a round receives them, which is logical time, and is part of a checkpoint.

Source: DAPO (Yu et al. 2025, §3.2: prompts with all rewards equal are left out and replaced; it over-samples by a fixed
factor, `gen_batch_size` in verl's recipe); RollPacker §7; verl's `algorithm.filter_groups.metric`; slime's
`dynamic_sampling_filter_path`.

Departures: the factor follows what a run sees. verl's `seq_final_reward` (the reward after a KL term) is refused: it is
not known in the rollout. By default generation waits for verdicts when half as many complete groups lack them as
still decode: many verdicts may be late while a wait would idle a full engine, and few when a late replacement would
prolong the round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

from annotated_types import Ge

from jaxrl.scheduling.mechanism import Mechanism
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.schema.declared import Names
from jaxrl.schema.section import Section
from jaxrl.types import Group

if TYPE_CHECKING:
    from jaxrl.config import Config

KeepsGroup = Callable[[Group, Sequence[Verdict]], bool]
"""Whether a group may be trained on: asked with its scored samples and their verdicts, both sorted by key."""

THE_REWARD = ("reward", "score", "seq_reward")
"""Names of the reward itself: `score` and `seq_reward` are verl's."""

FILTER_ARGUMENTS = ("data_source", "rewards", "infos", "responses", "extra_info")
"""The arguments of a user's function, by name."""


def value_of(metric: str, verdict: Verdict) -> Any:
    """A sample's value of a metric: the reward, or a value of that name in what the scorer returned with it
    (`jaxrl.rewards.reward_metrics`). A scoring that failed has the value 0, as its reward is."""
    if metric in THE_REWARD:
        return verdict.reward
    return verdict.info[metric] if verdict.status == "ok" else 0.0


def user_filter(function: Callable[..., Any], what: str) -> KeepsGroup:
    """Keeps the groups that a function of the user's says to keep. It must be deterministic: a resumed run asks again.
    `what`: its file and name, for messages."""

    def keeps(group: Group, verdicts: Sequence[Verdict]) -> bool:
        prompt = group.prompt
        known = {"prompt": prompt.text, "answer": prompt.answer, "epoch": prompt.epoch, "index": prompt.index}
        values = (
            prompt.source,
            [verdict.reward for verdict in verdicts],
            [dict(sample.reward_info) for sample in group.samples],
            [sample.text for sample in group.samples],
            {**known, **prompt.extra},
        )
        try:
            answer = function(**dict(zip(FILTER_ARGUMENTS, values, strict=True)))
        except (Exception, SystemExit) as error:
            raise ValueError(f"{what} failed on prompt {prompt.key} with {type(error).__name__}: {error}") from error
        if hasattr(answer, "item"):  # a scalar of numpy
            answer = answer.item()
        if not isinstance(answer, bool):
            raise ValueError(f"{what} must return True or False, found {answer!r:.200} for prompt {prompt.key}")
        return answer

    return keeps


PRIOR_GROUPS = 4  # that count as kept before the first verdict, so that few verdicts say little
MEMORY_BATCHES = 8  # batches' worth of groups after which a verdict counts 1/e of a new one
MARGIN = 0.5  # standard deviations of the number that count, by which more is launched than is needed on average
MOST_PER_MISSING = 4  # the most groups in flight for each missing one, at any share


class DynamicSampling(Mechanism):
    """The filter of groups that a round asks (`jaxrl.scheduling.rounds.round`). It is immutable: `after` returns a new
    one.

    Args:
      gen_batch_size: prompts launched at a time (`data.gen_batch_size`); 0: one by one.
      user_filter: which groups are kept; by default those in which `options.metric` differs.
      judged, filtered: groups so far, the older ones discounted.
    """

    class Options(Section):
        """DAPO's dynamic sampling: prompts that teach nothing (all rewards equal) are replaced by others."""

        enable: Annotated[bool, "Switch dynamic sampling on."] = False
        metric: Annotated[
            str,
            "What is compared within a prompt; reward: the reward itself, as are score and seq_reward; any other "
            "name: the value of that name in what the scorer returned, such as acc.",
        ] = "reward"
        path: Annotated[
            str, Names("file"), "The Python file of a filter of your own, instead of metric; empty: none."
        ] = ""
        name: Annotated[
            str,
            "The function in algorithm.filter_groups.path, called with data_source, rewards, infos, responses and "
            "extra_info of a prompt; it returns whether to keep the prompt, and must be deterministic.",
        ] = "keep_group"
        max_num_gen_batches: Annotated[
            int,
            Ge(1),
            "A round gives up with an error once it has launched this many times the prompts it started with, or "
            "this many times data.gen_batch_size where that is set.",
        ] = 10
        max_unscored_groups: Annotated[
            int,
            Ge(-1),
            "Complete prompts that may lack rewards before generation waits; -1: half as many as still decode, and "
            "at most data.train_batch_size.",
        ] = -1

        def problems(self, config: Any) -> Iterator[str]:
            data, option = config.data, "algorithm.filter_groups"
            if data.gen_batch_size and not self.enable:
                yield (
                    f"data.gen_batch_size ({data.gen_batch_size} prompts) needs {option}.enable: without dynamic "
                    "sampling a step launches what its rollout rule says"
                )
            if 0 < data.gen_batch_size * self.max_num_gen_batches < data.train_batch_size:
                yield (
                    f"data.gen_batch_size ({data.gen_batch_size} prompts) × {option}.max_num_gen_batches "
                    f"({self.max_num_gen_batches}) must be >= data.train_batch_size ({data.train_batch_size} prompts): "
                    "else a round gives up before it has launched a batch"
                )
            if self.path and self.metric != "reward":
                yield (
                    f"{option}.path and {option}.metric ({self.metric}) exclude each other: the function decides alone "
                    "which prompts are kept"
                )
            if self.enable and not self.metric:
                yield f"{option}.metric is empty: name reward, or a value that the scorer returns"
            if self.enable and not self.path and config.greedy_option:
                yield (
                    f"{config.greedy_option} makes all samples of a prompt equal, and {option}.enable leaves such "
                    "prompts out: no prompt would be left"
                )

    title = "dynamic sampling"
    option = "algorithm.filter_groups.enable"
    orders = True

    def __init__(
        self,
        options: Options,
        gen_batch_size: int = 0,
        user_filter: KeepsGroup | None = None,
        judged: float = 0.0,
        filtered: float = 0.0,
    ) -> None:
        self.options, self.gen_batch_size, self.user_filter = options, gen_batch_size, user_filter
        self._judged, self._filtered = judged, filtered

    @classmethod
    def problem(cls, config: Config, racing: Sequence[str]) -> str | None:
        options = config.algorithm.filter_groups
        if options.metric == "seq_final_reward":
            return (
                "algorithm.filter_groups.metric must not be seq_final_reward: the KL in it is not known when groups "
                "are filtered; use reward, or a name in what the scorer returns"
            )
        if config.rollout.n < 2 and not options.path:
            return (
                f"dynamic sampling needs rollout.n >= 2, found {config.rollout.n}: the rewards of a group of one are "
                "all equal, so every prompt would be left out"
            )
        if racing and config.reward.score_when == "rollout":
            return (
                f"dynamic sampling with {racing[0]} needs rewards during the rollout, which say when it ends: "
                "reward.score_when must be 'sample' or 'group', found 'rollout'"
            )
        return None

    @classmethod
    def of_config(cls, config: Config) -> Self | None:
        """The filter, with nothing learnt; None where it is off. Raises ValueError for a file that cannot be used."""
        options = config.algorithm.filter_groups
        if not options.enable:
            return None
        if not options.path:
            return cls(options, config.data.gen_batch_size)
        from jaxrl.config.functions import read_user_file, user_function

        names = "algorithm.filter_groups.path", "algorithm.filter_groups.name"
        file = read_user_file(names[0], options.path)
        function = user_function(names, file, options.name, FILTER_ARGUMENTS)
        what = f"{names[0]}: {file.path}: {options.name}"
        return cls(options, config.data.gen_batch_size, user_filter(function, what))

    def keeps(self, group: Group, verdicts: Sequence[Verdict]) -> bool:
        if self.user_filter is not None:
            return self.user_filter(group, verdicts)
        values = [value_of(self.options.metric, verdict) for verdict in verdicts]
        return any(value != values[0] for value in values)

    def after(self, *, kept: bool, num_prompts: int) -> Self:
        keep = 1 - 1 / (MEMORY_BATCHES * num_prompts)
        return self.of_state((self._judged * keep + 1, self._filtered * keep + (not kept)))

    @property
    def share(self) -> float:
        return self._filtered / (self._judged + PRIOR_GROUPS)

    def under_way(self, missing: int) -> int:
        counting = 1 - self.share
        # n counting >= missing + MARGIN sqrt(n counting share), solved for sqrt(n)
        margin = MARGIN * math.sqrt(counting * self.share)
        root = (margin + math.sqrt(margin * margin + 4 * counting * missing)) / (2 * counting)
        return min(math.ceil(root * root - 1e-9), MOST_PER_MISSING * missing)

    @property
    def launched_at_once(self) -> int:
        return max(self.gen_batch_size, 1)

    def most_under_way(self, num_prompts: int) -> int:
        return MOST_PER_MISSING * num_prompts + self.launched_at_once - 1

    def most_launched(self, num_started: int) -> int:
        return self.options.max_num_gen_batches * (self.gen_batch_size or num_started)

    @property
    def advice(self) -> str:
        return (
            "the problems are too easy or too hard for the model; algorithm.filter_groups.max_num_gen_batches "
            f"({self.options.max_num_gen_batches}) is the limit"
        )

    def max_unscored(self, num_running: int, num_prompts: int) -> int:
        allowed = self.options.max_unscored_groups
        return allowed if allowed >= 0 else min(num_prompts, num_running // 2)

    def state(self) -> list[float]:
        return [self._judged, self._filtered]

    def of_state(self, state: Sequence[float]) -> Self:
        return type(self)(self.options, self.gen_batch_size, self.user_filter, *map(float, state))
