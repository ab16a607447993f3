"""Configurations with options as keywords: `rollout__tail_batching__enable=True`."""

from __future__ import annotations

from typing import Any

from jaxrl.config import Config, from_mapping


def with_options(values: dict[str, Any], options: dict[str, Any]) -> Config:
    """The configuration of `values` with `options` (by path, with __ between its words) on top; changes `values`."""
    for path, value in options.items():
        *sections, option = path.split("__")
        node = values
        for section in sections:
            node = node.setdefault(section, {})
        node[option] = value
    return from_mapping(values)
