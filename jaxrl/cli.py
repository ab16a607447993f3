"""`jaxrl train | sft | dpo | simulate | tune | generate | serve | eval | replay | export | score | check-numerics |
explain-config | explain-layout | profile | options | completion | report`.

Only argument parsing is imported at the top. Reward workers re-import the main module and must not load jax, and `jaxrl
--help` answers at once.

Every command ends in one of these ways, and never with more than one line on stderr but for a bug's traceback:

- 0: done, or a training run that was stopped and has saved; also when the reader of the output has gone (`| head`).
- 1: it could not go on, though what was handed in is right (no space on the disk, no memory, a run that has gone
  wrong, no progress); or a bug, with its traceback.
- 2: what was handed in is wrong: an argument, an option, a file. One sentence says where and what the rule is.
- 130, 143: ended by SIGINT or SIGTERM (`jaxrl.runtime.stop`).
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from jaxrl import __version__
from jaxrl.commands.arguments import (
    MAX_PROCESSES,
    MAX_REPEATS,
    MAX_SEEDS,
    MAX_STEPS,
    MAX_TOKENS,
    Command,
    Parser,
    add_command,
    add_dtype,
    count,
    device_count,
    filled,
    number,
    numbers,
    one_of,
    parse,
    seed,
    whole,
    wholes,
    written,
)
from jaxrl.commands.drawing import add_drawing
from jaxrl.record.progress import ProgressCounter
from jaxrl.runtime.answer import answer, one_line
from jaxrl.runtime.stop import Stop

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.record.files import Removing
    from jaxrl.record.run_record import RunOutcome


def main(arguments: Sequence[str] | None = None, stop: Stop | None = None) -> int:
    """Runs one command; returns the exit status. `stop`: the program's signals; without one they are the caller's."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs tracebacks of errors that it raises as well
    try:
        parser = _parser()
        if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow: `jaxrl completion`
            from jaxrl.commands.completion import answer_shell

            answer_shell(*parser)
        options = parse(*parser, sys.argv[1:] if arguments is None else arguments)
        options.signals = stop
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except SystemExit:  # of --help and --version
        _output_is_whole()
        raise
    except KeyboardInterrupt:
        print("jaxrl: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        is_read = not (isinstance(error, BrokenPipeError) and _reader_is_gone())
        if not _output_is_whole() and isinstance(error, OSError) and error.filename is None:
            error.filename = "standard output"
        if not is_read:
            return 0
        said = answer(error)
        if said is None:
            raise  # a bug
        print(f"jaxrl: {one_line(said[0])}", file=sys.stderr)
        return said[1]


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe without a reader; any other broken pipe is an error like others."""
    output = select.poll()
    output.register(1, 0)
    return any(seen & (select.POLLERR | select.POLLHUP) for _, seen in output.poll(0))


def _output_is_whole() -> bool:
    """Writes the rest of the output. What cannot be written is dropped: the interpreter would try it again at its end,
    and has no sentence for the error."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        return False
    return True


def _parser() -> tuple[Parser, dict[str, Parser]]:
    """The whole parser, and each command's own by name."""
    parser = Parser(prog="jaxrl", description="RL post-training of language models in JAX.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="command")

    def command(name: str, run: Callable[..., int], text: str, *, config: bool = False) -> Parser:
        sub = add_command(commands, name, run, text)
        if config:
            sub.add_argument("--config", type=filled, metavar="FILE", help="a .yaml or .gin file")
            sub.add_argument("overrides", nargs="*", metavar="section.option=value", help="options on top of the file")
        return sub

    command("train", _train, "Train, or resume the run in trainer.run_dir.", config=True)
    command("sft", _sft, "Learn from conversations, or resume such a run: supervised fine-tuning.", config=True)
    command("dpo", _dpo, "Learn from pairs of which one was preferred, or resume such a run: DPO, IPO.", config=True)
    command("simulate", _simulate, "Run the same loop on modelled devices, lengths and times.", config=True)
    for add in (
        _add_tune,
        add_drawing,
        _add_eval_and_export,
        _add_replay,
        _add_score,
        _add_check,
        _add_explanations,
        _add_profile,
        _add_queries,
    ):
        add(command)
    return parser, commands.choices


def _add_tune(command: Command) -> None:
    tune = command("tune", _tune, "Find a rule's fastest factors by simulation, from a run's recorded lengths.")
    # not a positional: it would be taken for an override
    tune.add_argument(
        "--run", dest="run_dir", type=filled, metavar="DIR", required=True, help="of a real or a simulated run"
    )
    tune.add_argument("overrides", nargs="*", metavar="section.option=value", help="options on top of the run's own")
    rules = ("tail_batching", "partial_rollout")
    tune.add_argument("--rule", default=rules[0], type=one_of(*rules), metavar=f"{{{','.join(rules)}}}")
    for name, text in (
        ("--values", "factors to try, as 1.1,1.2,1.3; of prompts and responses together"),
        ("--prompt-factors", "factors of prompts alone; with --response-factors, all pairs"),
        ("--response-factors", "factors of responses alone"),
    ):
        tune.add_argument(name, type=numbers, default=(), metavar="LIST", help=text)
    tune.add_argument("--seeds", type=whole(1, MAX_SEEDS), default=5, help="simulated runs of each value (5)")
    steps = whole(1, MAX_STEPS)
    tune.add_argument("--steps", type=steps, default=None, help="of each of them (default: the longest period twice)")
    tune.add_argument("--processes", type=whole(1, MAX_PROCESSES), default=1, help="runs at the same time (1)")
    tune.add_argument("--out", type=written, metavar="FILE", help="also write the results as JSON")


def _add_eval_and_export(command: Command) -> None:
    evaluate = command("eval", _eval, "Score a model on held-out prompts: pass@k, avg@k, maj@k.", config=True)
    evaluate.add_argument(
        "--checkpoint", type=filled, metavar="DIR", help="a run directory: its last checkpoint's parameters"
    )
    evaluate.add_argument(
        "--out", type=written, metavar="FILE", help="write every response and its verdict as JSON lines"
    )

    export = command("export", _export, "Write a model as a Hugging Face folder.")
    export.add_argument(
        "source", type=filled, metavar="RUN|MODEL", help="a run directory (its last checkpoint), or a model.path"
    )
    export.add_argument("folder", type=filled, help="where to write")
    export.add_argument("--merge", action="store_true", help="with adapters (model.lora_rank): the whole model")
    add_dtype(export, "float32", "bfloat16", "float16", default="bfloat16")


def _add_replay(command: Command) -> None:
    replay = command("replay", _replay, "Draw a recorded response again, and compare each token.")
    replay.add_argument("run_dir", type=filled, metavar="RUN")
    replay.add_argument(
        "--sample", type=filled, metavar="KEY", required=True, help="as the report and samples.jsonl have it (0-17-3)"
    )
    replay.add_argument("--tokens", action="store_true", help="show each token with its log-probability")
    replay.add_argument("overrides", nargs="*", metavar="section.option=value", help="options on top of the run's own")


def _add_score(command: Command) -> None:
    score = command("score", _score, "Score given responses with a reward, without a model.", config=True)
    kinds = ("auto", "math", "task", "code", "judge", "custom")
    score.add_argument(
        "--kind", type=one_of(*kinds), metavar=f"{{{','.join(kinds)}}}", help="reward.kind, in place of --config"
    )
    score.add_argument(
        "--responses",
        type=filled,
        required=True,
        metavar="FILE",
        help="JSONL or Parquet: a problem's columns, and response",
    )
    score.add_argument(
        "--out", type=written, required=True, metavar="FILE", help="a JSON line with the reward for each response"
    )


def _add_check(command: Command) -> None:
    check = command(
        "check-numerics", _check, "Compute responses in many ways, and show which bits differ, where first."
    )
    source = check.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=filled, help="as model.path")
    source.add_argument("--shape", type=filled, help="random weights of a model by name (SmolLM2-135M)")
    check.add_argument(
        "--tp", type=wholes(1, 64), default=(1,), metavar="LIST", help="degrees, each on as many devices (1)"
    )
    check.add_argument(
        "--rows", type=wholes(1, 4096), default=(1, 8, 32), metavar="LIST", help="decoded together (1,8,32)"
    )
    check.add_argument("--tokens", type=whole(1, MAX_TOKENS), default=1024, help="drawn, about (1024)")
    check.add_argument("--seed", type=seed, default=0, help="of prompts and responses (0)")
    add_dtype(check, "float32", "bfloat16", "float64", default="float32")
    check.add_argument("--json", action="store_true", help="as a JSON object")
    check.add_argument("overrides", nargs="*", metavar="section.option=value", help="options of rollout and actor")


def _add_explanations(command: Command) -> None:
    devices, degree = device_count(0), device_count(1)
    explain = command("explain-config", _explain, "Show derived sizes and the memory of both phases.", config=True)
    explain.add_argument("--shape", type=filled, help="a model by name (Qwen2.5-7B), as model.path")
    explain.add_argument("--devices", type=devices, default=0, help="how many devices to plan for (0: those here)")
    gib = number(0, 100_000)
    explain.add_argument("--device-gib", type=gib, default=0.0, help="GiB that JAX has of each (0: what it says)")
    learning = ("train", "sft", "dpo")
    explain.add_argument(
        "--command",
        type=one_of(*learning),
        metavar=f"{{{','.join(learning)}}}",
        help="that reads it (of a run's config.yaml the run's, else train)",
    )

    layout = command("explain-layout", _explain_layout, "Show which device holds which part of the rollout weights.")
    source = layout.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=filled, help="as model.path; only its config is read")
    source.add_argument("--shape", type=filled, help="a model by name (SmolLM2-135M)")
    layout.add_argument("--devices", type=devices, default=0, help="how many devices (0: those here)")
    layout.add_argument("--tp", type=degree, default=1, help="tensor parallelism; dp is the rest (1)")
    layout.add_argument("--max-tp", type=degree, default=None, help="the degree that weights are padded for (--tp)")
    layout.add_argument(
        "--hosts", type=devices, default=1, help="on which the devices are, for what training sends (1)"
    )


