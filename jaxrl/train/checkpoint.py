"""Checkpoints: the training state on any mesh, and the host's queues, in one folder per step that vouches for itself.

A step holds three items: `state` (arrays, restored straight onto the target's shardings), `host` (JSON), and `arrays`
(named numpy arrays: what batch rules carry and the like, as flat integers with offsets). The named
arrays are written as one vector of bytes in numpy's own format, which keeps dtypes and empty arrays.

Orbax writes a draft in the background. Then the manifest is added (`jaxrl.train.manifest`), all of it is brought to the
disk, and the draft is renamed to its step: a folder that is named like a step is complete and has its manifest. A step
is compared with its manifest before anything is taken from it. Of several, the newest one without a fault is taken, and
`Choice` says which were passed over and why; those stay, under another name (`<step>.damaged`).

Several processes save and restore together, on a file system that all of them see: each writes and reads its own
devices' shards. Everything else is process 0's: the host's part of a step, its manifest and its name, what is removed,
and what was left by saves that were cut off. The others come back from `wait` once their shards are written, a moment
before the step has its name.

Source: Orbax; docs/architecture.md. Departures from its defaults: nothing is restored without a target, which would
bring arrays back onto the devices that wrote them. Steps are named, kept and removed here and not by its
`CheckpointManager`, whose commit leaves no moment for a manifest. Folders are made before a save returns: where one
cannot be made, Orbax's threads would wait for it for five minutes.
"""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl.record.disk import is_full, reason, system_error
from jaxrl.train import manifest
from jaxrl.train.steps import ARRAYS, HOST, SCHEMA_VERSION, STATE, Choice, choose, free_name, steps_of, verify_alone
from jaxrl.types import RunFailed

Tree = Any

_LEFTOVER = re.compile(r"\d+\.(draft|orbax-checkpoint-tmp|removed).*")
_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 1.0
_ASYNC = ocp.AsyncOptions(create_directories_asynchronously=False)


