"""`actor.numerics=invariant` with the GPU's kernels: no path of `jaxrl check-numerics` has other bits.

`pytest -m gpu --interpret --slow` has the kernels as plain JAX on a CPU, and some of the paths.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import jax
import pytest
from on_gpu import DEPRECATED, INTERPRET
from tiny import write_tiny_model

from jaxrl.cli import main
from jaxrl.commands import check_numerics as command
from jaxrl.models import decoder
from jaxrl.run import build

SOME = ("1 row at once", "prompts in chunks of 24 tokens", "drafts verified", "trainer, packed rows", "tp 2")
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
CASES = {"dense": ({}, ()), "experts": (EXPERTS, ()), "adapters": ({}, ("model.lora_rank=4",))}


@pytest.mark.gpu
@(pytest.mark.slow if INTERPRET else pytest.mark.gpu)
@pytest.mark.filterwarnings(DEPRECATED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_invariant_numbers_are_the_same_bits(
    case: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """In two parts: on one device one after another, and where there are two devices one on each as well."""
    (overrides, own), begin = CASES[case], decoder.init_table
    # adapters begin as zeros, which would change nothing
    monkeypatch.setattr(decoder, "init_table", lambda *table: jax.tree.map(lambda x: x + 0.1, begin(*table)))
    degrees = "1,2" if jax.device_count() > 1 else "1"
    if INTERPRET:
        monkeypatch.setattr(build, "ExecutorConfig", partial(build.ExecutorConfig, interpret=True))
        monkeypatch.setattr(command, "Trainer", partial(command.Trainer, interpret=True))
        every = command.paths
        monkeypatch.setattr(command, "paths", lambda *how: [path for path in every(*how) if path.name in SOME])
    model = write_tiny_model(tmp_path / "model", head_dim=16, **overrides)
    words = ("--model", f"random:{model}", "--rows=1,4", "--tokens=48", "--dtype", dtype, "--tp", degrees, "--json")
    status = main(["check-numerics", *words, "actor.numerics=invariant", "actor.numerics_tp=2", *own])
    said = capsys.readouterr()
    assert status == 0, said.err
    assert len(json.loads(said.out)["paths"]) == (len(SOME) if INTERPRET else 12 if degrees == "1" else 17)
