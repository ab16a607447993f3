"""Text in, samples out, on the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.loading import load_model
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.text import TextEngine
from jaxrl.types import Prompt, Sample, SampleKey, SamplingParams, TrainBatch

GREEDY = SamplingParams(temperature=0, max_tokens=12)
DRAWN = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> TextEngine:
    return TextEngine.from_path(
        f"random:{tiny_model}", max_length=96, num_slots=8, max_prefill_tokens=32, decode_steps=4, truncate=False
    )


def ids(samples: list[Sample]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]


def test_groups_follow_a_prompts_epoch_and_index(engine: TextEngine):
    tokens = tuple(engine.tokenizer.encode("hello"))
    first, again, other = (Prompt(epoch, index, tokens, "hello", "test") for epoch, index in ((0, 7), (1, 7), (0, 8)))
    groups = engine.groups([first, again, other], DRAWN, n=3)
    assert [group.prompt for group in groups] == [first, again, other]
    keys = [sample.key for group in groups for sample in group.samples]
    assert keys == [SampleKey(epoch, index, j) for epoch, index in ((0, 7), (1, 7), (0, 8)) for j in range(3)]
    assert len({tuple(sample.token_ids.tolist()) for group in groups for sample in group.samples}) == 9
    assert all(s.text == engine.tokenizer.decode(s.token_ids.tolist()) for group in groups for s in group.samples)
    (alone,) = engine.groups([again], DRAWN, n=3)
    assert ids(alone.samples) == ids(groups[1].samples), "whatever else is asked for"
    batch = TrainBatch.of(groups)
    assert [prompt.key for prompt in batch.prompts] == [(0, 7)] * 3 + [(1, 7)] * 3 + [(0, 8)] * 3
    assert [sample.key for sample in batch.samples] == keys
    assert [(len(a), a.any()) for a in batch.advantages] == [(len(sample), False) for sample in batch.samples]


def test_weights_are_taken_over(tiny_model: Path):
    mesh = make_mesh(jax.devices()[:1])
    (model, old), (_, new) = (load_model(tiny_model, mesh, random_init_seed=seed) for seed in (0, 1))
    tokenizer = Tokenizer.from_path(tiny_model)
    sizes = ExecutorConfig(num_slots=2, max_length=64, max_prefill_tokens=32, decode_steps=4)

    def engine_of(params: Any) -> TextEngine:
        return TextEngine.from_model(model, params, tokenizer, Layout(mesh, 1), sizes)

    engine = engine_of(old)
    ((before,),) = engine.generate(["hello"], GREEDY)
    stream = engine.stream(["hello"] * 40, GREEDY)
    next(stream)
    with pytest.raises(ValueError, match=r"sync_weights: \d+ requests are unfinished"):
        engine.sync_weights(new)
    stream.close()
    engine.sync_weights(new)
    ((after,),) = engine.generate(["hello"], GREEDY)
    ((expected,),) = engine_of(new).generate(["hello"], GREEDY)
    assert after.token_ids.tolist() == expected.token_ids.tolist()
    assert after.rollout_logprobs.tolist() == expected.rollout_logprobs.tolist() != before.rollout_logprobs.tolist()
    assert (set(before.versions), set(after.versions)) == ({0}, {1})


def test_a_question_is_a_conversation_and_ids_are_themselves(engine: TextEngine):
    tokenizer = engine.tokenizer
    conversation = [{"role": "user", "content": "hello"}]
    rendered = tokenizer.encode(tokenizer.apply_chat_template(conversation))
    by_text, by_messages, by_ids = engine.generate(["hello", conversation, rendered], GREEDY)
    assert ids(by_text) == ids(by_messages) == ids(by_ids)
    raw = engine.generate(["hello"], GREEDY, chat=False)[0]
    plain = engine.generate([tokenizer.encode("hello", add_special_tokens=True)], GREEDY)[0]
    assert ids(raw) == ids(plain)
    assert ids(raw) != ids(by_text)
