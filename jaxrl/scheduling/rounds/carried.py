"""Samples and groups packed for a checkpoint: prompts that wait for a round, and a batch that waits for its update.

A checkpoint has digests, so what comes back is as it was packed.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from jaxrl.scheduling.rounds.round import PlannedGroup
from jaxrl.types import Episode, FinishReason, Group, Prompt, Sample, SampleKey, Turn

_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length", "abort")
_ARRAYS = {"token_ids": "int32", "rollout_logprobs": "float32", "sampled_logprobs": "float32", "versions": "int32"}


def as_carried(sample: Sample) -> Sample:
    """A sample without its verdict: a clock decides whether that has come by the time the round ends."""
    return replace(sample, reward=None, reward_info={}, failure="")


def pack_samples(samples: Sequence[Sample]) -> dict[str, Any]:
    """Samples as flat arrays with offsets: keys int64 [N, 4], offsets int64 [N + 1], finish reasons int8 [N];
    token_ids, versions int32 [T], rollout_logprobs, sampled_logprobs float32 [T]; texts uint8 [B] as UTF-8, with
    text_offsets int64 [N + 1]; rewards float64 [N], NaN where there is none. As lists of JSON values: of each sample
    with a reward its `reward_info` and `failure`, and, where any sample has an episode, `episodes`."""
    import numpy as np

    episodes = [None if sample.episode is None else _packed_episode(sample.episode) for sample in samples]
    texts = [sample.text.encode(errors="surrogatepass") for sample in samples]
    keys = [(s.key.epoch, s.key.prompt_index, s.key.sample_index, s.key.attempt) for s in samples]
    return {
        "keys": np.asarray(keys, np.int64).reshape(-1, 4),
        "offsets": np.cumsum([0, *map(len, samples)], dtype=np.int64),
        "finish_reasons": np.asarray([_REASONS.index(s.finish_reason) for s in samples], np.int8),
        **{
            name: np.concatenate([np.zeros(0, dtype), *(np.asarray(getattr(s, name), dtype) for s in samples)])
            for name, dtype in _ARRAYS.items()
        },
        "texts": np.frombuffer(b"".join(texts), np.uint8),  # as JSON, gigabytes would keep the interpreter's lock
        "text_offsets": np.cumsum([0, *map(len, texts)], dtype=np.int64),
        "rewards": np.asarray([np.nan if s.reward is None else s.reward for s in samples], np.float64),
        "reward_infos": [(dict(s.reward_info), s.failure) for s in samples if s.reward is not None],
        **({"episodes": episodes} if any(episodes) else {}),
    }


def unpack_samples(packed: Mapping[str, Any]) -> list[Sample]:
    import numpy as np

    offsets, text_offsets, rewards = packed["offsets"], packed["text_offsets"], packed["rewards"]
    scored = ~np.isnan(rewards)
    samples: list[Sample] = []
    verdicts = iter(packed["reward_infos"])
    episodes = packed.get("episodes", [None] * len(rewards))
    for i, (row, reason, episode) in enumerate(zip(packed["keys"], packed["finish_reasons"], episodes, strict=True)):
        start, stop = int(offsets[i]), int(offsets[i + 1])
        arrays = (np.array(packed[name][start:stop]) for name in _ARRAYS)
        text = packed["texts"][int(text_offsets[i]) : int(text_offsets[i + 1])].tobytes().decode(errors="surrogatepass")
        key = SampleKey(*(int(value) for value in row))
        sample = Sample(key, *arrays, finish_reason=_REASONS[int(reason)], text=text)
        if scored[i]:
            info, failure = next(verdicts)
            sample = replace(sample, reward=float(rewards[i]), reward_info=info, failure=failure)
        samples.append(sample if episode is None else replace(sample, episode=_unpacked_episode(episode)))
    return samples


def _packed_episode(episode: Episode) -> dict[str, Any]:
    state = None if episode.state is None else base64.b64encode(episode.state).decode()
    return {**asdict(episode), "state": state}


def _unpacked_episode(packed: Mapping[str, Any]) -> Episode:
    turns = tuple(Turn(**{**turn, "messages": tuple(turn["messages"])}) for turn in packed["turns"])
    state = None if packed["state"] is None else base64.b64decode(packed["state"])
    return Episode(turns, state, packed["awaits"], packed["stop"], packed["error"])


def pack_groups(groups: Iterable[Group | PlannedGroup]) -> dict[str, Any]:
    """Groups in their order: epoch, index and number of samples of each, int64 [N, 3], and all samples."""
    import numpy as np

    groups = list(groups)
    return {
        "groups": np.asarray([(*group.prompt.key, len(group.samples)) for group in groups], np.int64).reshape(-1, 3),
        "samples": pack_samples([sample for group in groups for sample in group.samples]),
    }


def unpack_groups(packed: Mapping[str, Any], get: Callable[[int, int], Prompt]) -> list[Group]:
    """`get`: the prompt of an (epoch, index)."""
    left = iter(unpack_samples(packed["samples"]))
    return [
        Group(get(int(epoch), int(index)), [next(left) for _ in range(int(size))])
        for epoch, index, size in packed["groups"]
    ]


def check_lengths(what: str, samples: Sequence[Sample], max_response_length: int) -> None:
    """Raises ValueError for samples of a checkpoint that are too long for the run that resumes them, which has no room
    for them; 0: no limit."""
    needed = [len(sample) + (not sample.has_ended) for sample in samples]  # one that resumes samples a token at least
    num_over = sum(length > max_response_length for length in needed)
    if max_response_length and num_over:
        raise ValueError(
            f"data.max_response_length ({max_response_length} tokens) must be >= {max(needed)} to resume from this "
            f"checkpoint: {num_over} of {len(samples)} samples {what} are too long for it; or start a new run from the "
            "parameters alone (trainer.init_from)"
        )
