#!/usr/bin/env python3
"""Compiles jaxrl's programs for an H100 or a TPU on a machine without one, and prints what XLA made of them.

    python scripts/compile_for_gpu.py decode --shape Qwen2.5-1.5B --rows 64 --context 1024 --layers 2
    python scripts/compile_for_gpu.py prefill --tokens 512 --json
    python scripts/compile_for_gpu.py verify --rows 32 --width 8
    python scripts/compile_for_gpu.py decode --layers 6 --resident 2
    python scripts/compile_for_gpu.py gradients --rows 1 --tokens 8192 --remat dots --layers 28
    python scripts/compile_for_gpu.py gradients --rows 1 --tokens 32768 --devices 8 --cp 8
    python scripts/compile_for_gpu.py decode --chip v5e --shape Qwen2.5-7B --tp 4

Needs the CUDA plugin of JAX (`pip install 'jaxrl[compile-gpu]'`, best into a folder of its own that PYTHONPATH
names: without cuDNN the plugin complains in every process that finds it). CUDA and a driver are not needed. Autotuning
needs a device and is off, so tilings of products are guesses. Everything else is what a machine with the GPU would run:
fusions, copies, aliasing, loops, CUDA graphs, buffer sizes. For TPUs (`--chip`) it needs libtpu (`jaxrl[tpu]`), which
leaves out what is of GPUs alone: kernels are those of Pallas, and there are no graphs and no loops of the host.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

# Read when jax looks for backends: this machine's devices are its CPUs, and the plugin has no CUDA beside it. Nor has
# libtpu a TPU, to ask a cloud about, or to keep from other processes.
os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
from gpu import compiled

from jaxrl.config import from_mapping
from jaxrl.mechanisms.judge.device import judge_memory
from jaxrl.mechanisms.speculation.proposer import Drafting
from jaxrl.models.config import ModelConfig
from jaxrl.models.shapes import named_shape
from jaxrl.models.streaming import HOST
from jaxrl.rollout.layout_programs import ExecutorConfig, LayoutPrograms
from jaxrl.run.weights import adapted
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.training.programs import TrainPrograms
from jaxrl.training.update_memory import planned_update, update_phases

_PRODUCT = re.compile(r"precision_config\":(\{[^}]*\})| dot\([^)]*\)([^\n]*)")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("program", choices=["decode", "verify", "prefill", "gradients", "logprobs", "init", "update"])
    made.add_argument("--chip", default="H100", choices=["H100", *compiled.TPUS], help="what it is compiled for (H100)")
    made.add_argument("--shape", default="Qwen2.5-1.5B", help="of a model (jaxrl.models.shapes; Qwen2.5-1.5B)")
    made.add_argument("--layers", type=int, default=2, help="how many of its layers (2)")
    made.add_argument("--dtype", default="bfloat16", help="of weights and activations (bfloat16)")
    made.add_argument("--quantization", default="none", help="of the rollout: rollout.quantization (none)")
    made.add_argument("--kv", default="none", help="of the rollout: rollout.kv_cache_dtype (none)")
    made.add_argument("--rows", type=int, default=64, help="rows of the program (64)")
    made.add_argument("--context", type=int, default=1024, help="tokens of the longest sequence (1024)")
    made.add_argument("--tokens", type=int, default=512, help="prefill: tokens of a chunk; training: of a row (512)")
    made.add_argument("--remat", default="dots", choices=["dots", "full", "none"], help="gradients: actor.remat (dots)")
    made.add_argument("--lora", type=int, default=0, help="training: model.lora_rank (0)")
    made.add_argument("--dropout", type=float, default=0.0, help="training: model.lora_dropout (0)")
    made.add_argument("--base", default="none", help="training: model.base_quantization (none)")
    made.add_argument("--attention", default="auto", help="actor.attention, or rollout.attention (auto)")
    made.add_argument("--numerics", default="fast", choices=["fast", "invariant"], help="actor.numerics (fast)")
    made.add_argument("--numerics-tp", type=int, default=1, help="actor.numerics_tp; the rollout's at least --tp (1)")
    made.add_argument("--chunk", default="auto", help="training: actor.logprob_chunk_tokens (auto)")
    made.add_argument("--tp", type=int, default=1, help="of the rollout: tensor parallelism, on as many devices (1)")
    made.add_argument("--devices", type=int, default=1, help="training: devices, each with so many rows (1)")
    made.add_argument("--cp", type=int, default=1, help="training: actor.context_parallel_size; so many share rows (1)")
    made.add_argument("--reduce-dtype", default="float32", help="training: actor.reduce_dtype (float32)")
    made.add_argument("--optimizer", default="adamw", help="training: actor.optim.name (adamw)")
    made.add_argument("--state-dtype", default="float32", help="training: actor.optim.state_dtype (float32)")
    made.add_argument("--offload", action="store_true", help="init, update: actor.offload_optimizer, on one device")
    made.add_argument("--width", type=int, default=4, help="verify: drafted tokens of a row in a step (4)")
    made.add_argument("--resident", type=int, help="layers on the device, while the others are streamed from the host")
    made.add_argument("--json", action="store_true", help="print it on one line")
    made.add_argument("--lowered", action="store_true", help="compile nothing: what products say before XLA reads them")
    made.add_argument("--hlo", default="", metavar="FILE", help="write the optimised HLO there")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles and prints; the exit status is 2 where there is no plugin, or the request is none."""
    options = parser().parse_args(arguments)
    try:
        config = dataclasses.replace(named_shape(options.shape), num_layers=options.layers)
        trains = options.program in ("gradients", "logprobs", "init", "update")
        made = _training if trains else _rollout if options.resident is None else _streamed
        lowered, settings, facts = made(options, config)
        found = None if options.lowered else compiled.compile_program(lowered, settings, options.chip)
    except (ValueError, RuntimeError) as error:
        print(f"compile_for_gpu: {error}", file=sys.stderr)
        return 2
    if found is None:
        print(json.dumps(facts | {"products": re.findall(r"dot_general .*precision = \[(.*?)\]", lowered.as_text())}))
        return 0
    if options.hlo:
        with open(options.hlo, "w") as file:
            file.write(found.text)
    told = facts | {
        "graphs": found.graphs,
        "host_loops": found.host_loops,
        "kernels": dict(found.kernels),
        "kernels_of_turn": found.kernels_of_turn,
        "copies": found.copies,
        "memory": dict(found.memory),
        "collectives": compiled.collectives(found.text),
        "arithmetic": {name: dict(counts) for name, counts in found.arithmetic.items()},
        "scatters": [text.split(", metadata")[0] for text in re.findall(r"= (\S+ scatter\(.*)", found.text)],
        # of libraries' products the precision; of XLA's own what stands behind the operands, which names it
        "products": ["".join(each).split(", metadata")[0] for each in _PRODUCT.findall(found.text)],
    }
    if options.resident is not None:
        told["host_copies"] = compiled.host_copies(found.text)
    print(json.dumps(told, indent=None if options.json else 1))
    return 0