def _add_profile(command: Command) -> None:
    measure = command(
        "profile", _profile, "Measure latencies for rollout.layout: decode, prefill, switches.", config=True
    )
    measure.add_argument("--out", type=written, metavar="FILE", help="the table (default: rollout.layout.profile)")
    measure.add_argument("--max-batch", type=whole(0, 2**20), default=0, help="most live rows, all dp groups together")
    measure.add_argument("--token-budget", type=count, default=0, help="most live tokens, all dp groups together")
    measure.add_argument("--max-context", type=whole(0, MAX_TOKENS), default=0, help="most tokens of a row")
    measure.add_argument("--repeats", type=whole(1, MAX_REPEATS), default=3, help="measurements of a fast point (3)")


def _add_queries(command: Command) -> None:
    options = command("options", _options, "List the options of the configuration, with defaults, units and bounds.")
    options.add_argument(
        "section", nargs="?", default="", metavar="SECTION", help="a section (rollout.layout), or an option (rollout.n)"
    )
    options.add_argument("--json", action="store_true", help="as a JSON list")

    completion = command("completion", _completion, 'Print what a shell reads for completion: eval "$(...)".')
    shells = ("bash", "zsh", "fish")
    completion.add_argument("shell", type=one_of(*shells), metavar=f"{{{','.join(shells)}}}")

    report = command("report", _report, "Write a run's page, report.html; of several runs one that compares them.")
    report.add_argument("run_dir", type=filled, metavar="RUN")
    report.add_argument("others", nargs="*", type=filled, default=[], metavar="RUN", help="runs to compare it with")
    report.add_argument(
        "--out",
        type=written,
        metavar="FILE",
        help="the page (report.html in the run; of several, comparison.html here)",
    )


