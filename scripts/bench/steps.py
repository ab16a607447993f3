"""Whole GRPO steps of jaxrl in a process of their own, from the pieces that `jaxrl train` puts together.

Workers, mechanisms, reward pool, trainer and Loop are built as `jaxrl.runtime.build` builds them; only work outside a
timed step is left out (evaluation, checkpoints, the run directory).
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import prepare_devices
from bench.worker import Ask, process_figures

from jaxrl.config import from_mapping
from jaxrl.models.config import ModelConfig
from jaxrl.record.metrics import UPDATE_PHASES

REWARD = '''"""A reward that costs nothing and differs between responses."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(solution_str.encode()) % 7 / 6
'''
WORDS = ("one", "two", "three", "seven", "eleven", "plus", "minus", "times", "more", "less", "the", "of", "and", "is")
PROMPT_SLACK = 8  # a prompt made of words may miss its length by part of a word


def write_tokenizer(config: ModelConfig, folder: Path) -> str:
    """A model folder without weights: config.json, and a tokenizer with one word per token id; returns its path."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {f"t{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t0", "pad_token": "t0", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config.to_hf()), encoding="utf-8")
    return str(folder)


def write_inputs(folder: Path, tokenizer_path: str, count: int, prompt_tokens: int, seed: int) -> None:
    """train.jsonl with `count` distinct prompts of about `prompt_tokens` tokens (never more), and reward.py."""
    from jaxrl.data.tokenizer import Tokenizer

    tokenizer, draw = Tokenizer.from_path(tokenizer_path), random.Random(seed)
    words = [f"t{i}" for i in range(tokenizer.vocab_size)] if tokenizer.decode([1]) == "t1" else WORDS
    with open(folder / "train.jsonl", "w", encoding="utf-8") as file:
        for _ in range(count):
            text = draw.choice(words)
            while len(tokenizer.encode(longer := f"{text} {draw.choice(words)}")) <= prompt_tokens:
                text = longer
            file.write(json.dumps({"question": text, "answer": "0"}) + "\n")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def run_options(options: Any, folder: Path, path: str, **more: dict[str, Any]) -> dict[str, Any]:
    """Of a run over the inputs of a folder; `more`: options added to each section."""
    found: dict[str, dict[str, Any]] = {
        "model": {"path": path},
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "apply_chat_template": False,
            "max_prompt_length": options.prompt_tokens + PROMPT_SLACK,
            "max_response_length": options.new,
            "train_batch_size": options.prompts,
            "seed": options.seed,
        },
        "rollout": {"n": options.samples},
        "actor": {"old_logprobs": "rollout", "optim": {"lr": 1e-6}},
        "reward": {"kind": "custom", "path": str(folder / "reward.py")},
        "trainer": {"seed": options.seed, "save_freq": 0},
    }
    return {section: values | more.get(section, {}) for section, values in found.items()}


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of a run.

    Attributes:
      options: of the run, as a file of `jaxrl train` has them.
      devices: how many.
      stop_ids: tokens that end a response; none: all are of full length.
    """

    options: dict[str, Any]
    devices: int
    stop_ids: tuple[int, ...] = ()


def run(spec: Steps, ask: Ask) -> None:
    """Trains step by step: per request one step, its metrics as the loop reports them, what the timeline shows of it,
    and the peak memory."""
    devices = prepare_devices(spec.devices)
    from jaxrl.data.prompts import PromptSource, load_train
    from jaxrl.mechanisms import batch_rule
    from jaxrl.record.journal import Journal
    from jaxrl.record.timeline import Timeline
    from jaxrl.rewards.domains import build_scorer
    from jaxrl.rewards.reward_pool import build_pool
    from jaxrl.runtime.build import build_engines, build_workers, read_tokenizer_and_model
    from jaxrl.runtime.mesh_machine import MeshMachine
    from jaxrl.runtime.run import Run
    from jaxrl.runtime.weights import load_weights
    from jaxrl.sharding.mesh import make_mesh
    from jaxrl.train.trainer import MeshTrainer
    from jaxrl.train.training_step import Models

    config = from_mapping(spec.options)
    baseline = process_figures().get("rss_bytes", 0)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mesh = make_mesh(devices)
        tokenizer, model = read_tokenizer_and_model(config)
        trainer = MeshTrainer(config, model, load_weights(config, model, mesh), mesh)
        pool = stack.enter_context(contextlib.closing(build_pool(config, build_scorer(config))))
        pool.warm()
        timeline = stack.enter_context(Timeline(scratch / "timeline.json"))
        journal = stack.enter_context(contextlib.closing(Journal(scratch / "journal.jsonl", -1)))
        workers = build_workers(config, model, mesh)
        machine = MeshMachine(config, mesh, workers, stack, trainer, None, None, timeline)
        steps = _Callbacks(ask, baseline, timeline, scratch / "timeline.json")
        loop = Run(
            config=config,
            workers=build_engines(config, workers, tokenizer, None, None),
            executors=workers,
            machine=machine,
            weights=lambda: trainer.params,
            scoring=pool,
            text_of=lambda sample: tokenizer.decode(sample.token_ids.tolist()),
            timeline=timeline,
            rule=batch_rule(config),
            models=Models(trainer),
            prompts=PromptSource(load_train(config), tokenizer, config),
            total_steps=1 << 30,
            stop_token_ids=spec.stop_ids,
            num_devices=mesh.size,
            journal=journal,
            on_step=steps.on_step,
            stop=steps.stop,
        ).loop()
        loop.backend.enter_rollout(0)
        began = time.perf_counter()
        steps.values = {"programs": workers.warm_up(first=[trainer.programs, *machine.update_programs])}
        steps.values |= {"warm_up_s": time.perf_counter() - began, "parameters": model.num_params()}
        loop.run()


class _Callbacks:
    """Of the run: between any two steps the worker waits for its next request."""

    def __init__(self, ask: Ask, baseline: int, timeline: Any, file: Path) -> None:
        self._ask, self._baseline, self._timeline, self._file = ask, baseline, timeline, file
        self._seen, self._is_between = 0, True
        self.values: dict[str, Any] = {}

    def stop(self) -> bool:
        is_between, self._is_between = self._is_between, False  # it is asked after every plan, too
        return is_between and self._ask(self.values) is None

    def on_step(self, step: int, measured: dict[str, float], groups: Any) -> None:
        self._is_between = True
        self._timeline.flush()
        text = self._file.read_text()
        drawn, self._seen = text[self._seen :], len(text)
        phases = {name: value for name, value in measured.items() if name.startswith("timing_s/")}
        hidden = measured.get("rollout/scale_down/hidden_s", 0.0)
        update = sum(phases.get(f"timing_s/{name}", 0.0) for name in UPDATE_PHASES)
        tokens = [len(sample) for group in groups for sample in group.samples]
        peak = process_figures().get("peak_bytes", 0)
        self.values = {
            "seconds": measured["timing_s/step"],
            **phases,
            "residual_share": 2 - sum(phases.values()) / measured["timing_s/step"],  # in no phase; step is one of them
            "update_s": update,
            "hidden_s": hidden,
            "hidden_share": hidden / (hidden + update),
            "streamed_share": measured.get("actor/streamed_share", 0.0),
            "done_share": measured.get("rollout/scale_down/done_share", 0.0),
            "beside_s": beside(drawn),
            "recompiles": float(measured["rollout/recompiles"] + measured["actor/recompiles"]),
            "response_tokens": float(sum(tokens)),
            "longest": float(max(tokens)),
            "prompt_tokens": float(sum(len(group.prompt.token_ids) * len(group.samples) for group in groups)),
            "peak_bytes": float(peak),
            "peak_above_baseline_bytes": float(peak - self._baseline),
        }


def beside(lines: str) -> float:
    """Seconds of a timeline's new lines in which gradients were computed on some devices and others had a plan."""
    events = [json.loads(line.rstrip(",")) for line in lines.splitlines() if line.startswith("{")]
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in events:
        if event["ph"] == "X" and (event["name"] == "plan" or event["name"].startswith("part ")):
            spans[event["name"] == "plan"].append((event["ts"], event["ts"] + event["dur"]))
    plans, parts = _merged(spans[True]), _merged(spans[False])
    return sum(max(min(a[1], b[1]) - max(a[0], b[0]), 0.0) for a in plans for b in parts) / 1e6


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, as disjoint ones in order."""
    found: list[tuple[float, float]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found
