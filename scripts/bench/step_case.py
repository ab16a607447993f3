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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.config import from_mapping
from jaxrl.models.config import ModelConfig
from jaxrl.record.metrics import UPDATE_PHASES

from .records import prepare_devices
from .worker import Ask, peak_bytes, resident_bytes

REWARD = '''"""A reward that costs nothing and differs between responses."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(solution_str.encode()) % 7 / 6
'''
WORDS = ("one", "two", "three", "seven", "eleven", "plus", "minus", "times", "more", "less", "the", "of", "and", "is")
PROMPT_SLACK = 8  # a prompt made of words may miss its length by part of a word


@dataclass(frozen=True, slots=True)
class StepSpec:
    """Steps of a run.

    Attributes:
      options: of the run, as a file of `jaxrl train` has them.
      devices: how many.
      stop_ids: tokens that end a response; none: all are of full length.
    """

    options: dict[str, Any]
    devices: int
    stop_ids: tuple[int, ...] = ()


def write_tokenizer(config: ModelConfig, folder: Path) -> None:
    """A model folder without weights: config.json, and a tokenizer with one word per token id."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {f"t{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t0", "pad_token": "t0", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config.to_hf()), encoding="utf-8")


def write_inputs(folder: Path, tokenizer_path: str, count: int, prompt_tokens: int, seed: int) -> None:
    """train.jsonl with `count` distinct prompts of about `prompt_tokens` tokens (never more), and reward.py."""
    from jaxrl.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_path(tokenizer_path)
    draw = random.Random(seed)
    synthetic = tokenizer.decode([1]) == "t1"
    words = [f"t{i}" for i in range(tokenizer.vocab_size)] if synthetic else WORDS
    with open(folder / "train.jsonl", "w", encoding="utf-8") as file:
        for _ in range(count):
            text = draw.choice(words)
            while len(tokenizer.encode(longer := f"{text} {draw.choice(words)}")) <= prompt_tokens:
                text = longer
            file.write(json.dumps({"question": text, "answer": "0"}) + "\n")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def export(spec: tuple[str, str], ask: Ask) -> None:
    """What `jaxrl export` does, in float32: spec is (model.path or random:folder, target folder)."""
    from jaxrl.commands.export import export

    export(*spec, "float32")
    ask({})


def run(spec: StepSpec, ask: Ask) -> None:
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
    baseline = resident_bytes()
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
        engines = build_engines(config, workers, tokenizer, None, None)
        machine = MeshMachine(config, mesh, workers, stack, trainer, None, None, timeline)
        info: dict[str, Any] = {"parameters": model.num_params()}
        steps = _Steps(ask, info, baseline, timeline, scratch / "timeline.json")
        run = Run(
            config=config,
            workers=engines,
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
        )
        loop = run.loop()
        loop.backend.enter_rollout(0)
        began = time.perf_counter()
        info["programs"] = workers.warm_up(first=[trainer.programs, *machine.update_programs])
        info["warm_up_s"] = time.perf_counter() - began
        loop.run()


class _Steps:
    """Callbacks of the run: between any two steps the worker waits for its next request."""

    def __init__(
        self, ask: Callable[[dict[str, Any]], Any], info: dict[str, Any], baseline: int, timeline: Any, file: Path
    ) -> None:
        self._ask, self._values, self._baseline, self._timeline, self._file = ask, info, baseline, timeline, file
        self._seen, self._is_between = 0, True

    def stop(self) -> bool:
        is_between, self._is_between = self._is_between, False  # it is asked after every plan, too
        return is_between and self._ask(self._values) is None

    def on_step(self, step: int, measured: dict[str, float], groups: Any) -> None:
        self._is_between = True
        self._timeline.flush()
        text = self._file.read_text()
        drawn, self._seen = text[self._seen :], len(text)
        phases = {name: value for name, value in measured.items() if name.startswith("timing_s/")}
        hidden = measured.get("rollout/scale_down/hidden_s", 0.0)
        update = sum(phases.get(f"timing_s/{name}", 0.0) for name in UPDATE_PHASES)
        tokens = [len(sample) for group in groups for sample in group.samples]
        prompts = [len(group.prompt.token_ids) for group in groups for _ in group.samples]
        self._values = {
            "seconds": measured["timing_s/step"],
            **phases,
            "update_s": update,
            "hidden_s": hidden,
            "hidden_share": hidden / (hidden + update),
            "streamed_share": measured.get("actor/streamed_share", 0.0),
            "done_share": measured.get("rollout/scale_down/done_share", 0.0),
            "beside_s": beside(drawn),
            "recompiles": float(measured["rollout/recompiles"] + measured["actor/recompiles"]),
            "response_tokens": float(sum(tokens)),
            "longest": float(max(tokens)),
            "prompt_tokens": float(sum(prompts)),
            "peak_bytes": float(peak_bytes()),
            "peak_above_baseline_bytes": float(peak_bytes() - self._baseline),
        }


def beside(lines: str) -> float:
    """Seconds of a timeline's new lines in which gradients were computed on some devices and others had a plan."""
    events = [json.loads(line.rstrip(",")) for line in lines.splitlines() if line.startswith("{")]
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in events:
        if event["ph"] == "X" and (event["name"] == "plan" or event["name"].startswith("part ")):
            spans[event["name"] == "plan"].append((event["ts"], event["ts"] + event["dur"]))
    plans, parts = merged(spans[True]), merged(spans[False])
    return sum(max(min(a[1], b[1]) - max(a[0], b[0]), 0.0) for a in plans for b in parts) / 1e6


def merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, as disjoint ones in order."""
    found: list[tuple[float, float]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def data_options(folder: str, prompts: int, prompt_tokens: int, new: int, seed: int) -> dict[str, Any]:
    """Those of `data`, for a folder that `write_inputs` made, with batches of `prompts` prompts."""
    return {
        "train_files": [str(Path(folder) / "train.jsonl")],
        "apply_chat_template": False,
        "max_prompt_length": prompt_tokens + PROMPT_SLACK,
        "max_response_length": new,
        "train_batch_size": prompts,
        "seed": seed,
    }