Made = tuple[Any, dict[str, Any], dict[str, Any]]
"""A lowered program, XLA's options for it, and what else is told of it."""


def _rollout(options: argparse.Namespace, config: ModelConfig) -> Made:
    """The largest program of its kind that an executor of these sizes has."""

    sizes = ExecutorConfig(
        num_slots=options.rows,
        max_length=options.context,
        max_prefill_tokens=options.tokens,
        dtype=options.dtype,
        quantization=options.quantization,
        kv_codes=options.kv,
        attention="pallas" if options.chip == "H100" and options.attention == "auto" else options.attention,
        is_invariant=options.numerics == "invariant",
        max_tp=max(options.tp, options.numerics_tp),
        proposer=Drafting(8, 8 * options.context, options.width * options.rows)
        if options.program == "verify"
        else None,
    )
    devices = compiled.devices(options.tp, options.chip)
    programs = LayoutPrograms(config, Layout(make_mesh(devices), options.tp), sizes)
    shape = next(shape for shape in reversed(programs.shapes()) if shape[0] == options.program)
    with compiled.as_default_device(options.chip):
        lowered = programs.lower(*shape)
    pool = programs.abstract_pool()[0][0]
    return (
        lowered,
        programs.compiler_options(options.program),
        {
            "program": list(shape),
            "pool_array_bytes": sum(
                math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(pool)
            ),
        },
    )