@dataclass(frozen=True, slots=True)
class HostState:
    """The host's part of a checkpoint, beside the arrays on devices.

    Attributes:
      values: JSON-able (strings, finite numbers, lists, dicts with string keys).
      arrays: numpy arrays by name, of any dtype but object.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


class _Items(ocp.CompositeCheckpointHandler):
    """Orbax's handler of a step's items. It remembers what is being written: where one write fails, Orbax tells at once
    and leaves the others to themselves, and a draft can be removed only when they have ended as well."""

    def __init__(self) -> None:
        among = _processes()
        super().__init__(
            composite_options=ocp.CompositeOptions(async_options=_ASYNC, multiprocessing_options=among),
            **{
                STATE: ocp.PyTreeCheckpointHandler(multiprocessing_options=among),
                HOST: ocp.JsonCheckpointHandler(multiprocessing_options=among),
                ARRAYS: ocp.PyTreeCheckpointHandler(multiprocessing_options=among),
            },
        )
        self.writing: list[Any] = []

    async def async_save(self, directory: Any, args: Any) -> list[Any]:
        self.writing = await super().async_save(directory, args) or []
        return self.writing

    def wait(self) -> None:
        """Until nothing is written any more, whatever became of it."""
        for future in self.writing:
            with suppress(Exception):  # the first error has been raised by now
                future.result()


@ocp.args.register_with_handler(_Items, for_save=True, for_restore=True)
class _ItemArgs(ocp.args.Composite):
    """The arguments that Orbax expects for `_Items`."""


class Checkpointer:
    """The checkpoints of one run, a folder per step. Use as a context manager, or call `close`.

    Nothing is written before `tidy` or `save`.

    Example::

        with Checkpointer(run_dir / "checkpoints", max_to_keep=2) as checkpoints:
            checkpoints.save(step, trainer.state(), HostState(values, arrays))
            ...
            state, host = checkpoints.restore(trainer.abstract_state())
            trainer.load_state(state)
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_to_keep: int | None = 2,
        on_commit: Callable[[int], None] = lambda step: None,
        progress: Callable[[], None] = lambda: None,
        find: Callable[[Path, Callable[[], None]], Choice | None] = choose,
    ) -> None:
        """Looks for the newest step that is whole (`choose`, with its errors).

        Args:
          folder: of this run.
          max_to_keep: newest steps kept; None keeps all.
          on_commit: called with each step that is complete, in the background thread. The step stays even if this
            cannot write what it notes (OSError), which ends the run.
          progress: called while files are compared or hashed, and while a save that is waited for grows.
          find: what looks; of several processes one compares all files, and the others are told.
        """
        self._leads = jax.process_index() == 0
        self._folder = Path(folder).absolute()
        self._max_to_keep, self._on_commit, self._progress = max_to_keep, on_commit, progress
        self.chosen = find(self._folder, progress)
        self._damaged = [] if self.chosen is None else list(self.chosen.faults)
        self._found = [step for step in steps_of(self._folder) if step not in self._damaged]
        self._items = _Items()
        _tell_one_error()
        self._orbax = ocp.AsyncCheckpointer(self._items, async_options=_ASYNC, multiprocessing_options=_processes())
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: tuple[int, Future[None]] | None = None

    def tidy(self) -> None:
        """Gives damaged steps that were passed over another name, and removes what saves that were cut off left.
        What cannot be removed is told of, and tried again by the next save. Of several processes the first does it."""
        if not self._leads:
            return
        while self._damaged:
            step = self._damaged.pop()
            (self._folder / str(step)).rename(free_name(self._folder / f"{step}.damaged"))
        for leftover in self._folder.glob("*"):
            if _LEFTOVER.fullmatch(leftover.name):
                _remove(leftover)

    def save(self, step: int, train_state: Tree, host_state: HostState | None = None) -> None:
        """Writes a step in the background. Returns when the arrays are copied: they may be donated right after.

        Args:
          step: the number of finished training steps; above all earlier ones.
          train_state: nested dicts of arrays (`Trainer.state`).
          host_state: default: nothing.

        Raises:
          ValueError: the step exists already.
          RunFailed: this step, or the one that was being written, cannot be written, or `on_commit` cannot note it.
        """
        host = HostState() if host_state is None else host_state
        self.wait()
        if step in self._found:
            raise ValueError(f"checkpoint {step} exists already in {self._folder}")
        with self._saving(step):
            self._folder.mkdir(parents=True, exist_ok=True)
            self.tidy()
            for draft in self._folder.glob(f"{step}.draft*") if self._leads else ():
                shutil.rmtree(draft)  # could not be removed, and is in this one's way
            self._orbax.save(
                self._draft(step),
                args=_ItemArgs(
                    state=ocp.args.PyTreeSave(_owned(train_state)),
                    host=ocp.args.JsonSave({"schema_version": SCHEMA_VERSION, "values": dict(host.values)}),
                    arrays=ocp.args.PyTreeSave({"npz": _to_bytes(host.arrays)}),
                ),
            )
            self._pending = step, self._thread.submit(self._commit, step)

    def restore(self, abstract_state: Tree, step: int | None = None) -> tuple[Tree, HostState]:
        """(train_state, host_state) of a step, on whatever mesh `abstract_state` names.

        Args:
          abstract_state: a tree like the saved one of `jax.ShapeDtypeStruct` with shardings (`Trainer.abstract_state`);
            without a sharding, a leaf comes back as numpy.
          step: default: the newest.

        Raises:
          FileNotFoundError: there is no such step.
          ValueError: it holds other arrays, is damaged, or was written by a later version.
        """
        step = self._existing(step)
        place = self._folder / str(step)
        if self.chosen is None or step != self.chosen.step:  # that one has been compared
            verify_alone(place, self._progress)
        _refuse_other_arrays(place, abstract_state, _stored(place / STATE))
        size = _stored(place / ARRAYS)["npz"].shape
        found = self._orbax.restore(
            place,
            args=_ItemArgs(
                state=_restore_args(abstract_state),
                host=ocp.args.JsonRestore(),
                arrays=_restore_args({"npz": jax.ShapeDtypeStruct(size, np.uint8)}),
            ),
        )
        arrays = _from_bytes(np.asarray(found[ARRAYS]["npz"]))
        return found[STATE], HostState(found[HOST]["values"], arrays)

    def latest_step(self) -> int | None:
        """The newest complete step, or None."""
        return max(self._found, default=None)

    def all_steps(self) -> list[int]:
        """The complete steps, ascending."""
        return sorted(self._found)

    def last_good(self) -> str:
        """What is left of the run if it ends now, for a sentence."""
        step = self.latest_step()
        return "there is no checkpoint yet" if step is None else f"the last good checkpoint is step {step}"

    def wait(self) -> None:
        """Blocks until everything saved is on disk; raises RunFailed if writing failed."""
        if self._pending is not None:
            (step, future), self._pending = self._pending, None
            with self._saving(step):
                written = 0
                while not wait_for([future], _LOOK_EVERY_S).done:
                    before, written = written, _size(self._draft(step))
                    if written != before:
                        self._progress()
                future.result()

    def close(self) -> None:
        """`wait`, then release threads."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draft(self, step: int) -> Path:
        return self._folder / f"{step}.draft"

    def _commit(self, step: int) -> None:
        """In the background: waits for Orbax, adds the manifest, gives the step its name, removes the oldest."""
        try:
            self._orbax.wait_until_finished()
        except BaseException:
            self._items.wait()
            self._remove_drafts(step)
            raise
        if self._leads:
            manifest.write(self._draft(step), SCHEMA_VERSION, step, self._progress)
            self._draft(step).rename(self._folder / str(step))
            manifest.sync_folder(self._folder)
        self._found.append(step)
        try:
            self._on_commit(step)
        except OSError as error:
            where = error.filename or self._folder.parent
            raise RunFailed(
                f"{where} cannot be written: {reason(error)}; {self.last_good()}: {_way_on(error)}"
            ) from error
        for oldest in sorted(self._found)[: -self._max_to_keep] if self._max_to_keep else ():
            if self._leads and not self._remove_step(oldest):
                return  # the next one tries again
            self._found.remove(oldest)

    def _remove_step(self, step: int) -> bool:
        """Whether it is no step any more. Renamed first: a kill half-way leaves nothing that is named like a step."""
        place = self._folder / str(step)
        try:
            renamed = place.rename(free_name(self._folder / f"{step}.removed"))
        except OSError as error:
            _log.warning("%s cannot be removed: %s", place, reason(error))
            return False
        _remove(renamed)
        return True

    @contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        """What goes wrong while a step is written leaves no draft behind; what the system refuses ends the run."""
        try:
            yield
        except RunFailed:  # of a step that is written
            raise
        except Exception as error:
            self._remove_drafts(step)
            cause = system_error(error)
            if cause is None:
                raise
            raise RunFailed(
                f"checkpoint {step} cannot be written to {self._folder}: {reason(cause)}; {self.last_good()}: "
                f"{_way_on(cause)}"
            ) from error

    def _remove_drafts(self, step: int) -> None:
        """Until none comes back: TensorStore's writes that were still under way make their folders again."""
        if not self._leads:
            return
        rounds_without, deadline = 0, time.monotonic() + 5
        while rounds_without < 4 and time.monotonic() < deadline:
            drafts = list(self._folder.glob(f"{step}.draft*"))
            for draft in drafts:
                shutil.rmtree(draft, ignore_errors=True)
            rounds_without = 0 if drafts else rounds_without + 1
            time.sleep(0.05)

    def _existing(self, step: int | None) -> int:
        steps = self.all_steps()
        if step is None and steps:
            return steps[-1]
        if step is None or step not in steps:
            wanted = "no checkpoint" if step is None else f"no checkpoint {step}"
            raise FileNotFoundError(f"{wanted} in {self._folder}: found {steps}")
        return step


