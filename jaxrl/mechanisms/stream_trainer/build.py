"""The stream trainer of a real run, from its options."""

from __future__ import annotations

from functools import partial

from jaxrl.mechanisms.parts import RunParts
from jaxrl.mechanisms.stream_trainer.gradients import TrainStream
from jaxrl.mechanisms.stream_trainer.scale_down import halves
from jaxrl.mechanisms.stream_trainer.session import StreamSession
from jaxrl.mechanisms.stream_trainer.stream_pace import pace_of
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.plan_cost import cheaper_move
from jaxrl.scheduling.tokens.local_workers import By, LocalWorkers
from jaxrl.sharding.mesh import platform_of
from jaxrl.sharding.split_mesh import Half


def build(parts: RunParts) -> StreamSession | None:
    """The stream trainer on either half of the devices; None: it is off. Its programs are compiled with the update's.

    Raises ValueError where the devices have no halves (`jaxrl.sharding.split_mesh.Half`).
    """
    options, trainer = parts.config.trainer.stream, parts.trainer
    if not options.enable:
        return None
    assert isinstance(parts.engines, LocalWorkers), "gradients beside the rollout move requests between workers"
    streams = {
        freed: TrainStream(trainer, Half(trainer.mesh, index), parts.teacher)
        for index, freed in enumerate(halves(len(parts.engines.engines)))
    }
    parts.update_programs += [stream.programs for stream in streams.values()]
    parts.update_programs += [each for stream in streams.values() if (each := stream.teacher_programs) is not None]
    pace = pace_of(options.pace, platform_of(trainer.mesh.devices.flat[0]))
    given = options, parts.engines, streams, parts.workers.release_some, pace, parts.journal, parts.timeline
    session = StreamSession(*given, by=_moves(parts))
    parts.beside_rollout.append(session.wait_quiet)
    return session


def _moves(parts: RunParts) -> By:
    """How requests move from a worker that is freed: where layouts switch as `rollout.layout.state` says of a switch,
    else they are computed again. A profile of one degree alone knows nothing of moving KV."""
    options, profile = parts.config.rollout.layout, parts.profile
    if not options.switch or profile is None or not profile.switches:
        return "recompute"
    if options.state != "cheaper":
        return options.state
    return partial(cheaper_move, LatencyPredictor(profile, options, parts.row_sizes))
