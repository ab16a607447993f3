"""`jaxrl train | sft | dpo | simulate | tune | generate | serve | eval | replay | export | score | check-numerics |
explain-config | explain-layout | profile | options | completion | report`.

Only argument parsing is imported at the top. Reward workers re-import the main module and must not load jax, and `jaxrl
--help` answers at once.

Every command ends in one of these ways, with its sentences on stderr, but for a bug's traceback:

- 0: done, or a training run that was stopped and has saved; also when the reader of the output has gone (`| head`).
- 1: it could not continue, though its input is right (no space on the disk, no memory, a run that has gone wrong, no
  progress); or a bug, with its traceback.
- 2: its input is wrong: an argument, an option, a file. A sentence names the place and the rule.
- 130, 143: ended by SIGINT or SIGTERM (`jaxrl.run.stop`).
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxrl import __version__
from jaxrl.commands.arguments import (
    MAX_TOKENS,
    Parser,
    add,
    add_choice,
    add_dtype,
    add_overrides,
    add_switch,
    count,
    device_count,
    device_sizes,
    factors,
    filled,
    json_object,
    number,
    parse,
    seed,
    stop_string,
    utf8,
    whole,
    wholes,
    written,
)
from jaxrl.record.progress import ProgressCounter
from jaxrl.run.answer import answer, one_line
from jaxrl.run.stop import Stop

if TYPE_CHECKING:
    from jaxrl.config import Config


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
        _writes(options, getattr(options, "out", "") or getattr(options, "folder", ""))
        options.run(options)
        sys.stdout.flush()
        return 0
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
        for sentence in getattr(error, "problems", said[:1]):
            print(f"jaxrl: {one_line(sentence)}", file=sys.stderr)
        return said[1]


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe without a reader; any other broken pipe is an error like others."""
    output = select.poll()
    output.register(1, 0)
    return any(seen & (select.POLLERR | select.POLLHUP) for _, seen in output.poll(0))


def _output_is_whole() -> bool:
    """Writes the rest of the output, or drops it: the interpreter would try again at its end, with a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        return False
    return True


class _Version(argparse.Action):
    """`--version`: what a report of a fault should name."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import jax

        from jaxrl.record.run_dir import commit, versions

        head = f"jaxrl {__version__}" + (f" ({found})" if (found := commit()) else "")
        print(head, *(f"{name} {version}" for name, version in versions().items() if name != "jaxrl"), sep="\n")
        devices = jax.devices()
        print(f"devices {len(devices)} × {devices[0].device_kind} ({devices[0].platform})")
        parser.exit()


