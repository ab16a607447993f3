"""How many blocks requests hold whose layers lie in stacks with windows."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl.scheduling.tokens.stacks import WHOLE, KvStacks, is_there, most_ahead

TWO = KvStacks((0, 10), ahead=6)


@pytest.mark.parametrize(("first", "behind"), [(0, 0), (12, 0), (13, 1), (16, 1), (17, 2), (100, 22)])
def test_what_is_behind(first: int, behind: int):
    """A query at 13 sees 4 to 13: the block of 0 to 3 is behind it, where it sees ten positions."""
    assert TWO.behind(first, block_size=4) == (0, behind)
    assert WHOLE.behind(first, block_size=4) == (0,)


def test_the_most_that_a_request_holds():
    """From a query's window, nine positions behind it, to six ahead: four blocks, and one at each end."""
    assert TWO.limits(4) == (0, 6)
    assert [TWO.most_blocks(n, 4) for n in (1, 4, 5, 24, 25, 400)] == [2, 2, 4, 12, 13, 106]
    assert [WHOLE.most_blocks(n, 4) for n in (1, 4, 5, 400)] == [1, 1, 2, 100]
    assert most_ahead(max_prefill_tokens=100, most_new=9) == 109
    assert most_ahead(max_prefill_tokens=4, most_new=9) == 18


def test_tokens_and_positions():
    contexts = np.array([[0, 3], [15, 100]])
    assert TWO.num_positions(contexts).tolist() == [[0, 6], [30, 115]]
    assert WHOLE.num_positions(contexts) is contexts or np.array_equal(WHOLE.num_positions(contexts), contexts)
    assert WHOLE.num_tokens(7, 4) == 28
    assert TWO.num_tokens(7, 4) == 14, "each token in both stacks"
    assert KvStacks((0, 10), 6, longest=285).num_tokens(75, 4) == 285, "one of 285 tokens, and 15 in its window"


def test_a_table_has_what_is_not_behind():
    table = [1, 0, 2, 0, 3, 4]
    assert is_there(table, (0, 2), 3)
    assert not is_there(table, (0, 1), 3)
    assert not is_there([0, 5, *table[2:]], (0, 0), 2)
    assert is_there(table, (0, 1), 0)
