"""A few samples of each step, for people: `samples.jsonl` in the run directory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl.types import Group

GROUPS_PER_STEP = 2
SAMPLES_PER_GROUP = 2


class SampleLog:
    """Appends the first samples of a step's first groups; drops lines of steps after `last_step` when it opens."""

    def __init__(self, path: str | Path, last_step: int) -> None:
        path = Path(path)
        if path.exists():
            lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline was cut off
            kept = [line for line in lines if json.loads(line)["step"] <= last_step]
            draft = path.with_suffix(".draft")
            draft.write_bytes(b"".join(line + b"\n" for line in kept))
            os.replace(draft, path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run lasts

    def write(self, step: int, groups: Sequence[Group]) -> None:
        for group in groups[:GROUPS_PER_STEP]:
            for sample in group.samples[:SAMPLES_PER_GROUP]:
                line: dict[str, Any] = {
                    "step": step,
                    "prompt": group.prompt.text,
                    "response": sample.text,
                    "answer": group.prompt.answer,
                    "reward": sample.reward,
                    "length": len(sample),
                    "finish_reason": sample.finish_reason,
                    "source": group.prompt.source,
                }
                self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        self._file.close()
