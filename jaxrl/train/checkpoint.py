"""Checkpoints: the training state on any mesh, and the host's queues, in one atomic Orbax step.

A step holds three items: `state` (arrays, restored straight onto the target's shardings), `host` (JSON), and `arrays`
(named numpy arrays: long-prompt queue, partial-rollout buffer and the like, as flat integers with offsets). The named
arrays are written as one vector of bytes in numpy's own format, which keeps dtypes and empty arrays. Saving is
asynchronous; Orbax renames a step's folder when everything is written, so an incomplete step is never chosen.

Source: Orbax `CheckpointManager`; docs/architecture.md. Departure from its defaults: nothing is restored without a
target, which would bring arrays back onto the devices that wrote them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

Tree = Any

SCHEMA_VERSION = 1
"""Version of everything around the items. A reader refuses versions above its own."""

_STATE, _HOST, _ARRAYS = "state", "host", "arrays"


@dataclass(frozen=True, slots=True)
class HostState:
    """The host's part of a checkpoint, beside the arrays on devices.

    Attributes:
      values: JSON-able (strings, finite numbers, lists, dicts with string keys).
      arrays: numpy arrays by name, of any dtype but object.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


class Checkpointer:
    """The checkpoints of one run, a folder per step. Use as a context manager, or call `close`.

    Example::

        with Checkpointer(run_dir / "checkpoints", max_to_keep=2) as checkpoints:
            checkpoints.save(step, trainer.state(), HostState(values, arrays))
            ...
            state, host = checkpoints.restore(trainer.abstract_state())
            trainer.load_state(state)
    """

    def __init__(self, folder: str | Path, *, max_to_keep: int | None = 2) -> None:
        """Opens (and creates) `folder`; leftovers of steps that were cut off are removed.

        Args:
          folder: of this run.
          max_to_keep: newest steps kept; None keeps all.
        """
        self._folder = Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep, create=True, cleanup_tmp_directories=True, enable_async_checkpointing=True
        )
        handlers = {
            _STATE: ocp.PyTreeCheckpointHandler(),
            _HOST: ocp.JsonCheckpointHandler(),
            _ARRAYS: ocp.PyTreeCheckpointHandler(),
        }
        self._steps = ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)

    def save(self, step: int, train_state: Tree, host_state: HostState | None = None) -> None:
        """Writes a step in the background. Returns when the arrays are copied: they may be donated right after.

        Args:
          step: the number of finished training steps; above all earlier ones.
          train_state: nested dicts of arrays (`Trainer.state`).
          host_state: default: nothing.

        Raises:
          ValueError: the step exists already, or an earlier background write failed.
        """
        host = HostState() if host_state is None else host_state
        if step in self._steps.all_steps():
            raise ValueError(f"checkpoint {step} exists already in {self._folder}")
        self._steps.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(_owned(train_state)),
                host=ocp.args.JsonSave({"schema_version": SCHEMA_VERSION, "values": dict(host.values)}),
                arrays=ocp.args.PyTreeSave({"npz": _to_bytes(host.arrays)}),
            ),
        )

    def restore(self, abstract_state: Tree, step: int | None = None) -> tuple[Tree, HostState]:
        """(train_state, host_state) of a step, on whatever mesh `abstract_state` names.

        Args:
          abstract_state: a tree like the saved one of `jax.ShapeDtypeStruct` with shardings (`Trainer.abstract_state`);
            without a sharding, a leaf comes back as numpy.
          step: default: the latest.

        Raises:
          FileNotFoundError: there is no such step.
          ValueError: it was written by a later version.
        """
        step = self._existing(step)
        size = self._steps.item_metadata(step)[_ARRAYS].tree["npz"].shape
        found = self._steps.restore(
            step,
            args=ocp.args.Composite(
                state=_restore_args(abstract_state),
                host=ocp.args.JsonRestore(),
                arrays=_restore_args({"npz": jax.ShapeDtypeStruct(size, np.uint8)}),
            ),
        )
        version = found[_HOST]["schema_version"]
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"checkpoint {self._folder}/{step} has schema version {version}; this jaxrl reads up to "
                f"{SCHEMA_VERSION}"
            )
        return found[_STATE], HostState(found[_HOST]["values"], _from_bytes(np.asarray(found[_ARRAYS]["npz"])))

    def latest_step(self) -> int | None:
        """The newest complete step, or None."""
        return self._steps.latest_step()

    def all_steps(self) -> list[int]:
        """The complete steps, ascending."""
        return sorted(self._steps.all_steps())

    def wait(self) -> None:
        """Blocks until everything saved is on disk; raises the error if writing failed."""
        self._steps.wait_until_finished()

    def close(self) -> None:
        """`wait`, then release threads."""
        self.wait()
        self._steps.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _existing(self, step: int | None) -> int:
        steps = self._steps.all_steps()
        if step is None and steps:
            return max(steps)
        if step is None or step not in steps:
            raise FileNotFoundError(f"no checkpoint {'' if step is None else step} in {self._folder}: found {steps}")
        return step


def restore_params_only(path: str | Path, abstract_params: Tree, step: int | None = None) -> Tree:
    """The parameters of a checkpoint, without optimizer and queues.

    Args:
      path: a folder of checkpoints, a run directory with a folder `checkpoints`, or one step's folder.
      abstract_params: tree of `jax.ShapeDtypeStruct`; leaves with shardings land there, others come back as numpy.
      step: default: the latest; not with one step's folder.

    Raises:
      FileNotFoundError: there is none.
    """
    folder = Path(path).absolute()
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    if not (folder / _STATE).is_dir():
        steps = sorted(int(p.name) for p in folder.glob("*") if p.name.isdigit() and (p / _STATE).is_dir())
        if not steps or (step is not None and step not in steps):
            raise FileNotFoundError(f"no checkpoint {'' if step is None else step} in {folder}: found {steps}")
        folder = folder / str(steps[-1] if step is None else step)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        target = {"params": abstract_params}
        arguments = ocp.args.PyTreeRestore(item=target, restore_args=_leaf_args(target), partial_restore=True)
        return reader.restore(folder / _STATE, args=arguments)["params"]


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
