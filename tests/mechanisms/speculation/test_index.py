"""The index against a plain search of all occurrences, and what decides between continuations."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from draft_lookup import draft, find
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.mechanisms.speculation.index import END, START, DraftIndex, DraftLengths, context_hashes

SHORT = DraftLengths(min_prefix=2, max_prefix=4, max_draft=5)


def searched(
    responses: Sequence[Sequence[int]], weights: Sequence[float], lengths: DraftLengths, context: Sequence[int]
) -> tuple[list[int], int]:
    """The draft for a context and the tokens of it that were found, step by step over all occurrences."""
    texts = [[*[START] * lengths.max_prefix, *response, END] for response in responses]
    recent = [*[START] * lengths.max_prefix, *context][-lengths.max_prefix :]
    for m in range(lengths.max_prefix, lengths.min_prefix - 1, -1):
        wanted = recent[-m:]
        here = [
            (i, at + m)
            for i, text in enumerate(texts)
            for at in range(len(text) - m)
            if text[at : at + m] == wanted and at + m >= lengths.max_prefix
        ]
        draft: list[int] = []
        depth = lengths.max_prefix + lengths.max_draft - m
        while here and len(draft) < depth:
            branches: dict[int, list[tuple[int, int]]] = {}
            for i, at in here:
                branches.setdefault(texts[i][at], []).append((i, at))
            branches.pop(END, None)
            if not branches:
                break
            best = list(branches.items())
            for key in (
                lambda each: sum(max(weights[i], 0.0) for i, _ in each[1]),
                lambda each: len(each[1]),
                lambda each: sum(weights[i] for i, _ in each[1]),
            ):
                most = max(map(key, best))
                best = [each for each in best if key(each) == most]
            if len(best) > 1:  # a tie to the end: any of them, as the paths below them decide
                return [], -m
            token, branch = best[0]
            draft.append(token)
            here = [(i, at + 1) for i, at in branch]
        if draft:
            return draft[: lengths.max_draft], m
    return [], 0


responses_and_weights = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=30), st.sampled_from([-1.0, 0.0, 0.5, 1.0])), max_size=6
)


@given(responses_and_weights, st.lists(st.integers(0, 2), max_size=6))
def test_find_is_the_heaviest_path_below_the_longest_context(drawn: list, context: list[int]):
    responses, weights = [np.array(r, np.int32) for r, _ in drawn], [w for _, w in drawn]
    index = DraftIndex.build(responses, weights, SHORT)
    expected, m = searched([r for r, _ in drawn], weights, SHORT, context)
    assert find(index, context)[1] == abs(m)
    if m >= 0:
        assert draft(index, context, SHORT.max_draft) == expected


def build(*responses: list[int], weights: Sequence[float] | None = None) -> DraftIndex:
    return DraftIndex.build([np.array(r, np.int32) for r in responses], weights or [1.0] * len(responses))


def test_of_equals_the_later_response_is_followed_and_an_end_comes_last():
    assert draft(build([1, 2, 3, 5], [1, 2, 3, 6]), [1, 2, 3], 1) == [6]
    assert draft(build([1, 2, 3, 5], [1, 2, 3], [1, 2, 3], weights=[0, 9, 9]), [1, 2, 3], 1) == [5]


def test_a_device_hashes_as_the_host_does():
    recent = np.array([[1, 2, 3], [START, START, 70000]], np.int32)
    salts = np.array([0, 3], np.uint32)
    assert (np.asarray(context_hashes(jnp.asarray(recent), jnp.asarray(salts))) == context_hashes(recent, salts)).all()
