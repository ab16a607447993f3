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
from refusals import Refusal

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
    """Problems, a model's configuration for `export`, checkpoints, and what is done to the last one."""

    def prepare(folder: Path) -> None:
        rows = [{"question": f"{i} + 1", "answer": str(i + 1)} for i in range(4)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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


def in_manifest(change: Callable[[dict], object]) -> Damage:
    """Changes the manifest's content and leaves its digest."""

    def apply(step: Path) -> None:
        path = step / "manifest.json"
        found = json.loads(path.read_text())
        change(found["content"])
        path.write_text(json.dumps(found, indent=1) + "\n")

    return apply


def damaged(fault: str, *damages: Damage) -> Refusal:
    """The only checkpoint is damaged."""
    sentence = "{tmp}/run/checkpoints holds no checkpoint that is whole (4: " + fault + "): bring one back from a copy"
    return Refusal(TRAIN, sentence, prepared(*damages))


DAMAGED = (
    damaged(f"state/_METADATA {CHANGED}", file("state/_METADATA", flip)),
    damaged(f"state/manifest.ocdbt {CHANGED}", file("state/manifest.ocdbt", flip)),
    damaged(f"state/manifest.ocdbt {CHANGED}", file("state/manifest.ocdbt", lambda path: flip(path, -1))),
    damaged(f"arrays/manifest.ocdbt {CHANGED}", file("arrays/manifest.ocdbt", flip)),
    damaged(f"host/metadata {CHANGED}", file("host/metadata", flip)),
    damaged(f"_CHECKPOINT_METADATA {CHANGED}", file("_CHECKPOINT_METADATA", flip)),
    damaged(f"commit_success.txt {CHANGED}", file("commit_success.txt", flip)),
    damaged(f"manifest.json {CHANGED}", file("manifest.json", lambda path: flip(path, 99))),
    damaged(f"manifest.json {CHANGED}", file("manifest.json", lambda path: cut(path, 300))),
    damaged(f"manifest.json {CHANGED}", file("manifest.json", cut)),
    damaged(f"manifest.json {CHANGED}", rewritten("manifest.json", "{}")),
    damaged(f"manifest.json {CHANGED}", rewritten("manifest.json", "[]")),
    damaged(f"manifest.json {CHANGED}", rewritten("manifest.json", "[" * 100_000)),
    damaged(f"manifest.json {CHANGED}", in_manifest(lambda content: content["files"].clear())),
    damaged(f"manifest.json {CHANGED}", in_manifest(lambda c: c.update(schema_version=9))),
    damaged("host/metadata has 9 bytes and must have 44", file("host/metadata", lambda path: cut(path, 9))),
    damaged("host/metadata has 0 bytes and must have 44", file("host/metadata", cut)),
    damaged(
        "host/metadata has 45 bytes and must have 44",
        file("host/metadata", lambda path: path.write_bytes(path.read_bytes() + b" ")),
    ),
    damaged(
        "state/manifest.ocdbt has 5 bytes and must have 113", file("state/manifest.ocdbt", lambda path: cut(path, 5))
    ),
    damaged("manifest.json is missing", file("manifest.json", Path.unlink)),
    damaged("commit_success.txt is missing", file("commit_success.txt", Path.unlink)),
    damaged("host/metadata is missing", file("host/metadata", Path.unlink)),
    damaged("host/commit_success.txt is missing (and 1 more)", file("host", shutil.rmtree)),
    damaged("_CHECKPOINT_METADATA is missing", file("_CHECKPOINT_METADATA", Path.unlink)),
    damaged("host/metadata is missing", file("host/metadata", lambda path: path.rename(path.with_suffix(".old")))),
    damaged("host/notes.txt does not belong to it", rewritten("host/notes.txt", "the best so far")),
    damaged("host/a.txt does not belong to it (and 1 more)", rewritten("host/a.txt", ""), rewritten("state/b.txt", "")),
    damaged("host/metadata is missing", file("host/metadata", lambda path: (path.unlink(), path.mkdir()))),
    damaged("host/metadata is not a file", file("host/metadata", lambda path: (path.unlink(), os.mkfifo(path)))),
    damaged(
        "host/metadata cannot be read (no such file or directory)",
        file("host/metadata", lambda path: (path.unlink(), path.symlink_to("gone"))),
    ),
    damaged("it is empty", lambda step: (shutil.rmtree(step), step.mkdir())),
    damaged("it is a file, not a folder", lambda step: (shutil.rmtree(step), step.write_text("4"))),
    damaged("manifest.json is missing", lambda step: (step / "manifest.json").unlink()),
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
        "checkpoint {tmp}/run/checkpoints/4 has schema version 3; this jaxrl reads up to 2: update jaxrl",
        prepared(lambda step: manifest.write(step, 3, 4)),
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


def without_checkpoints(*, emptied: bool = False, steps: int = 3, **told: object) -> Damage:
    """A run of `steps` steps with its `run.json`, and no checkpoint any more."""

    def apply(step: Path) -> None:
        run = step.parents[1]
        shutil.rmtree(step.parent)
        if emptied:
            step.parent.mkdir()
        (run / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(1, steps + 1)))
        if told:
            (run / "run.json").write_text(json.dumps({"devices": {"platform": "cpu"}, "starts": []} | told))

    return apply


def recorded(save_freq: int) -> Damage:
    return lambda step: (step.parents[1] / "config.yaml").write_text(
        f"model:\n  path: random:a\ndata:\n  train_files: [a]\ntrainer:\n  save_freq: {save_freq}\n"
    )


GONE = (
    "{tmp}/run/checkpoints holds no checkpoint, though step 2 was saved: bring the folder back, choose another "
    "trainer.run_dir, or move {tmp}/run/metrics.jsonl away to start from step 1"
)
MISSING = (
    Refusal(TRAIN, GONE, prepared(without_checkpoints(checkpoint=2))),
    Refusal(TRAIN, GONE, prepared(without_checkpoints(emptied=True, checkpoint=2))),
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
