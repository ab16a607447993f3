"""The engine as a library for text: prompts in, finished samples out.

Example::

    engine = TextEngine.from_path("path/to/model")
    ((sample,),) = engine.generate(["What is 2 + 2?"], SamplingParams(temperature=0, max_tokens=32))
    print(sample.text)
    for index, sample in engine.stream(["one", "two"], SamplingParams(max_tokens=32), n=4):
        print(index, sample.text)  # as they finish

A custom training loop asks for groups, and gives the trained weights back (`examples/rl_loop.py`)::

    engine = TextEngine.from_model(model, params, tokenizer, Layout(mesh, 1), ExecutorConfig(num_slots=64))
    groups = engine.groups(prompt_source.next(8), SamplingParams(max_tokens=256), n=8)
    engine.sync_weights(trainer.params)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from jaxrl.data.stops import check_stop_strings, stop_ids, stop_string_check
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import RANDOM, check_length, check_vocabulary, config_of, load_model, resolve_path
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.types import Group, Prompt, Sample, SampleKey, SamplingParams

if TYPE_CHECKING:
    from jaxrl.scheduling.layouts.relayout import Relayout

TextPrompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""A question, a conversation ({"role", "content"} messages), or token ids."""


class TextEngine:
    """Text on top of a token engine. `chat_template_kwargs`: variables for the chat template of every prompt, such
    as {"enable_thinking": False}."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, stop_token_ids: tuple[int, ...]) -> None:
        self.engine, self.tokenizer, self.stop_token_ids = engine, tokenizer, stop_token_ids
        self.chat_template_kwargs: Mapping[str, Any] = {}
        self._ids = itertools.count()

    @classmethod
    def from_path(
        cls,
        path: str,
        *,
        max_length: int = 0,
        max_tokens: int = 128,
        prompts: Sequence[TextPrompt] = (),
        chat: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        dtype: str = "float32",
        tp: int = 1,
        max_tp: int = 0,
        num_slots: int = 32,
        truncate: bool = True,
        **sizes: Any,
    ) -> TextEngine:
        """Loads a model onto all devices.

        Args:
          path: as `model.path`.
          max_length: tokens of the longest prompt and response; 0: the longest of `prompts` plus `max_tokens`.
          max_tp: the largest degree that `switch` may go to, for which weights are padded; 0: `tp`.
          num_slots: rows that decode at once, per dp group.
          truncate: whether requests may use top-k, top-p or min-p.
          sizes: more of `ExecutorConfig`: `block_size`, `num_blocks`, `decode_steps`, `top_logprobs`, `seed` and so on.
        """
        path = resolve_path(path, weights=True)
        folder = path.removeprefix(RANDOM)
        model, tokenizer = config_of(path), Tokenizer.from_path(folder)
        check_vocabulary(tokenizer, model, folder)
        asked, variables = f"max_length is {max_length} tokens", dict(chat_template_kwargs or {})
        if not max_length:
            longest = max((len(_encode(tokenizer, prompt, chat, variables)) for prompt in prompts), default=0)
            max_length = longest + max_tokens if longest else min(2048, model.max_positions)
            asked = f"the longest prompt ({longest}) + --max-tokens ({max_tokens}) = {max_length} tokens"
        check_length(model, max_length, asked, folder)
        mesh = make_mesh()
        layout = Layout(mesh, tp)  # refuses a degree before weights load
        model, params = load_model(path, mesh, "float64" if dtype == "float64" else "float32")
        own = ExecutorConfig(
            num_slots, max_length=max_length, dtype=dtype, truncate=truncate, max_tp=max_tp or tp, **sizes
        )
        engine = cls.from_model(model, params, tokenizer, layout, own)
        engine.chat_template_kwargs = variables
        return engine

    @classmethod
    def from_model(
        cls, model: ModelConfig, params: Any, tokenizer: Tokenizer, layout: Layout, sizes: ExecutorConfig
    ) -> TextEngine:
        """An engine for a model that is loaded already (`jaxrl.models.loading.load_model`). `params`: in training
        form; the caller keeps them, and the engine makes a copy in `layout` and `sizes.dtype`."""
        executor = MeshExecutor(model, layout, sizes)
        executor.sync_weights(params, 0)
        executor.allocate()
        batcher = BatcherConfig(decode_steps=sizes.decode_steps, max_model_len=sizes.max_length)
        engine = Engine(executor, batcher, stop_check=stop_string_check(tokenizer))
        return cls(engine, tokenizer, stop_ids(tokenizer, model.eos_token_ids))

    def sync_weights(self, params: Any) -> None:
        """Copies weights in training form (`MeshTrainer.params`) into the engine, on the devices, cast and resharded.

        Tokens from now on are of the next `policy_version`, and conversations (`Request.session`) begin anew. Raises
        ValueError while requests are unfinished: their KV was computed with the old weights.
        """
        if not self.engine.is_idle:
            raise ValueError(
                f"sync_weights: {len(self.engine.unfinished())} requests are unfinished: finish or abort them first"
            )
        executor = self.engine.executor
        assert isinstance(executor, MeshExecutor), "from_model made it"
        executor.sync_weights(params, executor.policy_version + 1)
        self.engine.batcher.blocks.forget_all()

    def switch(self, tp: int, by: Literal["migrate", "recompute"] = "migrate") -> Relayout:
        """Switches to another tensor-parallel degree, also between two samples of a `stream`: `Engine.switch`."""
        return self.engine.switch(tp, by)

    def generate(
        self, prompts: Sequence[TextPrompt], params: SamplingParams, *, n: int = 1, chat: bool = True
    ) -> list[list[Sample]]:
        """`n` finished samples per prompt, in the order of the prompts; ValueError for a text in place of a list."""
        samples = [self._with_text(s) for s in self.engine.generate(self._of_texts(prompts, params, n, chat))]
        return [samples[i * n : (i + 1) * n] for i in range(len(prompts))]

    def stream(
        self, prompts: Sequence[TextPrompt], params: SamplingParams, *, n: int = 1, chat: bool = True
    ) -> Iterator[tuple[int, Sample]]:
        """(index of the prompt, sample) as samples finish."""
        for sample in self.engine.stream(self._of_texts(prompts, params, n, chat)):
            yield sample.key.prompt_index, self._with_text(sample)

    def groups(self, prompts: Sequence[Prompt], params: SamplingParams, *, n: int) -> list[Group]:
        """A group of `n` finished samples per prompt, in the order of the prompts.

        A prompt's epoch and index determine what is drawn: the same prompt draws new responses in the next epoch.
        """
        keyed = [(prompt.epoch, prompt.index, prompt.token_ids) for prompt in prompts]
        samples = [self._with_text(s) for s in self.engine.generate(self._requests(keyed, params, n))]
        return [Group(prompt, samples[i * n : (i + 1) * n]) for i, prompt in enumerate(prompts)]

    def _of_texts(self, prompts: Sequence[TextPrompt], params: SamplingParams, n: int, chat: bool) -> list[Request]:
        if isinstance(prompts, str):  # which is a sequence of texts as well
            raise ValueError(f"prompts must be a list, found the text {prompts!r:.40}: give [text]")
        variables = self.chat_template_kwargs
        encoded = enumerate(tuple(_encode(self.tokenizer, prompt, chat, variables)) for prompt in prompts)
        return self._requests([(0, i, ids) for i, ids in encoded], params, n)

    def _requests(
        self, keyed: Sequence[tuple[int, int, tuple[int, ...]]], params: SamplingParams, n: int
    ) -> list[Request]:
        """`n` requests for each (epoch, prompt index, prompt's token ids)."""
        check_stop_strings(params.stop_strings, "stop_strings")
        stops = tuple(dict.fromkeys((*params.stop_token_ids, *self.stop_token_ids)))
        params = replace(params, stop_token_ids=stops)
        return [
            Request(next(self._ids), SampleKey(epoch, index, j), ids, params, share=i)
            for i, (epoch, index, ids) in enumerate(keyed)
            for j in range(n)
        ]

    def _with_text(self, sample: Sample) -> Sample:
        return replace(sample, text=self.tokenizer.decode(sample.token_ids.tolist()))


def _encode(tokenizer: Tokenizer, prompt: TextPrompt, chat: bool, variables: Mapping[str, Any]) -> list[int]:
    if not isinstance(prompt, str):
        if all(isinstance(item, int) for item in prompt):
            return [int(item) for item in prompt]  # pyright: ignore[reportArgumentType]
        messages: list[Any] = list(prompt)
        return tokenizer.encode(tokenizer.apply_chat_template(messages, **variables))
    if chat and tokenizer.chat_templates:
        return tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": prompt}], **variables))
    return tokenizer.encode(prompt, add_special_tokens=True)
