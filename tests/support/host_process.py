"""One process of a small world (`host_worlds.run_world`): joins it, runs a case, keeps arrays for the test to compare.

Everything is float64, on a tiny random model. Run as:
host_process.py CASE[,CASE] PROCESS NUM_PROCESSES PORT FOLDER OPTIONS.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from keyword_options import with_options
from small_models import TRAINED
from watched_run import keep_programs

from jaxrl.config import Config
from jaxrl.models import decoder
from jaxrl.record.files import write_whole
from jaxrl.record.state import join_arrays, split_arrays
from jaxrl.rollout.worker_set import WorkerSet
from jaxrl.runtime.build import build_workers
from jaxrl.runtime.devices import ProcessDevices, prepare_hosts
from jaxrl.runtime.hosts.tokens import TokenExchange
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.rules import train_shardings
from jaxrl.train import manifest
from jaxrl.train.checkpoint import Checkpointer, HostState
from jaxrl.train.step import Trainer
from jaxrl.types import Prompt, Sample, SampleKey, SamplingParams, TrainBatch

STEPS = 4
PATIENCE_S = 400.0


def config_of(num_processes: int, **options: Any) -> Config:
    """Options as `section__option=value` on top of small ones."""
    values: dict[str, Any] = {
        "model": {"path": "unused"},
        "data": {"max_prompt_length": 16, "max_response_length": 32},
        "actor": {
            "ppo_max_token_len_per_gpu": 96,
            "logprob_chunk_tokens": 16,
            "optim": {"lr": 1e-2},
            "dtype": "float64",
            "param_dtype": "float64",
        },
        "rollout": {
            "dtype": "float64",
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "decode_steps": 4,
            "block_size": 24,  # tables of two sizes: few programs
        },
        "hosts": {"num": num_processes},
        "trainer": {"total_training_steps": STEPS},
    }
    return with_options(values, options)


class World:
    """What the cases are made from; `keep` fills the file of this process."""

    def __init__(self, out: Path, options: dict[str, Any]) -> None:
        self.out, self.options = out, options
        self.config = config_of(jax.process_count(), **options.get("config", {}))
        self.place: ProcessDevices = prepare_hosts(self.config)
        self.mesh = self.place.mesh
        self.board = Folder(out / "board", self.place.process)
        self.kept: dict[str, np.ndarray] = {}
        self._whole = jax.jit(lambda x: x, out_shardings=jax.NamedSharding(self.mesh, jax.P()))

    def trainer(self) -> Trainer:
        shardings = train_shardings(TRAINED, self.mesh)
        init = jax.jit(lambda key: decoder.init(TRAINED, key, "float64"), out_shardings=shardings)
        trainer = Trainer(self.config, TRAINED, init(jax.random.key(0)), self.mesh, meet=self.board.meet)
        trainer.programs.microbatches = trainer.programs.microbatches[-1:]  # one shape: less to compile
        return trainer

    def keep_tree(self, name: str, tree: Any) -> None:
        """Every array of a tree, whole."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            key = f"{name}{jax.tree_util.keystr(path)}"
            self.kept[key] = np.asarray(self._whole(leaf) if isinstance(leaf, jax.Array) else leaf)


