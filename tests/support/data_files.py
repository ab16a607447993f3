"""Data files of rows, and configurations that read them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from jaxrl.config import Config, from_mapping


def config(**data: Any) -> Config:
    return from_mapping({"model": {"path": "x"}, "data": data, "actor": {"ppo_max_token_len_per_gpu": 1 << 20}})


def write(path: Path, rows: list[Any]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write(text)
    return str(path)
