"""Bytes and floating-point operations that the work itself needs, whatever the implementation.

Additional work of an implementation (padding, keys behind a row's end, weights read twice) counts against it: fractions
of the ceilings count useful work only. A multiplication and an addition count two operations.
"""

from __future__ import annotations

from math import prod

from jaxrl.models.config import ModelConfig
from jaxrl.models.weights import leaves


def layer_matrices(config: ModelConfig) -> int:
    """Entries of all layers' matrices."""
    return sum(prod(w.shape) for w in leaves(config.weights()) if w.stacked and w.transpose)


def head_entries(config: ModelConfig) -> int:
    """Entries of the matrix that makes logits (the embedding, where tied)."""
    return config.vocab_size * config.hidden_size


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Read by every decode step: matrices of layers and head (of an embedding of its own, only a few rows are)."""
    return (layer_matrices(config) + head_entries(config)) * itemsize


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Keys and values of one position, all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def decode_flops(config: ModelConfig, rows: int, context: float) -> float:
    """Of a decode step: every matrix once per row, and attention over the live positions."""
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * context
    return rows * (2 * (layer_matrices(config) + head_entries(config)) + attention)


def train_flops(config: ModelConfig, rows: int, tokens: int, response: int) -> float:
    """Forward and backward over `rows` rows of `tokens`, of which the last `response` are learnt from.

    Three times the forward pass: layers for every token, the head for response tokens only, causal attention (half of
    the square). What is computed again in the backward pass does not count.
    """
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * tokens / 2
    forward = tokens * (2 * layer_matrices(config) + attention) + response * 2 * head_entries(config)
    return 3.0 * rows * forward
