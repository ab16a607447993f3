"""Short rounds that leave slow prompts for a long one (RollPacker §3)."""
