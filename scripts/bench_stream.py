#!/usr/bin/env python3
"""Gradients beside the rollout: whole steps with the stream trainer and without it, on two devices.

    python scripts/bench_stream.py [--hidden 256] [--prompts 8] [--samples 4] [--mean 64] [--new 512] [--json]
    python scripts/bench_stream.py --in-turns [--json]

Each case lives in a process of its own and runs one step when it is asked to: steps take turns and never run at once. A
CPU's devices get one core each (XLA's products are kept in one thread), so that two programs on two devices can run at
the same time. Both cases have two workers, one on each device, and draw the same responses: their lengths are
geometric, with a few long ones (`--mean`, `--new`).

- plain: rollout, then the update on both devices.
- stream: `trainer.stream.enable`. Once enough responses are done, one worker is freed, and computes gradients of
  complete prompts while the other decodes the rest; the update does what is left.

Figures: seconds of a step; of its phases (`timing_s/*`); update: its phases after the rollout; hidden: seconds of
gradients under the rollout; sum: all phases and what was hidden, which is what the step would have taken one after
another; share hidden: hidden over hidden and update; beside: seconds in which the timeline shows gradients on one
device and a plan on the other.

With --in-turns: one device with all cores, no second worker. Does it pay to hand a microbatch to the device after each
plan, and not all microbatches after all plans? Cases: the plans alone, the microbatches alone, one kind after the
other, and in turns; gain: what turns save of the time that both take one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import records, step_case, stream_case, turns_case
from bench.measure import Bench, Gauge, Summary, say, summarise, verdict
from bench.worker import Worker, once

QUICK = {
    "repetitions": 2,
    "hidden": 64,
    "layers": 2,
    "prompts": 4,
    "samples": 2,
    "prompt_tokens": 8,
    "mean": 16,
    "new": 48,
    "train_tokens": 128,
    "decode_steps": 2,
    "warmup": 1,
    "plans": 4,
}
WAYS = ("plans", "gradients", "after", "turns")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    records.common_options(made)
    made.set_defaults(dtypes=["float32"])
    made.add_argument("--in-turns", action="store_true", help="plans and microbatches on one device")
    made.add_argument("--hidden", type=int, default=256, help="width of the model, a multiple of 64 (256)")
    made.add_argument("--layers", type=int, default=4, help="layers of the model (4)")
    made.add_argument("--prompts", type=int, default=8, help="prompts per step (8)")
    made.add_argument("--samples", type=int, default=4, help="responses to each prompt (4)")
    made.add_argument("--prompt-tokens", type=int, default=16, help="tokens of a prompt, about (16)")
    made.add_argument("--mean", type=int, default=64, help="tokens of a response, on average (64)")
    made.add_argument("--new", type=int, default=512, help="tokens of a response, at most (512)")
    made.add_argument("--train-tokens", type=int, default=768, help="the most tokens of a microbatch (768)")
    made.add_argument("--decode-steps", type=int, default=8, help="decode steps of a plan (8)")
    made.add_argument("--warmup", type=int, default=2, help="steps of each case before the timed ones (2)")
    made.add_argument("--plans", type=int, default=24, help="with --in-turns: plans, and as many microbatches (24)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 2 if it was asked for nonsense."""
    return records.run("bench_stream", arguments, _parsed, _run)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = records.parse(parser(), arguments, QUICK, [name for name in QUICK if name != "repetitions"])
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    if options.model or options.shape not in ("tiny", "SmolLM2-135M"):
        raise ValueError("--model and --shape are of no use here: --hidden and --layers make the model")
    if options.dtypes != ["float32"]:
        raise ValueError(f"--dtypes ({' '.join(options.dtypes)}) must be float32")
    if options.devices != 1:
        raise ValueError(f"--devices ({options.devices}) is settled: two, and one with --in-turns")
    if options.hidden % 64:
        raise ValueError(f"--hidden ({options.hidden}) must be a multiple of 64, the width of a head")
    if options.samples < 2:
        raise ValueError(f"--samples ({options.samples}) must be at least 2: GRPO compares a prompt's responses")


