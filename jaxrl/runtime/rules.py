"""The rules that a configuration asks for, or why its settings do not go together.

Purpose: the switches `rollout.tail_batching`, `rollout.partial_rollout`, `rollout.over_provisioning`,
`algorithm.filter_groups` and `trainer.one_step_off` as one `BatchRule`, for real and simulated runs alike. What each
does and what composes with what: docs/rollout-rules.md. `layout_control` does the same for `rollout.layout`
(docs/layouts.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.config import Config, ConfigError
from jaxrl.scheduling.layouts.control import LayoutControl, LengthHistory
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.round_layouts import RoundLayouts
from jaxrl.scheduling.layouts.switch_rule import LayoutSwitchConfig, LayoutSwitchRule
from jaxrl.scheduling.layouts.tp_planner import TpPlanner, TpPlannerConfig
from jaxrl.scheduling.rounds.batches import BatchRule, FreshBatches
from jaxrl.scheduling.rounds.composition import composition_problem
from jaxrl.scheduling.rounds.partial_rollout import PartialRollout
from jaxrl.scheduling.rounds.race import BatchSettings
from jaxrl.scheduling.rounds.tail_batching import TailBatching
from jaxrl.scheduling.tokens.engine import Engine


def batch_rule(config: Config) -> BatchRule:
    """A new rule, with nothing carried. Raises ConfigError for settings that exclude each other."""
    problem = composition_problem(config)
    if problem is not None:
        raise ConfigError(problem)
    rollout = config.rollout
    try:
        batch = BatchSettings(
            config.data.train_batch_size,
            rollout.n,
            config.reward.score_when,
            config.algorithm.filter_groups,
            rollout.max_active_requests,
            version_lag=int(config.trainer.one_step_off),
        )
        if rollout.tail_batching.enable:
            return TailBatching(batch, rollout.tail_batching)
        if rollout.partial_rollout.enable:
            return PartialRollout(batch, rollout.partial_rollout)
        return FreshBatches(batch, rollout.over_provisioning)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def layout_control(
    config: Config, engine: Engine, degrees: Sequence[int], predictor: LatencyPredictor | None
) -> LayoutControl:
    """What changes the layout of `engine`, as `rollout.layout` has it.

    Args:
      degrees: those that rounds may use (`LayoutSection.degrees_on`).
      predictor: of step times and costs; None where `rollout.layout.switch` is off.
    """
    options, tp = config.rollout.layout, config.rollout.tensor_model_parallel_size
    rule = None
    if predictor is not None:
        switching = LayoutSwitchConfig(
            degrees=tuple(degrees),
            bound=options.bound,
            direction=options.direction,
            min_gain=options.min_gain,
            cooldown=options.cooldown,
            reversal_factor=options.reversal_factor,
            state=options.state,
            headroom_tokens=options.headroom_tokens,
        )
        rule = LayoutSwitchRule(switching, predictor)
    planner: TpPlanner | int = tp
    if options.planner:
        planning = TpPlannerConfig(tuple(degrees), tp, degrees[-1], options.planner_rise, options.planner_quiet_rounds)
        planner = TpPlanner(planning)
    history = LengthHistory() if options.bound == "expected" else None
    return LayoutControl(engine, RoundLayouts(planner, rule), degrees, predictor, history)


def carried(name: str, num_prompts: int) -> dict[str, str]:
    """What the summary of a run says of prompts that were begun and not trained on; nothing where there are none."""
    return {"prompts begun and not trained on": f"{num_prompts} ({name})"} if num_prompts else {}
