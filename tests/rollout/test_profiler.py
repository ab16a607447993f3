"""What the profiler leaves behind is an executor that draws as before; its figures are the clock's."""

from __future__ import annotations

import jax
from small_models import TRAINED

from jaxrl.models.decoder import init
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.rollout.profiler import Profiler
from jaxrl.scheduling.layouts.latency_profile import ProfilePoint
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import train_shardings
from jaxrl.types import SampleKey, SamplingParams


def test_a_profiled_executor_draws_as_before():
    sizes = ExecutorConfig(num_slots=2, max_length=32, block_size=4, decode_steps=2, max_tp=2, max_prefill_tokens=32)
    mesh = make_mesh(jax.devices()[:2])
    executor = MeshExecutor(TRAINED, Layout(mesh, 1), sizes)
    params = init(TRAINED, jax.random.key(0))
    executor.sync_weights(jax.device_put(params, train_shardings(TRAINED, mesh)), 0)
    executor.allocate()

    def drawn(number: int) -> list[int]:
        request = Request(number, SampleKey(0, 0, 0), (1, 2, 3), SamplingParams(max_tokens=8))
        (sample,) = Engine(executor, BatcherConfig(decode_steps=2)).generate([request])
        return sample.token_ids.tolist()

    before, profiler = drawn(0), Profiler(executor, repeats=2)
    point = ProfilePoint(tp=2, batch=2, context=16)
    decoded, prefilled = profiler.decode(point), profiler.prefill(point)
    assert executor.tp == 2
    for measured in (decoded, prefilled):
        assert (measured.tp, measured.batch, measured.context) == (2, 2, 16)
        assert 0 < measured.seconds < 60
    up, down = profiler.switches(1, 2)
    assert ((up.from_tp, up.to_tp), (down.from_tp, down.to_tp)) == ((1, 2), (2, 1))
    assert all(min(cost.weights_s, cost.fixed_s, cost.kv_s_per_token) >= 0 for cost in (up, down))
    assert executor.tp == 1
    assert drawn(0) == before
