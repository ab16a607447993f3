"""`jaxrl train | simulate | tune | generate | eval | export | explain-config | explain-layout | profile | report`.

Only argument parsing is imported at the top. Reward workers re-import the main module and must not load jax, and `jaxrl
--help` answers at once.

Exit status: 0 for done, or stopped and saved; 2 for an error that a user can mend, with one sentence on stderr.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxrl import __version__
from jaxrl.runtime.stop import Stop


def main(arguments: Sequence[str] | None = None, stop: Stop | None = None) -> int:
    """Runs one command; returns the exit status. `stop`: the program's signals; without one they are the caller's."""
    options = _parser().parse_args(arguments)
    options.stop = stop
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    try:
        return options.run(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"jaxrl: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0  # the reader of the output has closed it
    except KeyboardInterrupt:
        print("jaxrl: interrupted", file=sys.stderr)
        return 130


class _Command(Protocol):
    """Adds a command; with `config`, one that takes a configuration file and options on top of it."""

    def __call__(
        self, name: str, run: Callable[..., int], text: str, *, config: bool = False
    ) -> argparse.ArgumentParser: ...


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxrl", description="RL post-training of language models in JAX.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Callable[..., int], text: str, *, config: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        if config:
            sub.add_argument("--config", metavar="FILE", help="a .yaml or .gin file")
            sub.add_argument("overrides", nargs="*", metavar="section.option=value", help="options on top of the file")
        return sub

    command("train", _train, "Train, or resume the run in trainer.run_dir.", config=True)
    command("simulate", _simulate, "Run the same loop on modelled devices, lengths and times.", config=True)
    for add in (_add_tune, _add_generate, _add_eval_and_export, _add_explanations, _add_profile, _add_report):
        add(command)
    return parser


def _add_tune(command: _Command) -> None:
    tune = command("tune", _tune, "Find a rule's fastest factors by simulation, from a run's recorded lengths.")
    # not a positional: options between it and the overrides would end both
    tune.add_argument("--run", dest="run_dir", metavar="DIR", required=True, help="of a real or a simulated run")
    tune.add_argument("overrides", nargs="*", metavar="section.option=value", help="options on top of the run's own")
    tune.add_argument("--rule", default="tail_batching", choices=["tail_batching", "partial_rollout"])
    for name, text in (
        ("--values", "factors to try, as 1.1,1.2,1.3; of prompts and responses together"),
        ("--prompt-factors", "factors of prompts alone; with --response-factors, all pairs"),
        ("--response-factors", "factors of responses alone"),
    ):
        tune.add_argument(name, type=_numbers, default=(), metavar="LIST", help=text)
    tune.add_argument("--seeds", type=int, default=5, help="simulated runs of each value (5)")
    tune.add_argument("--steps", type=int, default=0, help="of each of them (default: the longest period twice)")
    tune.add_argument("--processes", type=int, default=1, help="runs at the same time (1)")
    tune.add_argument("--out", default="", metavar="FILE", help="also write the results as JSON")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers with commas between them, as 1.1,1.25") from None


def _add_generate(command: _Command) -> None:
    generate = command("generate", _generate, "Draw responses to prompts given as arguments or on standard input.")
    generate.add_argument("--model", required=True, help="as model.path")
    generate.add_argument("--max-tokens", type=int, default=128, help="of a response (128)")
    generate.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (1.0)")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--min-p", type=float, default=0.0)
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="a stop string; may be repeated")
    generate.add_argument("-n", type=int, default=1, help="responses per prompt (1)")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    generate.add_argument("--tp", type=int, default=1, help="tensor parallelism over all devices (1)")
    generate.add_argument("--raw", action="store_true", help="send the text as it is, without the chat template")
    generate.add_argument("--json", action="store_true", help="one JSON line per response")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT")


def _add_eval_and_export(command: _Command) -> None:
    evaluate = command("eval", _eval, "Score a model on held-out prompts: pass@k, avg@k, maj@k.", config=True)
    evaluate.add_argument("--checkpoint", metavar="DIR", help="a run directory: its last checkpoint's parameters")
    evaluate.add_argument("--out", metavar="FILE", help="write every response and its verdict as JSON lines")

    export = command("export", _export, "Write a model as a Hugging Face folder.")
    export.add_argument("source", metavar="RUN|MODEL", help="a run directory (its last checkpoint), or a model.path")
    export.add_argument("folder", help="where to write")
    export.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])


def _add_explanations(command: _Command) -> None:
    explain = command("explain-config", _explain, "Show derived sizes and the memory of both phases.", config=True)
    explain.add_argument("--devices", type=int, default=0, help="how many devices to plan for (default: those here)")
    explain.add_argument("--device-gib", type=float, default=0.0, help="memory per device (default: what it says)")

    layout = command("explain-layout", _explain_layout, "Show which device holds which part of the rollout weights.")
    source = layout.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", default="", help="as model.path; only its config is read")
    source.add_argument("--shape", default="", help="a model by name (SmolLM2-135M)")
    layout.add_argument("--devices", type=int, default=0, help="how many devices (default: those here)")
    layout.add_argument("--tp", type=int, default=1, help="tensor parallelism; dp is the rest (1)")
    layout.add_argument("--max-tp", type=int, default=None, help="the degree that weights are padded for (--tp)")
    layout.add_argument("--svg", metavar="FILE", help="also draw it")
    layout.add_argument("--png", metavar="FILE", help="also draw it (needs pillow)")


def _add_profile(command: _Command) -> None:
    measure = command(
        "profile", _profile, "Measure latencies for rollout.layout: decode, prefill, switches.", config=True
    )
    measure.add_argument("--out", metavar="FILE", help="the table (default: rollout.layout.profile)")
    measure.add_argument("--max-batch", type=int, default=0, help="most live rows, all dp groups together")
    measure.add_argument("--token-budget", type=int, default=0, help="most live tokens, all dp groups together")
    measure.add_argument("--max-context", type=int, default=0, help="most tokens of a row")
    measure.add_argument("--repeats", type=int, default=3, help="measurements of a fast point (3)")


def _add_report(command: _Command) -> None:
    report = command("report", _report, "Write a run's page, report.html.")
    report.add_argument("run_dir", metavar="RUN")
    report.add_argument("--out", metavar="FILE")


def _train(options: argparse.Namespace) -> int:
    from jaxrl.commands.start import start
    from jaxrl.config import files as config_files

    start(config_files.load(options.config, options.overrides), stop=options.stop)
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from jaxrl.commands.simulate import simulate
    from jaxrl.config import files as config_files

    simulate(config_files.load(options.config, options.overrides))
    return 0


def _tune(options: argparse.Namespace) -> int:
    from jaxrl.commands.tune import TuneOptions, tune

    chosen = TuneOptions(
        options.rule,
        options.values,
        options.prompt_factors,
        options.response_factors,
        options.seeds,
        options.steps,
        options.processes,
        options.out,
    )

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {total} runs", end="\n" if done == total else "", file=sys.stderr, flush=True)

    tune(options.run_dir, options.overrides, chosen, progress=progress)
    return 0


def _generate(options: argparse.Namespace) -> int:
    from jaxrl.text import TextEngine
    from jaxrl.types import SamplingParams

    prompts = options.prompts or [line.rstrip("\n") for line in sys.stdin]
    params = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        max_tokens=options.max_tokens,
        stop_strings=tuple(options.stop),
    )
    engine = TextEngine.from_path(
        options.model,
        max_tokens=options.max_tokens,
        prompts=prompts,
        chat=not options.raw,
        dtype=options.dtype,
        tp=options.tp,
        seed=options.seed,
        truncate=options.top_k > 0 or options.top_p < 1 or options.min_p > 0,
        num_slots=min(32, options.n * max(len(prompts), 1)),
    )
    for prompt, samples in zip(
        prompts, engine.generate(prompts, params, n=options.n, chat=not options.raw), strict=True
    ):
        for sample in samples:
            if options.json:
                line = {"prompt": prompt, "response": sample.text, "finish_reason": sample.finish_reason}
                print(json.dumps(line | {"num_tokens": len(sample), "token_ids": sample.token_ids.tolist()}))
            else:
                print(sample.text)
    return 0


def _eval(options: argparse.Namespace) -> int:
    from jaxrl.commands.evaluate import evaluate
    from jaxrl.config import files as config_files

    result = evaluate(config_files.load(options.config, options.overrides), options.checkpoint, options.out)
    width = max(map(len, result))
    for name, value in result.items():
        print(f"{name:<{width}}  {value:.4g}")
    return 0


def _export(options: argparse.Namespace) -> int:
    from jaxrl.commands.export import export

    for file in export(options.source, options.folder, options.dtype):
        print(file)
    return 0


def _explain(options: argparse.Namespace) -> int:
    from jaxrl.commands.explain import explain_config
    from jaxrl.config import files as config_files

    config = config_files.load(options.config, options.overrides)
    print(explain_config(config, options.devices, int(options.device_gib * 2**30) or None))
    return 0


def _explain_layout(options: argparse.Namespace) -> int:
    from pathlib import Path

    import jax

    from jaxrl.models.loading import config_of, resolve_path
    from jaxrl.models.shapes import named_shape
    from jaxrl.sharding.explain import explain_layout
    from jaxrl.sharding.picture import draw, png, svg

    config = named_shape(options.shape) if options.shape else config_of(resolve_path(options.model))
    name = options.shape or Path(options.model.partition(":")[2] or options.model).name
    devices = options.devices or len(jax.devices())
    explanation = explain_layout(config, devices, options.tp, options.max_tp, name=name)
    if options.svg:
        Path(options.svg).write_text(svg(draw(explanation)), encoding="utf-8")
    if options.png:
        Path(options.png).write_bytes(png(draw(explanation)))
    print(explanation)
    return 0


def _profile(options: argparse.Namespace) -> int:
    from jaxrl.commands.profile import ProfileOptions, run
    from jaxrl.config import files as config_files

    config = config_files.load(options.config, options.overrides)
    out = options.out or config.rollout.layout.profile
    if not out:
        raise ValueError("give the table's file with --out, or as rollout.layout.profile")
    sizes = ProfileOptions(options.max_batch, options.token_budget, options.max_context, options.repeats)
    table = run(config, out, sizes)
    print(f"{out}: {len(table.decode)} decode points, {len(table.prefill)} prefills, {len(table.switches)} switches")
    return 0


def _report(options: argparse.Namespace) -> int:
    from jaxrl.report.page import write_report

    print(write_report(options.run_dir, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
