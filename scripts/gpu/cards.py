"""What an H100 or an H200 should do, from bytes, operations and launches: arithmetic, before anything was measured.

`Card` has the datasheets' rates, and the rates that are assumed to be reached. Each function gives seconds of one piece
of work on a card: bytes over the copy bandwidth, operations over the rate of products, kernels times the gap between
two of them. What is left over by these terms is not in them; a figure that misses its expectation by a tenth or more
says that something is not understood.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench import costs
from bench.ceilings import datasheet

from jaxrl.models.config import ModelConfig
from jaxrl.sim.hardware import H100, H200, Hardware

WEIGHTS_OF_COPY = 0.92
"""Of the copy bandwidth: reading weights for a product of few rows."""
CACHE_OF_COPY = 0.88
"""Of the copy bandwidth: reading keys and values through block tables."""
LARGE_OF_PRODUCT = 0.75
"""Of the rate of a large square product: those of training, which are narrower, recomputed heads included."""
ATTENTION_OF_PRODUCT = 0.40
"""Of the same rate: packed attention, both passes; cuDNN's is taken as 0.6."""
CUDNN_OF_PRODUCT = 0.60
GAP_S = 1.0e-6
"""Between two kernels of one CUDA graph."""
KERNELS_A_LAYER = 9
KERNELS_OUTSIDE = 12
"""Of a decode step: embedding, last norm, head, sampling, bookkeeping."""
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


def kernels_of_step(model: ModelConfig) -> int:
    return KERNELS_A_LAYER * model.num_layers + KERNELS_OUTSIDE


def cache_bytes(model: ModelConfig, rows: int, context: int) -> float:
    return costs.decode_kv_bytes(model, rows, context, 0, 2)


def decode_seconds(card: Card, model: ModelConfig, rows: int, context: int) -> float:
    """Of one step: weights, or their products where these take longer; cache; float32 logits written once and read
    twice; the gaps."""
    weights = costs.weight_bytes(model, 2)
    products = rows * weights / (LARGE_OF_PRODUCT * card.product)
    logits = rows * model.vocab_size * 4 * 3 / card.copy
    gaps = kernels_of_step(model) * GAP_S
    cache = cache_bytes(model, rows, context) / (CACHE_OF_COPY * card.copy)
    return max(weights / (WEIGHTS_OF_COPY * card.copy), products) + cache + logits + gaps


def decode_share(card: Card, model: ModelConfig, rows: int, context: int) -> float:
    """Useful bytes per second, of the copy bandwidth."""
    useful = costs.weight_bytes(model, 2) + cache_bytes(model, rows, context)
    return useful / decode_seconds(card, model, rows, context) / card.copy


def gap_share(card: Card, model: ModelConfig, rows: int, context: int) -> float:
    return kernels_of_step(model) * GAP_S / decode_seconds(card, model, rows, context)


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
