#!/usr/bin/env python3
"""One update: forward, backward, clipping and AdamW on rows x tokens, by jaxrl's Trainer and by PyTorch.

    python scripts/bench_train.py [--rows 16] [--tokens 192] [--microbatches 1] [--dtypes float32 bfloat16] [--json]

Every case lives in a process of its own and runs one repetition when it is asked to, so that cases take turns, never
run at once, and have a peak memory of their own.

- jaxrl: `Trainer.accumulate` and `Trainer.apply` of the microbatches, packing included. The dtype is that of products;
  master weights, moments and the gradient's sum are float32. Its attention, what it recomputes and how many tokens have
  logits at once are options here as they are of a run.
- torch: transformers' model, SDPA, the same loss, `AdamW(fused=True)` where this torch has it, as many threads.
  bfloat16 means weights, gradients and moments in bfloat16, as torch users run it: half of jaxrl's memory for them,
  and less exact updates.
- loss of both: the clipped policy loss on the log-probabilities of each row's last `response` tokens, averaged over
  tokens; logits are computed for those tokens only. jaxrl also computes its metrics (entropy, KL).
- tokens/s: rows * tokens / seconds. MFU: operations that the update needs (nothing that is computed twice counts) /
  seconds / measured matrix products of that dtype. of sheet: the same over the data sheet's rate, for bfloat16 on a
  known device.
- peak: the most that the process held, less what it held before the model was built; on GPUs the most that the
  framework allocated on the device. of plan: over the bytes that jaxrl's memory plan foresees for the update.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from bench import costs, jax_cases, profiles, records, torch_cases
from bench.ceilings import Ceilings
from bench.frame import Benchmark, Record, Session
from bench.measure import DISTURBED, Bench, Summary, say
from bench.worker import Worker, once

QUICK = {"rows": 2, "tokens": 32, "response": 16, "repetitions": 2, "dtypes": ["float32"]}
LR, CLIP, GRAD_CLIP = 1e-6, 0.2, 1.0


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--rows", type=int, default=16, help="rows of the microbatch (16)")
    made.add_argument("--tokens", type=int, default=192, help="tokens of a row (192)")
    made.add_argument("--response", type=int, default=128, help="its last tokens, which are learnt from (128)")
    made.add_argument("--remat", choices=["none", "dots", "full"], default="dots", help="actor.remat of jaxrl (dots)")
    made.add_argument("--microbatches", type=int, default=1, help="microbatches of an update (1)")
    made.add_argument("--attention", default="auto", help="actor.attention of jaxrl (auto)")
    made.add_argument("--numerics", choices=("fast", "invariant"), default="fast", help="actor.numerics (fast)")
    made.add_argument("--chunk", help="actor.logprob_chunk_tokens of jaxrl (its default)")
    made.add_argument("--profile", action="store_true", help="an update more of jaxrl under its profiler")
    made.add_argument("--warmup", type=int, default=2, help="updates of each case before the timed ones (2)")
    made.add_argument("--without-torch", action="store_true", help="leave torch out")
    made.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="end each case's process before the next begins, instead of taking turns: for models of which no two fit",
    )


def _check(options: argparse.Namespace) -> None:
    if options.response >= options.tokens:
        raise ValueError(
            f"--response ({options.response}) must be below --tokens ({options.tokens}): a row begins with a prompt"
        )
    if options.rows % options.devices:
        raise ValueError(f"--rows ({options.rows}) must be a multiple of --devices ({options.devices})")
    model = records.model_of(options)
    for dtype in options.dtypes:
        jax_cases.train_config(_spec(options, model, dtype))  # refuses what a run would refuse


def _measure(options: argparse.Namespace, session: Session) -> Record:
    model = records.model_of(options)
    device, ceilings = jax_cases.survey(options.devices, options.quick)
    with_torch = _torch_fits(options, device["platform"])
    used = ("torch", "transformers") if with_torch else ()
    with session.on(device, ceilings, packages=used), tempfile.TemporaryDirectory() as folder:
        if with_torch and model.path:
            once("export", jax_cases.export, (model, folder, "float32"))
        cases = _cases(options, model, device, folder if model.path else "", with_torch)
        infos = _timed(session.bench, cases, options)
    results = _results(options, model, session.summaries(), infos, session.ceilings)
    return session.record(results, model=model.name, devices=options.devices)


def _torch_fits(options: argparse.Namespace, platform: str) -> bool:
    """Whether torch can run beside, with a word where it cannot."""
    if options.without_torch:
        return False
    if not records.installed("torch", "transformers"):
        print("torch is left out: torch and transformers are not both installed")
        return False
    if platform not in ("cpu", "gpu") or options.devices > 1:
        print(f"torch is left out: its step runs on one CPU or GPU, and this is {options.devices} x {platform}")
        return False
    return True


def _spec(options: argparse.Namespace, model: records.Model, dtype: str) -> jax_cases.TrainSpec:
    chunk = int(options.chunk) if options.chunk is not None and options.chunk.isdigit() else options.chunk
    return jax_cases.TrainSpec(
        model=model,
        dtype=dtype,
        devices=options.devices,
        rows=options.rows,
        microbatches=options.microbatches,
        tokens=options.tokens,
        response=options.response,
        attention=options.attention,
        numerics=options.numerics,
        chunk=chunk,
        remat=options.remat,
        lr=LR,
        clip=CLIP,
        grad_clip=GRAD_CLIP,
        seed=options.seed,
    )


def _cases(
    options: argparse.Namespace, model: records.Model, device: dict[str, Any], folder: str, with_torch: bool
) -> dict[str, tuple[Any, Any]]:
    """(work, spec) by label."""
    cases: dict[str, tuple[Any, Any]] = {}
    sizes = (options.rows, options.microbatches, options.tokens, options.response)
    for dtype in options.dtypes:
        cases[f"jaxrl {dtype}"] = (jax_cases.train, _spec(options, model, dtype))
        if with_torch:
            place = "cpu" if device["platform"] == "cpu" else "cuda"
            peer = torch_cases.TorchModel(
                model.config().to_hf(), folder, dtype, place, options.seed, records.threads(options)
            )
            cases[f"torch {dtype}"] = (torch_cases.train, torch_cases.TrainSpec(peer, *sizes, LR, CLIP, GRAD_CLIP))
    return cases


def _timed(bench: Bench, cases: dict[str, tuple[Any, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Runs everything; returns what each case says of itself."""
    infos: dict[str, Any] = {}
    groups = [[label] for label in cases] if options.one_at_a_time else [list(cases)]
    for group in groups:
        with contextlib.ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for label in group:
                workers[label] = stack.enter_context(Worker(label, *cases[label]))
                infos[label] = workers[label].info
                for _ in range(options.warmup):
                    workers[label]()
                say(f"{label}: ready")
            bench.interleave(workers, options.repetitions)
            for label in group:
                if options.profile and label.startswith("jaxrl"):
                    infos[label] |= workers[label](profile=True)
    return infos