def _parser() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(prog="jaxrl", description="RL post-training of language models in JAX.")
    parser.add_argument("--version", action=_Version, help="show the versions of what computes, and the devices")
    commands = parser.add_subparsers(metavar="command")

    def command(name: str, run: Callable[[argparse.Namespace], None], text: str) -> Parser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run, command=name)
        return sub

    def configured(name: str, run: Callable[[argparse.Namespace], None], text: str) -> Parser:
        """A command that takes a configuration file, and options on top of it."""
        sub = command(name, run, text)
        add(sub, "--config", filled, "a .yaml or .gin file", metavar="FILE")
        add_overrides(sub, "options on top of the file")
        return sub

    configured("train", _learn, "Train, or resume the run in trainer.run_dir.")
    configured("sft", _learn, "Learn from conversations, or resume such a run: supervised fine-tuning.")
    configured("dpo", _learn, "Learn from pairs of which one was preferred, or resume such a run: DPO, IPO.")
    configured("simulate", _simulate, "Run the same loop on modelled devices, lengths and times.")
    _add_tune(command("tune", _tune, "Find a rule's fastest factors by simulation, from a run's recorded lengths."))
    _add_generate(command("generate", _generate, "Draw responses to prompts given as arguments or on standard input."))
    _add_serve(command("serve", _serve, "Serve a model behind OpenAI's routes, until SIGTERM or Ctrl-C."))

    sub = configured("eval", _eval, "Score a model on held-out prompts: pass@k, avg@k, maj@k.")
    run = "a run directory: its last checkpoint's parameters, and its configuration without --config"
    add(sub, "--checkpoint", filled, run, metavar="DIR")
    add(sub, "--out", written, "write every response and its verdict as JSON lines", metavar="FILE")

    sub = command("export", _export, "Write a model as a Hugging Face folder.")
    add(sub, "source", filled, _SOURCE, metavar="RUN|MODEL")
    add(sub, "folder", filled, "where to write")
    add_switch(sub, "--merge", "with adapters (model.lora_rank): the whole model")
    add_dtype(sub, "float32", "bfloat16", "float16", default="bfloat16")

    sub = command("replay", _replay, "Draw a recorded response again, and compare each token.")
    add(sub, "run_dir", filled, metavar="RUN")
    add(sub, "--sample", filled, "as the report and samples.jsonl have it (0-17-3)", metavar="KEY", required=True)
    add_switch(sub, "--tokens", "show each token with its log-probability")
    add_overrides(sub, "options on top of the run's own")

    sub = configured("score", _score, "Score given responses with a reward, without a model.")
    columns = "JSONL or Parquet: a problem's columns, and response"
    add(sub, "--responses", filled, columns, required=True, metavar="FILE")
    add(sub, "--out", written, "a JSON line with the reward for each response", required=True, metavar="FILE")

    sub = command("check-numerics", _check, "Compute responses in many ways, and show which bits differ, where first.")
    add(sub, "--model", filled, "as model.path", required=True)
    add(sub, "--tp", wholes(1, 64), "degrees, each on as many devices (1)", default=(1,), metavar="LIST")
    add(sub, "--rows", wholes(1, 4096), "decoded together (1,8,32)", default=(1, 8, 32), metavar="LIST")
    add(sub, "--tokens", whole(1, MAX_TOKENS), "drawn, about (1024)", default=1024)
    add(sub, "--seed", seed, "of prompts and responses (0)", default=0)
    add_dtype(sub, "float32", "bfloat16", "float64", default="float32")
    add_switch(sub, "--json", "as a JSON object")
    add_overrides(sub, "options of rollout and actor")

    sub = configured("explain-config", _explain, "Show derived sizes and the memory of both phases.")
    add(sub, "--shape", filled, "a model by name (Qwen2.5-7B), as model.path")
    add(sub, "--devices", device_count(0), "how many devices to plan for (0: those here)", default=0)
    add(sub, "--device-gib", number(0, 100_000), "GiB that JAX has of each (0: what it says)", default=0.0)
    add(sub, "--fit", device_sizes, "propose a configuration for N cards of GIB GiB (8x80)", metavar="NxGIB")
    add(sub, "--length", whole(1, MAX_TOKENS), "with --fit: the longest response, in tokens (4096)", default=4096)
    reads = "that reads it (of a run's config.yaml the run's, else train)"
    add_choice(sub, "--command", "train", "sft", "dpo", text=reads, dest="reader")

    sub = command("explain-layout", _explain_layout, "Show which device holds which part of the rollout weights.")
    add(sub, "--model", filled, "as model.path, of which only the config is read, or SmolLM2-135M", required=True)
    add(sub, "--devices", device_count(0), "how many devices (0: those here)", default=0)
    add(sub, "--tp", device_count(1), "tensor parallelism; dp is the rest (1)", default=1)
    add(sub, "--hosts", device_count(0), "on which the devices are, for what training sends (1)", default=1)

    sub = configured("profile", _profile, "Measure latencies for rollout.layout: decode, prefill, switches.")
    add(sub, "--out", written, "the table (default: rollout.layout.profile)", metavar="FILE")
    add(sub, "--max-batch", whole(0, 2**20), "most live rows, all dp groups together", default=0)
    add(sub, "--token-budget", count, "most live tokens, all dp groups together", default=0)
    add(sub, "--max-context", whole(0, MAX_TOKENS), "most tokens of a row", default=0)
    add(sub, "--repeats", whole(1, 1000), "measurements of a fast point (3)", default=3)

    sub = command("options", _options, "List the options of the configuration, with defaults and bounds.")
    sections = "a section (rollout.layout), or an option (rollout.n)"
    add(sub, "section", None, sections, nargs="?", default="", metavar="SECTION")
    add_switch(sub, "--json", "as a JSON list")
    add_switch(sub, "--schema", "the JSON schema of a configuration file, for editors")

    sub = command("port", _port, "Write a run of verl or TRL as a configuration, with comments.")
    add_choice(sub, "--from", "verl", "trl", text="whose options they are", dest="library", required=True)
    add(sub, "--devices", device_count(1), "that the TRL run has, as it counts completions per device (1)", default=1)
    words = "a script, a YAML or a JSON file, or the options themselves (behind -- where they begin with --)"
    add(sub, "source", filled, words, nargs="+", metavar="FILE|OPTION")

    sub = command("completion", _completion, 'Print what a shell reads for completion: eval "$(...)".')
    add_choice(sub, "shell", "bash", "zsh", "fish")

    sub = command("report", _report, "Write a run's page, report.html; of several runs one that compares them.")
    add(sub, "run_dir", filled, metavar="RUN")
    add(sub, "others", filled, "runs to compare it with", nargs="*", default=[], metavar="RUN")
    page = "the page (report.html in the run; of several, comparison.html here)"
    add(sub, "--out", written, page, metavar="FILE")
    return parser, commands.choices