def _config(options: argparse.Namespace, command: str = "") -> Config:
    """The configuration of a command; options that have no effect are said."""
    from jaxrl.config.files import load

    notes: list[str] = []
    config = load(options.config, options.overrides, notes.append, command)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return config


def _removing(options: argparse.Namespace) -> Removing:
    """What keeps a signal from leaving a command's temporary file behind."""
    return nullcontext if options.signals is None else options.signals.removing


def _train(options: argparse.Namespace) -> int:
    from jaxrl.commands.start import start

    return _learn(options, "train", start)


def _sft(options: argparse.Namespace) -> int:
    from jaxrl.commands.supervised import start_sft

    return _learn(options, "sft", start_sft)


def _dpo(options: argparse.Namespace) -> int:
    from jaxrl.commands.supervised import start_dpo

    return _learn(options, "dpo", start_dpo)


def _learn(options: argparse.Namespace, name: str, start: Callable[..., RunOutcome]) -> int:
    start(_config(options, command=name), stop=options.signals, progress=partial(print, flush=True))
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from jaxrl.commands.simulate import simulate

    simulate(_config(options), stop=options.signals)
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
        options.out or "",
    )

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {total} runs", end="\n" if done == total else "", file=sys.stderr, flush=True)

    tune(options.run_dir, options.overrides, chosen, progress=progress, removing=_removing(options))
    return 0