def _results(
    options: argparse.Namespace,
    model: records.Model,
    summaries: dict[str, Summary],
    infos: dict[str, Any],
    ceilings: Ceilings,
) -> dict[str, Any]:
    rows = options.rows * options.microbatches
    tokens = rows * options.tokens
    flops = costs.train_flops(model.config(), rows, options.tokens, options.response)
    cases = []
    print(f"{options.microbatches} x {options.rows} x {options.tokens} tokens, the last {options.response} learnt from")
    print(f"{'case':<7}{'dtype':<9}{'seconds':>9}{'tokens/s':>10}{'MFU':>8}{'of sheet':>9}{'peak GB':>9}", end="")
    print(f"{'of plan':>9}{'kept':>6}{'dropped':>9}")
    for label, summary in summaries.items():
        name, dtype = label.split()
        m, rate = summary.medians, flops / summary.medians["seconds"]
        case = {"case": name, "dtype": dtype, "tokens": tokens, "flops": flops, **m, **infos[label]}
        case |= {"tokens_per_s": tokens / m["seconds"], "mfu": rate / ceilings.products(dtype)}
        case |= {"mfu_datasheet": ceilings.of_datasheet(flops_per_s=rate, dtype=dtype)}
        case |= summary.judged
        if name == "jaxrl":
            case |= {"peak_over_plan": m["peak_bytes"] / case["planned_bytes"], "profile": case.get("profile")}
        cases.append(case)
        print(
            f"{name:<7}{dtype:<9}{m['seconds']:>9.3f}{case['tokens_per_s']:>10.1f}{case['mfu']:>8.1%}"
            f"{_share(case['mfu_datasheet']):>9}{m['peak_bytes'] / 1e9:>9.2f}{_share(case.get('peak_over_plan')):>9}"
            f"{summary.kept:>6}{summary.dropped:>9}{summary.mark}"
            f"  {infos[label]['optimizer']}"
        )
        if case.get("profile"):
            print(profiles.table(case["profile"]))
    ratios = _ratios(cases)
    for r in ratios:
        mark = DISTURBED if r["disturbed"] else ""
        print(f"jaxrl / torch {r['dtype']:<9} tokens/s {r['tokens_per_s']:.3f}, peak {r['peak']:.3f}{mark}")
    names = ("rows", "microbatches", "tokens", "response", "attention", "numerics", "chunk", "remat")
    return {name: getattr(options, name) for name in names} | {"cases": cases, "ratios": ratios}


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _ratios(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name = {(case["case"], case["dtype"]): case for case in cases}
    return [
        {
            "dtype": dtype,
            "tokens_per_s": ours["tokens_per_s"] / theirs["tokens_per_s"],
            "peak": ours["peak_bytes"] / theirs["peak_bytes"],
            "disturbed": ours["disturbed"] or theirs["disturbed"],
        }
        for (name, dtype), ours in by_name.items()
        if name == "jaxrl" and (theirs := by_name.get(("torch", dtype))) is not None
    ]


COUNTS = ("rows", "tokens", "response", "warmup", "microbatches")
BENCHMARK = Benchmark("train", __doc__, _measure, _options, QUICK, COUNTS, _check)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
