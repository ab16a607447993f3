"""The options `algorithm.filter_groups.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge

from jaxrl.schema.declared import Checked, Names


@dataclass(frozen=True)
class FilterGroupsSection(Checked):
    """DAPO's dynamic sampling: prompts that teach nothing (all rewards equal) are left out and replaced by others."""

    enable: Annotated[bool, "Switch dynamic sampling on."] = False
    metric: Annotated[
        str,
        "What is compared within a prompt; reward: the reward itself, as are score and seq_reward; any other name: the "
        "value of that name in what the scorer returned, such as acc.",
    ] = "reward"
    path: Annotated[str, Names("file"), "The Python file of a filter of your own, instead of metric; empty: none."] = ""
    name: Annotated[
        str,
        "The function in algorithm.filter_groups.path, called with data_source, rewards, infos, responses and "
        "extra_info of a prompt; it returns whether to keep the prompt, and must be deterministic.",
    ] = "keep_group"
    max_num_gen_batches: Annotated[
        int,
        Ge(1),
        "A round gives up with an error once it has launched this many times the prompts it started with, or this many "
        "times data.gen_batch_size where that is set.",
    ] = 10
    max_unscored_groups: Annotated[
        int,
        Ge(-1),
        "Complete prompts that may lack rewards before generation waits; -1: half as many as still decode, and at most "
        "data.train_batch_size.",
    ] = -1

    def problem(self, config: Any) -> str | None:
        data, option = config.data, "algorithm.filter_groups"
        if data.gen_batch_size and not self.enable:
            return (
                f"data.gen_batch_size ({data.gen_batch_size} prompts) needs {option}.enable: without dynamic sampling "
                "a step launches what its rollout rule says"
            )
        if 0 < data.gen_batch_size * self.max_num_gen_batches < data.train_batch_size:
            return (
                f"data.gen_batch_size ({data.gen_batch_size} prompts) × {option}.max_num_gen_batches "
                f"({self.max_num_gen_batches}) must be >= data.train_batch_size ({data.train_batch_size} prompts): "
                "else a round gives up before it has launched a batch"
            )
        if self.path and self.metric != "reward":
            return (
                f"{option}.path and {option}.metric ({self.metric}) exclude each other: the function decides alone "
                "which prompts are kept"
            )
        if self.enable and not self.metric:
            return f"{option}.metric is empty: name reward, or a value that the scorer returns"
        if self.enable and not self.path and config.greedy_option:
            return (
                f"{config.greedy_option} makes all samples of a prompt equal, and {option}.enable leaves such prompts "
                "out: no prompt would be left"
            )
        return None
