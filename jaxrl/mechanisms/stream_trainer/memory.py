"""The memory of gradients beside the rollout, on each of the devices that are freed for them."""

from __future__ import annotations

from jaxrl.config import Config
from jaxrl.mechanisms.room import FreedMemory
from jaxrl.models.config import ModelConfig
from jaxrl.schema.limits import BYTES
from jaxrl.train.teacher import teacher_model
from jaxrl.train.update_memory import device_bytes, device_numbers, update_phases


def freed_memory(
    config: Config, model: ModelConfig, num_devices: int, platform: str, remat: str, chunk: int
) -> FreedMemory | None:
    """Half of the devices have a share of the weights that is twice the trainer's, and what an update there would add,
    but for the optimizer. The reference's weights, and a teacher's, come in turns with the others. None: the stream
    trainer is off.

    Args:
      num_devices: of the trainer. Others as in `update_phases`.
    """
    if not config.trainer.stream.enable:
        return None
    half = num_devices // 2
    weights = device_bytes(config, model, half)
    if config.algorithm.teacher.path:
        own = device_numbers(teacher_model(config), half) * BYTES[config.algorithm.teacher.dtype]
        weights = max(weights, own)
    phases = update_phases(config, model, half, platform, remat, chunk)
    most = max((phases[name] for name in ("head", "layers", "embedding")), key=lambda parts: sum(parts.values()))
    return FreedMemory(
        "stream",
        {"weights of the half": weights} | {name: size for name, size in most.items() if size},
        "gradients beside the rollout",
        "twice the trainer's share of weights and sums",
        "switch trainer.stream.enable off, set actor.offload_optimizer",
    )
