"""Bad inputs of the class "run directories and checkpoints": checkpoints that are damaged, gone, or of another run.

Each is refused before weights load, with one sentence, and nothing is written. What falls back on an older checkpoint
is no refusal: tests/train/test_damage.py and tests/faults have those.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from damage import cut, flip, saved
from refusals import Refusal, problems

from jaxrl.train import manifest

DATA = (
    "data.train_files=[{tmp}/train.jsonl]",
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "data.shuffle=false",
    "reward={kind: custom, path: {tmp}/reward.py}",  # its workers import little
)
MODEL = ("model.path=random:{model}", "data.train_batch_size=2", "trainer.total_training_steps=8")
TRAIN = ("train", *MODEL, *DATA, "trainer.run_dir={tmp}/run")
EVAL = ("eval", *MODEL, *DATA, "data.val_files=[{tmp}/held_out.jsonl]", "--checkpoint={tmp}/run")
INIT = ("train", *MODEL, *DATA, "trainer.run_dir={tmp}/new", "trainer.init_from={tmp}/run")
CHANGED = "has changed since it was written"
Damage = Callable[[Path], object]


def prepared(*damages: Damage, steps: tuple[int, ...] = (4,)) -> Callable[[Path], None]:
    """Problems, checkpoints, and what is done to the last one."""

    def prepare(folder: Path) -> None:
        problems(folder)
        (folder / "reward.py").write_text("def compute_score(**kwargs): return 1.0\n")
        (folder / "held_out.jsonl").write_text(json.dumps({"question": "7 + 7", "answer": "14"}) + "\n")
        (folder / "run").mkdir()
        saved(folder / "run" / "checkpoints", *steps)
        for damage in damages:
            damage(folder / "run" / "checkpoints" / str(steps[-1]))

    return prepare


def file(name: str, change: Callable[[Path], object]) -> Damage:
    return lambda step: change(step / name)


def rewritten(name: str, text: str) -> Damage:
    return file(name, lambda path: path.write_text(text))


def no_files_in_the_manifest(step: Path) -> None:
    """Its digest is left."""
    path = step / "manifest.json"
    found = json.loads(path.read_text())
    found["content"]["files"].clear()
    path.write_text(json.dumps(found, indent=1) + "\n")


def damaged(fault: str, *damages: Damage) -> Refusal:
    """The only checkpoint is damaged."""
    sentence = "{tmp}/run/checkpoints holds no checkpoint that is whole (4: " + fault + "): bring one back from a copy"
    return Refusal(TRAIN, sentence, prepared(*damages))


DAMAGED = (
    damaged(f"host/metadata {CHANGED}", file("host/metadata", flip)),
    damaged(f"manifest.json {CHANGED}", file("manifest.json", lambda path: flip(path, 99))),
    damaged(f"manifest.json {CHANGED}", file("manifest.json", cut)),
    damaged(f"manifest.json {CHANGED}", file("manifest.json", lambda path: path.write_bytes(path.read_bytes() + b" "))),
    damaged(f"manifest.json {CHANGED}", rewritten("manifest.json", "{}")),
    damaged(f"manifest.json {CHANGED}", rewritten("manifest.json", "[]")),
    damaged(f"manifest.json {CHANGED}", rewritten("manifest.json", "[" * 100_000)),
    damaged(f"manifest.json {CHANGED}", no_files_in_the_manifest),
    damaged("host/metadata has 9 bytes and must have 44", file("host/metadata", lambda path: cut(path, 9))),
    damaged(
        "host/metadata has 45 bytes and must have 44",
        file("host/metadata", lambda path: path.write_bytes(path.read_bytes() + b" ")),
    ),
    damaged("manifest.json is missing", file("manifest.json", Path.unlink)),
    damaged("host/commit_success.txt is missing (and 1 more)", file("host", shutil.rmtree)),
    damaged("host/metadata is missing", file("host/metadata", lambda path: path.rename(path.with_suffix(".old")))),
    damaged("host/a.txt does not belong to it (and 1 more)", rewritten("host/a.txt", ""), rewritten("state/b.txt", "")),
    damaged("host/metadata is missing", file("host/metadata", lambda path: (path.unlink(), path.mkdir()))),
    damaged("host/metadata is not a file", file("host/metadata", lambda path: (path.unlink(), os.mkfifo(path)))),
    damaged(
        "host/metadata cannot be read (no such file or directory)",
        file("host/metadata", lambda path: (path.unlink(), path.symlink_to("gone"))),
    ),
    damaged("it is empty", lambda step: (shutil.rmtree(step), step.mkdir())),
    damaged("it is a file, not a folder", lambda step: (shutil.rmtree(step), step.write_text("4"))),
)

OTHERS = (
    Refusal(
        TRAIN,
        "{tmp}/run/checkpoints holds no checkpoint that is whole (99: its manifest.json is that of step 4): bring one "
        "back from a copy",
        prepared(lambda step: step.rename(step.with_name("99"))),
    ),
    Refusal(
        TRAIN,
        "{tmp}/run/checkpoints holds no checkpoint that is whole (4: it is empty; 2: host/metadata is missing): bring "
        "one back from a copy",
        prepared(
            lambda step: (shutil.rmtree(step), step.mkdir()),
            lambda step: (step.parent / "2" / "host" / "metadata").unlink(),
            steps=(2, 4),
        ),
    ),
    Refusal(
        TRAIN,
        "checkpoint {tmp}/run/checkpoints/4 has schema version 4; this jaxrl reads up to 3: update jaxrl",
        prepared(lambda step: manifest.write(step, 4, 4)),
    ),
    Refusal(
        TRAIN,
        "{tmp}/run/checkpoints is a file and must be a folder of checkpoints: move it away",
        prepared(lambda step: (shutil.rmtree(step.parent), step.parent.write_text(""))),
    ),
    Refusal(
        TRAIN,
        "checkpoint {tmp}/run/checkpoints/4 does not fit this model and optimizer: params/a is of shape (40,) there "
        "and missing here",
        prepared(),
    ),
)


def without_checkpoints(step: Path) -> None:
    """A run of three steps that saved one of them, and has no checkpoint any more."""
    run = step.parents[1]
    shutil.rmtree(step.parent)
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(1, 4)))
    (run / "run.json").write_text(json.dumps({"devices": {"platform": "cpu"}, "starts": [], "checkpoint": 2}))


GONE = (
    "{tmp}/run/checkpoints holds no checkpoint, though step 2 was saved: bring the folder back, choose another "
    "trainer.run_dir, or move {tmp}/run/metrics.jsonl away to start from step 1"
)
MISSING = (
    Refusal(TRAIN, GONE, prepared(without_checkpoints)),
    Refusal(TRAIN, GONE, prepared(without_checkpoints, lambda step: step.parent.mkdir())),
)

ALONE = "{tmp}/run/checkpoints holds no checkpoint that is whole (4: it is empty): bring one back from a copy"
EMPTY = prepared(lambda step: (shutil.rmtree(step), step.mkdir()))
PARAMETERS = (
    Refusal(EVAL, ALONE, EMPTY),
    Refusal(INIT, ALONE, EMPTY),
    Refusal(
        (*EVAL[:-1], "--checkpoint={tmp}/run/checkpoints/4"),
        f"checkpoint {{tmp}}/run/checkpoints/4 is damaged: host/metadata {CHANGED}",
        prepared(file("host/metadata", flip)),
    ),
    Refusal(
        (*INIT[:-1], "trainer.init_from={tmp}/run/checkpoints/4"),
        "checkpoint {tmp}/run/checkpoints/4 is damaged: manifest.json is missing",
        prepared(file("manifest.json", Path.unlink)),
    ),
    Refusal(
        (*INIT[:-1], "trainer.init_from={tmp}/nowhere"),
        "trainer.init_from: no checkpoint in {tmp}/nowhere: there is no such folder",
        prepared(),
    ),
    Refusal(
        (*INIT[:-1], "trainer.init_from={tmp}/run/checkpoints/4/params"),
        "trainer.init_from: no checkpoint in {tmp}/run/checkpoints/4/params: it is a model's folder, which model.path "
        "takes",
        prepared(lambda step: [(step / "params").mkdir(), (step / "params/config.json").write_text("{}")]),
    ),
    Refusal(
        EVAL,
        "checkpoint {tmp}/run/checkpoints/4 does not fit this model and optimizer: params/a is of shape (40,) there "
        "and missing here",
        prepared(),
    ),
    Refusal(
        (*EVAL[:-1], "--checkpoint={tmp}"),
        "no checkpoint in {tmp}: no folder in it is named like a step (1, 2 ...)",
        prepared(),
    ),
    Refusal(
        (*EVAL[:-1], "--checkpoint={tmp}/nowhere"),
        "no checkpoint in {tmp}/nowhere: there is no such folder",
        prepared(),
    ),
    Refusal(
        (*INIT[:-1], "trainer.init_from={tmp}/train.jsonl"),
        "{tmp}/train.jsonl is a file and must be a folder of checkpoints: move it away",
        prepared(),
    ),
)


def test_refused(refused: Callable[[Iterable[Refusal]], None]):
    refused((*DAMAGED, *OTHERS, *MISSING, *PARAMETERS))
