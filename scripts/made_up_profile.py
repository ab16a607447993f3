#!/usr/bin/env python3
"""A made-up latency profile, to see a run switch its layout where an honest profile would not.

    python scripts/made_up_profile.py --config configs/adaptive_layout.yaml --out made_up.json
    jaxrl train --config configs/adaptive_layout.yaml rollout.layout.profile=made_up.json \\
        rollout.layout.allow_synthetic=true

In this table, a larger tp makes a step with few rows faster and each further row dearer, and a switch costs next to
nothing. It names this machine, model and jax, or runs would refuse it, and says `"source": "synthetic"`, which reports
repeat: decisions by it say nothing about the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.config.files import load
from jaxrl.models.loading import config_of, resolve_path
from jaxrl.rollout.profiler import identity_of
from jaxrl.run.devices import prepare_jax
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile, ProfileIdentity, SwitchCost
from jaxrl.sharding.mesh import make_mesh, submeshes


def made_up(identity: ProfileIdentity, degrees: Sequence[int]) -> Profile:
    """The table, in milliseconds a step: 8 / tp for the first row of a dp group, and 0.1 tp for each more."""
    decode = [
        Measurement(tp, rows, context, 1e-3 * (8 / tp + 0.1 * tp * (rows - 1)))
        for tp in degrees
        for rows in (1, 16)
        for context in (8, 4096)
    ]
    prefill = [Measurement(tp, rows, 48, 0.1) for tp in degrees for rows in (1, 16)]
    switches = [SwitchCost(a, b, 1e-4, 0.0, 1e-4) for a in degrees for b in degrees if a != b]
    return Profile(identity, tuple(decode), tuple(prefill), tuple(switches), source="synthetic")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE", help="of the run, with rollout.layout.switch on")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="where the table goes")
    parser.add_argument("overrides", nargs="*", metavar="section.option=value")
    options = parser.parse_args(arguments)
    try:
        config = load(options.config, options.overrides)
        devices = prepare_jax(config)[-config.rollout.num_devices :]  # the rollout's own, or all
        mesh = submeshes(make_mesh(devices), config.rollout.num_workers)[0]
        identity = identity_of(config, config_of(resolve_path(config.model.path)), mesh)
        profile = made_up(identity, config.rollout.layout.possible_on(mesh.size))
        options.out.write_text(json.dumps(profile.to_json()), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"made_up_profile: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}: made up, of tp {', '.join(map(str, profile.degrees))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