_SOURCE = "a run directory (its last checkpoint), or a model.path"


def _add_tune(sub: Parser) -> None:
    # not a positional: it would be taken for an override
    add(sub, "--run", filled, "of a real or a simulated run", dest="run_dir", metavar="DIR", required=True)
    add_overrides(sub, "options on top of the run's own")
    add_choice(sub, "--rule", "tail_batching", "partial_rollout", default="tail_batching")
    tried = "factors to try, as 1.1,1.2,1.3; of prompts and responses together"
    add(sub, "--values", factors, tried, default=(), metavar="LIST")
    add(sub, "--seeds", whole(1, 1000), "simulated runs of each value (5)", default=5)
    add(sub, "--steps", whole(1, 100_000), "of each of them (default: the longest period twice)")
    add(sub, "--processes", whole(1, 256), "runs at the same time (1)", default=1)


def _add_generate(sub: Parser) -> None:
    add(sub, "--model", filled, "as model.path", required=True)
    add(sub, "--max-tokens", whole(1, MAX_TOKENS), "of a response (128)", default=128)
    add(sub, "--temperature", number(0, 1000), "0 is greedy (1.0)", default=1.0)
    add(sub, "--top-p", number(0, 1, above=True), "share of the likeliest tokens (1.0)", default=1.0)
    add(sub, "--top-k", whole(-1, MAX_TOKENS), "0 or -1: no limit (0)", default=0)
    add(sub, "--min-p", number(0, 1, below=True), "least probability, as a share of the likeliest's (0.0)", default=0.0)
    add(sub, "--stop", stop_string, "a stop string; may be repeated", action="append", default=[], metavar="TEXT")
    add(sub, "-n", whole(1, 100_000), "responses per prompt (1)", default=1)
    add(sub, "--seed", seed, "the same seed draws the same responses (0)", default=0)
    add_dtype(sub, "float32", "bfloat16", default="float32")
    add(sub, "--tp", device_count(1), "tensor parallelism over all devices (1)", default=1)
    add(sub, "--system", utf8, "a system message, before every prompt", metavar="TEXT")
    add_switch(sub, "--raw", "send the text as it is, without the chat template")
    variables = "variables for the chat template, such as '{\"enable_thinking\": false}'"
    add(sub, "--chat-template-kwargs", json_object, variables, default={}, metavar="JSON")
    add_switch(sub, "--json", "one JSON line per response")
    add(sub, "prompts", utf8, nargs="*", metavar="PROMPT")


