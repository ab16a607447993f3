"""Commands that draw responses from a model: `jaxrl generate` and `jaxrl serve`.

Purpose: `add_drawing` gives them to the parser. What they need is imported when one of them runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxrl.commands.arguments import (
    MAX_TOKENS,
    Command,
    Parser,
    add_dtype,
    device_count,
    filled,
    json_object,
    number,
    one_of,
    seed,
    stop_string,
    utf8,
    whole,
)

if TYPE_CHECKING:
    from jaxrl.text import TextPrompt


JETSTREAM_DTYPES = ("float32", "bfloat16", "float64")


def add_drawing(command: Command) -> None:
    """Adds the two commands."""
    generate = command("generate", _generate, "Draw responses to prompts given as arguments or on standard input.")
    generate.add_argument("--model", type=filled, required=True, help="as model.path")
    generate.add_argument("--max-tokens", type=whole(1, MAX_TOKENS), default=128, help="of a response (128)")
    _add_sampling(generate, "0 is greedy (1.0)", temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    generate.add_argument(
        "--stop", type=stop_string, action="append", default=[], metavar="TEXT", help="a stop string; may be repeated"
    )
    generate.add_argument("-n", type=whole(1, 100_000), default=1, help="responses per prompt (1)")
    generate.add_argument("--seed", type=seed, default=0, help="the same seed draws the same responses (0)")
    add_dtype(generate, "float32", "bfloat16", default="float32")
    generate.add_argument("--tp", type=device_count(1), default=1, help="tensor parallelism over all devices (1)")
    generate.add_argument("--system", type=utf8, metavar="TEXT", help="a system message, before every prompt")
    generate.add_argument("--raw", action="store_true", help="send the text as it is, without the chat template")
    generate.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="variables for the chat template, such as '{\"enable_thinking\": false}'",
    )
    generate.add_argument("--json", action="store_true", help="one JSON line per response")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", type=utf8)

    serve = command("serve", _serve, "Serve a model behind OpenAI's routes, until SIGTERM or Ctrl-C.")
    serve.add_argument(
        "source",
        type=filled,
        nargs="?",
        metavar="RUN|MODEL",
        help="a run directory (its last checkpoint), or a model.path",
    )
    serve.add_argument("overrides", nargs="*", metavar="section.option=value", help="options of serve and rollout")
    serve.add_argument("--host", type=filled, help="address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=whole(0, 65535), help="0: any free one (8000; 9000 with --jetstream)")
    serve.add_argument("--api-key-file", type=filled, metavar="FILE", help="holds the key that clients must send")
    serve.add_argument(
        "--adapter", type=filled, action="append", metavar="NAME=FOLDER", help="serve it with peft's adapters, as NAME"
    )
    serve.add_argument("--jetstream", action="store_true", help="JetStream's gRPC service instead")
    _add_jetstream(serve)
    serve.epilog = (
        "Routes: GET /v1/models, /health, /metrics, /openapi.json; POST /v1/completions, /v1/chat/completions, "
        "/inference/v1/generate (tokens in, tokens out). Clients of OpenAI's API take http://HOST:PORT/v1 as base_url. "
        "Options that matter: serve.max_model_len, serve.max_waiting, serve.grace_s, serve.max_body_mib, "
        "rollout.max_num_seqs (requests at once), rollout.dtype, rollout.tensor_model_parallel_size. "
        "docs/serving.md has examples."
    )


def _add_jetstream(serve: Parser) -> None:
    """What `--jetstream` takes in place of RUN|MODEL and options; None where it is not given."""
    group = serve.add_argument_group("with --jetstream alone")
    group.add_argument("--model", type=filled, help="as model.path; must be given")
    group.add_argument("--num-slots", type=whole(1, 4096), help="requests at once, per dp group (8)")
    group.add_argument("--max-length", type=whole(1, MAX_TOKENS), help="of prompt and response (1024)")
    group.add_argument("--max-prefill-length", type=whole(1, MAX_TOKENS), help="of a prompt; 16, 32, 64 ... (512)")
    group.add_argument("--dtype", type=one_of(*JETSTREAM_DTYPES), help="float32, bfloat16 or float64 (float32)")
    group.add_argument("--tp", type=device_count(1), help="tensor parallelism over all devices (1)")
    group.add_argument("--seed", type=seed, help="the same seed draws the same responses (0)")
    _add_sampling(group, "of all requests; 0 is greedy (0)")


def _add_sampling(
    command: Any,
    text: str,
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
) -> None:
    """Adds how tokens are drawn, with these defaults, to a parser or a group of one."""
    command.add_argument("--temperature", type=number(0, 1000), default=temperature, help=text)
    share = "share of the likeliest tokens (1.0)"
    command.add_argument("--top-p", type=number(0, 1, above=True), default=top_p, help=share)
    command.add_argument("--top-k", type=whole(-1, MAX_TOKENS), default=top_k, help="0 or -1: no limit (0)")
    share = "least probability, as a share of the likeliest's (0.0)"
    command.add_argument("--min-p", type=number(0, 1), default=min_p, help=share)


def _serve(options: argparse.Namespace) -> int:
    from jaxrl.commands import serve_jetstream

    names = [field.name for field in dataclasses.fields(serve_jetstream.ServeOptions)]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.jetstream:
        if any(each is not None for each in (options.source, options.api_key_file, options.adapter)):
            raise ValueError(
                "serve --jetstream: takes --model in place of RUN|MODEL, and neither options nor a key nor adapters"
            )
        if "model" not in given:
            raise ValueError("serve --jetstream: --model must be given")
        serve_jetstream.serve(serve_jetstream.ServeOptions(**given), stop=options.signals)
        return 0
    address = {name: given.pop(name) for name in ("host", "port") if name in given}
    if given:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise ValueError(f"serve: {flag} goes with --jetstream; without it, give RUN|MODEL and section.option=value")
    if options.source is None:
        raise ValueError("serve: RUN|MODEL must be given")
    from jaxrl.commands.serve import Address, serve

    address = Address(**address, key_file=options.api_key_file)
    serve(options.source, options.overrides, address, stop=options.signals, adapters=options.adapter or ())
    return 0


def _generate(options: argparse.Namespace) -> int:
    if options.raw and options.system is not None:
        raise ValueError("generate: --system and --raw exclude each other")
    prompts = options.prompts or _prompts_from_input()
    asked: list[TextPrompt] = list(prompts)
    if options.system is not None:
        asked = [[{"role": "system", "content": options.system}, {"role": "user", "content": each}] for each in prompts]
    from jaxrl.record.progress import StartupProgress
    from jaxrl.text import TextEngine
    from jaxrl.types import SamplingParams

    params = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        max_tokens=options.max_tokens,
        stop_strings=tuple(options.stop),
    )
    # responses alone are on stdout
    with closing(StartupProgress(partial(print, file=sys.stderr, flush=True))) as stages:
        stages.begin("reading the model")
        engine = TextEngine.from_path(
            options.model,
            max_tokens=options.max_tokens,
            prompts=asked,
            chat=not options.raw,
            chat_template_kwargs=options.chat_template_kwargs,
            dtype=options.dtype,
            tp=options.tp,
            seed=options.seed,
            truncate=options.top_k > 0 or options.top_p < 1 or options.min_p > 0,
            num_slots=min(32, options.n * max(len(prompts), 1)),
        )
        stages.begin("compiling programs, then drawing the responses")
        drawn = engine.generate(asked, params, n=options.n, chat=not options.raw)
    for prompt, samples in zip(prompts, drawn, strict=True):
        if len(prompts) > 1 and not options.json:
            print(f"== {' '.join(prompt.split())}")  # on one line, whatever the prompt
        for sample in samples:
            if options.json:
                line = {"prompt": prompt, "response": sample.text, "finish_reason": sample.finish_reason}
                print(json.dumps(line | {"num_tokens": len(sample), "token_ids": sample.token_ids.tolist()}))
            else:
                print(sample.text)
    return 0


def _prompts_from_input() -> list[str]:
    """One prompt per line of standard input; blank lines are none."""
    from jaxrl.config.inputs import reading

    with reading("standard input"):
        text = "" if sys.stdin is None else sys.stdin.buffer.read().decode()
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError("generate: no prompt is given: add them as arguments, or as lines on standard input")
    return prompts
