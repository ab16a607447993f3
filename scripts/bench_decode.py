#!/usr/bin/env python3
"""Decoding: the engine beside `transformers.generate`, and its steps at a context beside what the device can do.

    python scripts/bench_decode.py [--rows 1 8 32] [--dtypes float32 bfloat16] [--json]
    python scripts/bench_decode.py --at-context 1024 8192 [--rows 1 16 64 256] [--dtypes bfloat16] [--profile]

All cases draw the same number of tokens: `new` for each of `rows` prompts, at temperature 1, no stop token. The first
one comes out of the prompt's forward pass (prefill), the other new - 1 out of decode steps.

- seconds: everything, prompts included. tokens/s = rows * new / seconds.
- decode_s: seconds less prefill_s, and prefill_s is the time of the same prompts with one new token, measured in the
  same repetition. decode tokens/s = rows * (new - 1) / decode_s.
- step: decode_s / (new - 1).
- of bandwidth: (bytes of weights + keys and values of live positions) per step / step / measured bandwidth.
- of FLOP/s: operations per step / step / measured matrix products of that dtype.

With --at-context, rows are placed at their context, without a prefill, in a pool of random keys and values; the engine
then decodes for some plans, its host one plan ahead of the device. Contexts are those of the middle of the timed steps.
With --longest one row of each point stands at more tokens than the others.

- step: seconds of the timed plans / their steps. of copy: bytes per step / step / measured copy.
- host: what the host did per plan besides waiting for the device (scheduling, submitting, reading results), and its
  share of a plan's time. The device works meanwhile, unless the share nears one.
- kernels, gap (--profile): the sum of the kernels of a plan under JAX's profiler, per step; and the rest of the step.
- left out: points whose pool does not fit into the device's memory beside the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from bench import at_context, costs, records, torch_cases
from bench.ceilings import Ceilings, measure_ceilings
from bench.decode_cases import EngineCase, Setting
from bench.frame import Benchmark, Record, Session
from bench.measure import DISTURBED, Summary, Values, say
from bench.worker import Worker

from jaxrl.models.safetensors import export_hf
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh

QUICK = {
    "rows": [2],
    "prompt": 16,
    "new": 48,
    "repetitions": 2,
    "dtypes": ["float32"],
    "decode_steps": 4,
    "plans": 2,
}
ROWS, ROWS_AT_CONTEXT = [1, 8, 32], [1, 16, 64, 256]


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--tp", type=int, default=1, help="tensor parallelism of the engine (1)")
    made.add_argument("--rows", type=int, nargs="+", default=[], help="prompts decoded at once (1 8 32)")
    made.add_argument("--prompt", type=int, default=64, help="tokens of a prompt (64)")
    made.add_argument("--new", type=int, default=128, help="tokens drawn for each prompt (128)")
    made.add_argument("--decode-steps", type=int, default=16, help="the engine's decode steps per plan (16)")
    made.add_argument("--prefill-tokens", type=int, default=8192, help="the most prompt tokens in a plan (8192)")
    made.add_argument("--numerics", choices=("fast", "invariant"), default="fast", help="actor.numerics (fast)")
    made.add_argument("--without-transformers", action="store_true", help="leave transformers.generate out")
    group = made.add_argument_group("--at-context")
    group.add_argument(
        "--at-context",
        type=int,
        nargs="+",
        default=[],
        metavar="TOKENS",
        help="instead: steps of rows with so many tokens each, placed there without a prefill (--rows 1 16 64 256)",
    )
    group.add_argument(
        "--longest", type=int, default=0, metavar="TOKENS", help="one of the rows stands there instead (0: none)"
    )
    group.add_argument("--plans", type=int, default=8, help="timed plans of a repetition (8)")
    group.add_argument("--profile", action="store_true", help="a plan more under JAX's profiler: kernels by group")


def _check(options: argparse.Namespace) -> None:
    options.rows = options.rows or (ROWS_AT_CONTEXT if options.at_context else ROWS)
    if options.new < 2:
        raise ValueError(f"--new ({options.new}) must be at least 2: the first token comes from the prompt")
    if options.longest and not options.at_context:
        raise ValueError("--longest needs --at-context: other rows are of one length")
    if options.profile and not options.at_context:
        raise ValueError("--profile needs --at-context: the other cases are not profiled")
    at_context.check(options)


def _measure(options: argparse.Namespace, session: Session) -> Record:
    model = records.model_of(options)
    devices = records.prepare_devices(options.devices)
    layout = Layout(make_mesh(devices), options.tp)
    with_torch = not options.at_context and _torch_fits(options, devices[0].platform)
    ceilings = partial(measure_ceilings, len(devices), options.quick)
    name = "decode-at-context" if options.at_context else ""
    used = ("torch", "transformers") if with_torch else ()
    found: dict[str, Any] = {}
    with session.on(records.describe_devices(devices), ceilings, name=name, packages=used):
        setting = Setting(options, model, model.config(), layout, session.bench)
        if options.at_context:
            found = at_context.measure(setting)
        else:
            _uniform(setting, with_torch)
    if options.at_context:
        results = at_context.results(setting, session.summaries(), found, session.ceilings)
    else:
        results = _uniform_results(setting, session.summaries(), session.ceilings)
    return session.record(results, model=model.name, devices=len(devices), tp=options.tp)


def _torch_fits(options: argparse.Namespace, platform: str) -> bool:
    """Whether transformers can run beside, with a word where it cannot."""
    if options.without_transformers:
        return False
    if not records.installed("torch", "transformers"):
        print("transformers.generate is left out: torch and transformers are not both installed")
        return False
    if platform not in ("cpu", "gpu"):
        print(f"transformers.generate is left out: torch has no {platform} here")
        return False
    return True


# -- uniform rows ------------------------------------------------------------------------------------------------------


def _uniform(setting: Setting, with_torch: bool) -> None:
    options = setting.options
    for dtype in options.dtypes:
        with contextlib.ExitStack() as stack:
            params = setting.params(dtype)
            peer = stack.enter_context(_peer(setting, params, dtype)) if with_torch else None
            for rows in options.rows:
                say(f"{rows} rows, {dtype}: compiling")
                _measure_rows(setting, params, peer, rows, dtype)


@contextlib.contextmanager
def _peer(setting: Setting, params: Any, dtype: str) -> Any:
    """`transformers.generate` in a process of its own."""
    device = "cpu" if setting.layout.mesh.devices.flat[0].platform == "cpu" else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        if setting.model.path:
            export_hf(params, setting.config, folder, dtype=jnp.dtype(dtype))
        source = folder if setting.model.path else ""
        spec = torch_cases.TorchModel(
            setting.config.to_hf(), source, dtype, device, setting.options.seed, records.threads(setting.options)
        )
        with Worker(f"transformers {dtype}", torch_cases.generate, spec) as worker:
            yield worker


def _measure_rows(setting: Setting, params: Any, peer: Worker | None, rows: int, dtype: str) -> None:
    options = setting.options
    prompts = setting.prompts(rows)
    engine = EngineCase(setting, params, prompts, dtype)
    cases: dict[str, Callable[[], Values]] = {"engine": engine}
    if peer is not None:
        request = {"prompts": prompts.tolist(), "new": options.new}
        cases["transformers"] = lambda: peer(**request)
    named = {f"{name} {rows} {dtype}": case for name, case in cases.items()}
    setting.bench.interleave(named, options.repetitions, warm_up=1)
    engine.close()


def _uniform_results(setting: Setting, summaries: Mapping[str, Summary], ceilings: Ceilings) -> dict[str, Any]:
    cases: list[dict[str, Any]] = []
    for label, summary in summaries.items():
        name, rows, dtype = label.split()
        cases.append(
            {"case": name, "rows": int(rows), "dtype": dtype} | _figures(setting, int(rows), dtype, summary, ceilings)
        )
    print(f"{'case':<17}{'rows':>5} {'dtype':<9}{'tokens/s':>10}{'decode t/s':>11}{'step ms':>9}", end="")
    print(f"{'GB/step':>9}{'GB/s':>7}{'of bandwidth':>14}{'of FLOP/s':>11}{'kept':>6}{'dropped':>9}")
    for c in cases:
        print(
            f"{c['case']:<17}{c['rows']:>5} {c['dtype']:<9}{c['tokens_per_s']:>10.1f}{c['decode_tokens_per_s']:>11.1f}"
            f"{c['step_s'] * 1e3:>9.2f}{c['bytes_per_step'] / 1e9:>9.3f}{c['bytes_per_s'] / 1e9:>7.1f}"
            f"{c['bandwidth_fraction']:>14.1%}{c['flops_fraction']:>11.1%}{c['kept']:>6}{c['dropped']:>9}"
            f"{DISTURBED if c['disturbed'] else ''}"
        )
    ratios = _ratios(cases)
    for r in ratios:
        mark = DISTURBED if r["disturbed"] else ""
        print(f"{r['ratio']:<30}{r['rows']:>5} {r['dtype']:<9} decode {r['decode']:.3f}, all {r['total']:.3f}{mark}")
    return {"prompt": setting.options.prompt, "new": setting.options.new, "cases": cases, "ratios": ratios}


def _figures(setting: Setting, rows: int, dtype: str, summary: Summary, ceilings: Ceilings) -> dict[str, Any]:
    options, config = setting.options, setting.config
    itemsize = jnp.dtype(dtype).itemsize
    medians = summary.medians
    if medians["decode_s"] <= 0:
        raise ValueError(
            f"{rows} rows, {dtype}: one new token took longer ({medians['prefill_s']:.3f} s) than --new "
            f"({options.new}) did ({medians['seconds']:.3f} s), so decoding cannot be told from noise: raise --new"
        )
    step_s = medians["decode_s"] / (options.new - 1)
    weights = costs.weight_bytes(config, itemsize)
    kv = costs.decode_kv_bytes(config, rows, options.prompt, options.new, itemsize)
    flops = costs.decode_flops(config, rows, options.prompt, options.new)
    return {
        "tokens": rows * options.new,
        "decode_tokens": rows * (options.new - 1),
        **medians,
        "tokens_per_s": rows * options.new / medians["seconds"],
        "decode_tokens_per_s": rows * (options.new - 1) / medians["decode_s"],
        "step_s": step_s,
        "weight_bytes": weights,
        "bytes_per_step": weights + kv,
        "bytes_per_s": (weights + kv) / step_s,
        "bandwidth_fraction": (weights + kv) / step_s / ceilings.bandwidth,
        "copy_fraction": (weights + kv) / step_s / ceilings.copy,
        "flops_fraction": flops / step_s / ceilings.products(dtype),
        **summary.judged,
    }


def _ratios(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    ours, theirs = (
        {(c["rows"], c["dtype"]): c for c in cases if c["case"] == name} for name in ("engine", "transformers")
    )
    return [
        {
            "ratio": "engine / transformers",
            "rows": point[0],
            "dtype": point[1],
            "decode": ours[point]["decode_tokens_per_s"] / peer["decode_tokens_per_s"],
            "total": ours[point]["tokens_per_s"] / peer["tokens_per_s"],
            "disturbed": ours[point]["disturbed"] or peer["disturbed"],
        }
        for point, peer in theirs.items()
    ]


COUNTS = ("tp", "rows", "prompt", "prefill_tokens", "decode_steps", "plans", "at_context")
BENCHMARK = Benchmark("decode", __doc__, _measure, _options, QUICK, COUNTS, _check)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
