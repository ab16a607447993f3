"""`jaxrl generate`: responses to prompts that are arguments, or lines of standard input."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from functools import partial

from jaxrl.config.inputs import reading
from jaxrl.record.progress import StartupProgress
from jaxrl.text import TextEngine, TextPrompt
from jaxrl.types import SamplingParams


def generate(options: argparse.Namespace) -> None:
    """Prints the responses; they alone are on standard output."""
    if options.raw and options.system is not None:
        raise ValueError("generate: --system and --raw exclude each other")
    prompts = options.prompts or _prompts_from_input()
    asked: list[TextPrompt] = list(prompts)
    if options.system is not None:
        asked = [[{"role": "system", "content": options.system}, {"role": "user", "content": each}] for each in prompts]
    params = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        max_tokens=options.max_tokens,
        stop_strings=tuple(options.stop),
    )
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
            truncate=params.truncates,
            num_slots=min(32, options.n * max(len(prompts), 1)),
        )
        stages.begin("compiling programs, then drawing the responses")
        drawn = engine.generate(asked, params, n=options.n, chat=not options.raw)
    for prompt, samples in zip(prompts, drawn, strict=True):
        if len(prompts) > 1 and not options.json:
            print(f"== {' '.join(prompt.split())}")  # on one line, for any prompt
        for sample in samples:
            if options.json:
                line = {"prompt": prompt, "response": sample.text, "finish_reason": sample.finish_reason}
                print(json.dumps(line | {"num_tokens": len(sample), "token_ids": sample.token_ids.tolist()}))
            else:
                print(sample.text)


def _prompts_from_input() -> list[str]:
    """One prompt per line of standard input; blank lines are none."""
    with reading("standard input"):
        text = "" if sys.stdin is None else sys.stdin.buffer.read().decode()
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError("generate: no prompt is given: add them as arguments, or as lines on standard input")
    return prompts
