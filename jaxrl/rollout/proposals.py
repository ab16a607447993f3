"""The interface of a mechanism that proposes the tokens which a plan's steps verify (`jaxrl.rollout.verify`).

A `Proposer` looks proposals up inside the decode loop, in arrays on the devices. Each dp group has *places* in these
arrays, one for each history (`jaxrl.scheduling.tokens.plan.Request.history`) that is there at the moment;
`DeviceHistories` knows which history lies in which place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np


class Proposed(NamedTuple):
    """Tokens int32 [R, W], of which the first `length` [R] are proposed, and the tokens of context `matched` [R]."""

    tokens: jax.Array
    length: jax.Array
    matched: jax.Array


class DeviceHistories(Protocol):
    arrays: Any  # on the devices
    num_places: int  # of each dp group

    def place(self, named: Iterable[tuple[int, Any]], write: Callable[[Any, np.ndarray, Any], Any]) -> list[int]:
        """Uploads the histories of a plan's rows, each with its dp group, and returns their places. Where a group names
        more than it has room for, the last ones get none, which is `num_places`. `write`: the compiled
        `Proposer.upload`."""
        ...

    def forget(self) -> None:
        """Drops all histories."""
        ...

    def delete(self) -> None: ...


class Proposer(Protocol):
    """Proposes tokens on the devices. Equal ones make equal programs.

    Attributes:
      num_recent: the last tokens of a response that it looks at.
      blank: the token that stands before the first of a response.
      first_window: the most tokens of a row's first proposal.
      upload_sizes: entries of the arrays of one place, which name the upload's program.
    """

    @property
    def num_recent(self) -> int: ...

    @property
    def blank(self) -> int: ...

    @property
    def first_window(self) -> int: ...

    @property
    def upload_sizes(self) -> tuple[int, int]: ...

    def width(self, rows: int) -> int:
        """How many proposed tokens a step verifies in each row, by the rows of its program; 0: none."""
        ...

    def num_places(self, num_slots: int) -> int: ...

    def refusal(self, history: Any) -> str | None:
        """Why a history has no room in a place; None if it has."""
        ...

    def array_shapes(self, *dims: int) -> Any:
        """The shapes and dtypes of the arrays of one place, a pytree, behind these leading dims."""
        ...

    def on_devices(self, arrays: Any) -> DeviceHistories:
        """The places in arrays [dp groups, places, ...] that are zero."""
        ...

    def upload(self, arrays: Any, place: jax.Array, new: Any) -> Any:
        """The arrays with one history of each group, `new` [G, ...], in its place [G]; beyond the last: in none."""
        ...

    def propose(self, arrays: Any, place: jax.Array, recent: jax.Array, width: int) -> Proposed:
        """Proposals for the rows of one dp group, whose arrays have no leading dim of groups.

        Args:
          place: int32 [R], beyond the last for a row without a history.
          recent: int32 [R, num_recent], the last tokens of each row's response.
          width: the most tokens of a proposal.
        """
        ...

    def next_window(self, window: Any, proposed: Any, accepted: Any) -> Any:
        """The most tokens of rows' next proposals, after a step with these counts; of numpy or jax arrays alike."""
        ...