def _add_serve(sub: Parser) -> None:
    add(sub, "source", filled, _SOURCE, metavar="RUN|MODEL")
    add_overrides(sub, "options of serve and rollout")
    add(sub, "--host", filled, "address to listen on (127.0.0.1)")
    add(sub, "--port", whole(0, 65535), "0: any free one (8000; 9000 with --jetstream)")
    add(sub, "--api-key-file", filled, "holds the key that clients must send", metavar="FILE")
    adapters = "serve it with peft's adapters, as NAME"
    add(sub, "--adapter", filled, adapters, action="append", metavar="NAME=FOLDER")
    add_switch(sub, "--jetstream", "JetStream's gRPC service of a MODEL instead")
    sub.epilog = (
        "Routes: GET /v1/models, /health, /metrics; POST /v1/completions, /v1/chat/completions, "
        "/inference/v1/generate (tokens in, tokens out). Clients of OpenAI's API take http://HOST:PORT/v1 as base_url. "
        "Options that matter: serve.max_model_len, serve.max_waiting, serve.grace_s, "
        "rollout.max_num_seqs (requests at once), rollout.dtype, rollout.tensor_model_parallel_size. "
        "docs/serving.md has examples."
    )


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _config(options: argparse.Namespace) -> Config:
    """The configuration of a command; says which options have no effect."""
    from jaxrl.config.files import load

    file, overrides, reader = options.config, options.overrides, ""
    match options.command:
        case "train" | "sft" | "dpo":
            reader = options.command
        case "eval" if file is None and options.checkpoint:
            from pathlib import Path

            from jaxrl.record.run_dir import CONFIG_FILE

            own = Path(options.checkpoint) / CONFIG_FILE
            options.config = file = str(own) if own.is_file() else None
        case "score":  # no model is read, so none need be named
            overrides = ["model.path=none", *overrides]
        case "explain-config":
            reader = _reader(options)
            overrides = [*overrides, *([f"model.path={options.shape}"] if options.shape else [])]
    return load(file, overrides, _note, reader)


def _writes(options: argparse.Namespace, file: str) -> None:
    if options.signals is not None:
        options.signals.written = file


def _learn(options: argparse.Namespace) -> None:
    config, progress = _config(options), partial(print, flush=True)
    if options.command == "train":
        from jaxrl.commands.train import train

        train(config, stop=options.signals, progress=progress)
    else:
        from jaxrl.commands.supervised import train_on_files

        train_on_files(options.command, config, options.signals, progress)


def _simulate(options: argparse.Namespace) -> None:
    from jaxrl.commands.simulate import simulate

    simulate(_config(options), stop=options.signals)


def _tune(options: argparse.Namespace) -> None:
    from jaxrl.commands.tune import tune

    names = ("values", "seeds", "steps", "processes")
    asked: dict[str, Any] = {name: getattr(options, name) for name in names}
    with closing(ProgressCounter("runs", sys.stderr)) as counted:
        tune(options.run_dir, options.overrides, options.rule, **asked, progress=counted.show)


def _generate(options: argparse.Namespace) -> None:
    from jaxrl.commands.generate import generate

    generate(options)


def _serve(options: argparse.Namespace) -> None:
    host, port = options.host or "127.0.0.1", options.port
    if options.jetstream:
        from jaxrl.commands.serve_jetstream import serve as serve_jetstream

        if options.api_key_file or options.adapter:
            raise ValueError("serve --jetstream: takes neither a key nor adapters")
        serve_jetstream(options.source, options.overrides, (host, 9000 if port is None else port), stop=options.signals)
        return
    from jaxrl.commands.serve import Address, serve

    listens = Address(host, 8000 if port is None else port, options.api_key_file)
    serve(options.source, options.overrides, listens, stop=options.signals, adapters=options.adapter or ())


def _eval(options: argparse.Namespace) -> None:
    from jaxrl.commands.evaluate import evaluate
    from jaxrl.record.run_dir import refuse_overwriting

    config = _config(options)
    if options.out:
        refuse_overwriting(options.out, "--out", [options.config or ""])
    with closing(ProgressCounter("responses", sys.stderr)) as counted:
        result = evaluate(config, options.checkpoint, options.out, progress=counted.show)
    width = max(map(len, result))
    for name, value in result.items():
        print(f"{name:<{width}}  {value:.4g}")


def _replay(options: argparse.Namespace) -> None:
    from jaxrl.commands.replay import replay

    replay(options.run_dir, options.sample, options.overrides, each_token=options.tokens)


def _score(options: argparse.Namespace) -> None:
    from jaxrl.commands.score import score

    config = _config(options)
    with closing(ProgressCounter("responses", sys.stderr)) as counted:
        inputs = [options.config or ""]
        scores = score(config, options.responses, options.out, inputs=inputs, progress=counted.show)
    print(scores.summary())


