"""An environment of OpenEnv (Meta and Hugging Face), as a program that asks for turns.

`environment.kind=openai environment.path=openenv environment.python=...`, a Python with `openenv-core` and `openai`;
the environment's own package is not needed there. Its server runs where you started it, with room for
`environment.num_workers` sessions (`max_concurrent_envs`). `environment.args`:

- `url`: of the server, such as http://127.0.0.1:8000; `rules`: a system message, before all else;
- `action`: the field of an action that takes the model's text, or the part of it that matches `pattern` (a regular
  expression);
- `observation`: the field that the model sees; empty: all of them, as JSON;
- `max_steps`: after which an episode ends with the rewards so far; 0: when the environment ends it.

An interrupted episode is played again from its seed, so a reset with the same seed has to show the same.
"""

import hashlib
import json
import re

import openai
from openenv.core import GenericEnvClient  # pyright: ignore[reportMissingImports]


async def problem(index, seed, url, observation="", rules=""):
    """A row: a seed, and what a reset with it shows."""
    number = int(hashlib.sha256(f"{seed}.{index}".encode()).hexdigest()[:7], 16)
    async with GenericEnvClient(base_url=url) as environment:
        shown = _shown(await environment.reset(seed=number), observation)
    system = [{"role": "system", "content": rules}] if rules else []
    return {"seed": number, "messages": [*system, {"role": "user", "content": shown}]}


async def run(row, base_url, api_key, url, action, observation="", pattern="", max_steps=0):
    """An episode: the sum of its rewards. A step that the server refuses is answered with its error."""
    messages, score, errors, steps = list(row["messages"]), 0.0, 0, 0
    async with (
        openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=None) as policy,
        GenericEnvClient(base_url=url) as environment,
    ):
        shown = _shown(await environment.reset(seed=row["seed"]), observation)
        if shown != messages[-1]["content"]:
            raise ValueError(
                f"environment.args.url: a reset of {url} with the seed {row['seed']} must show the same each time, "
                f"found {shown!r:.200}, and {messages[-1]['content']!r:.200} before"
            )
        while True:
            answer = await policy.chat.completions.create(model="policy", messages=messages)
            said = (answer.choices[0].message.content or "").strip()
            found = re.search(pattern, said) if pattern else None
            steps, done = steps + 1, False
            if pattern and not found:
                shown, errors = f"Error: an answer must have in it what fits {pattern}", errors + 1
            else:
                try:
                    result = await environment.step({action: found[0] if found else said})
                    shown, done, score = _shown(result, observation), result.done, score + (result.reward or 0.0)
                except RuntimeError as error:  # the server's
                    shown, errors = f"Error: {error!s:.300}", errors + 1
            if done or steps == max_steps:
                return {"score": score, "steps": steps, "errors": errors}
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": shown}]


def _shown(result, name):
    """The part of an observation that the model sees."""
    if name and name not in result.observation:
        raise ValueError(f"environment.args.observation: found no {name!r} among {sorted(result.observation)}")
    found = result.observation[name] if name else result.observation
    return found if isinstance(found, str) and found else json.dumps(found)
