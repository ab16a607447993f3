"""Simulation: the same scheduling code over modelled lengths and times. Never imports jax."""
