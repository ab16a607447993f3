"""What the stream trainer goes with (RollPacker §4.4)."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.config import Config
from jaxrl.config.checks import NEEDS_WHOLE_BATCH
from jaxrl.mechanisms.room import WORKERS, Room
from jaxrl.schema.devices import possible_workers, sharing_problem


def _problem(config: Config, racing: Sequence[str]) -> str | None:
    """Why gradients cannot be computed beside the rollout."""
    option, estimator = "trainer.stream.enable", config.algorithm.adv_estimator
    num_workers, own = config.rollout.num_workers, config.rollout.num_devices
    if estimator in NEEDS_WHOLE_BATCH:
        return (
            f"{option} excludes algorithm.adv_estimator={estimator}: its advantages have statistics over the whole "
            "batch, so no gradient can be computed before the rollout has ended"
        )
    if config.reward.score_when == "rollout":
        return (
            f"{option} needs rewards during the rollout, to compute gradients beside it: reward.score_when must be "
            "'sample' or 'group', found 'rollout'"
        )
    if config.mini_batch_prompts < config.data.train_batch_size:
        return (
            f"{option} needs one update per pass over the batch, because all gradients beside the rollout are of the "
            f"same weights: actor.ppo_mini_batch_size ({config.mini_batch_prompts} prompts) must be 0 or "
            f"data.train_batch_size ({config.data.train_batch_size} prompts)"
        )
    if own:
        return (
            f"{option} excludes rollout.num_devices ({own}): update and rollout have devices of their own there, and "
            "run side by side already"
        )
    if config.algorithm.teacher.endpoint:
        return (
            f"{option} excludes algorithm.teacher.endpoint: the rollout would wait for the endpoint's answers, and not "
            "for the devices alone"
        )
    if config.algorithm.teacher.path and config.algorithm.teacher.offload:
        return (
            f"{option} excludes algorithm.teacher.offload: the teacher's layers lie in the host's memory as all "
            "devices share them, and half of them cannot read them so"
        )
    if config.actor.offload_reference and config.needs_ref and not config.model.has_adapters:
        return f"{option} excludes actor.offload_reference: half of the devices cannot read what all share so"
    if config.rollout.max_active_requests:
        return (
            f"{option} excludes rollout.max_active_requests ({config.rollout.max_active_requests} samples): workers "
            "are freed by the share of a round's samples that have ended, and by what those under way will need, while "
            "others of the round are still to come"
        )
    if num_workers % 2:
        return (
            f"{option} needs rollout.num_workers to be even, found {num_workers}: half of the rollout's workers are "
            "freed, each of them whole"
        )
    if not (devices := config.trainer.num_devices):
        return None
    sharing = config.actor.context_parallel_size
    return devices_problem(devices) or sharing_problem(sharing, devices // 2, where=f"in a half, for {option}")


def devices_problem(num_devices: int) -> str | None:
    """Why no gradients can be computed beside the rollout on a run's devices: so many have no halves that are meshes
    like the whole."""
    if 2 not in possible_workers(num_devices):
        return (
            "trainer.stream.enable needs two halves of the devices that are meshes like the whole: the number of "
            f"devices (trainer.num_devices) must be a power of two, found {num_devices}"
        )
    return None


ROOM = Room(
    "stream trainer",
    "trainer.stream.enable",
    lambda config: config.trainer.stream.enable,
    changes=frozenset({WORKERS}),
    problem=_problem,
    devices_problem=devices_problem,
)
