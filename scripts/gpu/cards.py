"""What an H100 or an H200 should do, from bytes, operations and launches: arithmetic, before anything was measured.

`Card` has the datasheets' rates, and the rates that are assumed to be reached. Each function gives seconds of one piece
of work on a card: bytes over the copy bandwidth, operations over the rate of products, kernels times the gap between
two of them. What is left over by these terms is not in them; a figure that misses its expectation by a tenth or more
says that something is not understood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench import costs
from bench.ceilings import datasheet

from jaxrl.kernels.pieces import PIECE, WANTED_PROGRAMS
from jaxrl.models.config import ModelConfig
from jaxrl.sim.hardware import H100, H200, Hardware

WEIGHTS_OF_COPY = 0.92
"""Of the copy bandwidth: reading weights for a product of few rows."""
CACHE_OF_COPY = 0.88
"""Of the copy bandwidth: reading keys and values through block tables."""
PROGRAM_BYTES_PER_S = 100e9
"""That one program of attention reads at the most: 64 KiB under way, and 0.65 µs until they are there."""
LARGE_OF_PRODUCT = 0.75
"""Of the rate of a large square product: those of training, which are narrower, recomputed heads included."""
ATTENTION_OF_PRODUCT = 0.40
"""Of the same rate: packed attention, both passes; cuDNN's is taken as 0.6."""
CUDNN_OF_PRODUCT = 0.60
GAP_S = 1.0e-6
"""Between two kernels of one CUDA graph."""
KERNELS_A_LAYER = 8
KERNELS_OUTSIDE = 23
"""Of a decode step as it is compiled: embedding, last norm, head, sampling, bookkeeping."""
KERNELS_OF_PIECES = 1, 3
"""More in a layer and outside, where rows may be longer than a piece."""
COMPILE_S = 13.0
"""Of one rollout program, autotuning left out."""


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU: its data sheet, and the rates that are assumed to be reached.

    Attributes:
      copy: bytes per second, read and written, that a large copy is assumed to reach: 90 % of the data sheet.
      product: operations per second of a large bfloat16 product on random data: 80 % of it, for the power it draws.
    """

    sheet: Hardware

    @property
    def copy(self) -> float:
        return 0.9 * self.sheet.memory_bytes_per_s

    @property
    def product(self) -> float:
        return 0.8 * self.sheet.flops_per_s


CARDS = {sheet.name: Card(sheet) for sheet in (H100, H200)}


def card_of(kind: str) -> Card | None:
    """The card of a device as jax names it; None where nothing is expected of it."""
    sheet = datasheet(kind)
    return None if sheet is None else CARDS.get(sheet.name)


# -- decode ------------------------------------------------------------------------------------------------------------


def kernels_of_step(model: ModelConfig, context: float) -> int:
    layer, outside = KERNELS_OF_PIECES if context > PIECE else (0, 0)
    return (KERNELS_A_LAYER + layer) * model.num_layers + KERNELS_OUTSIDE + outside


def cache_bytes(model: ModelConfig, rows: int, context: float) -> float:
    return costs.decode_kv_bytes(model, rows, context, 0, 2)


def decode_seconds(card: Card, model: ModelConfig, rows: int, context: float) -> float:
    """Of one step: weights, or their products where these take longer; cache; float32 logits written once and read
    twice; the gaps."""
    weights = costs.weight_bytes(model, 2)
    products = rows * weights / (LARGE_OF_PRODUCT * card.product)
    logits = rows * model.vocab_size * 4 * 3 / card.copy
    gaps = kernels_of_step(model, context) * GAP_S
    cache = cache_bytes(model, rows, context) / (CACHE_OF_COPY * card.copy)
    return max(weights / (WEIGHTS_OF_COPY * card.copy), products) + cache + logits + gaps


def decode_share(card: Card, model: ModelConfig, rows: int, context: int) -> float:
    """Useful bytes per second, of the copy bandwidth."""
    useful = costs.weight_bytes(model, 2) + cache_bytes(model, rows, context)
    return useful / decode_seconds(card, model, rows, context) / card.copy


def mixed_decode_seconds(card: Card, model: ModelConfig, lengths: Sequence[int], most: int = 0) -> float:
    """The same of rows of these lengths, and longer where the program of attention with the most to read takes longer
    than all of the cache.

    Args:
      most: positions that this program reads; 0: of its share of all rows' pieces (`jaxrl.kernels.pieces`).
    """
    rows, mean = len(lengths), sum(lengths) / len(lengths)
    pieces = sum(-(-length // PIECE) for length in lengths)
    most = most or PIECE * -(-pieces // max(rows, WANTED_PROGRAMS // model.num_kv_heads))
    alone = most * costs.kv_bytes_per_token(model, 2) / model.num_kv_heads / PROGRAM_BYTES_PER_S
    cache = cache_bytes(model, rows, mean) / (CACHE_OF_COPY * card.copy)
    return decode_seconds(card, model, rows, mean) + max(0.0, alone - cache)


INVARIANT_TILE = 128
"""Rows that are computed together with `actor.numerics=invariant`, however few there are."""
INVARIANT_KERNELS_A_LAYER, INVARIANT_KERNELS_OUTSIDE = 26, 53
"""Of a decode step of one tile; eight a layer and one outside are products and attention."""
INVARIANT_OF_PRODUCT = 0.5
"""Of the rate of a large square product: its own kernels of 128 rows."""
SMALL_KERNEL_S = 1.5e-6
"""Of a kernel that moves next to nothing."""
INVARIANT_LOGIT_PASSES = 7
"""Over the float32 logits of a tile: written, filled up anew, and read by drawing and log-probability twice each."""


def invariant_decode_seconds(card: Card, model: ModelConfig, rows: int, context: int) -> float:
    """The same of one step with `actor.numerics=invariant`: weights are read for each tile of rows, all of which are
    multiplied; more kernels, most of them small. Shares of products, which stay in the cache of the chip, are left
    out."""
    tiles, weights = -(-rows // INVARIANT_TILE), costs.weight_bytes(model, 2)
    products = INVARIANT_TILE * weights / (INVARIANT_OF_PRODUCT * card.product)
    logits = INVARIANT_TILE * model.vocab_size * 4 * INVARIANT_LOGIT_PASSES / card.copy
    own = tiles * (max(weights / (WEIGHTS_OF_COPY * card.copy), products) + logits)
    kernels = INVARIANT_KERNELS_A_LAYER * model.num_layers + INVARIANT_KERNELS_OUTSIDE
    small = kernels - 8 * model.num_layers - 1
    cache = cache_bytes(model, rows, context) / (CACHE_OF_COPY * card.copy)
    return own + cache + tiles * (kernels * GAP_S + small * SMALL_KERNEL_S)


def gap_share(card: Card, model: ModelConfig, rows: int, context: int) -> float:
    return kernels_of_step(model, context) * GAP_S / decode_seconds(card, model, rows, context)


# -- training ----------------------------------------------------------------------------------------------------------

OUTER_BYTES = 6 * 2
"""Per token, layer and entry that lies between two products: three passes of two bytes, read and written."""
ACCUMULATE_BYTES = 16
"""Per weight and microbatch: its gradient written and read, the float32 sum read and written."""
ADAMW_BYTES = 28
"""Per weight and update: float32 weight and two moments read and written, the gradient read."""
LOGIT_PASSES = 8
"""Over the float32 logits of a response's tokens: forward 3, made again and differentiated 5."""


