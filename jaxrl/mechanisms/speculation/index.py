"""An index over a prompt's earlier responses, from which drafts of a new response are taken; and who builds it.

It consists of flat integer arrays, so that a device can look drafts up inside its decode loop
(`jaxrl.mechanisms.speculation.proposer`).

Source: RhymeRL §5.3 (HistoSpec): a suffix tree for each prompt; the priority of a node is the sum of the rewards of the
responses that run through it, once per occurrence; of several continuations the one with the highest priority is
followed. A context of 7 tokens is looked for first, then shorter ones down to 3 (§5.4). History workers build indexes
asynchronously, because a prompt comes again only an epoch later.

Departures:

- The tree is flattened. A draft follows the heaviest path below the context, and that path is a piece of the text. So
  for every context of `min_prefix` .. `max_prefix` tokens the index holds one place in the text, right behind the
  context on its heaviest path, in a hash table: a look-up of m tokens takes O(m), for a text of any size. Paths are
  distinguished for `max_draft` tokens behind the longest context; no draft is longer.
- Building sorts all places by the tokens that follow, by doubling, and goes through the tree depth by depth, all with
  numpy: O(n) memory, and log2(max_prefix + max_draft) sorts. docs/performance.md has figures.
- A response is preceded by `START` markers, which count as tokens of a context: the first tokens of a response can be
  drafted as well.
- One thread builds indexes, and no processes. numpy sorts without the interpreter's lock, and an index need not be sent
  anywhere; docs/performance.md has both measured.

Of two continuations the one is followed that, in this order, is not the end of a response; has the higher priority;
occurs more often; has the higher sum of rewards; is in the later response, or later in the same. The paper does not
mention rewards below zero: with them each occurrence would count against a continuation, and the rarest be followed. So
they add nothing to a priority here, and neither another occurrence nor a higher reward ever counts against one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.mechanisms.speculation import Speculation
from jaxrl.scheduling.mechanism import RoundEnd, RoundInfo
from jaxrl.scheduling.rounds.history import HistoryStore, PromptHistory
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.types import Prompt

if TYPE_CHECKING:
    from jaxrl.record.timeline import Timeline

START = -2  # precedes the first token of a response, `max_prefix` times
END = -1  # follows the last token of a response
MAX_PROBES = 16  # the most contexts that share a bucket of the hash table


@dataclass(frozen=True, slots=True)
class DraftLengths:
    """Tokens of the shortest and the longest context that an index holds, and of the longest draft that it tells from
    others."""

    min_prefix: int = 3
    max_prefix: int = 7
    max_draft: int = 32

    @property
    def num_prefixes(self) -> int:
        return self.max_prefix - self.min_prefix + 1

    def text_size(self, num_responses: int, num_tokens: int) -> int:
        """Entries of the text of an index over responses with `num_tokens` together."""
        return num_responses * (self.max_prefix + 1) + num_tokens

    def num_places(self, num_tokens: int) -> int:
        """The most entries of `places` of an index."""
        return self.num_prefixes * num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class DraftIndex:
    """The index of one prompt. Equal only to itself, so it can be a key.

    Attributes:
      first: int32 [B + 1], B a power of two: bucket b of the hash table is `places[first[b] : first[b + 1]]`, with at
        most `MAX_PROBES` entries.
      places: int32 [E]: `place * num_prefixes + m - min_prefix` for a context of m tokens that ends before
        `text[place]`, the first token of its draft.
    """

    lengths: DraftLengths
    text: np.ndarray  # int32 [N]: every response, `max_prefix` times `START` before it and `END` behind it
    first: np.ndarray
    places: np.ndarray
    salt: int  # the hash of a context begins with it
    num_tokens: int  # of all responses

    @property
    def num_bytes(self) -> int:
        return self.text.nbytes + self.first.nbytes + self.places.nbytes

    @classmethod
    def build(
        cls, responses: Sequence[np.ndarray], weights: Sequence[float], lengths: DraftLengths = DraftLengths()
    ) -> DraftIndex:
        """The index over these responses, older ones first: token ids, each [T] with T >= 0 and ids >= 0. `weights`:
        the reward of each, finite."""
        text, rest, weight = _joined(responses, weights, lengths)
        found = _heaviest(text, rest, weight, lengths) if len(text) else []
        place = np.concatenate([np.zeros(0, np.int64), *(begins + size for size, begins in found)])
        size = np.repeat([size for size, _ in found], [len(begins) for _, begins in found]).astype(np.int64)
        salt = 0
        while (table := _hashed(text, place, size, lengths, salt)) is None:
            salt += 1
        return cls(lengths, text, *table, salt, sum(len(response) for response in responses))


def num_buckets(num_places: int) -> int:
    """Buckets of a hash table: a power of two, about two places in each."""
    return 1 << max(num_places // 2 - 1, 0).bit_length()


def context_hashes(recent: Any, salt: Any) -> Any:
    """uint32 [R, P]: the hashes of the last 1 .. P tokens of int32 [R, P]; of numpy or jax arrays alike. `salt`:
    uint32, one for all rows or [R]."""
    tokens = recent.astype(np.uint32)
    running, hashes = salt * np.uint32(0x9E3779B1), []
    for i in range(tokens.shape[1] - 1, -1, -1):
        running = _mixed(tokens[:, i] ^ running)
        hashes.append(running)
    return tokens.__array_namespace__().stack(hashes, axis=1)


def _mixed(x: Any) -> Any:
    """A 32-bit integer finaliser (the "lowbias32" constants of Wellons' hash prospector)."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return (x ^ (x >> 16)) + np.uint32(0x9E3779B9)


def _joined(
    responses: Sequence[np.ndarray], weights: Sequence[float], lengths: DraftLengths
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The text [N], how many entries lie between each and the next `END` [N], and the weight of each [N]."""
    markers = np.full(lengths.max_prefix, START, np.int32)
    pieces = [np.concatenate([markers, np.asarray(each, np.int32), [np.int32(END)]]) for each in responses]
    sizes = [len(piece) for piece in pieces]
    text = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
    rest = np.concatenate([np.arange(size - 1, -1, -1) for size in sizes]) if pieces else np.zeros(0, np.int64)
    return text, rest, np.repeat(np.asarray(weights, np.float64), sizes)


def _heaviest(
    text: np.ndarray, rest: np.ndarray, weight: np.ndarray, lengths: DraftLengths
) -> list[tuple[int, np.ndarray]]:
    """For every number of tokens that a context may have: where its occurrences on the heaviest paths begin, one for
    each context that a draft can follow."""
    deepest = lengths.max_prefix + lengths.max_draft
    order, shared = _sorted_suffixes(text, deepest)
    starts = np.flatnonzero(shared < deepest)  # of classes of suffixes with the same first `deepest` tokens
    best = np.maximum.reduceat(order, starts)  # the suffix of each class that its heaviest path goes through
    found = []
    for depth in range(deepest - 1, lengths.min_prefix - 1, -1):
        is_first = shared[starts] < depth  # children of the classes of this depth, which begin with these
        if not is_first.all():
            best = _heavier(starts, best, is_first, rest[best] > depth, weight[order])
            starts = starts[is_first]
        if depth <= lengths.max_prefix:
            begins_with_text = (text[best + np.minimum(depth, rest[best]) - 1] != START) | (depth == lengths.max_prefix)
            found.append((depth, best[(rest[best] > depth) & begins_with_text]))
    return found


def _heavier(
    starts: np.ndarray, best: np.ndarray, is_first: np.ndarray, goes_on: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """The best place of the sibling class that is followed; `is_first` marks each first sibling."""
    parent = np.cumsum(is_first) - 1
    sizes = np.diff(starts, append=len(weight))
    siblings = np.flatnonzero(np.bincount(parent)[parent] > 1)
    total, priority = (np.add.reduceat(each, starts)[siblings] for each in (weight, np.maximum(weight, 0.0)))
    keys = best[siblings], total, sizes[siblings], priority, goes_on[siblings], parent[siblings]
    ranked = siblings[np.lexsort(keys)]
    last = np.flatnonzero(np.diff(parent[ranked], append=-1))
    followed = best[is_first]
    followed[parent[ranked[last]]] = best[ranked[last]]
    return followed


def _sorted_suffixes(text: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Where suffixes begin, sorted by at least their first `depth` entries [N], and how many entries, `depth` at the
    most, each shares with the one before it [N]. Prefix doubling (Manber and Myers 1990)."""
    size = len(text)
    ranks = [np.unique(text, return_inverse=True)[1].astype(np.int64) + 1]  # by the first 1, 2, 4, ... entries
    order = np.argsort(ranks[0], kind="stable")
    while 1 << (len(ranks) - 1) < depth:
        half = 1 << (len(ranks) - 1)
        behind = np.zeros(size, np.int64)
        behind[: max(size - half, 0)] = ranks[-1][half:]
        key = ranks[-1] * (size + 2) + behind
        order = np.argsort(key, kind="stable")
        ranked = key[order]
        rank = np.empty(size, np.int64)
        rank[order] = np.cumsum(np.diff(ranked, prepend=-1) != 0)
        ranks.append(rank)
    shared = np.zeros(size, np.int64)
    mine, other = order[1:], order[:-1]
    for level in range(len(ranks) - 1, -1, -1):
        at, beside = mine + shared[1:], other + shared[1:]
        inside = (at < size) & (beside < size)
        at, beside = np.where(inside, at, 0), np.where(inside, beside, 0)
        shared[1:] += np.where(inside & (ranks[level][at] == ranks[level][beside]), 1 << level, 0)
    return order, np.minimum(shared, depth)


def _hashed(
    text: np.ndarray, place: np.ndarray, size: np.ndarray, lengths: DraftLengths, salt: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """(first, places) of contexts of `size` tokens that end before `place`; None if a bucket would be too full."""
    size_of_table = num_buckets(len(place))
    recent = text[np.maximum(place[:, None] + np.arange(-lengths.max_prefix, 0), 0)]
    hashes = context_hashes(recent, np.uint32(salt))[np.arange(len(place)), size - 1]
    bucket = (hashes & np.uint32(size_of_table - 1)).astype(np.int64)
    counts = np.bincount(bucket, minlength=size_of_table)
    if counts.max() > MAX_PROBES:
        return None
    entries = place * lengths.num_prefixes + size - lengths.min_prefix
    first = np.concatenate([[0], np.cumsum(counts)])
    return first.astype(np.int32), entries[np.argsort(bucket, kind="stable")].astype(np.int32)


# -- beside the update -------------------------------------------------------------------------------------------------

TRACK = "history"  # of the timeline


def index_bytes(lengths: DraftLengths, num_responses: int, num_tokens: int) -> int:
    """The largest size of an index over `num_responses` responses of `num_tokens` tokens in total."""
    places = lengths.num_places(num_tokens)
    return 4 * (lengths.text_size(num_responses, num_tokens) + places + num_buckets(places) + 1)


def history_store(options: Speculation.Options) -> HistoryStore:
    """An empty store for `rollout.speculation`; where that is off, of lengths alone."""
    if not options.enable:
        return HistoryStore(0)
    return HistoryStore(options.epochs, options.max_bytes, partial(index_bytes, DraftLengths()))


def build_index(history: PromptHistory) -> DraftIndex:
    """The index over a prompt's last responses, weighted by their rewards."""
    responses = [response for rollout in history.rollouts for response in rollout.responses()]
    rewards = np.concatenate([rollout.rewards for rollout in history.rollouts])
    return DraftIndex.build(responses, rewards.tolist())


class IndexBuilder:
    """Builds indexes in a thread, first come, first served. `build_s`: seconds of builds in the thread; `wait_s`: in
    which `take` has blocked."""

    def __init__(self, timeline: Timeline | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.build_s = self.wait_s = 0.0
        self._timeline, self._clock = timeline, clock
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=TRACK)

    def begin(self, index: int, history: PromptHistory) -> Future[DraftIndex]:
        return self._threads.submit(self._built, index, history)

    def take(self, building: Future[DraftIndex]) -> DraftIndex:
        """The index; waits for it. Raises what its build has raised."""
        if building.done():
            return building.result()
        began = self._clock()
        try:
            return building.result()
        finally:
            self.wait_s += self._clock() - began

    def close(self) -> None:
        """Ends the thread; builds that have not begun are dropped."""
        self._threads.shutdown(cancel_futures=True)

    def _built(self, index: int, history: PromptHistory) -> DraftIndex:
        drawn = {"prompt": index, "tokens": history.num_tokens}
        with nullcontext() if self._timeline is None else self._timeline.span(TRACK, "build", **drawn):
            began = self._clock()
            history.pack()  # else a checkpoint would do it between two steps
            try:
                built = build_index(history)
            except Exception as error:
                error.add_note(f"while the draft index of prompt {index} was built ({history.num_tokens} tokens)")
                raise
            self.build_s += self._clock() - began
            return built


class SpeculationSession(Speculation):
    """History speculation in a run. `builder`: None where lengths alone are kept.

    A round's groups enter the history, and requests draft from indexes over it, which are built beside the update. Only
    the responses are part of a checkpoint: a resumed run builds the indexes again. Where ranking groups are on and
    drafts are off, it keeps the lengths alone.

    Logical time: a request's index holds the groups of all rounds before its own, and of no other. A request that comes
    before its index is ready waits (`rollout/spec/build_wait_s`). A build that fails ends the run.
    """

    def __init__(self, store: HistoryStore, builder: IndexBuilder | None = None) -> None:
        self.store = store
        self._builder = builder
        self._indexes: dict[int, Future[DraftIndex]] = {}  # of the prompts that the store keeps
        self._is_training = False  # the round under way is one of training
        self._measured = (0.0, 0.0, 0)  # build_s, wait_s, num_evicted when the last round ended

    # -- the backend's hooks -----------------------------------------------------------------------------------------

    def round_begins(self, info: RoundInfo) -> None:
        self._is_training = info.is_training

    def on_request(self, request: Request, prompt: Prompt) -> Request:
        building = self._indexes.get(prompt.index)
        if self._builder is None or building is None or not self._is_training:
            return request
        return replace(request, history=self._builder.take(building))

    def round_ends(self, end: RoundEnd) -> dict[str, float]:
        """Takes in the scored groups of a round, and begins their indexes."""
        if not self._is_training:
            return {}
        self._is_training = False
        if self._builder is not None:  # the indexes of the round before: there since an update ago
            for index in self.store.unsettled():
                self.store.settle(index, self._builder.take(self._indexes[index]).num_bytes)
        changed = self.store.add(end.scored)
        if self._builder is None:
            return {}
        self._begin(changed)
        before = self._measured
        self._measured = now = (self._builder.build_s, self._builder.wait_s, self.store.num_evicted)
        return spec_metrics(end.done) | {
            "rollout/spec/index_bytes": float(self.store.num_bytes),
            "rollout/spec/evicted_prompts": float(now[2] - before[2]),
            "rollout/spec/build_s": now[0] - before[0],
            "rollout/spec/build_wait_s": now[1] - before[1],
        }

    def round_cancelled(self) -> None:
        self._is_training = False

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.store.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.store.load_state_dict(state)
        self._begin(self.store.prompts())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _begin(self, changed: Sequence[int]) -> None:
        """Begins indexes, and drops those of prompts that the store no longer keeps."""
        if self._builder is None:
            return
        kept = {*self.store.prompts()}.difference(changed)
        for index in [index for index in self._indexes if index not in kept]:
            self._indexes.pop(index).cancel()
        for index in changed:
            history = self.store.history(index)
            assert history is not None, "an index of responses that are not kept"
            self._indexes[index] = self._builder.begin(index, history)


def spec_metrics(counts: Counters) -> dict[str, float]:
    """A round's metrics: `plans_share`, plans that verified drafts; `accept_rate`, drafted tokens that were accepted;
    `drafted_share`, decoded tokens that came from drafts; `tokens_per_step`, the gain of a row in a step of a plan that
    verifies (1 where none did); `match_length`, tokens of the context by which a draft was found."""
    steps, accepted = counts.verifying_row_steps, counts.accepted_tokens
    return {
        "rollout/spec/plans_share": counts.verifying_plans / max(counts.plans, 1),
        "rollout/spec/accept_rate": accepted / max(counts.proposed_tokens, 1),
        "rollout/spec/drafted_share": accepted / max(counts.busy_row_steps + accepted, 1),
        "rollout/spec/tokens_per_step": 1.0 + accepted / max(steps, 1),
        "rollout/spec/match_length": counts.matched_tokens / max(counts.proposed_row_steps, 1),
    }
