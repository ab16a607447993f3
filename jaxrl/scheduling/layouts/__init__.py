"""Tensor parallelism that adapts: what a layout costs, when it changes, and who goes where."""