def train_seconds(card: Card, model: ModelConfig, rows: int, tokens: int, response: int, microbatches: int) -> float:
    """Of an update of `microbatches` microbatches of `rows` rows each, with `actor.remat: dots`."""
    number, learnt = rows * tokens, rows * response
    layers, head = costs.layer_matrices(model), costs.head_entries(model)
    products = (6 * number * layers + 8 * learnt * head) / (LARGE_OF_PRODUCT * card.product)
    attention = 3.5 * attention_flops(model, rows, tokens) / (ATTENTION_OF_PRODUCT * card.product)
    between = number * model.num_layers * (5 * model.hidden_size + 3 * model.intermediate_size) * OUTER_BYTES
    logits = learnt * model.vocab_size * 4 * LOGIT_PASSES
    gradients = model.num_params() * ACCUMULATE_BYTES
    moved = (between + logits + gradients) / card.copy
    return microbatches * (products + attention + moved) + model.num_params() * ADAMW_BYTES / card.copy


def attention_flops(model: ModelConfig, rows: int, tokens: int) -> float:
    """Of the forward pass, all layers, causal."""
    return 4 * model.num_layers * model.num_heads * model.head_dim * rows * tokens * tokens / 2


INVARIANT_KERNELS_A_TILE = 27
"""Of a layer's forward pass: what it computes, and what moves rows in and out."""


def invariant_train_seconds(
    card: Card, model: ModelConfig, rows: int, tokens: int, response: int, microbatches: int
) -> float:
    """The same with `actor.numerics=invariant`: the gradient's own pass over the layers, and before it one in tiles."""
    tiles = rows * tokens / INVARIANT_TILE
    layer = 2 * costs.layer_matrices(model) / model.num_layers
    products = max(
        layer / (WEIGHTS_OF_COPY * card.copy), INVARIANT_TILE * layer / (INVARIANT_OF_PRODUCT * card.product)
    )
    of_tile = products + INVARIANT_KERNELS_A_TILE * (GAP_S + SMALL_KERNEL_S)
    plain = train_seconds(card, model, rows, tokens, response, microbatches)
    return plain + microbatches * tiles * model.num_layers * of_tile


def train_mfu(
    card: Card, model: ModelConfig, rows: int, tokens: int, response: int, microbatches: int, rate: float
) -> float:
    flops = costs.train_flops(model, rows * microbatches, tokens, response)
    return flops / train_seconds(card, model, rows, tokens, response, microbatches) / rate


# -- a whole step ------------------------------------------------------------------------------------------------------


def generation_seconds(card: Card, model: ModelConfig, rows: int, prompt: int, new: int) -> float:
    """All rows together, all of one length: the prompts' products, then `new` decode steps at the mean context."""
    prompts = rows * prompt * 2 * costs.layer_matrices(model) / (LARGE_OF_PRODUCT * card.product)
    return prompts + new * decode_seconds(card, model, rows, prompt + new // 2)


def sync_seconds(card: Card, model: ModelConfig) -> float:
    """float32 read, bfloat16 written."""
    return model.num_params() * 6 / card.copy