def _streamed(options: argparse.Namespace, config: ModelConfig) -> Made:
    """The same with layers that come from the host's memory; attention in plain JAX."""

    sizes = ExecutorConfig(
        num_slots=options.rows,
        max_length=options.context,
        max_prefill_tokens=options.tokens,
        dtype=options.dtype,
        attention="reference",
        features_first=False,
        fused_projections=True,
        gathered=False,
        resident_layers=options.resident,
    )
    here, there = (
        LayoutPrograms(config, Layout(make_mesh(devices), 1), sizes) for devices in (jax.devices(), compiled.devices())
    )
    shape = next(shape for shape in reversed(here.shapes()) if shape[0] == options.program)
    lowered = compiled.with_host_memory(here.lower(*shape, platforms=("cuda",)), there.lower(*shape))
    layer = here.abstract_params()["layers"][-1]
    matrices = [x.size * x.dtype.itemsize for x in layer.values() if x.sharding.memory_kind == HOST]
    return (
        lowered,
        here.compiler_options(options.program),
        {
            "program": list(shape),
            "layer_bytes": sum(matrices),
            "plan": _judge_plan(options, config),
        },
    )


def _judge_plan(options: argparse.Namespace, model: ModelConfig) -> dict[str, int]:
    """What the memory plan says of a judge of these sizes."""
    judge = {
        "model": "unused",
        "max_num_seqs": options.rows,
        "max_prompt_tokens": options.context - 16,
        "max_tokens": 16,
        "dtype": options.dtype,
        "resident_layers": options.resident,
    }
    task = {"task": "chain_sum", "task_size": 100}
    config = from_mapping({"model": {"path": "unused"}, "data": task, "reward": {"kind": "judge", "judge": judge}})
    return judge_memory(config, model, 1).parts


def _training(options: argparse.Namespace, model: ModelConfig) -> Made:
    """A microbatch of one device, or of those that share rows; with what the memory plan says of the update."""

    chunk = options.chunk if options.chunk == "auto" else int(options.chunk)
    actor: dict[str, Any] = {
        "dtype": options.dtype,
        "remat": options.remat,
        "attention": options.attention,
        "numerics": options.numerics,
        "numerics_tp": options.numerics_tp,
        "ppo_max_token_len_per_gpu": options.rows * -(-options.tokens // options.cp),
        "context_parallel_size": options.cp,
        "logprob_chunk_tokens": chunk,
        "reduce_dtype": options.reduce_dtype,
        "optim": {"name": options.optimizer, "state_dtype": options.state_dtype},
    }
    data = {"max_prompt_length": options.tokens // 2, "max_response_length": options.tokens - options.tokens // 2}
    own = {"path": "unused", "lora_rank": options.lora, "lora_dropout": options.dropout}
    own |= {"base_quantization": options.base}
    rollout = {"dtype": options.dtype}
    config = from_mapping({"model": own, "data": data, "actor": actor, "rollout": rollout})
    model = adapted(config, model)
    kind = "accumulate" if options.program == "gradients" else options.program
    platform = "tpu" if options.chip in compiled.TPUS else "gpu"
    devices, rows = compiled.devices(options.devices, options.chip), options.rows * options.devices // options.cp
    with compiled.as_default_device(options.chip):
        programs = TrainPrograms(config, model, make_mesh(devices))
        lowered = programs.lower(kind, rows, options.tokens)
    if options.offload:
        config = config.replace(actor=config.actor.replace(offload_optimizer=True))
        here = TrainPrograms(config, model, make_mesh(jax.devices()[:1]))
        lowered = compiled.with_host_memory(here.lower(kind, platforms=("cuda",)), lowered)
    settings = programs.compiler_options(kind)
    if platform == "gpu":  # without a device Triton's products of concatenated operands find no tiling
        settings |= {"xla_gpu_enable_triton_gemm": False}
    planned = planned_update(config, model, options.devices, None, platform)
    phases = update_phases(planned, model, options.devices, platform)
    return (
        lowered,
        settings,
        {
            "program": [kind, rows, options.tokens],
            "plan": phases["optimizer"] if kind == "update" else max(phases.values(), key=lambda x: sum(x.values())),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