def _processes() -> ocp.options.MultiprocessingOptions:
    """Of several processes, all by name: Orbax then lets them meet at barriers, which name who is missing after 300 s.
    By default it runs a collective on all devices, which gloo gives up after 30 s where it is the first one."""
    count = jax.process_count()
    return ocp.options.MultiprocessingOptions(active_processes=set(range(count)) if count > 1 else None)


def _remove(folder: Path) -> None:
    """Removes what is no checkpoint (any more); a failure costs no more than its room."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning("%s cannot be removed: %s", error.filename or folder, reason(error))


def _way_on(error: OSError) -> str:
    return "make room and run again" if is_full(error) else "mend that and run again"


def refuse_other_model(place: Path, abstract_params: Tree) -> None:
    """Raises ValueError if a step's folder holds parameters of other names or shapes, before any weights load."""
    _refuse_other_arrays(place, {"params": abstract_params}, {"params": _stored(place / STATE).get("params", {})})


def holds_critic(place: Path) -> bool:
    """Whether a step's folder holds a critic beside the policy."""
    return "critic" in _stored(place / STATE)


def restore_params(place: Path, abstract_params: Tree) -> Tree:
    """The parameters of a step's folder that is whole (`steps.whole_step`), without optimizer and queues.

    Args:
      abstract_params: tree of `jax.ShapeDtypeStruct`; leaves with shardings land there, others come back as numpy.

    Raises:
      ValueError: it holds another model.
    """
    target = {"params": abstract_params}
    refuse_other_model(place, abstract_params)
    _tell_one_error()
    among = _processes()
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=among)
    with ocp.Checkpointer(handler, multiprocessing_options=among) as reader:
        arguments = ocp.args.PyTreeRestore(item=target, restore_args=_leaf_args(target), partial_restore=True)
        return reader.restore(place / STATE, args=arguments)["params"]