def batch_of(step: int, size: int = 12, longest: int = 32) -> TrainBatch:
    """The same in every process: random samples, four of a prompt."""
    random = np.random.default_rng(step)
    prompts, samples, advantages, old = [], [], [], []
    for i in range(size):
        length = int(random.integers(1, longest + 1)) if i % 4 else longest
        if i % 4 == 0:
            tokens = random.integers(0, TRAINED.vocab_size, int(random.integers(1, 17)))
            prompts += [Prompt(0, i // 4, tuple(tokens.tolist()), "", "test")] * 4
        logprobs = (np.log(1 / TRAINED.vocab_size) + 0.3 * random.normal(size=(2, length))).astype(np.float32)
        sample = Sample.empty(SampleKey(0, i // 4, i % 4))
        sample.token_ids = random.integers(0, TRAINED.vocab_size, length).astype(np.int32)
        sample.rollout_logprobs, sample.sampled_logprobs = logprobs[0], logprobs[0]
        sample.versions = np.zeros(length, np.int32)
        samples.append(sample)
        advantages.append(random.normal(size=length).astype(np.float32))
        old.append(logprobs[1])
    return TrainBatch(prompts, samples, advantages, old)


def train(world: World, trainer: Trainer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        batch = batch_of(step)
        found = trainer.token_logprobs(batch)
        world.kept[f"logprobs {step}"] = np.concatenate(found)
        trainer.accumulate(batch.select(list(range(8))))
        trainer.accumulate(batch.select(list(range(8, 12))))
        metrics = trainer.apply()
        world.kept[f"metrics {step}"] = np.asarray([metrics[name] for name in sorted(metrics)])


# -- cases -------------------------------------------------------------------------------------------------------------


def training(world: World) -> None:
    """Four steps, with a checkpoint in the middle; the weights at the workers of this host; what they draw; the tokens
    of all hosts; and the state in the checkpoints of `restores`."""
    trainer = world.trainer()
    with Checkpointer(world.options["saves"]) as checkpoints:
        train(world, trainer, 1, 2)
        world.keep_tree("middle", trainer.state())
        checkpoints.save(2, trainer.state(), HostState({"by": world.place.process}))
        train(world, trainer, 3, STEPS)
    world.keep_tree("state", trainer.state())
    for number, folder in enumerate(world.options["restores"]):
        with Checkpointer(folder) as checkpoints:
            state, host = checkpoints.restore(trainer.abstract_state())
        assert host.values == {"by": 0}
        world.keep_tree(f"restored {number}", state)
    workers = build_workers(world.config, TRAINED, world.place.rollout_mesh(), place=world.place, meet=world.board.meet)
    if degrees := world.options.get("degrees"):  # of the first workers of all hosts
        first = world.place.process * len(workers.executors)
        for executor, tp in zip(workers.executors, degrees[first:], strict=False):
            executor.start_in(tp)
    workers.sync_weights(trainer.params, STEPS)
    workers.allocate()
    for number, executor in enumerate(workers.executors):
        for path, leaf in jax.tree_util.tree_leaves_with_path(executor.copied_weights(executor.layout)):
            assert leaf.sharding.device_set <= set(world.place.local_devices)
            world.kept[f"weights of {number}{jax.tree_util.keystr(path)}"] = np.asarray(leaf)
    samples, owners = drawn(world, workers)
    if world.place.num_processes > 1:
        exchanged = TokenExchange(world.place, meet=world.board.meet).exchange(samples, owners)
        assert exchanged.num_samples == len(samples)
    for sample in samples:
        keep_sample(world, "sample", sample)


def requests() -> list[Request]:
    random = np.random.default_rng(7)
    made: list[Request] = []
    for prompt in range(4):
        ids = tuple(random.integers(1, TRAINED.vocab_size, (13, 3, 9, 16)[prompt]).tolist())
        for number in range(4):
            params = SamplingParams(max_tokens=int(random.integers(4, 33)), temperature=(1.0, 0.7)[number % 2])
            key = SampleKey(0, prompt, number)
            made.append(Request(len(made), key, ids, params, share=prompt))
    return made


def drawn(world: World, workers: WorkerSet) -> tuple[list[Sample], list[int]]:
    """The responses to all requests, prompts dealt to workers in turn. Those of other hosts have a length only."""
    made, per_host = requests(), len(workers.executors)
    place, longest = world.place, BatcherConfig(decode_steps=4, max_model_len=world.config.max_model_length)
    worker_of = [request.key.prompt_index % (per_host * place.num_processes) for request in made]
    found: dict[int, Sample] = {}
    for number, executor in enumerate(workers.executors):
        worker = place.process * per_host + number
        own = [request for request, each in zip(made, worker_of, strict=True) if each == worker]
        engine = Engine(executor, longest)
        found |= dict(zip((request.request_id for request in own), engine.generate(own), strict=True))
    samples: list[Sample] = []
    for request in made:
        if request.request_id in found:
            samples.append(found[request.request_id])
        else:  # no stop tokens: each is as long as it may be
            samples.append(placeholder(request.key, request.params.max_tokens))
    return samples, [worker // per_host for worker in worker_of]


def placeholder(key: SampleKey, length: int) -> Sample:
    """A sample of another host: its length, and no content."""
    ints, floats = np.broadcast_to(np.int32(0), length), np.broadcast_to(np.float32(0), length)
    return Sample(key, ints, floats, floats, ints, "length")


def keep_sample(world: World, name: str, sample: Sample) -> None:
    label = f"{name} {sample.key}"
    for field in ("token_ids", "versions", "rollout_logprobs", "sampled_logprobs"):
        world.kept[f"{label} {field}"] = np.asarray(getattr(sample, field))


def tokens(world: World) -> None:
    """Random ragged samples of all hosts, several times; bits that are no numbers are among them."""
    place = world.place
    exchange = TokenExchange(place, max_bytes=world.options["max_bytes"], meet=world.board.meet)
    figures = []
    for turn, longest in enumerate(world.options["longest"]):
        random = np.random.default_rng(turn)
        samples, owners = [], []
        for number in range(world.options["num_samples"]):
            length, owner = int(random.integers(0, longest + 1)), int(random.integers(place.num_processes))
            words = random.integers(-(2**31), 2**31, (4, length)).astype(np.int32)
            sample = placeholder(SampleKey(turn, number, 0), length)
            if owner == place.process:
                sample.token_ids, sample.versions = words[0], words[1]
                sample.rollout_logprobs, sample.sampled_logprobs = words[2].view(np.float32), words[3].view(np.float32)
            samples.append(sample)
            owners.append(owner)
        done = exchange.exchange(samples, owners)
        figures.append((done.num_tokens, done.num_bytes, done.turns, done.seconds))
        for sample in samples:
            keep_sample(world, "exchanged", sample)
    world.kept["figures"] = np.asarray(figures)
    world.kept["programs"] = np.asarray(exchange.num_programs)


def save(world: World) -> None:
    """Two steps, a checkpoint after each; then two more steps beside the last save. `hashed`: what this process has
    hashed of that, by name."""
    trainer = world.trainer()
    really = manifest.write_part

    def write_part(folder: Path, process: int, files: Mapping[str, Any]) -> None:
        world.kept["hashed"] = np.asarray([f"{process} {name}" for name in files])
        really(folder, process, files)

    manifest.write_part = write_part
    with Checkpointer(world.options["folder"], max_to_keep=1) as checkpoints:
        for step in (1, 2):
            train(world, trainer, step, step)
            if step == 2:
                world.keep_tree("state", trainer.state())
            state = {"cursor": [1, step], "queue": np.arange(step, dtype=np.int64), "by": world.place.process}
            checkpoints.save(step, trainer.state(), HostState(*split_arrays(state)))
        train(world, trainer, 3, 3)
        checkpoints.wait()
        world.kept["steps"] = np.asarray(checkpoints.all_steps())


def restore(world: World) -> None:
    """What a checkpoint holds."""
    trainer = world.trainer()
    with Checkpointer(world.options["folder"]) as checkpoints:
        state, host = checkpoints.restore(trainer.abstract_state())
    trainer.load_state(state)
    world.keep_tree("state", trainer.state())
    values = join_arrays(host.values, host.arrays)
    world.kept["host"] = np.asarray([*values["cursor"], *values["queue"], values["by"]])


class Folder:
    """A board whose values are files."""

    def __init__(self, folder: Path, process: int) -> None:
        self.process, self._folder = process, folder
        folder.mkdir(exist_ok=True)

    def put(self, key: str, value: bytes) -> None:
        write_whole(self._folder / key.replace("/", "."), value)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        file, deadline = self._folder / key.replace("/", "."), time.monotonic() + timeout_s
        while not file.exists():
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        return file.read_bytes()

    def meet(self, name: str) -> None:
        """Where all processes wait for each other; each name once."""
        self.put(f"{name} {self.process}", b"")
        for other in range(jax.process_count()):
            assert self.get(f"{name} {other}", PATIENCE_S) is not None, f"process {other} does not come to {name}"


CASES = {"training": training, "tokens": tokens, "save": save, "restore": restore}


def end_with(parent: int) -> None:
    """Ends this process when the one that started it has ended, however that was."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def main(case: str, process: str, num_processes: str, port: str, out: str, options: str) -> None:
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    jax.config.update("jax_enable_x64", True)
    keep_programs()
    jax.distributed.initialize(f"127.0.0.1:{port}", int(num_processes), int(process))
    world = World(Path(out), json.loads(options))
    for name in case.split(","):
        CASES[name](world)
    jax.distributed.shutdown()
    np.savez(Path(out) / f"{process}.npz", allow_pickle=False, **world.kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