def _export(options: argparse.Namespace) -> None:
    from jaxrl.commands.export import export

    for file in export(options.source, options.folder, options.dtype, merge=options.merge):
        print(file)


def _check(options: argparse.Namespace) -> None:
    from dataclasses import fields

    from jaxrl.commands.check_numerics import CheckOptions, check_numerics

    given = {each.name: value for each in fields(CheckOptions) if (value := getattr(options, each.name)) is not None}
    progress = partial(print, file=sys.stderr, flush=True)
    check_numerics(CheckOptions(**given), partial(print, flush=True), progress, options.json)


def _explain(options: argparse.Namespace) -> None:
    from jaxrl.commands.explain import explain_config

    if options.fit:
        from jaxrl.commands.fit import fit

        if not options.shape:
            raise ValueError("explain-config --fit: name the model with --shape (Qwen2.5-7B), as model.path")
        if options.config or options.overrides:
            raise ValueError(
                "explain-config --fit: proposes a file of its own, and takes neither --config nor options: leave them "
                "out, or explain the file with --devices and --device-gib"
            )
        count, gib = options.fit
        print(fit(options.shape, count, gib, options.length), end="")
        return
    config = _config(options)
    print(explain_config(config, options.devices, int(options.device_gib * 2**30) or None, _reader(options)))


def _reader(options: argparse.Namespace) -> str:
    """The command that reads the configuration which `explain-config` explains."""
    from pathlib import Path

    from jaxrl.record.run_dir import CONFIG_FILE, recorded_start

    file = Path(options.config or "")
    recorded = recorded_start(file.parent) if file.name == CONFIG_FILE else None
    return options.reader or (recorded or {}).get("kind", "train")


def _explain_layout(options: argparse.Namespace) -> None:
    from pathlib import Path

    import jax

    from jaxrl.models.loading import config_of, resolve_path
    from jaxrl.models.shapes import SHAPES
    from jaxrl.sharding.explain import explain_layout

    config = SHAPES.get(options.model) or config_of(resolve_path(options.model, "--model"), "--model")
    name = Path(options.model.partition(":")[2] or options.model).name
    devices = options.devices or len(jax.devices())
    print(explain_layout(config, devices, options.tp, name=name, num_hosts=options.hosts))


def _profile(options: argparse.Namespace) -> None:
    from jaxrl.commands.profile import profile

    config = _config(options)
    out = options.out or config.rollout.layout.profile
    if not out:
        raise ValueError("profile: give the table's file with --out, or as rollout.layout.profile")
    _writes(options, out)
    sizes = (options.max_batch, options.token_budget, options.max_context)
    with closing(ProgressCounter("measurements", sys.stderr)) as counted:
        table = profile(config, out, sizes, options.repeats, counted.show)
    verify = f", {len(table.verify)} that verify" if table.verify else ""
    counts = f"{len(table.prefill)} prefills, {len(table.switches)} switches"
    print(f"{out}: {len(table.decode)} decode points{verify}, {counts}")


def _options(options: argparse.Namespace) -> None:
    from jaxrl.commands.options import options_json, options_text, schema_json

    print(schema_json() if options.schema else (options_json if options.json else options_text)(options.section))


def _port(options: argparse.Namespace) -> None:
    from jaxrl.commands.port import port

    print(port(options.library, options.source, options.devices), end="")


def _completion(options: argparse.Namespace) -> None:
    from jaxrl.commands.completion import script

    print(script(options.shell))


def _report(options: argparse.Namespace) -> None:
    _writes(options, options.out or ("comparison.html" if options.others else f"{options.run_dir}/report.html"))
    if not options.others:
        from jaxrl.mechanisms import page_parts
        from jaxrl.report.page import write_report

        def say(text: str) -> None:
            print(f"jaxrl: {text}", file=sys.stderr)

        print(write_report(options.run_dir, options.out, say, page_parts()))
        return
    from jaxrl.report.comparison import write_comparison

    page, summary = write_comparison([options.run_dir, *options.others], options.out or "comparison.html")
    print(f"{summary}\n\n{page}")


if __name__ == "__main__":
    sys.exit(main())
