"""An environment of verifiers below 0.4: what its `load_environment` makes (`verifiers_program.py` picks this file).

Rows are those of its data set, with its prompts; its tools, its turns and its rubric are its own.
"""

import os

import openai
import verifiers as vf  # pyright: ignore[reportMissingImports]
from verifiers.clients.openai_chat_completions_client import (  # pyright: ignore[reportMissingImports]
    OpenAIChatCompletionsClient,
)

HELD_OUT = 1_000_000_000  # the number of the first held-out row
_loaded = {}


def schemas(id, args):
    """The tools of the environment, as chat templates take them."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in _environment(id, args).tool_defs or []
    ]


def problem(index, seed, id, args):
    row = _row(index, id, args)
    prompt, answer = row["prompt"], row.get("answer")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {"number": index, "answer": answer if answer and isinstance(answer, str) else None, "messages": messages}


async def run(row, base_url, api_key, id, args):
    """A rollout, scored by the environment's rubric."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=None) as client:
        environment = _environment(id, args)
        given = dict(_row(row["number"], id, args))
        found = await environment.run_rollout(given, OpenAIChatCompletionsClient(client), "policy", {})
    if found.get("error"):
        raise RuntimeError(str(found["error"]))
    numbers = {name: value for name, value in (found.get("metrics") or {}).items() if isinstance(value, int | float)}
    return {**numbers, "score": found["reward"]}


def _environment(id, args):
    if id not in _loaded:
        try:
            made = vf.load_environment(id, **args)
        except Exception as error:  # the environment's own, or pydantic's in several lines
            raise ValueError(f"environment.id: {' '.join(str(error).split(' [type=')[0].split())}") from None
        if any(kind.__name__ == "SandboxEnv" for kind in type(made).__mro__) and not os.environ.get("PRIME_API_KEY"):
            raise ValueError(
                f"environment.id: {id} runs code in Prime's sandboxes, which take PRIME_API_KEY: name it in "
                "environment.env"
            )
        _loaded[id] = made
    return _loaded[id]


def _row(index, id, args):
    environment = _environment(id, args)
    rows = environment.get_dataset() if index < HELD_OUT else environment.get_eval_dataset()
    return rows[index % HELD_OUT % len(rows)]
