"""The memory of drafts: indexes on the rollout's devices, and the logits of what is verified."""

from jaxrl.config import Config
from jaxrl.mechanisms.room import RolloutMemory
from jaxrl.mechanisms.speculation.build import index_bytes_of, verified_positions


def rollout_memory(config: Config, platform: str) -> RolloutMemory | None:
    """Of the indexes for which the devices have room; None where `rollout.speculation` is off."""
    spec, name = config.rollout.speculation, "draft indexes"
    if not spec.enable:
        return None
    return RolloutMemory(
        name,
        {name: index_bytes_of(config)},
        "rollout.speculation.num_indexes",
        f"rollout.speculation.num_indexes ({spec.num_indexes or config.rollout.max_num_seqs} per dp group) or "
        f"rollout.speculation.epochs ({spec.epochs})",
        positions=verified_positions(config, platform),
    )
