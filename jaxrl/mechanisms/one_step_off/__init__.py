"""The next step's rollout beside or before an update (RollPacker §6.7)."""
