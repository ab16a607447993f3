"""A baseline: launch more than is needed, and discard what comes last."""
