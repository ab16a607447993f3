#!/usr/bin/env python3
"""Draft indexes of long responses: how fast they are built and asked, what they take, and who is held up meanwhile.

    python scripts/bench_draft_index.py [--tokens 16384] [--responses 8] [--prompts 1000] [--answered 48] [--json]

Responses are made up: each is put together from pieces of the ones before it (`--same` of its tokens) and of fresh
tokens, with pieces of 40 tokens on average and token frequencies by Zipf's law.

- build: `DraftIndex.build` over one prompt's responses; tokens of them per second.
- find: `DraftIndex.find`, the host's reference of the look-up, at places spread over a response. Runs look drafts up on
  the device (`jaxrl.rollout.verify`), where it is part of a step.
- the host's loop: an engine over replayed lengths, plan by plan, in one thread: what a rollout's host does. It is timed
  alone, beside a thread that builds one index after another (as runs do), and beside a process that does, to which the
  responses are sent and which sends the index back. `slower`: its time over that alone. `builds`: indexes per second of
  it.
- bytes: of responses, compressed for a checkpoint, and of the index, for `--prompts` prompts that are built one after
  another (0: none); and by these for 230,000 prompts on 8 nodes, which RhymeRL (§5.3) says take less than 80 GB a node.
- accepted: of the tokens that are drafted for the next epoch's responses, by how rewards are given, over
  `--answered` prompts. A response is 24 stretches of text, each one of eight that the prompt has for that place; some
  are usual, some good. The better half of 16 responses is right, and the next epoch's take good stretches more often.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import numpy as np
from bench import records
from bench.measure import Bench, Gauge, Values, num_cores, say, summarise, verdict

from jaxrl.mechanisms.speculation.index import DraftIndex
from jaxrl.mechanisms.speculation.options import SpeculationSection
from jaxrl.mechanisms.speculation.rule import Window
from jaxrl.mechanisms.speculation.session import build_index
from jaxrl.scheduling.rounds.history import PastRollout, PromptHistory
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sim.replay import ReplayExecutor
from jaxrl.types import SampleKey, SamplingParams

QUICK = {"repetitions": 1, "tokens": 300, "responses": 2, "prompts": 3, "requests": 16, "answered": 2}
OPTIONS = SpeculationSection(enable=True)
PAPER_PROMPTS, PAPER_NODES, PAPER_BYTES = 230_000, 8, 80e9
_PIECE, _ZIPF, _VOCABULARY = 40, 1.3, 100_000


def made_up(rng: np.random.Generator, responses: int, tokens: int, same: float) -> PromptHistory:
    """A prompt's responses, of which so many tokens stand in ones before."""
    made = [_fresh(rng, tokens)]
    while len(made) < responses:
        source, pieces, size = made[rng.integers(len(made))], [], 0
        while size < tokens:
            count = int(rng.geometric(1 / _PIECE))
            pieces.append(source[size : size + count] if rng.random() < same else _fresh(rng, count))
            size += len(pieces[-1])
        made.append(np.concatenate(pieces)[:tokens])
    lengths = np.full(responses, tokens, np.int32)
    return PromptHistory((PastRollout(0, np.concatenate(made), lengths, rng.random(responses)),))


def _fresh(rng: np.random.Generator, tokens: int) -> np.ndarray:
    return (rng.zipf(_ZIPF, tokens) % _VOCABULARY).astype(np.int32)


def _build(history: PromptHistory) -> DraftIndex:
    return build_index(history, OPTIONS)


