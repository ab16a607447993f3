"""Which of a request's KV stays: layers in stacks of one window each, and the blocks that a request holds in them.

Purpose: a layer with a sliding window reads no position behind it, so blocks there can be freed. Layers are dealt into
*stacks* of equally many layers, all of a stack with the same window (`jaxrl.models.kv_layers`). A block holds the KV of
one stack's layers, whichever stack that is: so there is one pool, one free list and one way to move blocks. All that
turns tokens into blocks goes by this file.

Source: the hybrid KV cache manager of vLLM (layers in groups of equal size over one pool).

A request's table lists, for each stretch of `block_size` positions, a block for every stack: block i * stacks + s is
that of stack s at positions [i * block_size, (i + 1) * block_size). Blocks behind the window of a stack have been
freed; the table names the trash block there. One stack without a window, the default, is the cache of a model in which
every layer sees everything, and its tables are plain lists of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class KvStacks:
    """The stacks of a model's layers.

    Attributes:
      windows: of each stack: the positions that a query sees, its own included; 0: all.
      ahead: the most tokens by which the positions that plans may write can be ahead of the first position that plans
        not yet made, or made last, may have to run.
      longest: tokens of the longest request; 0: not known.
    """

    windows: tuple[int, ...] = (0,)
    ahead: int = 0
    longest: int = 0

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def is_whole(self) -> bool:
        """Nothing is ever behind a window."""
        return self.windows == (0,)

    def behind(self, first: int, block_size: int) -> tuple[int, ...]:
        """For each stack, the number of leading blocks that no query at position `first` or beyond sees."""
        return tuple(max(first - window + 1, 0) // block_size if window else 0 for window in self.windows)

    def limits(self, block_size: int) -> tuple[int, ...]:
        """For each stack with a window, the most blocks that a request holds in it at a time; 0 for the others.

        One for a window that begins, and one for plans that end, in the middle of a block."""
        return tuple(-(-(window - 1 + self.ahead) // block_size) + 2 if window else 0 for window in self.windows)

    def most_blocks(self, num_tokens: int, block_size: int) -> int:
        """The most blocks that a request holds at a time on its way to `num_tokens` positions."""
        each = -(-num_tokens // block_size)
        if self.is_whole:
            return each
        return sum(min(each, limit) if limit else each for limit in self.limits(block_size))

    def refuse_small(self, num_blocks: int, block_size: int, longest: int, tp: int, degrees: Sequence[int]) -> None:
        """Raises ValueError for a pool at this TP degree, of these, that cannot hold one request of `longest` tokens.

        Args:
          num_blocks: of the pool, the reserved one included.
        """
        needed = self.most_blocks(longest, block_size) + 1
        if num_blocks < needed:
            several = len(degrees) > 1
            at = f" at tp {tp}" if several else ""
            other = f", or leave tp {tp} out of rollout.layout.degrees" if several else ""
            raise ValueError(
                f"rollout.num_blocks ({num_blocks}{at}, one of them reserved) must hold one request of {longest} "
                f"tokens: at least {needed} blocks of {block_size} tokens{other}"
            )

    def num_positions(self, num_tokens: Any) -> Any:
        """The positions that requests of `num_tokens` tokens (a number, or an array) hold, summed over the stacks: the
        tokens themselves for a single stack without a window."""
        ends = ((window and window - 1 + self.ahead) for window in self.windows)
        return sum(np.minimum(num_tokens, end) if end else num_tokens for end in ends)

    def num_tokens(self, num_blocks: int, block_size: int) -> int:
        """The tokens that `num_blocks` blocks hold in requests of the longest length, in which windows leave most
        behind. Requests that end in the middle of a block are not accounted for."""
        positions = int(self.num_positions(self.longest)) if self.longest else len(self)
        return num_blocks * block_size * max(self.longest, 1) // positions


WHOLE = KvStacks()


def most_ahead(max_prefill_tokens: int, most_new: int) -> int:
    """`KvStacks.ahead` if a plan brings a row at most `max_prefill_tokens`, and then at most `most_new`: one plan is in
    flight while the next is made."""
    return max(max_prefill_tokens, most_new) + most_new


def is_there(table: Sequence[int], behind: Sequence[int], num_stretches: int) -> bool:
    """Whether a table has all blocks of its first stretches, but for those behind a window."""
    stacks = len(behind)
    return all(all(table[s + stacks * each : s + stacks * num_stretches : stacks]) for s, each in enumerate(behind))