def _size(draft: Path) -> int:
    """The bytes of a folder in which others write, make and rename."""
    total = 0
    for folder, _, names in os.walk(f"{draft}"):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(folder, name))
    return total


def _stored(item: Path) -> Tree:
    """What is stored of an item: nested dicts; leaves have `shape`."""
    handler: Any = ocp.PyTreeCheckpointHandler()  # its annotation asks for a class of another package
    return handler.metadata(item).tree


def _refuse_other_arrays(place: Path, abstract: Tree, stored: Tree) -> None:
    """Raises ValueError unless names and shapes are the same: a checkpoint of another model or optimizer."""
    here, there = _shapes(abstract), _shapes(stored)
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            described = [f"of shape {each[name]}" if name in each else "missing" for each in (there, here)]
            raise ValueError(
                f"checkpoint {place} does not fit this model and optimizer: {name} is {described[0]} there and "
                f"{described[1]} here"
            )


def _shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}


@cache
def _tell_one_error() -> None:
    """From now on, of several arrays that cannot be written or read, only the error that Orbax raises is told.

    The others come as reports that cannot be caught, with tracebacks, at any moment up to the end of the process:
    asyncio's, of tasks, gathered tasks and TensorStore's futures whose error was never asked for, and TensorStore's, of
    the event loop that Orbax has closed by then. All other reports stay as they are.
    """
    logging.getLogger("asyncio").addFilter(_not_orbaxs_others)
    earlier = sys.unraisablehook

    def told(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not (closed and unraisable.object is None):  # TensorStore's callbacks are no objects of Python
            earlier(unraisable)

    sys.unraisablehook = told


def _not_orbaxs_others(record: logging.LogRecord) -> bool:
    """A filter of asyncio's log: False for errors that Orbax's tasks, or TensorStore under them, have left behind."""
    error = record.exc_info[1] if record.exc_info else None
    lost = re.match(r"(Task|Future|_GatheringFuture) exception was never retrieved", record.getMessage())
    if error is None or lost is None:
        return True
    if error.__traceback__ is None:  # no line of Python raised it: TensorStore gave it to a future that Orbax dropped
        return lost[1] == "Task"
    modules = {frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)}
    return not any(module.startswith("orbax.") for module in modules)


def _restore_args(abstract: Tree) -> Any:
    return ocp.args.PyTreeRestore(item=abstract, restore_args=_leaf_args(abstract))


def _leaf_args(abstract: Tree) -> Tree:
    def one(leaf: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
        if leaf.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=True)

    return jax.tree.map(one, abstract)


def _owned(tree: Tree) -> Tree:
    """Leaves that a background writer may keep: numpy arrays are copied, jax's left to Orbax."""
    return jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray | np.generic) else x, tree)


def _to_bytes(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    buffer = io.BytesIO()
    # allow_pickle off refuses object arrays, which could hold anything
    np.savez(buffer, allow_pickle=False, **{name: np.asarray(value) for name, value in arrays.items()})
    return np.frombuffer(buffer.getvalue(), np.uint8)


def _from_bytes(data: np.ndarray) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(data.tobytes()), allow_pickle=False) as found:
        return {name: found[name] for name in found.files}
