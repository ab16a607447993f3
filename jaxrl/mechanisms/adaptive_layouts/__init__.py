"""Tensor parallelism that adapts, within a generation and between steps (PAT §4; RollPacker §4.2)."""
