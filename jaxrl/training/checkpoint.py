"""Checkpoints: the training state on any mesh, and the host's queues, in one folder per step with its checksums.

A step holds three items: `state` (arrays, restored straight onto the target's shardings), `host` (JSON), and `arrays`
(named numpy arrays, such as the queues of batch rules, as flat integers with offsets). The last may be gigabytes: they
are compressed and written without Orbax, which would copy them before a save returns
(`jaxrl.record.state.write_arrays`).

Orbax writes a temporary folder, `<step>.tmp`, in the background. Then the manifest of SHA-256 checksums is added
(`jaxrl.training.manifest`), everything is synced to the disk, and the folder is renamed to `<step>`: a folder with a
step's name is complete. A step is checked against its manifest before anything is restored from it, and the newest step
that passes is used. `Choice` lists newer steps that failed, with the reasons; they are kept as `<step>.damaged`.

Several processes save and restore together, on a shared file system: each writes and reads its own devices' shards.
Process 0 does the rest: the host's part of a step, its manifest and its name, comparing before a restore, retention,
and cleaning up after interrupted saves. In the others `wait` returns once all shards are written, before the step has
its name.

Source: Orbax. Departures from its defaults: nothing is restored without a target, which would bring arrays back onto
the devices that wrote them. Folders are made before a save returns: where one cannot be made, Orbax's threads would
wait for five minutes. Its `CheckpointManager` (0.12.8) is not used. It renames a step before a manifest could list all
of its files, and deletes old steps file by file under their names, so that a kill leaves part of a step.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl.record.files import reason, system_error, way_on
from jaxrl.record.state import join_arrays, read_arrays, split_arrays, write_arrays
from jaxrl.training import manifest
from jaxrl.training.steps import ARRAYS, HOST, SCHEMA_VERSION, STATE, Choice, choose, free_name, steps_of, verify
from jaxrl.types import RunFailed

Tree = Any

_LEFTOVER = re.compile(r"\d+\.(tmp|orbax-checkpoint-tmp|removed).*")
_log = logging.getLogger(__name__)
_ARRAYS_FILE = f"{ARRAYS}/arrays.arrow"
_FILE_BYTES = 2**28  # hashed by one thread (Orbax: 2 GiB)
_ASYNC = ocp.AsyncOptions(create_directories_asynchronously=False)


class _Items(ocp.CompositeCheckpointHandler):
    """Orbax's handler of a step's items. When one write fails, Orbax raises at once while the others continue:
    `writing` keeps them, since the temporary folder can be removed only after them."""

    writing: Sequence[Any] = ()

    async def async_save(self, directory: Any, args: Any) -> list[Any]:
        self.writing = await super().async_save(directory, args) or []
        return [*self.writing]

    def wait(self) -> None:
        """Blocks until all writes have ended, failed or not."""
        for future in self.writing:
            with suppress(Exception):  # the first error has been raised by now
                future.result()


@ocp.args.register_with_handler(_Items, for_save=True, for_restore=True)
class _ItemArgs(ocp.args.Composite):
    """The arguments that Orbax expects for `_Items`."""


class Checkpointer:
    """The checkpoints of one run, a folder per step. Use as a context manager, or call `close`.

    Nothing is written before `tidy` or `save`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_to_keep: int | None = 2,
        on_commit: Callable[[int], None] = lambda step: None,
        progress: Callable[[], None] = lambda: None,
        first: Callable[[str, Callable[[], str]], str] = lambda name, make: make(),
    ) -> None:
        """Looks for the newest complete step (`choose`, with its errors).

        Args:
          max_to_keep: newest steps kept; None keeps all.
          on_commit: called with each complete step, in the background thread. An OSError that it raises ends the run,
            but the step stays.
          progress: called while files are compared or hashed.
          first: (name, make): returns process 0's `make()` in every process.
        """
        self._leads = jax.process_index() == 0
        self._folder = Path(folder).absolute()
        self._max_to_keep, self._on_commit, self._progress = max_to_keep, on_commit, progress
        found = json.loads(first(f"the newest step in {self._folder}", self._choose))
        self.chosen = None if found is None else Choice(found[0], dict(found[1]))
        self._damaged = [] if self.chosen is None else list(self.chosen.faults)
        self._found = [step for step in steps_of(self._folder) if step not in self._damaged]
        among = _processes()
        self._items = _Items(
            composite_options=ocp.CompositeOptions(async_options=_ASYNC, multiprocessing_options=among),
            **{
                STATE: ocp.PyTreeCheckpointHandler(multiprocessing_options=among),
                HOST: ocp.JsonCheckpointHandler(multiprocessing_options=among),
            },
        )
        self._orbax = ocp.AsyncCheckpointer(self._items, async_options=_ASYNC, multiprocessing_options=among)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: tuple[int, Future[None]] | None = None

    def _choose(self) -> str:
        chosen = choose(self._folder, self._progress)
        return json.dumps(None if chosen is None else [chosen.step, [*chosen.faults.items()]])

    def tidy(self) -> None:
        """Process 0 renames damaged steps, and removes what interrupted saves left. What cannot be removed is logged,
        and tried again by the next save."""
        if not self._leads:
            return
        while self._damaged:
            step = self._damaged.pop()
            (self._folder / str(step)).rename(free_name(self._folder / f"{step}.damaged"))
        for leftover in self._folder.glob("*"):
            if _LEFTOVER.fullmatch(leftover.name):
                _remove(leftover)

    def save(self, step: int, train_state: Tree, host_state: Mapping[str, Any] | None = None) -> None:
        """Writes a step in the background. Returns when the arrays are copied: they may be donated right after.

        Args:
          step: the number of finished training steps; above all earlier ones.
          train_state: nested dicts of arrays (`MeshTrainer.state`).
          host_state: nested dicts with string keys, of JSON values and numpy arrays. It is written in the background
            and must not change.

        Raises:
          RunFailed: this step, or the one that was being written, cannot be written, or `on_commit` cannot note it.
        """
        values, arrays = split_arrays(host_state or {})
        self.wait()
        if step in self._found:
            raise ValueError(f"checkpoint {step} exists already in {self._folder}")
        with self._saving(step):
            self._folder.mkdir(parents=True, exist_ok=True)
            self.tidy()
            for leftover in self._folder.glob(f"{step}.tmp*") if self._leads else ():
                shutil.rmtree(leftover)  # could not be removed, and is in this one's way
            # the background writer keeps numpy arrays: it gets copies of them
            owned = jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray | np.generic) else x, train_state)
            self._orbax.save(
                self._temporary(step),
                args=_ItemArgs(
                    state=ocp.args.PyTreeSave(owned, ocdbt_target_data_file_size=_FILE_BYTES),
                    host=ocp.args.JsonSave({"schema_version": SCHEMA_VERSION, "values": values}),
                ),
            )
            self._pending = step, self._thread.submit(self._commit, step, arrays)

    def restore(self, abstract_state: Tree, step: int | None = None) -> tuple[Tree, dict[str, Any]]:
        """(train_state, host_state) of a step, on the mesh of `abstract_state`.

        Args:
          abstract_state: a tree like the saved one of `jax.ShapeDtypeStruct` with shardings
            (`MeshTrainer.abstract_state`); without a sharding, a leaf comes back as numpy.
          step: default: the newest.
        """
        wanted, step = step, self.latest_step() if step is None else step
        if step not in self._found:
            which = "" if wanted is None else f" {wanted}"
            raise FileNotFoundError(f"no checkpoint{which} in {self._folder}: found {self.all_steps()}")
        place = self._folder / str(step)
        if self.chosen is None or step != self.chosen.step:  # that one has been compared
            verify(place, self._progress)
        if (version := manifest.read(place, None)["schema_version"]) != SCHEMA_VERSION:
            raise ValueError(
                f"checkpoint {place} was written by an earlier jaxrl (schema version {version}, now {SCHEMA_VERSION}): "
                "begin another run from its parameters (trainer.init_from)"
            )
        _refuse_other_arrays(place, abstract_state, _stored(place / STATE))
        args = _ItemArgs(state=_restore_args(abstract_state), host=ocp.args.JsonRestore())
        found = self._orbax.restore(place, args=args)
        return found[STATE], join_arrays(found[HOST]["values"], read_arrays(place / _ARRAYS_FILE))

    def latest_step(self) -> int | None:
        """The newest complete step, or None."""
        return max(self._found, default=None)

    def all_steps(self) -> list[int]:
        """The complete steps, ascending."""
        return sorted(self._found)

    def last_good(self) -> str:
        """The newest step, as part of a sentence."""
        step = self.latest_step()
        return "there is no checkpoint yet" if step is None else f"the last good checkpoint is step {step}"

    def wait(self) -> None:
        """Blocks until everything saved is on disk; raises RunFailed if writing failed."""
        if self._pending is not None:
            (step, future), self._pending = self._pending, None
            with self._saving(step):
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

    def _temporary(self, step: int) -> Path:
        return self._folder / f"{step}.tmp"

    def _commit(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """In the background: waits for Orbax, adds the host's arrays and the manifest, gives the step its name, removes
        the oldest."""
        try:
            self._orbax.wait_until_finished()
        except BaseException:
            self._items.wait()
            raise
        if self._leads:
            (self._temporary(step) / ARRAYS).mkdir()
            write_arrays(self._temporary(step) / _ARRAYS_FILE, arrays)
            manifest.write(self._temporary(step), SCHEMA_VERSION, step, self._progress)
            self._temporary(step).rename(self._folder / str(step))
            manifest.sync_folder(self._folder)
        self._found.append(step)
        try:
            self._on_commit(step)
        except OSError as error:
            said = f"{error.filename or self._folder.parent} cannot be written: {reason(error)}"
            raise RunFailed(f"{said}; {self.last_good()}: {way_on(error)}") from error
        for oldest in sorted(self._found)[: -self._max_to_keep] if self._max_to_keep else ():
            if self._leads and not self._remove_step(oldest):
                return  # the next one tries again
            self._found.remove(oldest)

    def _remove_step(self, step: int) -> bool:
        """Whether it could be removed. It is renamed first: a kill half-way leaves nothing named like a step."""
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
        """Removes the temporary folder of a save that fails; an error of the operating system becomes RunFailed."""
        try:
            yield
        except RunFailed:  # of a step that is written
            raise
        except Exception as error:
            self._remove_temporary(step)
            cause = system_error(error)
            if cause is None:
                raise
            raise RunFailed(
                f"checkpoint {step} cannot be written to {self._folder}: {reason(cause)}; {self.last_good()}: "
                f"{way_on(cause)}"
            ) from error

    def _remove_temporary(self, step: int) -> None:
        """Repeats until the folder stays away: TensorStore's pending writes make it again."""
        if not self._leads:
            return
        rounds_without, deadline = 0, time.monotonic() + 5
        while rounds_without < 4 and time.monotonic() < deadline:
            found = [place for place in self._folder.glob(f"{step}.tmp*") if not place.is_symlink()]  # it makes none
            for folder in found:
                shutil.rmtree(folder, ignore_errors=True)
            rounds_without = 0 if found else rounds_without + 1
            time.sleep(0.05)


def _processes() -> ocp.options.MultiprocessingOptions:
    """Names all of several processes: Orbax then uses barriers, which report a missing process after 300 s. By default
    it runs a collective on all devices, which gloo abandons after 30 s where it is the first one."""
    count = jax.process_count()
    return ocp.options.MultiprocessingOptions(active_processes=set(range(count)) if count > 1 else None)


def _remove(folder: Path) -> None:
    """Removes a folder that is not a checkpoint; a failure only costs disk space."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning("%s cannot be removed: %s", error.filename or folder, reason(error))


def refuse_other_model(place: Path, abstract_params: Tree) -> None:
    """Raises ValueError if a step's folder holds parameters of other names or shapes, before any weights load."""
    _refuse_other_arrays(place, {"params": abstract_params}, {"params": _stored(place / STATE).get("params", {})})


def holds_critic(place: Path) -> bool:
    """Whether a step's folder holds a critic beside the policy."""
    return "critic" in _stored(place / STATE)


def restore_params(place: Path, abstract_params: Tree) -> Tree:
    """The parameters of a step's folder that is whole (`steps.whole_step`), without optimizer and queues. Leaves of
    `abstract_params` as in `Checkpointer.restore`. Raises ValueError if it holds another model."""
    refuse_other_model(place, abstract_params)
    among = _processes()
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=among)
    with ocp.Checkpointer(handler, multiprocessing_options=among) as reader:
        return reader.restore(place / STATE, args=_restore_args({"params": abstract_params}))["params"]


