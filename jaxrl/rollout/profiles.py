"""Latency profiles of this machine: files of `jaxrl profile`, checked against the model and the devices of a run."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxrl.config import Config, ConfigError, flatten
from jaxrl.models.config import ModelConfig
from jaxrl.scheduling.layouts.latency_profile import Profile, ProfileIdentity
from jaxrl.sharding.mesh import platform_of, submeshes


def identity_of(config: Config, model: ModelConfig, mesh: Mesh) -> ProfileIdentity:
    """The model, machine and versions for which a profile of a worker holds; `mesh` is the worker's."""
    shapes = {name: (weight.shape, weight.dims) for name, weight in flatten(model.base.weights()).items()}
    device = mesh.devices.ravel()[0]
    cores = f" ({os.cpu_count()} cores)" if device.platform == "cpu" else ""
    return ProfileIdentity(
        model=Path(config.model.path.partition(":")[2] or config.model.path).name,
        fingerprint=hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:16],
        device_kind=device.device_kind + cores,
        device_count=mesh.size,
        jax_version=jax.__version__,
        dtype=config.with_types(platform_of(device)).rollout.types,
    )


def load_profile(path: str | Path) -> Profile:
    """Raises ConfigError for a file that is not a table, or of another version."""
    try:
        return Profile.from_json(json.loads(Path(path).expanduser().read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"rollout.layout.profile: {path} does not exist: make it with `jaxrl profile`") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"rollout.layout.profile: {path} cannot be used: {error}") from None


def checked_profile(config: Config, model: ModelConfig, mesh: Mesh) -> Profile:
    """`rollout.layout.profile`, refused with the reason if it is of another model or machine, or made up."""
    path = config.rollout.layout.profile
    profile = load_profile(path)
    if profile.source == "synthetic" and not config.rollout.layout.allow_synthetic:
        raise ConfigError(
            f"rollout.layout.profile: {path} was made up (source: synthetic): decisions that rest on it say nothing of "
            "this machine; rollout.layout.allow_synthetic=true takes it all the same"
        )
    try:
        profile.check(identity_of(config, model, submeshes(mesh, config.workers_per_group)[0]))
    except ValueError as error:
        raise ConfigError(f"rollout.layout.profile: {path}: {error}") from None
    return profile
