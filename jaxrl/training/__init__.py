"""Training: advantages, losses, packing, the gradient step, checkpoints."""