def _stored(item: Path) -> Tree:
    """The stored structure of an item: nested dicts; leaves have `shape`."""
    handler: Any = ocp.PyTreeCheckpointHandler()  # its annotation asks for a class of another package
    return handler.metadata(item).tree


def _refuse_other_arrays(place: Path, abstract: Tree, stored: Tree) -> None:
    """Raises ValueError unless names and shapes are the same: a checkpoint of another model or optimizer."""
    here, there = _shapes(abstract), _shapes(stored)
    adapted, adapts = (any("_lora_" in name for name in each) for each in (there, here))
    if adapted and not adapts:
        raise ValueError(
            f"checkpoint {place} has adapters, and this run trains all weights: give its model.lora_rank, or merge "
            "first: jaxrl export RUN FOLDER --merge, then model.path=FOLDER"
        )
    if adapts and not adapted:
        raise ValueError(
            f"checkpoint {place} has all weights, and this run trains adapters (model.lora_rank): jaxrl export RUN "
            "FOLDER, then model.path=FOLDER"
        )
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            described = [f"of shape {each[name]}" if name in each else "missing" for each in (there, here)]
            raise ValueError(
                f"checkpoint {place} does not fit this model and optimizer: {name} is {described[0]} there and "
                f"{described[1]} here" + (", as optim.name and optim.state_dtype say" if "optimizer/" in name else "")
            )


def _shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}


def _restore_args(abstract: Tree) -> Any:
    """Orbax's arguments to restore the leaves of `abstract`; others may be stored beside them."""

    def one(leaf: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
        if leaf.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=True)

    return ocp.args.PyTreeRestore(item=abstract, restore_args=jax.tree.map(one, abstract), partial_restore=True)
