"""One device that draws and learns, in a process of its own: plans and microbatches in the way that a request names."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from .records import prepare_devices
from .stream_case import StreamSpec, config_of
from .worker import Ask


def run(spec: StreamSpec, ask: Ask) -> None:
    """Per request, as many plans and microbatches as it names, in the way that it names, and the seconds of that.

    Requests: `plans` and `microbatches`, counts; `way`: "plans", "gradients", "after" (all plans, then all
    microbatches) or "turns" (a microbatch is handed over after each plan, while there are any).
    """
    device = _OneDevice(spec)
    values: dict[str, Any] = device.info
    while (request := ask(values)) is not None:
        values = {"seconds": device.once(request["plans"], request["microbatches"], request["way"])}


class _OneDevice:
    """An executor and a trainer on the first device, and a batch that it has drawn."""

    def __init__(self, spec: StreamSpec) -> None:
        devices = prepare_devices(1)
        import numpy as np

        from jaxrl.runtime.build import build_executor, load_weights, read_tokenizer_and_model
        from jaxrl.sharding.layout import Layout
        from jaxrl.sharding.mesh import make_mesh
        from jaxrl.train.microbatches import Passes
        from jaxrl.train.step import Trainer
        from jaxrl.types import Prompt

        self._spec, self._config, mesh = spec, config_of(spec), make_mesh(devices)
        self._tokenizer, model = read_tokenizer_and_model(self._config)
        self._trainer = Trainer(self._config, model, load_weights(self._config, mesh), mesh)
        self._executor = build_executor(self._config, model, Layout(mesh, 1))
        self._executor.sync_weights(self._trainer.params, 0)
        self._executor.allocate()
        programs = self._executor.warm_up(first=[self._trainer.programs])
        self.info = {"programs": programs, "parameters": model.num_params()}
        random = np.random.default_rng(spec.seed)
        self._prompts = [
            Prompt(0, i, tuple(random.integers(1, model.vocab_size, spec.prompt_tokens).tolist()), "", "")
            for i in range(spec.prompts)
        ]
        self._batch = self._drawn()
        self._passes = Passes(self._trainer.programs)
        self._weights = self._trainer.programs.partition(self._trainer.params)  # trainable, frozen

    def _drawn(self) -> Any:
        """A batch whose responses have the mean length, ready for gradients."""
        from jaxrl.train import batch_preparation
        from jaxrl.types import Group, TrainBatch

        samples = self._engine().generate(self._requests(self._spec.mean))
        for sample in samples:
            sample.reward = float(sample.token_ids.sum() % 7)
        n = self._spec.samples
        groups = [Group(prompt, samples[i * n : (i + 1) * n]) for i, prompt in enumerate(self._prompts)]
        batch = TrainBatch.of(groups)
        batch.old_logprobs = batch_preparation.old_logprobs(self._config, batch, 1, None)
        batch.loss_masks = batch_preparation.loss_masks(self._config, batch, 1)
        batch_preparation.set_advantages(self._config, groups, batch)
        return batch

    def _engine(self) -> Any:
        from jaxrl.runtime.build import build_engine

        return build_engine(self._config, self._executor, self._tokenizer)

    def _requests(self, tokens: int) -> list[Any]:
        """One for each row; none ends before it has so many tokens."""
        from jaxrl.scheduling.tokens.plan import Request
        from jaxrl.types import SampleKey, SamplingParams

        params, n = SamplingParams(max_tokens=tokens), self._spec.samples
        return [
            Request(i * n + j, SampleKey(0, i, j), prompt.token_ids, params, share=i)
            for i, prompt in enumerate(self._prompts)
            for j in range(n)
        ]

    def _microbatches(self, count: int) -> Iterator[Any]:
        """Hands microbatches to the device, one for each step of the iterator, as often as asked."""
        done = 0
        while done < count:
            for handed in self._passes.accumulate(*self._weights, self._batch):
                yield handed
                done += 1
                if done == count:
                    return

    def _prefilled(self, tokens: int) -> Any:
        """An engine in which every row has its prefill behind it."""
        engine, requests = self._engine(), self._requests(tokens)
        for request in requests:
            engine.add(request)
        while not all(row.prefilled == len(row.prefix) for row in engine.batcher.running()) or (
            engine.batcher.num_running < len(requests)
        ):
            engine.step()
        return engine

    def once(self, plans: int, gradients: int, way: str) -> float:
        """Seconds from the first plan to the last outcome; prefills come before."""
        import jax

        if way == "gradients":
            plans, engine = 0, self._engine()
        else:
            engine = self._prefilled(min((plans + 2) * self._spec.decode_steps, self._spec.new))
        jax.block_until_ready(jax.live_arrays())
        pending: list[Any] = []
        work = self._microbatches(gradients if way != "plans" else 0)
        began = time.perf_counter()
        for _ in range(plans):
            engine.step()
            if way == "turns" and (handed := next(work, None)) is not None:
                pending.append(handed)
        engine.drain()
        pending.extend(work)
        jax.block_until_ready(pending)
        seconds = time.perf_counter() - began
        engine.abort(engine.unfinished())
        self._passes.discard()
        return seconds
