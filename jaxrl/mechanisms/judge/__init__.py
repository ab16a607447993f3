"""A judge model on the devices of the rollout (RollPacker §4.3)."""
