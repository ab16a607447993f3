"""Tensor parallelism that adapts: what a layout costs, when it changes, and which request goes where."""
