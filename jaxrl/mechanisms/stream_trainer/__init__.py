"""The stream trainer: gradients of complete prompts beside the rollout, on half of its devices.

The rule (`scale_down.py`) says when workers are freed and which; a stream (`gradients.py`, or modelled in
`jaxrl.sim.trainer`) computes on their devices; `session.py` is the mechanism of a run that has it on.

Source: RollPacker §4.4, Algorithm 1, lines 17 to 23.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Interval

from jaxrl.scheduling.mechanism import WORKERS, FreedMemory, Mechanism
from jaxrl.schema.devices import possible_workers, sharing_problem
from jaxrl.schema.section import Section

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.mechanisms.stream_trainer.session import StreamSession
    from jaxrl.models.config import ModelConfig
    from jaxrl.run.run import Run


class StreamTrainer(Mechanism):
    """Gradients beside the rollout, of groups that are certain to be in the next update's batch."""

    class Options(Section):
        """The stream trainer: gradients of complete prompts on half of the devices, while the others decode."""

        enable: Annotated[bool, "Switch the stream trainer on."] = False
        min_done: Annotated[
            float, Interval(gt=0, le=1), "The share of a round's samples that must be done before workers are freed."
        ] = 0.2
        max_done: Annotated[
            float, Interval(gt=0, le=1), "The share of a round's samples after which no worker is freed any more."
        ] = 0.5
        kv_margin: Annotated[
            float, Interval(ge=0, lt=1), "Share of the KV pools that stay which the projected peak must leave free."
        ] = 0.1
        trigger: Annotated[
            Literal["adaptive", "fixed"],
            "When workers are freed; adaptive: at the first look at which the projected peak of KV fits, fixed: at the "
            "first look (to compare).",
        ] = "adaptive"
        counts: Annotated[
            Literal["samples", "prompts"],
            "What min_done and max_done are shares of: samples that have ended, or prompts that have no "
            "sample under way any more.",
        ] = "samples"
        max_prompts: Annotated[
            int,
            Ge(0),
            "Prompts whose gradients begin together, at most; what has begun when the round ends holds up the "
            "update. 0: all that there are.",
        ] = 2
        pace: Annotated[
            float,
            Ge(0),
            "Tokens whose gradients the devices of a freed dp group are taken to compute while the others decode a "
            "step: decides how much is streamed. 0: 16, on a CPU 4.",
        ] = 0.0
        short_rounds: Annotated[
            bool, "Free workers in tail batching's short rounds too, not in its long ones alone."
        ] = False

        def problems(self, config: Any) -> Iterator[str]:
            if self.min_done > self.max_done:
                yield (
                    f"trainer.stream.min_done ({self.min_done}) must be at most trainer.stream.max_done "
                    f"({self.max_done}): between them workers may be freed"
                )

        def excludes_hosts(self, config: Any) -> tuple[str, str] | None:
            why = "weights and gradients that go between the halves of the devices cannot cross between hosts"
            return ("trainer.stream.enable", why) if self.enable else None

    name = "stream"
    title = "stream trainer"
    option = "trainer.stream.enable"
    changes = frozenset({WORKERS})

    @classmethod
    def problem(cls, config: Config, racing: Sequence[str]) -> str | None:
        from jaxrl.config.checks import NEEDS_WHOLE_BATCH

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
                f"{option} needs one update per pass over the batch, because all gradients beside the rollout are of "
                f"the same weights: actor.ppo_mini_batch_size ({config.mini_batch_prompts} prompts) must be 0 or "
                f"data.train_batch_size ({config.data.train_batch_size} prompts)"
            )
        if own:
            return (
                f"{option} excludes rollout.num_devices ({own}): update and rollout have devices of their own there, "
                "and run side by side already"
            )
        if config.algorithm.teacher.endpoint:
            return (
                f"{option} excludes algorithm.teacher.endpoint: the rollout would wait for the endpoint's answers, "
                "and not for the devices alone"
            )
        if config.algorithm.teacher.path and config.algorithm.teacher.offload:
            return (
                f"{option} excludes algorithm.teacher.offload: the teacher's layers lie in the host's memory as all "
                "devices share them, and half of them cannot read them so"
            )
        if config.actor.offload_reference and config.needs_ref and not config.model.has_adapters:
            return f"{option} excludes actor.offload_reference: half of the devices cannot read what all share so"
        if num_workers % 2:
            return (
                f"{option} needs rollout.num_workers to be even, found {num_workers}: half of the rollout's workers "
                "are freed, each of them whole"
            )
        if not (devices := config.trainer.num_devices):
            return None
        sharing = config.actor.context_parallel_size
        return cls.devices_problem(devices) or sharing_problem(sharing, devices // 2, where=f"in a half, for {option}")

    @classmethod
    def devices_problem(cls, num_devices: int) -> str | None:
        """Without two halves that are meshes like the whole, no gradients can be computed beside the rollout."""
        if 2 not in possible_workers(num_devices):
            return (
                "trainer.stream.enable needs two halves of the devices that are meshes like the whole: the number of "
                f"devices (trainer.num_devices) must be a power of two, found {num_devices}"
            )
        return None

    @classmethod
    def freed_memory(cls, config: Config, model: ModelConfig, num_devices: int, platform: str) -> FreedMemory | None:
        """Half of the devices have a share of the weights that is twice the trainer's, and what an update there would
        add, but for the optimizer. The reference's weights, and a teacher's, come in turns with the others."""
        from jaxrl.schema.limits import BYTES
        from jaxrl.training.teacher import teacher_model
        from jaxrl.training.update_memory import device_bytes, device_numbers, largest, update_phases

        if not config.trainer.stream.enable:
            return None
        half = num_devices // 2
        weights = device_bytes(config, model, half)
        if config.algorithm.teacher.path:
            own = device_numbers(teacher_model(config), half) * BYTES[config.algorithm.teacher.dtype]
            weights = max(weights, own)
        phases = update_phases(config, model, half, platform)
        return FreedMemory(
            "stream",
            {"weights of the half": weights} | largest(phases[name] for name in ("head", "layers", "embedding")),
            "switch trainer.stream.enable off, set actor.offload_optimizer or lower actor.ppo_max_token_len_per_gpu",
        )

    @classmethod
    def build(cls, run: Run) -> StreamSession | None:
        if not cls.is_on(run.config):
            return None
        from jaxrl.mechanisms.stream_trainer.session import StreamSession

        return StreamSession(run)
