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
from typing import TYPE_CHECKING

from jaxrl.commands.arguments import (
    MAX_TOKENS,
    Command,
    Parser,
    add_dtype,
    device_count,
    filled,
    json_object,
    number,
    seed,
    stop_string,
    utf8,
    whole,
)

if TYPE_CHECKING:
    from jaxrl.text import TextPrompt


def add_drawing(command: Command) -> None:
    """Adds the two commands."""
    generate = command("generate", _generate, "Draw responses to prompts given as arguments or on standard input.")
    generate.add_argument("--model", type=filled, required=True, help="as model.path")
    generate.add_argument("--max-tokens", type=whole(1, MAX_TOKENS), default=128, help="of a response (128)")
    _add_sampling(generate, temperature=1.0, text="0 is greedy (1.0)")
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

    serve = command("serve", _serve, "Serve a model over gRPC, as JetStream does, until SIGTERM or Ctrl-C.")
    serve.add_argument("--jetstream", action="store_true", required=True, help="JetStream's service; there is no other")
    serve.add_argument("--model", type=filled, required=True, help="as model.path")
    serve.add_argument("--host", type=filled, default="127.0.0.1", help="address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=whole(0, 65535), default=9000, help="0: any free one (9000)")
    serve.add_argument("--num-slots", type=whole(1, 4096), default=8, help="requests at once, per dp group (8)")
    serve.add_argument("--max-length", type=whole(1, MAX_TOKENS), default=1024, help="of prompt and response (1024)")
    serve.add_argument(
        "--max-prefill-length", type=whole(1, MAX_TOKENS), default=512, help="of a prompt; 16, 32, 64 ... (512)"
    )
    add_dtype(serve, "float32", "bfloat16", "float64", default="float32")
    serve.add_argument("--tp", type=device_count(1), default=1, help="tensor parallelism over all devices (1)")
    serve.add_argument("--seed", type=seed, default=0, help="the same seed draws the same responses (0)")
    _add_sampling(serve, temperature=0.0, text="of all requests; 0 is greedy (0)")


def _add_sampling(command: Parser, temperature: float, text: str) -> None:
    command.add_argument("--temperature", type=number(0, 1000), default=temperature, help=text)
    command.add_argument(
        "--top-p", type=number(0, 1, above=True), default=1.0, help="share of the likeliest tokens (1.0)"
    )
    command.add_argument("--top-k", type=whole(-1, MAX_TOKENS), default=0, help="0 or -1: no limit (0)")
    command.add_argument(
        "--min-p", type=number(0, 1), default=0.0, help="least probability, as a share of the likeliest's (0.0)"
    )


def _serve(options: argparse.Namespace) -> int:
    from jaxrl.commands.serve import ServeOptions, serve

    names = [field.name for field in dataclasses.fields(ServeOptions)]
    serve(ServeOptions(**{name: getattr(options, name) for name in names}), stop=options.signals)
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