def _eval(options: argparse.Namespace) -> int:
    from jaxrl.commands.evaluate import evaluate
    from jaxrl.record.run_dir import refuse_overwriting

    if options.out:
        refuse_overwriting(options.out, "--out", [options.config or ""])
    with closing(ProgressCounter("responses", sys.stderr)) as counted:
        result = evaluate(
            _config(options), options.checkpoint, options.out, removing=_removing(options), progress=counted.show
        )
    width = max(map(len, result))
    for name, value in result.items():
        print(f"{name:<{width}}  {value:.4g}")
    return 0


def _replay(options: argparse.Namespace) -> int:
    from jaxrl.commands.replay import replay

    replay(options.run_dir, options.sample, options.overrides, each_token=options.tokens)
    return 0


def _score(options: argparse.Namespace) -> int:
    from jaxrl.commands.score import score

    if options.config and options.kind:
        raise ValueError("score: --kind and --config exclude each other")
    kind = [f"reward.kind={options.kind}"] if options.kind else []
    options.overrides = ["model.path=none", *kind, *options.overrides]  # no model is read, so none need be named
    config = _config(options)
    with closing(ProgressCounter("responses", sys.stderr)) as counted:
        scores = score(
            config,
            options.responses,
            options.out,
            inputs=[options.config or ""],
            progress=counted.show,
            removing=_removing(options),
        )
    print(scores.summary())
    return 0


def _export(options: argparse.Namespace) -> int:
    from jaxrl.commands.export import export

    for file in export(options.source, options.folder, options.dtype, stop=options.signals, merge=options.merge):
        print(file)
    return 0


def _check(options: argparse.Namespace) -> int:
    from jaxrl.commands.check_numerics import CheckOptions, check_numerics

    asked = CheckOptions(
        options.model or "",
        options.shape or "",
        options.dtype,
        options.tp,
        options.rows,
        options.tokens,
        options.seed,
        tuple(options.overrides),
    )
    check_numerics(asked, partial(print, flush=True), partial(print, file=sys.stderr, flush=True), options.json)
    return 0


def _explain(options: argparse.Namespace) -> int:
    from pathlib import Path

    from jaxrl.commands.explain import explain_config
    from jaxrl.record.run_dir import CONFIG_FILE, recorded_start

    file = Path(options.config or "")
    recorded = recorded_start(file.parent) if file.name == CONFIG_FILE else None
    command = options.command or (recorded or {}).get("kind", "train")
    if options.shape:
        options.overrides = [*options.overrides, f"model.path={options.shape}"]
    config = _config(options, command=command)
    print(explain_config(config, options.devices, int(options.device_gib * 2**30) or None, command))
    return 0


def _explain_layout(options: argparse.Namespace) -> int:
    from pathlib import Path

    import jax

    from jaxrl.models.loading import config_of, resolve_path
    from jaxrl.models.shapes import named_shape
    from jaxrl.sharding.explain import explain_layout

    config = named_shape(options.shape) if options.shape else config_of(resolve_path(options.model, "--model"))
    name = options.shape or Path(options.model.partition(":")[2] or options.model).name
    devices = options.devices or len(jax.devices())
    print(explain_layout(config, devices, options.tp, options.max_tp, name=name, num_hosts=options.hosts))
    return 0


def _profile(options: argparse.Namespace) -> int:
    from jaxrl.commands.profile import ProfileOptions, run

    config = _config(options)
    out = options.out or config.rollout.layout.profile
    if not out:
        raise ValueError("profile: give the table's file with --out, or as rollout.layout.profile")
    sizes = ProfileOptions(options.max_batch, options.token_budget, options.max_context, options.repeats)
    table = run(config, out, sizes, _removing(options))
    verify = f", {len(table.verify)} that verify" if table.verify else ""
    counts = f"{len(table.prefill)} prefills, {len(table.switches)} switches"
    print(f"{out}: {len(table.decode)} decode points{verify}, {counts}")
    return 0


def _options(options: argparse.Namespace) -> int:
    from jaxrl.commands.options import options_json, options_text

    print((options_json if options.json else options_text)(options.section))
    return 0


def _completion(options: argparse.Namespace) -> int:
    from jaxrl.commands.completion import script

    print(script(options.shell))
    return 0


def _report(options: argparse.Namespace) -> int:
    removing = _removing(options)
    if not options.others:
        from jaxrl.mechanisms import page_parts
        from jaxrl.report.page import write_report

        print(
            write_report(
                options.run_dir,
                options.out,
                removing,
                lambda text: print(f"jaxrl: {text}", file=sys.stderr),
                page_parts(),
            )
        )
        return 0
    from jaxrl.report.comparison import write_comparison

    page, summary = write_comparison([options.run_dir, *options.others], options.out or "comparison.html", removing)
    print(f"{summary}\n\n{page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
