"""The memory of drafts: indexes on the rollout's devices, and the logits of what is verified."""

from jaxrl.config import Config
from jaxrl.mechanisms.room import RolloutMemory
from jaxrl.mechanisms.speculation.build import proposer


def rollout_memory(config: Config, platform: str) -> RolloutMemory | None:
    """Of the indexes that a dp group of `rollout.max_num_seqs` rows has room for, and of the tokens that a step checks;
    None where `rollout.speculation` is off."""
    drafting, spec, name = proposer(config, platform), config.rollout.speculation, "draft indexes"
    if drafting is None:
        return None
    return RolloutMemory(
        name,
        {name: drafting.num_bytes(config.rollout.max_num_seqs)},
        "rollout.speculation.num_indexes",
        f"rollout.speculation.num_indexes ({spec.num_indexes or config.rollout.max_num_seqs} per dp group) or "
        f"rollout.speculation.epochs ({spec.epochs})",
        positions=drafting.verify_tokens,
    )