def _run(options: argparse.Namespace, called: str) -> dict[str, Any]:
    count = 1 if options.in_turns else 2
    if not options.in_turns:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    device = once("devices", _describe, count)
    head = records.header("stream-in-turns" if options.in_turns else "stream", device, records.versions(), called)
    records.print_header(head, say)
    bench = Bench(Gauge() if device["platform"] == "cpu" else None, say)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        specs = _specs(options, Path(folder))
        if options.in_turns:
            worker = stack.enter_context(Worker("in turns", turns_case.run, specs["plain"]))
            info = worker.info
            asked = {"plans": options.plans, "microbatches": options.plans}
            runs = {way: lambda way=way: worker(way=way, **asked) for way in WAYS}
            for run in runs.values():
                run()
        else:
            workers = {name: stack.enter_context(Worker(name, stream_case.run, spec)) for name, spec in specs.items()}
            info = workers["plain"].info
            runs = {name: lambda worker=worker: worker() for name, worker in workers.items()}
            for _ in range(options.warmup):
                for run in runs.values():
                    run()
        bench.interleave(runs, options.repetitions)
    if bench.gauge:
        bench.gauge.close()
    say(verdict(bench))
    results = (_in_turns if options.in_turns else _steps)(options, summarise(bench.runs))
    kept, dropped = bench.counts()
    say(f"{info['parameters'] / 1e6:.2f} million parameters, {info['programs']} programs")
    sizes = {name: getattr(options, name) for name in QUICK if name not in ("repetitions", "warmup")}
    return (
        head
        | {"model": "random", "devices": count, "kept": kept, "dropped": dropped}
        | {"results": sizes | {"parameters": info["parameters"]} | results}
    )


def _describe(count: int, ask: Any) -> None:
    ask(records.describe_devices(records.prepare_devices(count)))


def _specs(options: argparse.Namespace, folder: Path) -> dict[str, stream_case.StreamSpec]:
    """Writes a model folder, prompts and a reward; the specs of both cases."""
    made = stream_case.small_model(options.hidden, options.layers, options.mean)
    step_case.write_tokenizer(made, folder / "model")
    steps = options.warmup + options.repetitions + 1
    step_case.write_inputs(folder, str(folder / "model"), steps * options.prompts, options.prompt_tokens, options.seed)
    return {
        name: stream_case.StreamSpec(
            folder=str(folder),
            path=str(folder / "model"),
            devices=1 if options.in_turns else 2,
            stream=name == "stream",
            prompts=options.prompts,
            samples=options.samples,
            prompt_tokens=options.prompt_tokens,
            mean=options.mean,
            new=options.new,
            train_tokens=options.train_tokens,
            decode_steps=options.decode_steps,
            seed=options.seed,
        )
        for name in ("plain", "stream")
    }


def _steps(options: argparse.Namespace, summaries: Mapping[str, Summary]) -> dict[str, Any]:
    cases = []
    for name, summary in summaries.items():
        found = summary.medians
        say(
            f"{name:<7}{found['seconds']:>8.3f} s a step, sum {found['sum_s']:.3f} s, update {found['update_s']:.3f} "
            f"s, hidden {found['hidden_s']:.3f} s ({found['hidden_share']:.0%} of the update, "
            f"{found['streamed_share']:.0%} of its prompts), gradients beside plans {found['beside_s']:.3f} s"
            f"{'  DISTURBED' if summary.disturbed else ''}"
        )
        for phase, value in found.items():
            if phase.startswith("timing_s/"):
                say(f"  {phase:<26}{value:>9.3f} s{value / found['seconds']:>8.1%}")
        judged = {"kept": summary.kept, "dropped": summary.dropped, "disturbed": summary.disturbed}
        cases.append({"case": name} | found | judged)
    by_name = {case["case"]: case for case in cases}
    speed = by_name["plain"]["seconds"] / by_name["stream"]["seconds"]
    say(f"plain / stream, seconds of a step: {speed:.3f}")
    return {"cases": cases, "speed": speed}


def _in_turns(options: argparse.Namespace, summaries: Mapping[str, Summary]) -> dict[str, Any]:
    seconds = {name: summary.medians["seconds"] for name, summary in summaries.items()}
    cases = []
    for name, summary in summaries.items():
        say(f"{name:<10}{seconds[name]:>8.3f} s{'  DISTURBED' if summary.disturbed else ''}")
        judged = {"kept": summary.kept, "dropped": summary.dropped, "disturbed": summary.disturbed}
        cases.append({"case": name, "seconds": seconds[name]} | judged)
    gain = 1 - seconds["turns"] / seconds["after"]
    plan_ms, micro_ms = (seconds[name] / options.plans * 1e3 for name in ("plans", "gradients"))
    say(
        f"in turns saves {gain:.1%} of {seconds['after']:.3f} s; alone a plan takes {plan_ms:.1f} ms, a microbatch "
        f"{micro_ms:.1f} ms"
    )
    return {"cases": cases, "gain": gain}


if __name__ == "__main__":
    sys.exit(main())
