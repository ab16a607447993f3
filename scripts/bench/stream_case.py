"""Whole training steps with two workers on two devices, with or without gradients beside the rollout, in a process of
its own.

Parts are put together as `jaxrl train` does; only work outside a timed step is left out (evaluation, checkpoints, the
run directory). Weights are random, so each token of the vocabulary is about as likely as any other, and a few of them
end a response: lengths are geometric, and the longest of 32 is about four times the mean.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.config import Config, from_mapping
from jaxrl.models.config import ModelConfig
from jaxrl.record.metrics import UPDATE_PHASES

from .records import prepare_devices
from .step_case import PROMPT_SLACK, data_section
from .worker import Ask

BLOCK = 16
STOP_IDS = tuple(range(1, 9))


def small_model(hidden: int, layers: int, mean: int) -> ModelConfig:
    """A Llama of heads of 64 with half as many for keys and values; `mean`: see `StreamSpec`."""
    return ModelConfig(
        family="llama",
        vocab_size=len(STOP_IDS) * mean,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_layers=layers,
        num_heads=hidden // 64,
        num_kv_heads=max(hidden // 128, 1),
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_ids=(0,),
    )


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """One run of steps.

    Attributes:
      folder: holds train.jsonl and reward.py. path: of the model's config and tokenizer.
      devices: of the run, one worker on each.
      stream: gradients beside the rollout.
      mean, new: tokens of a response, on average and at most; the mean decides how many tokens the vocabulary has.
      train_tokens: the most tokens of a microbatch.
    """

    folder: str
    path: str
    devices: int
    stream: bool
    prompts: int
    samples: int
    prompt_tokens: int
    mean: int
    new: int
    train_tokens: int
    decode_steps: int
    seed: int


def config_of(spec: StreamSpec) -> Config:
    """The options of the run. Each worker has rows and blocks for all samples: one can take over from the other."""
    rows = spec.prompts * spec.samples
    longest = spec.prompt_tokens + PROMPT_SLACK + spec.new
    return from_mapping(
        {
            "model": {"path": spec.path, "random_init": True},
            "data": data_section(spec.folder, spec.prompts, spec.prompt_tokens, spec.new, spec.seed),
            "rollout": {
                "n": spec.samples,
                "dtype": "float32",
                "num_workers": spec.devices,
                "max_num_seqs": rows,
                "num_blocks": 2 + rows * -(-longest // BLOCK),
                "block_size": BLOCK,
                "decode_steps": spec.decode_steps,
                "max_num_batched_tokens": max(64, spec.prompt_tokens + PROMPT_SLACK),  # few programs to compile
            },
            "actor": {
                "dtype": "float32",
                "old_logprobs": "rollout",
                "ppo_mini_batch_size": 0,
                "ppo_max_token_len_per_gpu": max(spec.train_tokens, longest),
                "optim": {"lr": 1e-6},
            },
            "reward": {"kind": "custom", "path": str(Path(spec.folder) / "reward.py"), "num_workers": 1},
            "trainer": {
                "seed": spec.seed,
                "num_devices": spec.devices,
                "save_freq": 0,
                "stream": {"enable": spec.stream},
            },
        }
    )


def run(spec: StreamSpec, ask: Ask) -> None:
    """Trains step by step: per request one step, its metrics, and what the timeline shows of it."""
    devices = prepare_devices(spec.devices)
    from jaxrl.data.prompts import PromptSource, load_train
    from jaxrl.loop import Hooks, Job, Loop
    from jaxrl.mechanisms.parts import RunParts
    from jaxrl.mechanisms.table import batch_rule, is_timeless, of_run
    from jaxrl.record.journal import Journal
    from jaxrl.record.timeline import Timeline
    from jaxrl.rewards.domains import build_scorer
    from jaxrl.rewards.pool import build_pool
    from jaxrl.runtime.backend import RolloutBackend, Surroundings, text_by
    from jaxrl.runtime.build import build_engines, build_workers, load_weights, read_tokenizer_and_model, row_sizes
    from jaxrl.sharding.mesh import make_mesh
    from jaxrl.train.learning import Models
    from jaxrl.train.step import Trainer

    config = config_of(spec)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mesh = make_mesh(devices)
        tokenizer, model = read_tokenizer_and_model(config)
        trainer = Trainer(config, model, load_weights(config, mesh), mesh)
        pool = stack.enter_context(contextlib.closing(build_pool(config, build_scorer(config))))
        pool.warm()
        timeline = stack.enter_context(Timeline(scratch / "timeline.json"))
        journal = stack.enter_context(contextlib.closing(Journal(scratch / "journal.jsonl", -1)))
        workers = build_workers(config, model, mesh)
        engines = build_engines(config, workers, tokenizer, None)
        kept = journal, timeline, None, None
        around = row_sizes(config, workers), is_timeless(config), lambda doing: None, stack
        parts = RunParts(config, 0, mesh, engines, workers, trainer, pool, *kept, *around)
        mechanisms = of_run(parts)
        backend = RolloutBackend(
            engines,
            workers,
            pool,
            text_by(tokenizer),
            lambda: trainer.params,
            mechanisms,
            Surroundings(journal=journal, timeline=timeline),
        )
        backend.enter_rollout(0)
        programs = workers.warm_up(first=[trainer.programs, *parts.update_programs])
        steps = _Steps(ask, {"programs": programs, "parameters": model.num_params()}, timeline, scratch)
        loop = Loop(
            config,
            Job(PromptSource(load_train(config), tokenizer, config), (), 1 << 30, STOP_IDS, mesh.size),
            batch_rule(config),
            backend,
            Models(trainer),
            timeline,
            Hooks(_nothing, steps.on_step, _nothing, _nothing, steps.stop),
            mechanisms,
        )
        loop.run()


class _Steps:
    """The loop's hooks: it asks `stop` between any two steps, and there the process waits for its next request."""

    def __init__(self, ask: Callable[[dict[str, Any]], Any], info: dict[str, Any], timeline: Any, folder: Path) -> None:
        self._ask, self._values, self._timeline, self._folder = ask, info, timeline, folder
        self._seen = 0

    def stop(self) -> bool:
        return self._ask(self._values) is None

    def on_step(self, step: int, measured: dict[str, float], groups: Any) -> None:
        self._timeline.flush()
        text = (self._folder / "timeline.json").read_text()
        drawn, self._seen = text[self._seen :], len(text)
        phases = {name: value for name, value in measured.items() if name.startswith("timing_s/")}
        whole = phases.pop("timing_s/step")
        hidden = measured.get("rollout/scale_down/hidden_s", 0.0)
        update = sum(phases.get(f"timing_s/{name}", 0.0) for name in UPDATE_PHASES)
        self._values = {
            "seconds": whole,
            **phases,
            "update_s": update,
            "sum_s": sum(phases.values()) + hidden,
            "hidden_s": hidden,
            "hidden_share": hidden / (hidden + update),
            "streamed_share": measured.get("actor/streamed_share", 0.0),
            "done_share": measured.get("rollout/scale_down/done_share", 0.0),
            "beside_s": beside(drawn),
            "response_tokens": float(sum(len(sample) for group in groups for sample in group.samples)),
            "longest": float(max(len(sample) for group in groups for sample in group.samples)),
            "recompiles": float(measured["rollout/recompiles"] + measured["actor/recompiles"]),
        }


def beside(lines: str) -> float:
    """Seconds of a timeline's new lines in which gradients were computed on some devices and others had a plan."""
    events = [json.loads(line.rstrip(",")) for line in lines.splitlines() if line.startswith("{")]
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in events:
        if event["ph"] == "X" and (event["name"] == "plan" or event["name"].startswith("part ")):
            spans[event["name"] == "plan"].append((event["ts"], event["ts"] + event["dur"]))
    return overlap(merged(spans[True]), merged(spans[False])) / 1e6


def merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, as disjoint ones in order."""
    found: list[tuple[float, float]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def overlap(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """The length of what two sets of disjoint intervals have in common."""
    return sum(max(min(a[1], b[1]) - max(a[0], b[0]), 0.0) for a in some for b in others)


def _nothing(*_: Any) -> None:
    """A hook that has nothing to do."""
