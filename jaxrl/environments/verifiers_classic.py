"""An environment of verifiers below 0.4: what its `load_environment` makes (`verifiers_program.py` picks this file).

Rows are those of its data set, with its prompts; its tools, its turns and its rubric are its own.
"""

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
    return {"number": index, "answer": row.get("answer") or None, "messages": row["prompt"]}


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
        _loaded[id] = vf.load_environment(id, **args)
    return _loaded[id]


def _row(index, id, args):
    environment = _environment(id, args)
    rows = environment.get_dataset() if index < HELD_OUT else environment.get_eval_dataset()
    return rows[index % HELD_OUT % len(rows)]
