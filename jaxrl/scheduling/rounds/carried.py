"""Samples that a later round goes on with and groups that wait for training, packed for a checkpoint.

Departures: a sample that a later round goes on with is carried without its verdict.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from jaxrl.scheduling.rounds.batches import PromptStream
from jaxrl.types import Episode, FinishReason, Group, Sample, SampleKey, Turn

_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length", "abort")


def as_carried(sample: Sample) -> Sample:
    """A sample without its verdict, which may or may not have come by the time the round ended."""
    return replace(sample, reward=None, reward_info={}, failure="")


def pack_samples(samples: Sequence[Sample]) -> dict[str, Any]:
    """Unscored samples as flat arrays with offsets: keys int64 [N, 4], offsets int64 [N + 1], finish reasons int8 [N];
    token_ids, versions int32 [T], rollout_logprobs, sampled_logprobs float32 [T]; texts uint8 [B] as UTF-8, with
    text_offsets int64 [N + 1]. Where a sample has an episode, `episodes` as a list of JSON values."""
    assert all(sample.reward is None for sample in samples)

    def flat(name: str, dtype: Any) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *(np.asarray(getattr(s, name), dtype) for s in samples)])

    episodes = [None if sample.episode is None else _packed(sample.episode) for sample in samples]
    texts = [sample.text.encode(errors="surrogatepass") for sample in samples]
    keys = [(s.key.epoch, s.key.prompt_index, s.key.sample_index, s.key.attempt) for s in samples]
    return {
        "keys": np.asarray(keys, np.int64).reshape(-1, 4),
        "offsets": np.cumsum([0, *map(len, samples)], dtype=np.int64),
        "finish_reasons": np.asarray([_REASONS.index(s.finish_reason) for s in samples], np.int8),
        "token_ids": flat("token_ids", np.int32),
        "versions": flat("versions", np.int32),
        "rollout_logprobs": flat("rollout_logprobs", np.float32),
        "sampled_logprobs": flat("sampled_logprobs", np.float32),
        "texts": np.frombuffer(b"".join(texts), np.uint8),  # as JSON, gigabytes would keep the interpreter's lock
        "text_offsets": np.cumsum([0, *map(len, texts)], dtype=np.int64),
        **({"episodes": episodes} if any(episodes) else {}),
    }


def unpack_samples(packed: Mapping[str, Any]) -> list[Sample]:
    """The reverse of `pack_samples`. Raises ValueError if the pieces do not fit together."""
    offsets, text_offsets, names = (
        packed["offsets"],
        packed["text_offsets"],
        ("token_ids", "rollout_logprobs", "sampled_logprobs", "versions"),
    )
    count, total = len(packed["keys"]), int(offsets[-1])
    lengths = {name: len(packed[name]) for name in names}
    whole_texts = len(text_offsets) == count + 1 and len(packed["texts"]) == text_offsets[-1]
    if len(offsets) != count + 1 or set(lengths.values()) != {total} or not whole_texts:
        raise ValueError(
            f"carried samples: {count} keys, {len(offsets)} offsets up to {total}, {len(text_offsets)} offsets of "
            f"{len(packed['texts'])} bytes of text and {lengths} must fit together"
        )
    samples: list[Sample] = []
    episodes = packed.get("episodes", [None] * count)
    for i, (row, reason, episode) in enumerate(zip(packed["keys"], packed["finish_reasons"], episodes, strict=True)):
        start, stop = int(offsets[i]), int(offsets[i + 1])
        tokens, rollout, sampled, versions = (np.array(packed[name][start:stop]) for name in names)
        text = packed["texts"][int(text_offsets[i]) : int(text_offsets[i + 1])].tobytes().decode(errors="surrogatepass")
        key = SampleKey(*(int(value) for value in row))
        sample = Sample(key, tokens, rollout, sampled, versions, _REASONS[int(reason)], text)
        samples.append(sample if episode is None else replace(sample, episode=_unpacked(episode)))
    return samples


def _packed(episode: Episode) -> dict[str, Any]:
    state = None if episode.state is None else base64.b64encode(episode.state).decode()
    return {**asdict(episode), "state": state}


def _unpacked(packed: Mapping[str, Any]) -> Episode:
    turns = tuple(Turn(**{**turn, "messages": tuple(turn["messages"])}) for turn in packed["turns"])
    state = None if packed["state"] is None else base64.b64decode(packed["state"])
    return Episode(turns, state, packed["awaits"], packed["stop"], packed["error"])


def check_lengths(what: str, samples: Sequence[Sample], max_response_length: int) -> None:
    """Raises ValueError for samples of a checkpoint that are too long for the run that takes them in: rows, the cache
    and packed batches have no room for them. `max_response_length` is in tokens; 0: no limit."""
    # a sample that goes on draws one token more at least
    needed = [len(sample) + (sample.finish_reason not in ("stop", "length")) for sample in samples]
    num_over = sum(length > max_response_length for length in needed)
    if max_response_length and num_over:
        raise ValueError(
            f"data.max_response_length ({max_response_length} tokens) must be >= {max(needed)} to go on from this "
            f"checkpoint: {num_over} of {len(samples)} samples {what} are too long for it; or start a new run from the "
            "parameters alone (trainer.init_from)"
        )


def pack_groups(groups: Sequence[Group]) -> dict[str, Any]:
    """Scored groups for a checkpoint: prompt keys and sizes int64 [N, 3], samples as in `pack_samples`, rewards
    float64, and what the scorers said, which is JSON, as a list of mappings, each with why there is no score."""
    samples = [sample for group in groups for sample in group.samples]
    return {
        "groups": np.asarray([(*g.prompt.key, len(g.samples)) for g in groups], np.int64).reshape(-1, 3),
        "samples": pack_samples([as_carried(sample) for sample in samples]),
        "rewards": np.asarray([sample.reward for sample in samples], np.float64),
        "reward_infos": [(dict(sample.reward_info), sample.failure) for sample in samples],
    }


def unpack_groups(packed: Mapping[str, Any], prompts: PromptStream) -> list[Group]:
    """The reverse of `pack_groups`. Raises ValueError if the pieces do not fit together."""
    samples, rewards, infos = unpack_samples(packed["samples"]), packed["rewards"], packed["reward_infos"]
    sizes = [int(size) for *_, size in packed["groups"]]
    if not len(samples) == len(rewards) == len(infos) == sum(sizes):
        raise ValueError(
            f"a batch that waits: {len(samples)} samples, {len(rewards)} rewards, {len(infos)} infos and groups of "
            f"{sizes} must fit together"
        )
    scored = iter(
        replace(sample, reward=float(reward), reward_info=info, failure=failure)
        for sample, reward, (info, failure) in zip(samples, rewards, infos, strict=True)
    )
    return [
        Group(prompts.get(int(epoch), int(index)), [next(scored) for _ in range(int(size))])
        for epoch, index, size in packed["groups"]
    ]