def host_loop(num_requests: int) -> None:
    """A rollout's host work without a device: `num_requests` responses of 512 tokens in 64 rows."""
    keys = [SampleKey(0, i // 8, i % 8) for i in range(num_requests)]
    executor = ReplayExecutor(dict.fromkeys(keys, 512), 1, 64, 64 * 40 + 1, 16, 4096)
    params = SamplingParams(max_tokens=512)
    requests = [Request(i, key, (1,) * 64, params, share=key.prompt_index) for i, key in enumerate(keys)]
    Engine(executor, BatcherConfig(decode_steps=8)).generate(requests)


def beside(pool: Executor, history: PromptHistory, work: Callable[[], None]) -> Callable[[], Values]:
    """The work, timed while a pool of one builds one index after another."""
    pool.submit(_build, history).result()  # a process starts

    def run() -> Values:
        stop, counts = threading.Event(), [0]

        def feed() -> None:
            while not stop.is_set():
                pool.submit(_build, history).result()
                counts[0] += 1

        feeder = threading.Thread(target=feed)
        feeder.start()
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        done = counts[0]
        stop.set()
        feeder.join()
        return {"seconds": seconds, "builds": done / seconds}

    return run


def cases_of(options: argparse.Namespace, pools: Sequence[Executor]) -> dict[str, Callable[[], Values]]:
    history = made_up(np.random.default_rng(options.seed), options.responses, options.tokens, options.same)
    index, newest = _build(history), history.rollouts[-1].responses()[-1]
    places = np.linspace(0, len(newest), 2000, dtype=int).tolist()
    contexts = [newest[max(place - OPTIONS.max_prefix, 0) : place].tolist() for place in places]

    def work() -> None:
        host_loop(options.requests)

    def timed(run: Callable[[], Any], count: int) -> Callable[[], Values]:
        def one() -> Values:
            began = time.perf_counter()
            run()
            seconds = time.perf_counter() - began
            return {"seconds": seconds, "rate": count / seconds}

        return one

    return {
        "build": timed(lambda: _build(history), history.num_tokens),
        "find": timed(lambda: [index.find(context) for context in contexts], len(contexts)),
        "host alone": timed(work, 1),
        "host beside a thread": beside(pools[0], history, work),
        "host beside a process": beside(pools[1], history, work),
    }


def sizes_of(options: argparse.Namespace) -> dict[str, float]:
    """Bytes of all prompts, and how long their indexes and what goes into a checkpoint took."""
    rng, totals = np.random.default_rng(options.seed + 1), dict.fromkeys(("tokens", "index", "packed"), 0.0)
    build_s = pack_s = 0.0
    for _ in range(options.prompts):
        history = made_up(rng, options.responses, options.tokens, options.same)
        began = time.perf_counter()
        totals["index"] += _build(history).num_bytes
        built = time.perf_counter()
        totals["packed"] += len(history.pack())
        build_s, pack_s = build_s + built - began, pack_s + time.perf_counter() - built
        totals["tokens"] += history.num_tokens
    held = 4 * totals["tokens"] + totals["index"]
    per_prompt = held / options.prompts
    return totals | {
        "prompts": options.prompts,
        "build_s": build_s,
        "pack_s": pack_s,
        "held_bytes": held,
        "node_bytes": per_prompt * PAPER_PROMPTS / PAPER_NODES,
    }


REWARDS = ("1", "0/1", "-1", "-1/+1", "-1/+1 and overlong")
"""Of every response; of wrong and of right ones; and with up to 1 off for being longer than most, as in DAPO."""


def accepted(rewards: str, prompts: int, seed: int) -> float:
    """The share of drafted tokens that an epoch's responses accept, drafted from those of the epoch before."""
    drafted = right = 0
    for prompt in range(prompts):
        rng = np.random.default_rng((seed, prompt))
        pieces = [[_fresh(rng, int(rng.integers(4, 9))) for _ in range(8)] for _ in range(24)]
        good, common = rng.normal(size=(2, 24, 8)) * np.array([1.0, 3.0])[:, None, None]
        before = _answers(rng, common, 16)
        quality = good[np.arange(24), before].sum(1)
        texts = [_text(pieces, answer) for answer in before]
        lengths = np.array([len(text) for text in texts], np.int32)
        scores = _scores(rewards, quality > np.median(quality), lengths)
        past = PastRollout(0, np.concatenate(texts), lengths, scores)
        index = _build(PromptHistory((past,)))
        for answer in _answers(rng, common + good / 2, 4):
            counts = _drafted(index, _text(pieces, answer))
            drafted, right = drafted + counts[0], right + counts[1]
    return right / drafted


def _answers(rng: np.random.Generator, scores: np.ndarray, count: int) -> np.ndarray:
    """[count, 24]: of each response and place, the stretch that it has; drawn by the softmax of scores [24, 8]."""
    return np.argmax(scores + rng.gumbel(size=(count, *scores.shape)), axis=-1)


def _text(pieces: Sequence[Sequence[np.ndarray]], answer: np.ndarray) -> np.ndarray:
    return np.concatenate([stretches[i] for stretches, i in zip(pieces, answer, strict=True)])


def _scores(rewards: str, is_right: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """float64 [R]: the rewards of responses, by a word of `REWARDS`."""
    signed = np.where(is_right, 1.0, -1.0)
    middle, longest = np.median(lengths), lengths.max()
    match rewards:
        case "1" | "-1":
            return np.full(len(lengths), float(rewards))
        case "0/1":
            return is_right.astype(np.float64)
        case "-1/+1":
            return signed
    return signed - np.clip((lengths - middle) / max(longest - middle, 1), 0, 1)


def _drafted(index: DraftIndex, text: np.ndarray) -> tuple[int, int]:
    """Tokens that are drafted and accepted while a response is drawn."""
    window = Window(OPTIONS.min_window, OPTIONS.window_step, OPTIONS.max_window)
    width, place, drafted, right = window.least, 0, 0, 0
    while place < len(text):
        draft = index.draft(text[max(place - OPTIONS.max_prefix, 0) : place].tolist(), width)
        rest = text[place : place + len(draft)]
        differs = np.flatnonzero(draft[: len(rest)] != rest)
        count = int(differs[0]) if len(differs) else len(rest)
        width = int(window.after(np.asarray(width), len(draft), count))
        drafted, right, place = drafted + len(draft), right + count, place + count + 1
    return drafted, right


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    records.common_options(made)
    made.add_argument("--tokens", type=int, default=16384, help="of a response (16384)")
    made.add_argument("--responses", type=int, default=8, help="of a prompt (8)")
    made.add_argument("--same", type=float, default=0.8, help="share of a response that stands in others (0.8)")
    made.add_argument("--requests", type=int, default=512, help="of the host's loop (512)")
    made.add_argument("--prompts", type=int, default=20, help="whose bytes are counted (20)")
    made.add_argument("--answered", type=int, default=48, help="prompts whose drafts are compared with answers (48)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 2 if it was asked for nonsense."""
    try:
        options = records.parse(parser(), arguments, QUICK, ("tokens", "responses", "requests", "prompts", "answered"))
        if not 0 <= options.same <= 1:
            raise ValueError(f"--same ({options.same}) must be in [0, 1]")
    except ValueError as error:
        print(f"bench_draft_index: {error}", file=sys.stderr)
        return 2
    cores = {"platform": "cpu", "kind": records.cpu_name(), "count": 1, "cores": num_cores()}
    head = records.header("draft-index", cores, records.versions("numpy"), records.command(arguments))
    records.print_header(head, say)
    bench = Bench(Gauge(), say)
    context = multiprocessing.get_context("spawn")
    with ThreadPoolExecutor(1) as threads, ProcessPoolExecutor(1, mp_context=context) as processes:
        bench.interleave(cases_of(options, (threads, processes)), options.repetitions)
    assert bench.gauge is not None
    bench.gauge.close()
    say(verdict(bench))
    results = tell(bench, options)
    kept, dropped = bench.counts()
    record = head | {"kept": kept, "dropped": dropped, "results": results}
    if options.json is not None:
        print(f"appended to {records.append_record(options.json, record).name}")
    return 0


def tell(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Prints the figures; returns them for the record."""
    found = summarise(bench.runs)
    mark = {name: "  DISTURBED" if summary.disturbed else "" for name, summary in found.items()}
    medians = {name: summary.medians for name, summary in found.items()}
    tokens, build_s = options.tokens * options.responses, medians["build"]["seconds"]
    say(f"build: {build_s:.3f} s for {tokens:,} tokens, {tokens / build_s:,.0f} tokens/s{mark['build']}")
    say(f"find: {1e6 / medians['find']['rate']:.0f} µs{mark['find']}")
    alone = medians["host alone"]["seconds"]
    say(f"the host's loop alone: {alone:.3f} s{mark['host alone']}")
    for name in ("host beside a thread", "host beside a process"):
        own = medians[name]
        slower = own["slower"] = own["seconds"] / alone
        say(f"{name}: {own['seconds']:.3f} s, {slower:.2f} times, {own['builds']:.2f} builds/s{mark[name]}")
    sizes = sizes_of(options)
    each = {name: sizes[name] / options.prompts for name in ("index", "packed", "held_bytes")}
    say(
        f"{options.prompts} prompts: {sizes['held_bytes'] / 1e6:,.1f} MB, {each['held_bytes'] / 1e6:.2f} MB a prompt "
        f"({each['index'] / 1e6:.2f} of it the index), built in {sizes['build_s']:.1f} s; compressed for a checkpoint "
        f"{each['packed'] / 1e6:.3f} MB a prompt, in {sizes['pack_s']:.1f} s"
    )
    node = sizes["node_bytes"]
    say(
        f"{PAPER_PROMPTS:,} such prompts on {PAPER_NODES} nodes: {node / 1e9:.1f} GB a node (the paper's, of responses "
        f"of up to 16k tokens: less than {PAPER_BYTES / 1e9:.0f})"
    )
    shares = {rewards: accepted(rewards, options.answered, options.seed) for rewards in REWARDS}
    told = ", ".join(f"{share:.1%} at {rewards}" for rewards, share in shares.items())
    say(f"accepted of the drafted tokens, by rewards: {told}")
    judged = {name: {"kept": s.kept, "dropped": s.dropped, "disturbed": s.disturbed} for name, s in found.items()}
    shape = {name: getattr(options, name) for name in ("tokens", "responses", "same", "requests")}
    return shape | {
        "cases": {name: medians[name] | judged[name] for name in medians},
        "sizes": sizes,
        "accepted": shares,
    }


if __name__ == "__main__":
    sys.exit(main())
