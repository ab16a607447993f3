"""Gradients beside a simulated rollout: seconds by hand, the same groups, and the same work in all."""

from __future__ import annotations

from typing import Any

import pytest
from adaptive_runs import LARGE, WORKLOAD
from adaptive_runs import config as large_config
from known_samples import KnownSample, KnownWorkload
from sim_machine import ConstantCost, key
from simulated_runs import played, samples_of

from jaxrl.config import Config, from_mapping
from jaxrl.mechanisms.stream_trainer import StreamTrainer
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.hardware import H100
from jaxrl.sim.workload import ModelledWorkload


def simulated(made: Config, cost: CostModel, workload: ModelledWorkload, **more: Any) -> Any:
    simulation, metrics, groups, saved = played(made, cost, workload, **more)
    return simulation, metrics, samples_of(groups), saved


def streaming(made: Config, num_workers: int = 2, **options: Any) -> Config:
    stream = made.trainer.stream.replace(enable=True, **options)
    made = made.replace(rollout=made.rollout.replace(num_workers=num_workers))
    return made.replace(trainer=made.trainer.replace(stream=stream))


LIMITS = {"max_prompt_length": 16, "max_response_length": 40}
POOLS = {"block_size": 4, "num_blocks": 60, "max_num_seqs": 8}


def by_hand(**stream: Any) -> Config:
    return from_mapping(
        {
            "model": {"path": "tiny"},
            "data": {"train_batch_size": 4, "shuffle": False, "val_size": 0} | LIMITS,
            "rollout": {"n": 2, "decode_steps": 2, "num_workers": 2, "deal": "prompts"} | POOLS,
            "trainer": {"total_training_steps": 1, "save_freq": 0, "num_devices": 2, "stream": {"pace": 1.0} | stream},
            "simulate": {"num_prompts": 4},
        }
    )


# prompts 0 and 1 are short, 2 and 3 long; a worker gets one of each
LENGTHS = {key(p, i): 3 if p < 2 else 31 for p in range(4) for i in range(2)}
BY_HAND = KnownWorkload(
    {k: KnownSample(n, float(k.sample_index)) for k, n in LENGTHS.items()}, dict.fromkeys(range(4), 4)
)


def test_a_step_with_a_stream_by_hand():
    """All short responses end 12 s after the start, so half is done and worker 0 is freed: its two plans in flight end
    at 16 s, where its rows begin again on worker 1, with the 7 tokens that they have. That takes a prefill of 10 s,
    before the 26 steps that worker 1's own rows have left after its plan in flight: the rollout ends at 52 s. Weights
    take 3 s from 16 s on; the plan that is running ends at 28 s, when the short groups are given: 7 s of
    log-probabilities and 20 s of gradients, of which 3 s are left when the rollout ends. Then 3 s for the sums, 7 s of
    log-probabilities, 101 s of an update, 5 s of a sync.
    """
    simulation, metrics, trained, _ = simulated(by_hand(enable=True), ConstantCost(), BY_HAND)
    step = metrics[1]
    (decision,) = simulation.run.mechanism(StreamTrainer).decisions
    assert (decision.freed, decision.moved_requests, decision.num_done) == ((0,), 2, 4)
    assert step["timing_s/gen"] == 16 + 10 + 26
    assert step["timing_s/stream"] == 3 + 3
    assert step["timing_s/step"] == 52 + 3 + 3 + 7 + 101 + 5
    assert step["rollout/scale_down/freed"] == 1
    assert step["rollout/scale_down/done_share"] == 0.5
    assert step["rollout/scale_down/moved_samples"] == 2
    assert step["rollout/scale_down/moved_tokens"] == 2 * (4 + 3)
    assert step["rollout/scale_down/hidden_s"] == 52 - 28
    assert step["actor/streamed_share"] == 0.5
    _, plain, same, _ = simulated(by_hand(), ConstantCost(), BY_HAND)
    assert plain[1]["timing_s/step"] == 40 + 7 + 101 + 5
    assert trained == same


COST = CostModel(LARGE, H100)


@pytest.mark.parametrize("short_rounds", [False, True])
def test_long_rounds_of_tail_batching(short_rounds: bool):
    made = large_config()
    rules = made.rollout.tail_batching.replace(enable=True, prompt_factor=1.5, at_end="leave")
    made = made.replace(rollout=made.rollout.replace(tail_batching=rules))
    _, _, trained, _ = simulated(made.replace(rollout=made.rollout.replace(num_workers=2)), COST, WORKLOAD)
    _, metrics, same, _ = simulated(streaming(made, short_rounds=short_rounds), COST, WORKLOAD)
    if not short_rounds:  # in a race others end first where devices are freed
        assert same == trained
    freed = {step["rollout/long_round"]: step["rollout/scale_down/freed"] for step in metrics.values()}
    assert freed == {1.0: 1.0, 0.0: float(short_rounds)}
