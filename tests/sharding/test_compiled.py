"""Programs compiled side by side: each once, with the settings of the thread that asked, and from the cache the second
time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrl.sharding.compiled import CompileAhead, CompiledPrograms

ROOT = Path(__file__).resolve().parents[2]


class Sums(CompiledPrograms):
    """Programs ("sum", size) of vectors; `traced` has the dtype of each program's argument, and its thread."""

    def __init__(self, *sizes: int, together: int = 1) -> None:
        super().__init__()
        self.sizes, self.traced = sizes, {}
        self.meeting = threading.Barrier(together)

    def shapes(self) -> Sequence[tuple[str, int]]:
        return [("sum", size) for size in self.sizes]

    def lower(self, kind: str, *sizes: int) -> Any:
        self.meeting.wait(30)
        (size,) = sizes
        if size < 0:
            raise ValueError("no vector has a negative size")
        dtype = jnp.result_type(float)
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        self.traced[size] = dtype, precision, threading.current_thread().name
        return jax.jit(jnp.sum).lower(jax.ShapeDtypeStruct(sizes, dtype))


def test_several_are_compiled_at_a_time_each_once_and_counted():
    programs, counted = Sums(3, 4, 5, 6, together=2), []
    with closing(CompileAhead([programs], 2)) as ahead:  # each waits for another: one thread alone would not end
        assert ahead.wait(counted.append) == 4
    assert counted[0] == "0 of 4 programs ready: sum 3, sum 4"
    assert counted[-1] == "", "nothing is left"
    assert programs.is_warm
    assert len({name for *_, name in programs.traced.values()}) == 2
    assert float(programs.program(("sum", 5))(jnp.ones(5))) == 5
    assert (len(programs.traced), programs.recompiles) == (4, 0)
    programs.meeting = threading.Barrier(1)
    programs.program(("sum", 7))
    assert (len(programs.traced), programs.recompiles) == (5, 1)


def test_the_settings_of_the_thread_that_asks_are_those_of_the_programs():
    programs = Sums(3)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"), closing(CompileAhead([programs])) as ahead:
        ahead.wait()
    assert programs.traced[3][:2] == (jnp.dtype("float64"), "highest")


def test_what_compiling_raises_is_raised_and_tried_again():
    programs = Sums(-1, 2)
    with (
        closing(CompileAhead([programs], 1)) as ahead,
        pytest.raises(ValueError, match="no vector has a negative size"),
    ):
        ahead.wait()
    assert not programs.is_warm
    with pytest.raises(ValueError, match="no vector has a negative size"):
        programs.program(("sum", -1))


PROCESS = """
import json, sys
from collections import Counter
from contextlib import closing

import jax
from jaxrl.config import from_mapping
from jaxrl.models import decoder
from jaxrl.models.shapes import SHAPES
from jaxrl.rollout.layout_programs import ExecutorConfig, LayoutPrograms
from jaxrl.run.build import use_compilation_cache
from jaxrl.sharding.compiled import CompileAhead
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.training.programs import TrainPrograms

events = Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
data = {"max_prompt_length": 16, "max_response_length": 16, "train_batch_size": 2}
config = from_mapping({
    "model": {"path": "m"}, "data": data, "rollout": {"n": 2}, "actor": {"ppo_max_token_len_per_gpu": 64},
    "trainer": {"compilation_cache_dir": sys.argv[1]},
})
mesh = make_mesh(jax.devices()[:1])
use_compilation_cache(config)
sizes = ExecutorConfig(num_slots=2, max_length=32, max_prefill_tokens=32, decode_steps=2)
rollout = LayoutPrograms(SHAPES["tiny"], Layout(mesh, 1), sizes)
update = TrainPrograms(config, SHAPES["tiny"], mesh)
with closing(CompileAhead([rollout, update])) as ahead:
    count = ahead.wait()
print(json.dumps([count, events["cache_hits"], events["cache_misses"]]))
"""


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path: Path):
    """Rollout and update of a tiny model, in two processes with one compilation cache; jax counts."""
    found = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", PROCESS, str(tmp_path / "cache")], cwd=ROOT, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    (count, hits, misses), again = found
    assert hits == 0
    assert misses >= count > 8
    assert again == [count, misses, 0]
