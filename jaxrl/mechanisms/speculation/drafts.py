"""When plans verify drafts, and by how many tokens, from `rollout.speculation`."""

from __future__ import annotations

from jaxrl.config import Config
from jaxrl.mechanisms.speculation.options import SpeculationSection
from jaxrl.mechanisms.speculation.rule import DraftConfig, StepCosts, Window, default_verify_tokens


def draft_config(config: Config, platform: str, costs: StepCosts | None = None) -> DraftConfig | None:
    """When plans verify drafts, by `rollout.speculation`; None: never.

    Args:
      platform: of the rollout's devices (`cpu`, `gpu`, ...).
      costs: what steps take; None: not known.
    """
    spec = config.rollout.speculation
    if not spec.enable:
        return None
    return DraftConfig(draft_window(spec), spec.verify_tokens or default_verify_tokens(platform), spec.max_batch, costs)


def draft_window(options: SpeculationSection) -> Window:
    """How the windows of `rollout.speculation` move."""
    return Window(options.min_window, options.window_step, options.max_window)
