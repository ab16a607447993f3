"""Block accounting: examples, and the invariants after any sequence of calls."""

from typing import Any

import numpy as np
import pytest
from checked_blocks import check_blocks
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.scheduling.tokens.blocks import BlockManager
from jaxrl.scheduling.tokens.stacks import KvStacks


def extend_all(blocks: BlockManager, *wanted: tuple[int, int, int]) -> bool:
    """Of (request, dp group, blocks)."""
    rows, groups, more = zip(*((blocks.row(request), group, more) for request, group, more in wanted), strict=True)
    return blocks.extend_all(np.array(rows), np.array(groups), np.array(more))


def num_held(blocks: BlockManager, request: int) -> int:
    return int(blocks.held[blocks.row(request)])


@pytest.mark.parametrize(("prompt_len", "shareable"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_last_token_of_a_prompt_is_never_shared(prompt_len: int, shareable: int):
    blocks = BlockManager(num_groups=1, num_blocks=9, block_size=4)
    blocks.allocate(1, 0, num_tokens=prompt_len, share="p", prompt_len=prompt_len)
    assert blocks.num_published(0, "p", prompt_len) == 0, "no chunk is in a plan yet"
    blocks.publish(1, min(prompt_len, 7))
    assert blocks.num_published(0, "p", prompt_len) == min(shareable, 1)
    blocks.publish(1, prompt_len)
    assert blocks.num_published(0, "p", prompt_len) == shareable


def test_a_conversation_goes_on_with_its_blocks():
    blocks = BlockManager(num_groups=2, num_blocks=9, block_size=4)
    blocks.allocate(1, 1, num_tokens=14)
    blocks.park(1, "talk", tuple(range(10)))
    assert num_held(blocks, 1) == 1
    blocks.free(1)
    assert (blocks.num_free(1), blocks.num_parked(1)) == (8, 3), "they count as free, and the fourth block is"
    assert (blocks.parked_in("talk"), blocks.parked_in("other")) == (1, None)
    assert blocks.num_resumed(0, "talk", tuple(range(10))) == 0, "pools of other groups know nothing of it"
    assert blocks.num_resumed(1, "talk", tuple(range(10))) == 9, "the last token must be run to get logits"
    turn = (*range(7), 70, 80, 90, 100)
    assert blocks.resume(2, 1, num_tokens=13, session="talk", tokens=turn) == 7
    assert blocks.table(2) == (1, 2, 3, 4), "of the second only the first half is its own, and the rest is written over"
    assert blocks.num_parked(1) == 0
    blocks.park(2, "talk", turn)
    blocks.free(2)
    assert blocks.resume(3, 0, num_tokens=11, session="talk", tokens=turn) == 0, "it goes on elsewhere"
    assert blocks.num_free(1) == 8
    assert blocks.parked_in("talk") is None
    check_blocks(blocks)


def test_where_a_pool_runs_dry_the_blocks_parked_longest_ago_are_given_up():
    blocks = BlockManager(num_groups=1, num_blocks=7, block_size=2)
    for request, session in enumerate("abc"):
        blocks.allocate(request, 0, num_tokens=4)
        blocks.park(request, session, (request,) * 4)
        blocks.free(request)
    assert (blocks.num_free(0), blocks.num_parked(0)) == (6, 6)
    assert blocks.allocate(3, 0, num_tokens=3) == 0
    assert [blocks.parked_in(session) for session in "abc"] == [None, 0, 0]
    assert blocks.extend(3, num_tokens=6)
    assert [blocks.parked_in(session) for session in "abc"] == [None, None, 0]
    assert extend_all(blocks, (3, 0, 1)), "one of the two that b had is there"
    assert not extend_all(blocks, (3, 0, 3))
    assert blocks.parked_in("c") == 0, "what cannot be is no reason to give anything up"
    assert blocks.resume(4, 0, num_tokens=7, session="d", tokens=(1,)) is None
    blocks.forget_all()
    assert (blocks.num_free(0), blocks.num_parked(0)) == (2, 0)
    check_blocks(blocks)


PROMPT_LENGTHS = {"a": 1, "b": 6, "c": 9, None: 5}
CALLS = st.tuples(
    st.sampled_from(["allocate", "allocate", "extend", "publish", "free", "park", "resume"]),
    st.integers(0, 9),  # which request of those that hold blocks, or which conversation
    st.integers(0, 1),  # which group
    st.sampled_from(list(PROMPT_LENGTHS)),
    st.integers(0, 12),  # tokens beyond the prompt
)


@given(
    windows=st.sampled_from([*[(0,)] * 4, (3,), (0, 4), (0, 0, 2), (0, 3, 3)]),
    num_blocks=st.integers(8, 40),
    block_size=st.integers(1, 4),
    calls=st.lists(CALLS, min_size=20, max_size=60),
)
def test_invariants_hold_and_what_is_seen_is_there(
    windows: tuple[int, ...], num_blocks: int, block_size: int, calls: list
):
    """After any sequence of calls. The table of a request has a block for all that its queries from `first` on see."""
    blocks = BlockManager(2, num_blocks, block_size, KvStacks(windows, ahead=25))
    live: dict[int, tuple[int, int, int]] = {}  # request -> (group, first, tokens covered)
    shares: dict[int, Any] = {}
    talks: dict[int, Any] = {}  # session -> the `share` of its prompt
    for new, (call, which, group, share, more) in enumerate(calls):
        prompt_len, session = PROMPT_LENGTHS[share], which % 3
        request = new if call in ("allocate", "resume") or not live else sorted(live)[which % len(live)]
        if call == "allocate":
            free, first = blocks.num_free(group), more // 3 if share is None else 0
            tokens = prompt_len + more
            saved = blocks.num_saved(group, share, prompt_len, num_tokens=tokens)
            there = blocks.num_published(group, share, prompt_len) * block_size
            shared = blocks.allocate(request, group, tokens, share, prompt_len, first)
            assert shared is not None or blocks.num_free(group) == free
            assert shared is not None or blocks.most_blocks(tokens) - saved > free, "admitted without room"
            if blocks.stacks.is_whole:
                assert (shared is None) == (blocks.blocks_for(tokens) - saved > free), "kept out with room"
            if shared is not None:
                assert shared == there
                live[request], shares[request] = (group, max(first, shared), tokens), share
        elif call == "extend" and request in live:
            where, first, tokens = live[request]
            first = max(first, tokens - 10, min(first + more // 2, tokens - 1))
            most, free = blocks.more_for(blocks.row(request), tokens + more), blocks.num_free(where)
            could = most <= free
            live[request] = (where, first, tokens)  # what is behind it may be gone, whether or not there is room
            if blocks.extend(request, tokens + more, first):
                assert free - blocks.num_free(where) == most or not blocks.stacks.is_whole, "wants more than it takes"
                live[request] = (where, first, tokens + more)
            else:
                assert not could or blocks.blocks_for(more) > blocks.num_free(where)
        elif call == "publish" and request in live:
            blocks.publish(request, min(more, live[request][2]))
        elif call == "free" and request in live:
            blocks.free(request)
            del live[request]
        elif call == "park" and request in live:  # with all of a prompt that others may share
            tokens, talks[session] = live.pop(request)[2], shares[request]
            num_kept = more if talks[session] is None else PROMPT_LENGTHS[talks[session]] + more
            blocks.park(request, session, tuple(range(min(num_kept, tokens))))
            blocks.free(request)
        elif call == "resume":  # as the next turn, which has all of the prompt
            tokens = tuple(range(PROMPT_LENGTHS[talks.get(session)] + more))
            there, free = blocks.num_resumed(group, session, tokens), blocks.num_free(group)
            found = blocks.resume(request, group, len(tokens) + 2, session, tokens)
            assert found == there or (found is None and blocks.num_free(group) == free)
            assert found is not None or blocks.most_blocks(len(tokens) + 2) > free, "admitted without room"
            if found is not None:
                live[request], shares[request] = (group, found, len(tokens) + 2), talks.get(session)
        check_blocks(blocks)
        for holder, (_, first, tokens) in live.items():
            table = blocks.table(holder)
            for stack, window in enumerate(windows):
                begin = max(first - window + 1, 0) // block_size if window else 0
                assert all(table[i * len(windows) + stack] for i in range(begin, -(-tokens // block_size)))
    for request in live:
        blocks.free(request)
        check_blocks(blocks)
    blocks.forget_all()
    check_blocks(blocks)
    assert not any(blocks.groups_holding(share) for share in PROMPT_LENGTHS)
    assert [blocks.num_free(g) for g in range(2)] == [num_blocks - 1] * 2
