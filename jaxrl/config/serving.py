"""The options of a server (`serve`): `jaxrl serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from jaxrl.schema.declared import Cap
from jaxrl.schema.limits import MAX_LENGTH, MAX_WAIT

MAX_WAITING = Cap(1_000_000, "each of them is held in memory")
MAX_BODY_MIB = Cap(1024, "a request's body is held in memory")


@dataclass(frozen=True)
class ServeSection:
    """A model behind OpenAI's routes; what it draws with are options of `rollout`."""

    max_model_len: Annotated[
        int, Ge(0), MAX_LENGTH, "The longest prompt and response together, in tokens; 0: 4096, or what the model takes."
    ] = 0
    max_waiting: Annotated[
        int, Ge(0), MAX_WAITING, "Requests that wait for a row; beyond them a client is told to come again later (503)."
    ] = 256
    grace_s: Annotated[
        float, Ge(0), MAX_WAIT, "Seconds that responses under way have to end once the server is asked to stop."
    ] = 30.0
    max_body_mib: Annotated[float, Gt(0), MAX_BODY_MIB, "The largest request, in MiB."] = 16.0
